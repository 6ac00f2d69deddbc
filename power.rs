// SPDX-License-Identifier: GPL-2.0

//! Being told when the system is about to hibernate.
//!
//! C header: [`include/linux/suspend.h`](srctree/include/linux/suspend.h)

use crate::bindings;
use kernel::{
    bindings::notifier_block,
    container_of,
    error::to_result,
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// What is done around hibernation.
pub(crate) trait HibernateHandler: Send + Sync + 'static {
    /// The system is about to save its memory: frees as much as it can. May sleep, but must return.
    fn prepare(&self);

    /// The system has woken up, or has not gone to sleep after all. May sleep.
    fn finished(&self);
}

/// A registration for hibernation. Dropping it ends it, and waits for a call under way.
#[must_use = "dropping it ends the notifications"]
#[pin_data(PinnedDrop)]
pub(crate) struct HibernateNotifier<H: HibernateHandler> {
    #[pin]
    block: Opaque<notifier_block>,
    handler: Arc<H>,
}

// SAFETY: A notifier can be unregistered from any thread.
unsafe impl<H: HibernateHandler> Send for HibernateNotifier<H> {}

// SAFETY: There is nothing that can be done with a shared reference.
unsafe impl<H: HibernateHandler> Sync for HibernateNotifier<H> {}

impl<H: HibernateHandler> HibernateNotifier<H> {
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
                    to_result(bindings::register_pm_notifier(slot))
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
        _unused: *mut c_void,
    ) -> c_int {
        // SAFETY: The chain calls this with a registered block, which is part of a
        // `HibernateNotifier<H>`.
        let this = unsafe { &*container_of!(Opaque::cast_from(block.cast_const()), Self, block) };

        match action {
            bindings::VBRS_PM_HIBERNATION_PREPARE => this.handler.prepare(),
            bindings::VBRS_PM_POST_HIBERNATION => this.handler.finished(),
            _ => (),
        }
        // CAST: a small constant that the C side takes as `int`.
        kernel::bindings::NOTIFY_OK as c_int
    }
}

#[pinned_drop]
impl<H: HibernateHandler> PinnedDrop for HibernateNotifier<H> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: It was registered in `new`.
        unsafe { bindings::unregister_pm_notifier(self.block.get()) };
    }
}
