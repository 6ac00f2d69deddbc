// SPDX-License-Identifier: GPL-2.0

//! Being told when a part of the guest's memory is to be taken out of use.
//!
//! C header: [`include/linux/memory.h`](srctree/include/linux/memory.h)

use super::notifier::{
    Chain,
    Notifier, //
};
use crate::bindings;
use core::ops::Range;
use kernel::{
    bindings::notifier_block,
    num::casts::usize_as_u64,
    prelude::*, //
};

/// What is done when memory is to be taken out of use.
pub(crate) trait OfflineHandler: Send + Sync + 'static {
    /// Gives back pages, by their frame numbers, which the allocator hands out to nobody any more. May sleep,
    /// but must not wait for long.
    fn going_offline(&self, frames: Range<u64>);
}

/// A registration for memory that goes.
pub(crate) type OfflineNotifier<H> = Notifier<OfflineChain, H>;

/// See [`OfflineNotifier`].
pub(crate) struct OfflineChain;

// SAFETY: The C functions do that.
unsafe impl<H: OfflineHandler> Chain<H> for OfflineChain {
    unsafe fn register(block: *mut notifier_block) -> c_int {
        // SAFETY: By the safety requirements.
        unsafe { bindings::register_memory_notifier(block) }
    }

    unsafe fn unregister(block: *mut notifier_block) {
        // SAFETY: By the safety requirements.
        unsafe { bindings::unregister_memory_notifier(block) };
    }

    unsafe fn tell(handler: &H, action: c_ulong, data: *mut c_void) {
        // CAST: one of the small constants of the enumeration.
        if action as bindings::memory_block_state == bindings::memory_block_state_MEM_GOING_OFFLINE
        {
            // SAFETY: For this action the chain calls with a valid `struct memory_notify`.
            let what = unsafe { &*data.cast::<bindings::memory_notify>() };
            let first = usize_as_u64(what.start_pfn);

            handler.going_offline(first..first.saturating_add(usize_as_u64(what.nr_pages)));
        }
    }
}
