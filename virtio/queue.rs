// SPDX-License-Identifier: GPL-2.0

//! Virtqueues that own their buffers.
//!
//! A [`Message`] moves into the queue when it is sent and comes out when the device has used it. What
//! the device still has when it is reset comes home only after the queue is deleted, since some
//! transports stop the device not before that.
//!
//! C header: [`include/linux/virtio.h`](srctree/include/linux/virtio.h)

use super::{
    attachment::{
        Attachment,
        Virtqueue, //
    },
    event::Event,
    message::Message, //
};
use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::SpinLock,
    time::Jiffies, //
};

/// When the device should interrupt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupts {
    /// Whenever it has used messages.
    Always,
    /// Only while somebody waits for it.
    WhileWaiting,
}

/// A virtqueue for messages that the device reads or writes.
///
/// Once the queue is revoked every operation fails with [`ENODEV`].
///
/// Locks: `vq` before `returned`; both are held for short, in process context only. Interrupts only
/// signal `used`.
///
/// # Invariants
///
/// All tokens in the virtqueue are `KBox<Message<T>>`.
#[pin_data]
pub(crate) struct Queue<T: Send + 'static> {
    name: &'static CStr,
    interrupts: Interrupts,
    #[pin]
    vq: SpinLock<Attachment>,
    #[pin]
    returned: SpinLock<Option<KBox<Message<T>>>>,
    #[pin]
    used: Event,
    _tokens: PhantomData<fn(T) -> T>,
}

// SAFETY: A virtqueue can be used from any thread, and messages are `Send` if `T` is.
unsafe impl<T: Send + 'static> Send for Queue<T> {}

// SAFETY: All operations on the virtqueue are serialised by `vq`.
unsafe impl<T: Send + 'static> Sync for Queue<T> {}

impl<T: Send + 'static> Queue<T> {
    /// A queue to be found under this name.
    pub(crate) fn new(name: &'static CStr, interrupts: Interrupts) -> impl PinInit<Self> {
        pin_init!(Self {
            name,
            interrupts,
            vq <- new_spinlock!(Attachment::Absent, "Queue::vq"),
            returned <- new_spinlock!(None, "Queue::returned"),
            used <- Event::new(),
            _tokens: PhantomData,
        })
    }

    fn with_live<R>(&self, f: impl FnOnce(Virtqueue<'_>) -> Result<R>) -> Result<R> {
        f(self.vq.lock().live()?)
    }

    /// The number of descriptors in the ring.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if the queue is revoked.
    pub(crate) fn ring_size(&self) -> Result<usize> {
        self.with_live(|vq| Ok(usize::try_from(vq.ring_size())?))
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
        let attachment = self.vq.lock();
        let vq = match attachment.live() {
            Ok(vq) => vq,
            Err(e) => return Err((message, e)),
        };
        let (table, entries) = message.scatterlist();
        if entries == 0 {
            return Err((message, EINVAL));
        }
        let writable = message.is_writable();
        let token = KBox::into_raw(message);
        // SAFETY: `into_raw` never returns null.
        let raw = unsafe { NonNull::new_unchecked(token.cast()) };
        // SAFETY: What the scatter list describes is owned by `token`, which comes back to Rust only when
        // the device has used it or cannot reach it any more; nobody looks at it meanwhile.
        let added = unsafe {
            if writable {
                vq.add_in(table, entries, raw)
            } else {
                vq.add_out(table, entries, raw)
            }
        };
        // SAFETY: On error the virtqueue has not taken `token`, which comes from `KBox::into_raw`.
        added.map_err(|e| (unsafe { KBox::from_raw(token) }, e))
    }

    /// Tells the device that there are new messages.
    ///
    /// # Errors
    ///
    /// [`EIO`] if the device is broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn kick(&self) -> Result {
        self.with_live(|vq| vq.kick())
    }

    /// Takes a message that the device has used, if there is one.
    ///
    /// # Errors
    ///
    /// [`EIO`] if the device is broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn take_used(&self) -> Result<Option<KBox<Message<T>>>> {
        self.with_live(|vq| {
            let Some((token, len)) = vq.take()? else {
                return Ok(None);
            };
            // SAFETY: By the type invariants every token is a `KBox<Message<T>>`, and this one is no
            // longer in the virtqueue.
            let mut message: KBox<Message<T>> = unsafe { KBox::from_raw(token.as_ptr().cast()) };

            // CAST: the length of a buffer.
            message.note_written(len as usize);
            Ok(Some(message))
        })
    }

    /// Sleeps until the device may have used a message, for `timeout` at most; less if there were
    /// interrupts that nobody has waited for.
    ///
    /// For one waiter at a time. Must be called from a context that may sleep.
    pub(crate) fn wait(&self, timeout: Jiffies) {
        if self.interrupts == Interrupts::WhileWaiting {
            let more = self.with_live(|vq| Ok(vq.enable_interrupts()));
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
            if let Ok(vq) = self.vq.lock().live() {
                vq.disable_interrupts();
            }
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
        *self.vq.lock() = Attachment::Live(vq);
        self.set_quiet();
    }

    fn on_used(&self) {
        self.used.signal();
    }

    fn revoke(&self) {
        self.vq.lock().revoke();
        self.used.signal();
    }

    fn reclaim(&self) {
        self.vq.lock().detach(|token| {
            // SAFETY: By the type invariants every token is a `KBox<Message<T>>`, and this one is no
            // longer in the virtqueue.
            let mut message: KBox<Message<T>> = unsafe { KBox::from_raw(token.as_ptr().cast()) };
            let mut returned = self.returned.lock();

            message.next = returned.take();
            *returned = Some(message);
        });
    }

    fn release(&self) {
        *self.vq.lock() = Attachment::Absent;

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
