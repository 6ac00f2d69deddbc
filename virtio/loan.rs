// SPDX-License-Identifier: GPL-2.0

//! Virtqueues for memory that is lent to the device for the length of a call.
//!
//! C header: [`include/linux/virtio.h`](srctree/include/linux/virtio.h)

use super::{
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
    error::to_result,
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

/// What a queue is attached to.
enum State {
    /// Nothing: the device, if there is one, has nothing of what was lent.
    Absent,
    /// A virtqueue in use.
    Live(NonNull<bindings::virtqueue>),
    /// A virtqueue whose device is being reset.
    Revoked(NonNull<bindings::virtqueue>),
    /// A virtqueue that is being deleted: the device may still have what was lent.
    Leaving,
}

/// A virtqueue for memory that the device may change or discard during a call.
///
/// Locks: `turn` before `state`, which is held for short, in process context only.
///
/// # Invariants
///
/// A virtqueue in `state` has not been deleted.
#[pin_data]
pub(crate) struct LoanQueue {
    name: &'static CStr,
    #[pin]
    turn: Mutex<()>,
    #[pin]
    state: SpinLock<State>,
    #[pin]
    used: Event,
}

// SAFETY: A virtqueue can be used from any thread.
unsafe impl Send for LoanQueue {}

// SAFETY: All operations on the virtqueue are serialised by `state`.
unsafe impl Sync for LoanQueue {}

impl LoanQueue {
    /// How long a wait sleeps before it looks around, in milliseconds.
    const SLICE_MS: u32 = 500;

    /// A queue to be found under this name.
    pub(crate) fn new(name: &'static CStr) -> impl PinInit<Self> {
        pin_init!(Self {
            name,
            turn <- new_mutex!((), "LoanQueue::turn"),
            state <- new_spinlock!(State::Absent, "LoanQueue::state"),
            used <- Event::new(),
        })
    }

    /// The number of pieces that fit into the ring.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if the queue is revoked.
    pub(crate) fn capacity(&self) -> Result<c_uint> {
        match &*self.state.lock() {
            // SAFETY: By the type invariants the virtqueue is live.
            State::Live(vq) => Ok(unsafe { bindings::virtqueue_get_vring_size(vq.as_ptr()) }),
            _ => Err(ENODEV),
        }
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
        let state = self.state.lock();
        let State::Live(vq) = &*state else {
            return Err(ENODEV);
        };

        // SAFETY: By the type invariants the virtqueue is live, and the memory is nobody else's until
        // this returns. The token is never looked at, it only must not be null. Indirect descriptors
        // are not negotiated, so nothing is allocated.
        to_result(unsafe {
            bindings::virtqueue_add_inbuf(
                vq.as_ptr(),
                segments.table,
                segments.entries,
                core::ptr::from_ref(self).cast_mut().cast(),
                kernel::bindings::GFP_NOWAIT,
            )
        })?;
        // SAFETY: As above. If the device cannot be told it will be reset before long.
        unsafe { bindings::virtqueue_kick(vq.as_ptr()) };
        drop(state);
        loop {
            match &*self.state.lock() {
                State::Live(vq) => {
                    let mut len = 0;
                    // SAFETY: By the type invariants the virtqueue is live.
                    let token = unsafe { bindings::virtqueue_get_buf(vq.as_ptr(), &mut len) };
                    if !token.is_null() {
                        return Ok(());
                    }
                }
                State::Absent => return Err(ENODEV),
                State::Revoked(_) | State::Leaving => (),
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
        *self.state.lock() = State::Live(vq);
    }

    fn on_used(&self) {
        self.used.signal();
    }

    fn revoke(&self) {
        let mut state = self.state.lock();
        if let State::Live(vq) = &*state {
            *state = State::Revoked(*vq);
        }
    }

    fn reclaim(&self) {
        let mut state = self.state.lock();
        let (State::Live(vq) | State::Revoked(vq)) = &*state else {
            return;
        };
        // SAFETY: By the type invariants the virtqueue has not been deleted yet. There is one token
        // at most, which is not looked at.
        while !unsafe { bindings::virtqueue_detach_unused_buf(vq.as_ptr()) }.is_null() {}
        *state = State::Leaving;
    }

    fn release(&self) {
        *self.state.lock() = State::Absent;
        self.used.signal();
    }
}
