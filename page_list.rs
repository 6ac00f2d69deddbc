// SPDX-License-Identifier: GPL-2.0

//! Lists of pages that are neither the guest's nor anybody else's.

use crate::{
    bindings,
    mm::Block, //
};
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::bindings::page;

/// A list of blocks. Dropping it gives all of them back to the guest.
///
/// The list is linked through the pages' own list fields, so that it needs no memory and two lists
/// are joined in no time.
///
/// # Invariants
///
/// - From `first` on each block's link leads to the next one, and that of `last` is null; both are
///   `None` if the list is empty.
/// - The list owns the blocks, as [`Block`] does, but for their list fields being in use.
/// - `pages` is the number of pages in all blocks.
#[must_use = "dropping a list gives its pages back to the guest"]
pub(crate) struct PageList {
    first: Option<NonNull<page>>,
    last: Option<NonNull<page>>,
    pages: u64,
}

// SAFETY: Pages can be used and freed from any thread.
unsafe impl Send for PageList {}

impl PageList {
    /// An empty list.
    pub(crate) const fn new() -> Self {
        Self {
            first: None,
            last: None,
            pages: 0,
        }
    }

    /// The number of guest pages in the list.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether there is nothing in the list.
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Puts a block at the front.
    pub(crate) fn push(&mut self, block: Block) {
        let order = block.order();
        let pages = block.pages();
        let page = block.into_raw();
        let next = self.first.map_or(core::ptr::null_mut(), NonNull::as_ptr);

        // SAFETY: The block is ours, so its list fields are.
        unsafe { bindings::page_set_link(page.as_ptr(), next.cast(), order as usize) };
        // INVARIANT: The block leads to what was first, and is the last one if there was none.
        self.first = Some(page);
        if self.last.is_none() {
            self.last = Some(page);
        }
        self.pages += pages;
    }

    /// Takes the block at the front.
    pub(crate) fn pop(&mut self) -> Option<Block> {
        let page = self.first?;
        let (_, order, next) = Self::look(page);

        // INVARIANT: The list begins with what the block leads to; if that is nothing it is empty.
        self.first = next;
        if next.is_none() {
            self.last = None;
        }
        self.pages -= 1 << order;
        // SAFETY: By the type invariants the list owned the block, and it is no longer in the list.
        Some(unsafe { Block::from_raw(page, order) })
    }

    /// The order of the block at the front.
    pub(crate) fn first_order(&self) -> Option<u32> {
        self.first.map(|page| Self::look(page).1)
    }

    /// Puts all blocks of `other` at the front.
    pub(crate) fn append(&mut self, mut other: Self) {
        let (Some(first), Some(last)) = (other.first.take(), other.last.take()) else {
            return;
        };
        let next = self.first.map_or(core::ptr::null_mut(), NonNull::as_ptr);
        let (_, order, _) = Self::look(last);

        // SAFETY: By the type invariants `other` owned the block, so its list fields are ours.
        unsafe { bindings::page_set_link(last.as_ptr(), next.cast(), order as usize) };
        // INVARIANT: The last block of `other` leads to what was first. `other` is left empty.
        self.first = Some(first);
        if self.last.is_none() {
            self.last = Some(last);
        }
        self.pages += other.pages;
        other.pages = 0;
    }

    /// Iterates over the blocks: the frame number of the first page in guest pages, and the order.
    pub(crate) fn iter(&self) -> Iter<'_> {
        Iter {
            next: self.first,
            _list: PhantomData,
        }
    }

    /// The frame number, the order, and the successor of a block in a list.
    fn look(page: NonNull<page>) -> (u64, u32, Option<NonNull<page>>) {
        let raw = page.as_ptr();

        // SAFETY: Only called for blocks in a list, whose link was set when they were put there.
        unsafe {
            (
                kernel::num::casts::usize_as_u64(bindings::page_to_pfn(raw)),
                // CAST: an order, as set by `push`.
                bindings::page_order(raw) as u32,
                NonNull::new(bindings::page_next(raw).cast()),
            )
        }
    }
}

impl Drop for PageList {
    fn drop(&mut self) {
        while let Some(block) = self.pop() {
            drop(block);
        }
    }
}

/// See [`PageList::iter`].
pub(crate) struct Iter<'a> {
    next: Option<NonNull<page>>,
    _list: PhantomData<&'a PageList>,
}

impl Iterator for Iter<'_> {
    type Item = (u64, u32);

    fn next(&mut self) -> Option<(u64, u32)> {
        let (pfn, order, next) = PageList::look(self.next?);

        self.next = next;
        Some((pfn, order))
    }
}
