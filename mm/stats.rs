// SPDX-License-Identifier: GPL-2.0

//! The kernel's memory statistics.
//!
//! C header: [`include/linux/vmstat.h`](srctree/include/linux/vmstat.h)

use crate::bindings;
use kernel::{
    bindings::{
        node_stat_item,
        sysinfo, //
    },
    num::casts::usize_as_u64,
    prelude::*, //
};

/// The memory of the guest now, in guest pages.
pub(crate) struct MemoryNow {
    /// Pages that nobody uses.
    pub(crate) free: u64,
    /// Pages that the kernel manages.
    pub(crate) total: u64,
    /// Pages that can be had without swapping.
    pub(crate) available: u64,
    /// Pages that cache files.
    pub(crate) caches: u64,
}

impl MemoryNow {
    /// Looks at the counters. May sleep.
    pub(crate) fn read() -> Self {
        let mut info = sysinfo::default();

        // SAFETY: `info` is valid for writes.
        unsafe { kernel::bindings::si_meminfo(&mut info) };
        Self {
            free: usize_as_u64(info.freeram),
            total: usize_as_u64(info.totalram),
            available: super::available_pages(),
            caches: node_state(kernel::bindings::node_stat_item_NR_FILE_PAGES),
        }
    }
}

/// What has happened to the memory of the guest since it was started.
#[cfg(CONFIG_VM_EVENT_COUNTERS)]
pub(crate) struct MemoryEvents {
    /// Pages read from swap.
    pub(crate) swap_in: u64,
    /// Pages written to swap.
    pub(crate) swap_out: u64,
    /// Page faults that needed I/O.
    pub(crate) major_faults: u64,
    /// Page faults.
    pub(crate) minor_faults: u64,
    /// Processes killed for lack of memory.
    pub(crate) oom_kills: u64,
    /// Allocations that had to wait for reclaim.
    pub(crate) allocation_stalls: u64,
    /// Pages scanned by kswapd, and by those who allocate.
    pub(crate) scans: (u64, u64),
    /// Pages reclaimed by kswapd, and by those who allocate.
    pub(crate) reclaims: (u64, u64),
    /// Huge pages allocated, and not allocated for lack of memory, where there are any.
    pub(crate) huge_pages: Option<(u64, u64)>,
}

#[cfg(CONFIG_VM_EVENT_COUNTERS)]
impl MemoryEvents {
    /// Sums the counters up. May sleep.
    pub(crate) fn read() -> Self {
        use kernel::bindings::*;

        const EVENTS: usize = vm_event_item_NR_VM_EVENT_ITEMS as usize;

        let mut events: [c_ulong; EVENTS] = [0; EVENTS];
        // SAFETY: There is room for all events.
        unsafe { all_vm_events(events.as_mut_ptr()) };
        let event = |item: vm_event_item| {
            // CAST: an index into `events`.
            usize_as_u64(events.get(item as usize).copied().unwrap_or(0))
        };
        let zones = zone_type___MAX_NR_ZONES;
        let first = vm_event_item_ALLOCSTALL_NORMAL.wrapping_sub(zone_type_ZONE_NORMAL);

        Self {
            swap_in: event(vm_event_item_PSWPIN),
            swap_out: event(vm_event_item_PSWPOUT),
            major_faults: event(vm_event_item_PGMAJFAULT),
            minor_faults: event(vm_event_item_PGFAULT),
            oom_kills: event(vm_event_item_OOM_KILL),
            allocation_stalls: (0..zones)
                .map(|zone| event(first.wrapping_add(zone)))
                .fold(0, u64::wrapping_add),
            scans: (
                node_state(node_stat_item_PGSCAN_KSWAPD),
                node_state(node_stat_item_PGSCAN_DIRECT),
            ),
            reclaims: (
                node_state(node_stat_item_PGSTEAL_KSWAPD),
                node_state(node_stat_item_PGSTEAL_DIRECT),
            ),
            #[cfg(CONFIG_HUGETLB_PAGE)]
            huge_pages: Some((
                event(vm_event_item_HTLB_BUDDY_PGALLOC),
                event(vm_event_item_HTLB_BUDDY_PGALLOC_FAIL),
            )),
            #[cfg(not(CONFIG_HUGETLB_PAGE))]
            huge_pages: None,
        }
    }
}

/// A counter summed over all nodes.
fn node_state(item: node_stat_item) -> u64 {
    // SAFETY: Reads a counter.
    usize_as_u64(unsafe { bindings::global_node_page_state(item) })
}
