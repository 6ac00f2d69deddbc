// SPDX-License-Identifier: GPL-2.0

//! How much memory there is.
//!
//! C header: [`include/linux/mm.h`](srctree/include/linux/mm.h)

use crate::bindings;
use kernel::{
    num::casts::usize_as_u64,
    prelude::*, //
};

/// log2 of the size of a guest page in bytes.
// CAST: the kernel's own constant, below 20.
pub(crate) const PAGE_SHIFT: u32 = kernel::page::PAGE_SHIFT as u32;

/// The kernel's estimate of the guest pages that can be had without swapping, above its watermarks.
pub(crate) fn available_pages() -> u64 {
    // SAFETY: Can be called from any context.
    let available: c_long = unsafe { bindings::si_mem_available() };

    u64::try_from(available).unwrap_or(0)
}

/// The guest pages that the kernel manages.
pub(crate) fn total_pages() -> u64 {
    // SAFETY: Reads an atomic counter.
    usize_as_u64(unsafe { bindings::totalram_pages() })
}

/// Whether this kernel runs only to save the memory of one that has crashed.
pub(crate) fn is_kdump_kernel() -> bool {
    // SAFETY: Looks at a variable that does not change after boot.
    unsafe { bindings::is_kdump_kernel() }
}

/// Lets others run, where the kernel is not preemptible. Must be called from a context that may
/// sleep.
pub(crate) fn relax() {
    // SAFETY: The caller may sleep.
    unsafe { bindings::cond_resched() };
}
