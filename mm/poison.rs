// SPDX-License-Identifier: GPL-2.0

//! What the kernel writes to memory that is freed.
//!
//! C headers: [`include/linux/mm.h`](srctree/include/linux/mm.h),
//! [`include/linux/poison.h`](srctree/include/linux/poison.h)

use crate::bindings;

/// What the kernel does to memory that is freed.
pub(crate) enum OnFree {
    /// Nothing.
    Nothing,
    /// It writes this to each byte.
    Fill(u8),
}

/// What the kernel does to memory that is freed.
pub(crate) fn on_free() -> OnFree {
    // SAFETY: Both only look at static keys.
    let (init, poisoning) = unsafe {
        (
            bindings::want_init_on_free(),
            bindings::page_poisoning_enabled_static(),
        )
    };

    if init {
        OnFree::Fill(0)
    } else if poisoning {
        OnFree::Fill(bindings::VBRS_PAGE_POISON)
    } else {
        OnFree::Nothing
    }
}
