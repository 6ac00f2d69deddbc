// SPDX-License-Identifier: GPL-2.0

//! Being told when the guest is out of memory.
//!
//! C header: [`include/linux/oom.h`](srctree/include/linux/oom.h)

use crate::bindings;
use kernel::{
    bindings::notifier_block,
    container_of,
    error::to_result,
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// What is done when the guest is out of memory, before a process is killed.
pub(crate) trait OomHandler: Send + Sync + 'static {
    /// Frees memory. Returns how many guest pages.
    ///
    /// Called in the path of memory allocation of any process: may sleep, but must neither allocate
    /// nor wait for long.
    fn out_of_memory(&self) -> u64;
}

/// A registration for out-of-memory notifications. Dropping it ends them, and waits for one under
/// way; so it must not be dropped under a lock that the handler takes.
#[must_use = "dropping it ends the notifications"]
#[pin_data(PinnedDrop)]
pub(crate) struct OomNotifier<H: OomHandler> {
    #[pin]
    block: Opaque<notifier_block>,
    handler: Arc<H>,
}

// SAFETY: A notifier can be unregistered from any thread.
unsafe impl<H: OomHandler> Send for OomNotifier<H> {}

impl<H: OomHandler> OomNotifier<H> {
    /// The C driver's priority among the notifiers.
    const PRIORITY: c_int = 80;

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
                        priority: Self::PRIORITY,
                        ..Default::default()
                    });
                    to_result(bindings::register_oom_notifier(slot))
                }
            }),
        })
    }

    /// # Safety
    ///
    /// Only for the notifier chain to call, with what was registered in `new`.
    unsafe extern "C" fn notify(
        block: *mut notifier_block,
        _action: c_ulong,
        freed: *mut c_void,
    ) -> c_int {
        // SAFETY: The chain calls this with a registered block, which is part of an `OomNotifier<H>`.
        let this = unsafe { &*container_of!(Opaque::cast_from(block.cast_const()), Self, block) };
        let pages = this.handler.out_of_memory();

        // SAFETY: For out-of-memory notifications this is the counter of freed pages.
        unsafe {
            let freed = freed.cast::<c_ulong>();
            *freed = (*freed).saturating_add(usize::try_from(pages).unwrap_or(usize::MAX));
        }
        // CAST: a small constant that the C side takes as `int`.
        kernel::bindings::NOTIFY_OK as c_int
    }
}

#[pinned_drop]
impl<H: OomHandler> PinnedDrop for OomNotifier<H> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: It was registered in `new`.
        unsafe { bindings::unregister_oom_notifier(self.block.get()) };
    }
}
