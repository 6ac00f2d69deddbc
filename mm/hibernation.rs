// SPDX-License-Identifier: GPL-2.0

//! Being told when the system is about to save all of its memory, to hibernate.
//!
//! C header: [`include/linux/suspend.h`](srctree/include/linux/suspend.h)

use super::notifier::{
    Chain,
    Notifier, //
};
use crate::bindings;
use kernel::{
    bindings::notifier_block,
    prelude::*, //
};

/// What is done around hibernation.
pub(crate) trait HibernateHandler: Send + Sync + 'static {
    /// The system is about to save its memory: frees as much as it can. May sleep, but must return.
    fn prepare(&self);

    /// The system has woken up, or has not gone to sleep after all. May sleep.
    fn finished(&self);
}

/// A registration for hibernation.
pub(crate) type HibernateNotifier<H> = Notifier<SleepChain, H>;

/// See [`HibernateNotifier`].
pub(crate) struct SleepChain;

// SAFETY: The C functions do that.
unsafe impl<H: HibernateHandler> Chain<H> for SleepChain {
    unsafe fn register(block: *mut notifier_block) -> c_int {
        // SAFETY: By the safety requirements.
        unsafe { bindings::register_pm_notifier(block) }
    }

    unsafe fn unregister(block: *mut notifier_block) {
        // SAFETY: By the safety requirements.
        unsafe { bindings::unregister_pm_notifier(block) };
    }

    unsafe fn tell(handler: &H, action: c_ulong, _data: *mut c_void) {
        match action {
            bindings::VBRS_PM_HIBERNATION_PREPARE => handler.prepare(),
            bindings::VBRS_PM_POST_HIBERNATION => handler.finished(),
            _ => (),
        }
    }
}
