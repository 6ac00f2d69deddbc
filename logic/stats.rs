// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The buffer of the statistics queue: entries of a 16-bit tag and a 64-bit value, packed.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

/// What a statistic is of. Memory is in bytes, everything else a count since the guest was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Tag {
    /// Memory read from swap.
    SwapIn = 0,
    /// Memory written to swap.
    SwapOut = 1,
    /// Page faults that needed I/O.
    MajorFaults = 2,
    /// Page faults.
    MinorFaults = 3,
    /// Memory that nobody uses.
    Free = 4,
    /// Memory that the guest has.
    Total = 5,
    /// Memory that the guest could use without swapping.
    Available = 6,
    /// Memory used by caches of files.
    Caches = 7,
    /// Huge pages allocated.
    HugePageAllocations = 8,
    /// Huge pages that could not be allocated.
    HugePageFailures = 9,
    /// Processes killed for lack of memory.
    OomKills = 10,
    /// Allocations that had to wait for reclaim.
    AllocationStalls = 11,
    /// Memory scanned by kswapd.
    AsyncScans = 12,
    /// Memory scanned by those who allocate.
    DirectScans = 13,
    /// Memory reclaimed by kswapd.
    AsyncReclaims = 14,
    /// Memory reclaimed by those who allocate.
    DirectReclaims = 15,
}

/// Number of tags.
pub const TAGS: usize = 16;

/// Bytes of an entry.
pub const ENTRY_LEN: usize = 10;

/// A statistic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// What it is of.
    pub tag: Tag,
    /// Its value, in bytes or a count.
    pub value: u64,
}

/// Writes as many statistics as fit into `out`, in the byte order of the device. Returns the number
/// of bytes written.
pub fn encode(stats: &[Stat], little_endian: bool, out: &mut [u8]) -> usize {
    let mut len = 0;

    for (entry, stat) in out.chunks_exact_mut(ENTRY_LEN).zip(stats) {
        let (tag, value) = if little_endian {
            ((stat.tag as u16).to_le_bytes(), stat.value.to_le_bytes())
        } else {
            ((stat.tag as u16).to_ne_bytes(), stat.value.to_ne_bytes())
        };
        for (to, from) in entry.iter_mut().zip(tag.iter().chain(value.iter())) {
            *to = *from;
        }
        len += ENTRY_LEN;
    }
    len
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_stats))]
mod tests {
    use super::*;

    #[test]
    fn entries_are_packed() {
        let stats = [
            Stat {
                tag: Tag::Free,
                value: 0x0102_0304_0506_0708,
            },
            Stat {
                tag: Tag::DirectReclaims,
                value: 1,
            },
        ];
        let mut out = [0xff; 30];
        assert_eq!(encode(&stats, true, &mut out), 20);
        let golden = [
            4, 0, 8, 7, 6, 5, 4, 3, 2, 1, 15, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0xff,
        ];
        assert!(out.starts_with(&golden));
        assert_eq!(encode(&stats, true, &mut out[..19]), 10);
    }
}
