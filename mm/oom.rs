// SPDX-License-Identifier: GPL-2.0

//! Being told when the guest is out of memory.
//!
//! C header: [`include/linux/oom.h`](srctree/include/linux/oom.h)

use super::notifier::{
    Chain,
    Notifier, //
};
use crate::bindings;
use kernel::{
    bindings::notifier_block,
    prelude::*, //
};

/// What is done when the guest is out of memory, before a process is killed.
pub(crate) trait OomHandler: Send + Sync + 'static {
    /// Frees memory. Returns how many guest pages.
    ///
    /// Called in the path of memory allocation of any process: may sleep, but must neither allocate
    /// nor wait for long.
    fn out_of_memory(&self) -> u64;
}

/// A registration for out-of-memory notifications.
pub(crate) type OomNotifier<H> = Notifier<OomChain, H>;

/// See [`OomNotifier`].
pub(crate) struct OomChain;

// SAFETY: The C functions do that.
unsafe impl<H: OomHandler> Chain<H> for OomChain {
    // That of the C driver.
    const PRIORITY: c_int = 80;

    unsafe fn register(block: *mut notifier_block) -> c_int {
        // SAFETY: By the safety requirements.
        unsafe { bindings::register_oom_notifier(block) }
    }

    unsafe fn unregister(block: *mut notifier_block) {
        // SAFETY: By the safety requirements.
        unsafe { bindings::unregister_oom_notifier(block) };
    }

    unsafe fn tell(handler: &H, _action: c_ulong, data: *mut c_void) {
        let pages = handler.out_of_memory();

        // SAFETY: This chain calls with the counter of freed pages.
        unsafe {
            let freed = data.cast::<c_ulong>();
            *freed = (*freed).saturating_add(usize::try_from(pages).unwrap_or(usize::MAX));
        }
    }
}
