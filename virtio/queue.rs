// SPDX-License-Identifier: GPL-2.0

//! Virtqueues that own their buffers.
//!
//! A [`Message`] moves into the queue when it is sent and comes out when the device has used it. What
//! the device still has when it is reset comes home only after the queue is deleted, since some
//! transports stop the device not before that.
//!
//! C header: [`include/linux/virtio.h`](srctree/include/linux/virtio.h)

use super::{
    event::Event,
    message::Message, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    new_spinlock,
    prelude::*,
    sync::SpinLock,
    time::Jiffies, //
};

/// What a queue is attached to.
enum State {
    /// Nothing: the queue has not been found yet, or has been deleted.
    Absent,
    /// A virtqueue in use.
    Live(NonNull<bindings::virtqueue>),
    /// A virtqueue whose device is being reset: nothing may be added or taken any more.
    Revoked(NonNull<bindings::virtqueue>),
}

/// When the device should interrupt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupts {
    /// Whenever it has used messages.
    Always,
    /// Only while somebody waits for it.
    WhileWaiting,
}

/// A virtqueue for messages that the device reads.
///
/// Once the queue is revoked every operation fails with [`ENODEV`].
///
/// Locks: `state` before `returned`; both are held for short, in process context only. Interrupts only
/// signal `used`.
///
/// # Invariants
///
/// A virtqueue in `state` has not been deleted, and all tokens in it are `KBox<Message<T>>`.
#[pin_data]
pub(crate) struct Queue<T: Send + 'static> {
    name: &'static CStr,
    interrupts: Interrupts,
    #[pin]
    state: SpinLock<State>,
    #[pin]
    returned: SpinLock<Option<KBox<Message<T>>>>,
    #[pin]
    used: Event,
    _tokens: PhantomData<fn(T) -> T>,
}

// SAFETY: A virtqueue can be used from any thread, and messages are `Send` if `T` is.
unsafe impl<T: Send + 'static> Send for Queue<T> {}

// SAFETY: All operations on the virtqueue are serialised by `state`.
unsafe impl<T: Send + 'static> Sync for Queue<T> {}

impl<T: Send + 'static> Queue<T> {
    /// A queue to be found under this name.
    pub(crate) fn new(name: &'static CStr, interrupts: Interrupts) -> impl PinInit<Self> {
        pin_init!(Self {
            name,
            interrupts,
            state <- new_spinlock!(State::Absent, "Queue::state"),
            returned <- new_spinlock!(None, "Queue::returned"),
            used <- Event::new(),
            _tokens: PhantomData,
        })
    }

    fn with_live<R>(&self, f: impl FnOnce(NonNull<bindings::virtqueue>) -> Result<R>) -> Result<R> {
        match &*self.state.lock() {
            State::Live(vq) => f(*vq),
            State::Absent | State::Revoked(_) => Err(ENODEV),
        }
    }

    /// The number of descriptors in the ring.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if the queue is revoked.
    pub(crate) fn ring_size(&self) -> Result<usize> {
        self.with_live(|vq| {
            // SAFETY: By the type invariants the virtqueue is live.
            let size = unsafe { bindings::virtqueue_get_vring_size(vq.as_ptr()) };
            Ok(usize::try_from(size)?)
        })
    }

    /// Gives a message to the device, which is told by [`Queue::kick`]. Allocates nothing.
    ///
    /// # Errors
    ///
    /// The message comes back with [`ENOSPC`] if the ring is full, [`EINVAL`] if it sends nothing,
    /// [`EIO`] if the device is broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn send(
        &self,
        mut message: KBox<Message<T>>,
    ) -> Result<(), (KBox<Message<T>>, Error)> {
        let state = self.state.lock();
        let State::Live(vq) = &*state else {
            return Err((message, ENODEV));
        };
        let (table, entries) = message.scatterlist();
        if entries == 0 {
            return Err((message, EINVAL));
        }
        let token = KBox::into_raw(message);
        // SAFETY: By the type invariants the virtqueue is live. What the scatter list describes is
        // owned by `token`, which comes back to Rust only when the device has used it or cannot
        // reach it any more. The scatter list itself is only read during the call. Indirect
        // descriptors are not negotiated, so nothing is allocated.
        let ret = unsafe {
            bindings::virtqueue_add_outbuf(
                vq.as_ptr(),
                table,
                entries,
                token.cast(),
                kernel::bindings::GFP_NOWAIT,
            )
        };
        // SAFETY: On error the virtqueue has not taken `token`, which comes from `KBox::into_raw`.
        to_result(ret).map_err(|e| (unsafe { KBox::from_raw(token) }, e))
    }

    /// Tells the device that there are new messages.
    ///
    /// # Errors
    ///
    /// [`EIO`] if the device is broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn kick(&self) -> Result {
        self.with_live(|vq| {
            // SAFETY: By the type invariants the virtqueue is live.
            if unsafe { bindings::virtqueue_kick(vq.as_ptr()) } {
                Ok(())
            } else {
                Err(EIO)
            }
        })
    }

    /// Takes a message that the device has used, if there is one.
    ///
    /// # Errors
    ///
    /// [`EIO`] if the device is broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn take_used(&self) -> Result<Option<KBox<Message<T>>>> {
        self.with_live(|vq| {
            let mut len = 0;
            // SAFETY: By the type invariants the virtqueue is live.
            let token = unsafe { bindings::virtqueue_get_buf(vq.as_ptr(), &mut len) };
            if let Some(token) = NonNull::new(token) {
                // SAFETY: By the type invariants every token is a `KBox<Message<T>>`. The C side has
                // checked the id that the device gave, and has removed the token from the queue.
                return Ok(Some(unsafe { KBox::from_raw(token.as_ptr().cast()) }));
            }
            // SAFETY: As above.
            if unsafe { bindings::virtqueue_is_broken(vq.as_ptr()) } {
                return Err(EIO);
            }
            Ok(None)
        })
    }

    /// Sleeps until the device may have used a message, for `timeout` at most; less if there were
    /// interrupts that nobody has waited for.
    ///
    /// For one waiter at a time. Must be called from a context that may sleep.
    pub(crate) fn wait(&self, timeout: Jiffies) {
        if self.interrupts == Interrupts::WhileWaiting {
            let more = self.with_live(|vq| {
                // SAFETY: By the type invariants the virtqueue is live.
                Ok(unsafe { !bindings::virtqueue_enable_cb(vq.as_ptr()) })
            });
            if more != Ok(false) {
                return;
            }
        }
        self.used.wait(timeout);
        self.set_quiet();
    }

    /// Tells the device not to interrupt, if nobody waits.
    fn set_quiet(&self) {
        if self.interrupts == Interrupts::WhileWaiting {
            let _ = self.with_live(|vq| {
                // SAFETY: By the type invariants the virtqueue is live.
                unsafe { bindings::virtqueue_disable_cb(vq.as_ptr()) };
                Ok(())
            });
        }
    }
}

