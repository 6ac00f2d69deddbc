// SPDX-License-Identifier: GPL-2.0

//! Being asked for memory before the guest runs out of it.
//!
//! C header: [`include/linux/shrinker.h`](srctree/include/linux/shrinker.h)

use crate::bindings;
use core::ptr::NonNull;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Who has memory that the guest can have back.
pub(crate) trait Shrink: Send + Sync + 'static {
    /// How many guest pages there are. Called in the path of memory allocation: must not sleep.
    fn count(&self) -> u64;

    /// Gives back about `pages`. Returns how many. Called in the path of memory allocation of any process: must
    /// neither allocate nor wait for anybody who does; but it should wait for others who look at the same pages
    /// for a moment, since reclaim that finds nothing at once kills a process.
    fn shrink(&self, pages: u64) -> u64;
}

/// A registration with the kernel's memory reclaim. Dropping it ends it, and waits for a call under way.
#[must_use = "dropping it ends the registration"]
pub(crate) struct Shrinker<S: Shrink> {
    raw: NonNull<bindings::shrinker>,
    _who: Arc<S>,
}

// SAFETY: A shrinker can be freed from any thread.
unsafe impl<S: Shrink> Send for Shrinker<S> {}

impl<S: Shrink> Shrinker<S> {
    /// Registers `who`. May sleep.
    pub(crate) fn new(name: &'static CStr, who: Arc<S>) -> Result<Self> {
        // SAFETY: The format takes one C string.
        let raw = unsafe { bindings::shrinker_alloc(0, c"%s".as_char_ptr(), name.as_char_ptr()) };
        let raw = NonNull::new(raw).ok_or(ENOMEM)?;

        // SAFETY: It was just allocated and nobody else knows of it. `who` lives until after it was freed in
        // `drop`.
        unsafe {
            (*raw.as_ptr()).count_objects = Some(Self::count);
            (*raw.as_ptr()).scan_objects = Some(Self::scan);
            (*raw.as_ptr()).private_data = Arc::as_ptr(&who).cast_mut().cast();
            bindings::shrinker_register(raw.as_ptr());
        }
        Ok(Self { raw, _who: who })
    }

    /// # Safety
    ///
    /// Only for reclaim to call, with what was registered in `new`.
    unsafe extern "C" fn count(
        shrinker: *mut bindings::shrinker,
        _control: *mut bindings::shrink_control,
    ) -> c_ulong {
        // SAFETY: It was set in `new`, and lives as long as the registration.
        let who = unsafe { &*(*shrinker).private_data.cast::<S>() };

        usize::try_from(who.count()).unwrap_or(0)
    }

    /// # Safety
    ///
    /// As for `count`.
    unsafe extern "C" fn scan(
        shrinker: *mut bindings::shrinker,
        control: *mut bindings::shrink_control,
    ) -> c_ulong {
        // SAFETY: As in `count`; reclaim hands over a valid `control`.
        let (who, want) = unsafe {
            (
                &*(*shrinker).private_data.cast::<S>(),
                (*control).nr_to_scan,
            )
        };

        match who.shrink(kernel::num::casts::usize_as_u64(want)) {
            // CAST: the same bits.
            0 => bindings::VBRS_SHRINK_STOP as c_ulong,
            pages => usize::try_from(pages).unwrap_or(0),
        }
    }
}

impl<S: Shrink> Drop for Shrinker<S> {
    fn drop(&mut self) {
        // SAFETY: It was registered in `new`. When this returns nobody calls it any more.
        unsafe { bindings::shrinker_free(self.raw.as_ptr()) };
    }
}
