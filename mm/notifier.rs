// SPDX-License-Identifier: GPL-2.0

//! Being called by the kernel when something happens.
//!
//! C header: [`include/linux/notifier.h`](srctree/include/linux/notifier.h)

use core::marker::PhantomData;
use kernel::{
    bindings::notifier_block,
    container_of,
    error::to_result,
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// A notifier chain of the kernel, for handlers of type `H`.
///
/// # Safety
///
/// `register` puts a block on the chain, unless it returns an error. After `unregister` has returned, the chain
/// neither calls the block nor is in a call of it.
pub(crate) unsafe trait Chain<H>: 'static {
    /// The place among other blocks; those of a higher one are called first.
    const PRIORITY: c_int = 0;

    /// # Safety
    ///
    /// `block` must be valid, and stay so and in its place, until `unregister` has returned.
    unsafe fn register(block: *mut notifier_block) -> c_int;

    /// # Safety
    ///
    /// `block` must be on the chain.
    unsafe fn unregister(block: *mut notifier_block);

    /// Tells the handler.
    ///
    /// # Safety
    ///
    /// `action` and `data` must be what the chain has called a block with.
    unsafe fn tell(handler: &H, action: c_ulong, data: *mut c_void);
}

/// A place on a chain. Dropping it ends the calls, and waits for one under way; so it must not be dropped under
/// a lock that the handler takes.
#[must_use = "dropping it ends the notifications"]
#[pin_data(PinnedDrop)]
pub(crate) struct Notifier<C: Chain<H>, H: Send + Sync + 'static> {
    #[pin]
    block: Opaque<notifier_block>,
    handler: Arc<H>,
    _chain: PhantomData<fn(C)>,
}

// SAFETY: A block can be taken off its chain from any thread.
unsafe impl<C: Chain<H>, H: Send + Sync + 'static> Send for Notifier<C, H> {}

// SAFETY: There is nothing that can be done with a shared reference.
unsafe impl<C: Chain<H>, H: Send + Sync + 'static> Sync for Notifier<C, H> {}

impl<C: Chain<H>, H: Send + Sync + 'static> Notifier<C, H> {
    /// Puts `handler` on the chain. May sleep.
    pub(crate) fn new(handler: Arc<H>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            handler,
            block <- Opaque::try_ffi_init(|slot: *mut notifier_block| {
                // SAFETY: `slot` is valid for writes and stays pinned until it is unregistered in
                // `drop`. `handler` is initialised already.
                unsafe {
                    slot.write(notifier_block {
                        notifier_call: Some(Self::notify),
                        priority: C::PRIORITY,
                        ..Default::default()
                    });
                    to_result(C::register(slot))
                }
            }),
            _chain: PhantomData,
        })
    }

    /// # Safety
    ///
    /// Only for the chain to call, with what was registered in `new`.
    unsafe extern "C" fn notify(
        block: *mut notifier_block,
        action: c_ulong,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: The chain calls this with a registered block, which is part of a `Notifier<C, H>`.
        let this = unsafe { &*container_of!(Opaque::cast_from(block.cast_const()), Self, block) };

        // SAFETY: That is what the chain has called.
        unsafe { C::tell(&this.handler, action, data) };
        // CAST: a small constant that the C side takes as `int`.
        kernel::bindings::NOTIFY_OK as c_int
    }
}

#[pinned_drop]
impl<C: Chain<H>, H: Send + Sync + 'static> PinnedDrop for Notifier<C, H> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: It was registered in `new`.
        unsafe { C::unregister(self.block.get()) };
    }
}
