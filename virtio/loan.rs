// SPDX-License-Identifier: GPL-2.0

//! Virtqueues for memory that is lent to the device for the length of a call.
//!
//! C header: [`include/linux/virtio.h`](srctree/include/linux/virtio.h)

use super::{
    attachment::Attachment,
    event::Event,
    queue::AnyQueue, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    bindings::scatterlist,
    new_mutex,
    new_spinlock,
    prelude::*,
    sync::{
        Mutex,
        SpinLock, //
    },
    time::msecs_to_jiffies, //
};

/// Pieces of memory that nobody uses as long as this exists.
///
/// # Invariants
///
/// `table` is a scatter list with `entries` entries, whose memory nobody else uses for `'a`.
pub(crate) struct Segments<'a> {
    table: *mut scatterlist,
    entries: c_uint,
    _memory: PhantomData<&'a mut scatterlist>,
}

impl Segments<'_> {
    /// Borrows a scatter list.
    ///
    /// # Safety
    ///
    /// The type invariants must hold for a lifetime that the caller chooses.
    pub(crate) unsafe fn new(table: *mut scatterlist, entries: c_uint) -> Self {
        // INVARIANT: By the safety requirements.
        Self {
            table,
            entries,
            _memory: PhantomData,
        }
    }
}

/// A virtqueue for memory that the device may change or discard during a call.
///
/// Locks: `turn` before `vq`, which is held for short, in process context only.
#[pin_data]
pub(crate) struct LoanQueue {
    name: &'static CStr,
    #[pin]
    turn: Mutex<()>,
    #[pin]
    vq: SpinLock<Attachment>,
    #[pin]
    used: Event,
}

// SAFETY: A virtqueue can be used from any thread.
unsafe impl Send for LoanQueue {}

// SAFETY: All operations on the virtqueue are serialised by `vq`.
unsafe impl Sync for LoanQueue {}

impl LoanQueue {
    /// How long a wait sleeps before it looks around, in milliseconds.
    const SLICE_MS: u32 = 500;

    /// A queue to be found under this name.
    pub(crate) fn new(name: &'static CStr) -> impl PinInit<Self> {
        pin_init!(Self {
            name,
            turn <- new_mutex!((), "LoanQueue::turn"),
            vq <- new_spinlock!(Attachment::Absent, "LoanQueue::vq"),
            used <- Event::new(),
        })
    }

    /// The number of pieces that fit into the ring.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if the queue is revoked.
    pub(crate) fn capacity(&self) -> Result<c_uint> {
        Ok(self.vq.lock().live()?.ring_size())
    }

    /// Lends memory to the device, and waits until the device has given it back, or has been reset
    /// so that it cannot use it any more: returning earlier would leave memory to two. May sleep.
    /// Allocates nothing.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if the queue is or was revoked, else those of the ring; the device has not, or not
    /// certainly, dealt with the memory.
    pub(crate) fn lend(&self, segments: &Segments<'_>) -> Result {
        let _turn = self.turn.lock();
        let attachment = self.vq.lock();
        let vq = attachment.live()?;

        // SAFETY: The memory is nobody else's until this returns. The token is never looked at.
        unsafe { vq.add_in(segments.table, segments.entries, NonNull::from(self).cast()) }?;
        // If the device cannot be told it will be reset before long.
        let _ = vq.kick();
        drop(attachment);
        loop {
            match &*self.vq.lock() {
                attachment @ Attachment::Live(_) => {
                    if let Ok(Some(_)) = attachment.live().and_then(|vq| vq.take()) {
                        return Ok(());
                    }
                }
                Attachment::Absent => return Err(ENODEV),
                Attachment::Revoked(_) | Attachment::Leaving => (),
            }
            self.used.wait(msecs_to_jiffies(Self::SLICE_MS));
        }
    }
}

impl AnyQueue for LoanQueue {
    fn name(&self) -> &'static CStr {
        self.name
    }

    unsafe fn attach(&self, vq: NonNull<bindings::virtqueue>) {
        // INVARIANT: The caller guarantees that `vq` is valid until `reclaim`.
        *self.vq.lock() = Attachment::Live(vq);
    }

    fn on_used(&self) {
        self.used.signal();
    }

    fn revoke(&self) {
        self.vq.lock().revoke();
    }

    fn reclaim(&self) {
        // There is one token at most, which is not looked at.
        self.vq.lock().detach(|_| ());
    }

    fn release(&self) {
        *self.vq.lock() = Attachment::Absent;
        self.used.signal();
    }
}
