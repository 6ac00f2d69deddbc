// SPDX-License-Identifier: GPL-2.0

//! Many single pages at a time.
//!
//! C header: [`include/linux/gfp.h`](srctree/include/linux/gfp.h)

use super::block::Block;
use crate::bindings;
use core::ptr::NonNull;
use kernel::{
    bindings::page,
    prelude::*, //
};

/// Pages that were allocated together and are handed out one by one. Dropping it gives the rest back
/// to the guest.
///
/// # Invariants
///
/// All pages are ours, allocated with order 0.
pub(crate) struct PageBatch {
    pages: KVec<NonNull<page>>,
    /// What the allocator fills; all null between calls.
    slots: KVec<*mut page>,
}

// SAFETY: Pages can be used and freed from any thread.
unsafe impl Send for PageBatch {}

impl PageBatch {
    /// The most pages in a batch.
    pub(crate) const SIZE: usize = 256;

    /// An empty batch. May sleep.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            pages: KVec::with_capacity(Self::SIZE, GFP_KERNEL)?,
            slots: KVec::from_elem(core::ptr::null_mut(), Self::SIZE, GFP_KERNEL)?,
        })
    }

    /// Takes the next page, if `sorted` in ascending order within what was allocated together.
    /// Allocates up to `want` more if there is none left, which compaction can move, after a light
    /// reclaim if need be; touches no reserve, does not wake the OOM killer, and is silent if there is
    /// nothing.
    ///
    /// Must be called from a context that may sleep.
    pub(crate) fn next(&mut self, want: u64, sorted: bool) -> Option<Block> {
        if self.pages.is_empty() {
            self.refill(usize::try_from(want).unwrap_or(Self::SIZE).min(Self::SIZE));
            if sorted {
                self.sort();
            }
        }
        let page = self.pages.pop()?;

        // SAFETY: By the type invariants the page is ours, and it is no longer in the batch.
        Some(unsafe { Block::from_raw(page, 0) })
    }

    /// Gives what is left back to the guest.
    pub(crate) fn clear(&mut self) {
        while let Some(page) = self.pages.pop() {
            // SAFETY: By the type invariants the page is ours, and it is no longer in the batch.
            drop(unsafe { Block::from_raw(page, 0) });
        }
    }

    fn refill(&mut self, want: usize) {
        // SAFETY: There are `SIZE` slots, all null, and `want` is at most that.
        let got = unsafe {
            bindings::alloc_pages_bulk(bindings::VBRS_GFP_PAGE, want, self.slots.as_mut_ptr())
        };

        for slot in self.slots.iter_mut().take(got) {
            if let Some(page) = NonNull::new(core::mem::replace(slot, core::ptr::null_mut())) {
                // INVARIANT: It was just allocated. There is room for as many as there are slots.
                let _ = self.pages.push_within_capacity(page);
            }
        }
    }

    /// Sorts the pages so that the last one has the lowest frame: they are taken from the end.
    fn sort(&mut self) {
        // SAFETY: The elements are pointers, and the function compares such. The kernel's own function
        // has no way to panic, unlike that of `core`.
        unsafe {
            bindings::sort(
                self.pages.as_mut_ptr().cast(),
                self.pages.len(),
                size_of::<NonNull<page>>(),
                Some(descending),
                None,
            )
        };
    }
}

/// Compares pages by their frames, the higher one first: the array of pages is in the order of frames
/// wherever it is contiguous.
///
/// # Safety
///
/// Both must point at pointers to pages.
unsafe extern "C" fn descending(a: *const c_void, b: *const c_void) -> c_int {
    // SAFETY: By the safety requirements.
    let (a, b) = unsafe { (*a.cast::<NonNull<page>>(), *b.cast::<NonNull<page>>()) };

    // CAST: -1, 0 or 1.
    b.cmp(&a) as c_int
}

impl Drop for PageBatch {
    fn drop(&mut self) {
        self.clear();
    }
}
