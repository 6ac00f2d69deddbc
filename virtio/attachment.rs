// SPDX-License-Identifier: GPL-2.0

//! What a queue of the driver is attached to.
//!
//! C header: [`include/linux/virtio.h`](srctree/include/linux/virtio.h)

use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    bindings::scatterlist,
    error::to_result,
    prelude::*, //
};

/// The virtqueue of a queue, and what may be done with it.
///
/// Each queue keeps one of these under a lock, so that nobody uses a virtqueue while it changes hands.
///
/// # Invariants
///
/// A virtqueue in here has not been deleted.
pub(super) enum Attachment {
    /// There is none: the queue has not been found yet, or has been deleted.
    Absent,
    /// A virtqueue in use.
    Live(NonNull<bindings::virtqueue>),
    /// A virtqueue whose device is being reset: nothing may be added or taken any more.
    Revoked(NonNull<bindings::virtqueue>),
    /// A virtqueue that is being deleted: the device may still use what it was given.
    Leaving,
}

impl Attachment {
    /// The virtqueue, if it is in use.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if it is not, or not any more.
    pub(super) fn live(&self) -> Result<Virtqueue<'_>> {
        match self {
            // INVARIANT: It lives as long as it is in here.
            Self::Live(vq) => Ok(Virtqueue(*vq, PhantomData)),
            Self::Absent | Self::Revoked(_) | Self::Leaving => Err(ENODEV),
        }
    }

    /// Ends all use of the virtqueue by the driver.
    pub(super) fn revoke(&mut self) {
        if let Self::Live(vq) = self {
            *self = Self::Revoked(*vq);
        }
    }

    /// Takes the tokens of what the device has not used, and forgets the virtqueue. The device can
    /// still use what they stand for until the virtqueue is deleted.
    pub(super) fn detach(&mut self, mut each: impl FnMut(NonNull<c_void>)) {
        let (Self::Live(vq) | Self::Revoked(vq)) = self else {
            return;
        };
        let vq = vq.as_ptr();
        // SAFETY: By the type invariants the virtqueue has not been deleted yet.
        let next = || NonNull::new(unsafe { bindings::virtqueue_detach_unused_buf(vq) });

        while let Some(token) = next() {
            each(token);
        }
        *self = Self::Leaving;
    }
}

/// A virtqueue in use.
///
/// # Invariants
///
/// It is not deleted during `'a`, and nobody else uses it meanwhile, since the lock of its queue is held.
pub(super) struct Virtqueue<'a>(NonNull<bindings::virtqueue>, PhantomData<&'a Attachment>);

impl Virtqueue<'_> {
    /// The number of descriptors in the ring.
    pub(super) fn ring_size(&self) -> c_uint {
        // SAFETY: By the type invariants the virtqueue is live.
        unsafe { bindings::virtqueue_get_vring_size(self.0.as_ptr()) }
    }

    /// Tells the device that there is something new.
    ///
    /// # Errors
    ///
    /// [`EIO`] if the device is broken.
    pub(super) fn kick(&self) -> Result {
        // SAFETY: By the type invariants the virtqueue is live.
        if unsafe { bindings::virtqueue_kick(self.0.as_ptr()) } {
            Ok(())
        } else {
            Err(EIO)
        }
    }

    /// Adds memory for the device to read. Allocates nothing, since indirect descriptors are not
    /// negotiated.
    ///
    /// # Errors
    ///
    /// [`ENOSPC`] if the ring is full, [`EIO`] if the device is broken.
    ///
    /// # Safety
    ///
    /// `table` must have `entries` entries. If this succeeds their memory stays valid until `token`
    /// comes back from [`Self::take`], or until the virtqueue is deleted.
    pub(super) unsafe fn add_out(
        &self,
        table: *mut scatterlist,
        entries: c_uint,
        token: NonNull<c_void>,
    ) -> Result {
        let (vq, flags) = (self.0.as_ptr(), kernel::bindings::GFP_NOWAIT);

        // SAFETY: By the type invariants and the safety requirements. The table itself is only read
        // during the call.
        to_result(unsafe {
            bindings::virtqueue_add_outbuf(vq, table, entries, token.as_ptr(), flags)
        })
    }

    /// Adds memory for the device to write. Otherwise like [`Self::add_out`].
    ///
    /// # Safety
    ///
    /// As for [`Self::add_out`]; and nobody else uses the memory meanwhile.
    pub(super) unsafe fn add_in(
        &self,
        table: *mut scatterlist,
        entries: c_uint,
        token: NonNull<c_void>,
    ) -> Result {
        let (vq, flags) = (self.0.as_ptr(), kernel::bindings::GFP_NOWAIT);

        // SAFETY: As in `add_out`.
        to_result(unsafe {
            bindings::virtqueue_add_inbuf(vq, table, entries, token.as_ptr(), flags)
        })
    }

    /// Takes the token of something that the device has used, which it does not touch any more, and the
    /// number of bytes that it says to have written.
    ///
    /// # Errors
    ///
    /// [`EIO`] if there is none because the device is broken.
    pub(super) fn take(&self) -> Result<Option<(NonNull<c_void>, c_uint)>> {
        let mut len = 0;
        // SAFETY: By the type invariants the virtqueue is live. The C side checks the id that the device
        // gives.
        let token = unsafe { bindings::virtqueue_get_buf(self.0.as_ptr(), &mut len) };

        match NonNull::new(token) {
            Some(token) => Ok(Some((token, len))),
            // SAFETY: As above.
            None if unsafe { bindings::virtqueue_is_broken(self.0.as_ptr()) } => Err(EIO),
            None => Ok(None),
        }
    }

    /// Asks the device for interrupts. Returns whether something was used already, for which there will
    /// be none.
    pub(super) fn enable_interrupts(&self) -> bool {
        // SAFETY: By the type invariants the virtqueue is live.
        unsafe { !bindings::virtqueue_enable_cb(self.0.as_ptr()) }
    }

    /// Asks the device not to interrupt.
    pub(super) fn disable_interrupts(&self) {
        // SAFETY: By the type invariants the virtqueue is live.
        unsafe { bindings::virtqueue_disable_cb(self.0.as_ptr()) };
    }
}
