// SPDX-License-Identifier: GPL-2.0

//! Blocks of pages that were allocated to give them to the host.
//!
//! A block is a handle, never a slice: its memory may be gone at any time.
//!
//! C headers: [`include/linux/gfp.h`](srctree/include/linux/gfp.h),
//! [`include/linux/page-flags.h`](srctree/include/linux/page-flags.h)

use crate::{
    bindings,
    page_list::PageList, //
};
use core::{
    mem::ManuallyDrop,
    ptr::NonNull, //
};
use kernel::{
    bindings::page,
    num::casts::usize_as_u64, //
};

/// `1 << order` guest pages, aligned to that size. Dropping a block gives it back to the guest.
///
/// # Invariants
///
/// `page` is the first page of a block that was allocated with `order`, not as a compound page, and
/// that nobody else frees. Its list fields are unused.
#[must_use = "dropping a block gives it back to the guest"]
pub(crate) struct Block {
    page: NonNull<page>,
    order: u32,
}

// SAFETY: Pages can be used and freed from any thread.
unsafe impl Send for Block {}

impl Block {
    /// The largest order there is.
    pub(crate) const MAX_ORDER: u32 = bindings::VBRS_MAX_PAGE_ORDER;

    /// Allocates a block of free memory, without reclaim or compaction, and without touching any
    /// reserve. Silent if there is none.
    ///
    /// Must be called from a context that may sleep.
    pub(crate) fn alloc(order: u32) -> Option<Self> {
        if order > Self::MAX_ORDER {
            return None;
        }
        Self::alloc_with(bindings::VBRS_GFP_BLOCK, order)
    }

    /// Allocates a block of free memory, to be split into pages that compaction can move. Otherwise
    /// like [`Block::alloc`].
    ///
    /// Must be called from a context that may sleep.
    pub(crate) fn alloc_chunk(order: u32) -> Option<Self> {
        if order > Self::MAX_ORDER {
            return None;
        }
        Self::alloc_with(bindings::VBRS_GFP_CHUNK, order)
    }

    fn alloc_with(gfp: kernel::bindings::gfp_t, order: u32) -> Option<Self> {
        // SAFETY: The flags do not ask for a compound page, and the order is not above the largest.
        let page = unsafe { bindings::alloc_pages(gfp, order) };

        // INVARIANT: It was just allocated.
        NonNull::new(page).map(|page| Self { page, order })
    }

    /// Takes over a block.
    ///
    /// # Safety
    ///
    /// The type invariants must hold for `page` and `order`.
    pub(crate) unsafe fn from_raw(page: NonNull<page>, order: u32) -> Self {
        // INVARIANT: By the safety requirements.
        Self { page, order }
    }

    /// Gives the block out of Rust's hands.
    pub(crate) fn into_raw(self) -> NonNull<page> {
        ManuallyDrop::new(self).page
    }

    /// The first page.
    pub(super) fn as_raw(&self) -> *mut page {
        self.page.as_ptr()
    }

    /// The frame number of the first page, in guest pages.
    pub(crate) fn pfn(&self) -> u64 {
        // SAFETY: By the type invariants `page` is valid.
        usize_as_u64(unsafe { bindings::page_to_pfn(self.page.as_ptr()) })
    }

    /// log2 of the number of pages.
    pub(crate) fn order(&self) -> u32 {
        self.order
    }

    /// The number of pages.
    pub(crate) fn pages(&self) -> u64 {
        1 << self.order
    }

    /// Marks all pages as such that nobody may read, not even for a crash dump.
    ///
    /// To be called before the host is told of them; freeing the block takes the marks away.
    pub(crate) fn mark_offline(&mut self) {
        // SAFETY: By the type invariants all the pages are ours.
        unsafe { bindings::set_offline(self.page.as_ptr(), 1 << self.order) };
    }

    /// Splits the block into single pages, put at the front of `pages`. Marks stay.
    pub(crate) fn split(self, pages: &mut PageList) {
        let order = self.order;
        let first = self.into_raw();

        if order > 0 {
            // SAFETY: By the type invariants it is ours and no compound page.
            unsafe { kernel::bindings::split_page(first.as_ptr(), order) };
        }
        for i in (0..1usize << order).rev() {
            // SAFETY: The page is one of the block's, and the array of pages is contiguous within a
            // block.
            let page = unsafe { bindings::nth_page(first.as_ptr(), i) };
            if let Some(page) = NonNull::new(page) {
                // SAFETY: After the split each page is one of its own, allocated with order 0.
                pages.push(unsafe { Self::from_raw(page, 0) });
            }
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let page = self.page.as_ptr();

        // SAFETY: By the type invariants the block is ours, and this is the last use of it. The
        // allocator takes away the mark of a single page, also if somebody who tries to move it
        // holds a reference of his own, but not those of a block, of which only the first page has
        // a reference count.
        unsafe {
            if self.order > 0 && bindings::page_offline(page) {
                bindings::clear_offline(page, 1 << self.order);
            }
            kernel::bindings::__free_pages(page, self.order);
        }
    }
}
