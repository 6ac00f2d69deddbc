// SPDX-License-Identifier: GPL-2.0

//! Telling the host how the guest's memory is.
//!
//! The driver gives the host a buffer with statistics; the host gives it back when it wants newer
//! ones. A work item of its own answers, so that it does not wait for the balloon to be resized.

use super::balloon::Balloon;
use crate::{
    logic::stats::{
        encode,
        Stat,
        Tag,
        ENTRY_LEN,
        TAGS, //
    },
    mm::MemoryNow,
    virtio,
    work::Job, //
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::Jiffies, //
};

/// The queue of the buffer.
pub(super) type StatsQueue = virtio::Queue<()>;

/// Answers the host's requests for statistics.
pub(super) struct Stats {
    balloon: Arc<Balloon>,
    queue: Arc<StatsQueue>,
}

impl Stats {
    /// Statistics of the guest, for the device of a balloon.
    pub(super) fn new(balloon: Arc<Balloon>) -> Result<Self> {
        Ok(Self {
            balloon,
            queue: Arc::pin_init(
                StatsQueue::new(c"stats", virtio::Interrupts::Always),
                GFP_KERNEL,
            )?,
        })
    }

    /// The queue of the buffer.
    pub(super) fn queue(&self) -> &StatsQueue {
        &self.queue
    }

    /// Gives the host its buffer. To be called when the device is ready. May sleep.
    pub(super) fn prime(&self) -> Result {
        let words = (TAGS * ENTRY_LEN).div_ceil(size_of::<u64>());
        let message = virtio::Message::new(core::iter::once(words), (), GFP_KERNEL)?;

        self.send(message)
    }

    /// Fills the buffer and sends it.
    fn send(&self, mut message: KBox<virtio::Message<()>>) -> Result {
        const NONE: Stat = Stat {
            tag: Tag::Free,
            value: 0,
        };
        let mut stats = [NONE; TAGS];
        let n = collect(self.balloon.page_size().shift(), &mut stats);
        let stats = stats.get(..n).unwrap_or(&[]);
        let little_endian = self.balloon.link.little_endian;
        let len = encode(stats, little_endian, message.piece_mut(0).as_mut_bytes());

        message.select(0, 0..len);
        self.queue.send(message).map_err(|(_, e)| e)?;
        self.queue.kick()
    }
}

impl Job for Stats {
    fn run(&self) -> Option<Jiffies> {
        // An interrupt without a buffer, or a device that is broken or gone: nothing to answer.
        if let Ok(Some(message)) = self.queue.take_used() {
            let _ = self.send(message);
        }
        None
    }
}

/// Collects all statistics that the kernel has. Returns how many.
fn collect(page_shift: u32, out: &mut [Stat; TAGS]) -> usize {
    let mut n = 0;
    let mut put = |tag, value| {
        if let Some(slot) = out.get_mut(n) {
            *slot = Stat { tag, value };
            n += 1;
        }
    };
    let bytes = |pages: u64| pages << page_shift;

    #[cfg(CONFIG_VM_EVENT_COUNTERS)]
    {
        let events = crate::mm::MemoryEvents::read();

        put(Tag::SwapIn, bytes(events.swap_in));
        put(Tag::SwapOut, bytes(events.swap_out));
        put(Tag::MajorFaults, events.major_faults);
        put(Tag::MinorFaults, events.minor_faults);
        put(Tag::OomKills, events.oom_kills);
        put(Tag::AllocationStalls, events.allocation_stalls);
        put(Tag::AsyncScans, bytes(events.scans.0));
        put(Tag::DirectScans, bytes(events.scans.1));
        put(Tag::AsyncReclaims, bytes(events.reclaims.0));
        put(Tag::DirectReclaims, bytes(events.reclaims.1));
        if let Some((allocated, failed)) = events.huge_pages {
            put(Tag::HugePageAllocations, allocated);
            put(Tag::HugePageFailures, failed);
        }
    }

    let now = MemoryNow::read();
    put(Tag::Free, bytes(now.free));
    put(Tag::Total, bytes(now.total));
    put(Tag::Available, bytes(now.available));
    put(Tag::Caches, bytes(now.caches));
    n
}