/// A queue of whatever messages, as the bus layer sees it.
pub(crate) trait AnyQueue: Sync {
    /// The name to find the queue by.
    fn name(&self) -> &'static CStr;

    /// Attaches the queue to a virtqueue.
    ///
    /// # Safety
    ///
    /// `vq` must be a virtqueue that nothing was added to, and must stay valid until
    /// [`AnyQueue::reclaim`].
    unsafe fn attach(&self, vq: NonNull<bindings::virtqueue>);

    /// Called in interrupt context when the device has used messages.
    fn on_used(&self);

    /// Ends all use of the queue by the driver.
    fn revoke(&self);

    /// Takes back what the device has not used, and forgets the virtqueue, which is deleted next.
    fn reclaim(&self);

    /// Frees what was taken back; to be called when the virtqueue is deleted.
    fn release(&self);
}

impl<T: Send + 'static> AnyQueue for Queue<T> {
    fn name(&self) -> &'static CStr {
        self.name
    }

    unsafe fn attach(&self, vq: NonNull<bindings::virtqueue>) {
        // INVARIANT: The caller guarantees that `vq` is valid until `reclaim` and has no tokens.
        *self.state.lock() = State::Live(vq);
        self.set_quiet();
    }

    fn on_used(&self) {
        self.used.signal();
    }

    fn revoke(&self) {
        let mut state = self.state.lock();
        if let State::Live(vq) = &*state {
            *state = State::Revoked(*vq);
        }
        drop(state);
        self.used.signal();
    }

    fn reclaim(&self) {
        let mut state = self.state.lock();
        let (State::Live(vq) | State::Revoked(vq)) = &*state else {
            return;
        };
        let vq = *vq;
        loop {
            // SAFETY: By the type invariants the virtqueue has not been deleted yet.
            let token = unsafe { bindings::virtqueue_detach_unused_buf(vq.as_ptr()) };
            let Some(token) = NonNull::new(token) else {
                break;
            };
            // SAFETY: By the type invariants every token is a `KBox<Message<T>>`; the C side has
            // removed it from the queue.
            let mut message: KBox<Message<T>> = unsafe { KBox::from_raw(token.as_ptr().cast()) };
            let mut returned = self.returned.lock();
            message.next = returned.take();
            *returned = Some(message);
        }
        *state = State::Absent;
    }

    fn release(&self) {
        let mut chain = self.returned.lock().take();
        // One by one: dropping a chain at once would recurse.
        while let Some(mut message) = chain {
            chain = message.next.take();
        }
    }
}

/// The most queues a device can have.
pub(super) const MAX_QUEUES: usize = 8;

/// The queues of a device in the order of their numbers.
pub(crate) struct QueueSet<'a> {
    queues: [Option<&'a dyn AnyQueue>; MAX_QUEUES],
    canary: Option<&'static CStr>,
}

impl<'a> QueueSet<'a> {
    pub(super) fn new() -> Self {
        Self {
            queues: [None; MAX_QUEUES],
            canary: None,
        }
    }

    /// Adds the queue with the next number.
    ///
    /// # Errors
    ///
    /// [`ENOSPC`] if there are [`MAX_QUEUES`] already.
    pub(crate) fn push(&mut self, queue: &'a dyn AnyQueue) -> Result {
        let slot = self.queues.iter_mut().find(|q| q.is_none()).ok_or(ENOSPC)?;
        *slot = Some(queue);
        Ok(())
    }

    /// Asks for a queue behind the others that the device should not have; whether it does is told
    /// to [`super::Driver::start`].
    pub(crate) fn expect_none_behind(&mut self, name: &'static CStr) {
        self.canary = Some(name);
    }

    pub(super) fn canary(&self) -> Option<&'static CStr> {
        self.canary
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'a dyn AnyQueue> + '_ {
        self.queues.iter().flatten().copied()
    }
}
