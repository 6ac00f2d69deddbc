// SPDX-License-Identifier: GPL-2.0

//! Being told when a part of the guest's memory is to be taken out of use.
//!
//! C header: [`include/linux/memory.h`](srctree/include/linux/memory.h)

use crate::bindings;
use core::ops::Range;
use kernel::{
    bindings::notifier_block,
    container_of,
    error::to_result,
    num::casts::usize_as_u64,
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// What is done when memory is to be taken out of use.
pub(crate) trait OfflineHandler: Send + Sync + 'static {
    /// Gives back pages, by their frame numbers, which the allocator hands out to nobody any more. May sleep,
    /// but must not wait for long.
    fn going_offline(&self, frames: Range<u64>);
}

/// A registration for memory that goes. Dropping it ends it, and waits for a call under way.
#[must_use = "dropping it ends the notifications"]
#[pin_data(PinnedDrop)]
pub(crate) struct OfflineNotifier<H: OfflineHandler> {
    #[pin]
    block: Opaque<notifier_block>,
    handler: Arc<H>,
}

// SAFETY: A notifier can be unregistered from any thread.
unsafe impl<H: OfflineHandler> Send for OfflineNotifier<H> {}

impl<H: OfflineHandler> OfflineNotifier<H> {
    /// Registers `handler`. May sleep.
    pub(crate) fn new(handler: Arc<H>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            handler,
            block <- Opaque::try_ffi_init(|slot: *mut notifier_block| {
                // SAFETY: `slot` is valid for writes and stays pinned until it is unregistered in
                // `drop`. `handler` is initialised already.
                unsafe {
                    slot.write(notifier_block {
                        notifier_call: Some(Self::notify),
                        ..Default::default()
                    });
                    to_result(bindings::register_memory_notifier(slot))
                }
            }),
        })
    }

    /// # Safety
    ///
    /// Only for the notifier chain to call, with what was registered in `new`.
    unsafe extern "C" fn notify(
        block: *mut notifier_block,
        action: c_ulong,
        what: *mut c_void,
    ) -> c_int {
        // CAST: one of the small constants of the enumeration.
        if action as bindings::memory_block_state == bindings::memory_block_state_MEM_GOING_OFFLINE
        {
            // SAFETY: The chain calls this with a registered block, which is part of an
            // `OfflineNotifier<H>`, and for this action `what` is a valid `struct memory_notify`.
            let (this, what) = unsafe {
                (
                    &*container_of!(Opaque::cast_from(block.cast_const()), Self, block),
                    &*what.cast::<bindings::memory_notify>(),
                )
            };
            let first = usize_as_u64(what.start_pfn);

            this.handler
                .going_offline(first..first.saturating_add(usize_as_u64(what.nr_pages)));
        }
        // CAST: a small constant that the C side takes as `int`.
        kernel::bindings::NOTIFY_OK as c_int
    }
}

#[pinned_drop]
impl<H: OfflineHandler> PinnedDrop for OfflineNotifier<H> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: It was registered in `new`.
        unsafe { bindings::unregister_memory_notifier(self.block.get()) };
    }
}
