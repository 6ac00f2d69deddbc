// SPDX-License-Identifier: GPL-2.0

//! Finding one's own pages among all, in the order of their frames.
//!
//! A list of pages is in no order, and to sort it would take memory or long. But each page can bear a mark,
//! and all pages can be looked at in order.
//!
//! C header: [`include/linux/page-flags.h`](srctree/include/linux/page-flags.h)

use super::{
    block::Block,
    free_list::{
        page_at,
        pieces,
        Page, //
    },
};
use crate::{
    bindings,
    page_list::PageList, //
};
use core::ops::Range;
use kernel::{
    num::casts::usize_as_u64,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
};

/// A mark that nobody else uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark(usize);

impl Mark {
    /// A new one. No pointer looks like it, since it is odd.
    pub(crate) fn new() -> Self {
        static LAST: Atomic<usize> = Atomic::new(0);

        Self(LAST.fetch_add(2, Relaxed) | 1)
    }

    /// Marks the first page of a block that is marked as offline. Freeing the block takes the mark away.
    pub(crate) fn put(self, block: &Block) {
        // SAFETY: The block is ours.
        unsafe { bindings::set_page_mark(block.as_raw(), self.0) };
    }

    /// Takes the mark off a block.
    pub(crate) fn take_off(self, block: &Block) {
        // SAFETY: The block is ours.
        unsafe { bindings::set_page_mark(block.as_raw(), 0) };
    }
}

/// The order of the marked block that begins with a page.
fn order_of(page: Page, mark: Mark) -> Option<u32> {
    // SAFETY: The page is valid. If it has the mark the list fields are those of a list of pages.
    unsafe {
        if bindings::pages_unmarked(page.as_ptr(), 1, mark.0, mark.0) != 0 {
            return None;
        }
        u32::try_from(bindings::page_order(page.as_ptr())).ok()
    }
}

/// Calls `each` with the runs of guest pages within `frames` that belong to blocks with `mark`, or that are
/// single pages, marked as offline, with `single` in their private field; in ascending order.
///
/// # Safety
///
/// Blocks with this mark must be in a [`PageList`], and stay there during the call.
pub(super) unsafe fn for_each_marked(
    frames: Range<u64>,
    mark: Mark,
    single: Option<usize>,
    each: &mut dyn FnMut(Range<u64>),
) {
    let end_of = |pfn: u64, order: u32| {
        let size = 1 << order.min(Block::MAX_ORDER);
        pfn.saturating_add(size).min(frames.end)
    };
    // A block may have begun before the first frame.
    let mut at = (1..=Block::MAX_ORDER)
        .find_map(|order| {
            let start = frames.start >> order << order;
            let end = end_of(start, order_of(page_at(start)?, mark)?);

            (start < frames.start && frames.start < end).then_some(end)
        })
        .unwrap_or(frames.start);

    if at > frames.start {
        each(frames.start..at);
    }
    for piece in pieces(frames.clone()) {
        let Some(page) = page_at(piece.start) else {
            continue;
        };

        at = at.max(piece.start);
        while at < piece.end {
            // SAFETY: `at` is within the piece, here and below.
            let here = unsafe { page.nth(at - piece.start) };
            // CAST: at most the size of a page block.
            let left = (piece.end - at) as usize;
            let single = single.unwrap_or(mark.0);
            // SAFETY: There are so many pages.
            let skip = unsafe { bindings::pages_unmarked(here.as_ptr(), left, mark.0, single) };

            at += usize_as_u64(skip);
            if at < piece.end {
                // SAFETY: See above.
                let order = order_of(unsafe { page.nth(at - piece.start) }, mark);
                let end = end_of(at, order.unwrap_or(0));

                each(at..end);
                at = end;
            }
        }
    }
}

/// Blocks that are kept from being used, and can be named in the order of their frames. Dropping it gives
/// them back to the guest.
///
/// # Invariants
///
/// The blocks in `list`, and no others, have `mark`.
pub(crate) struct MarkedPages {
    mark: Mark,
    list: PageList,
}

impl MarkedPages {
    /// None.
    pub(crate) fn new() -> Self {
        Self {
            mark: Mark::new(),
            list: PageList::new(),
        }
    }

    /// The number of guest pages.
    pub(crate) fn pages(&self) -> u64 {
        self.list.pages()
    }

    /// Takes in a block.
    pub(crate) fn push(&mut self, mut block: Block) {
        block.mark_offline();
        self.mark.put(&block);
        self.list.push(block);
    }

    /// Takes out a block, which bears no mark any more.
    pub(crate) fn pop(&mut self) -> Option<Block> {
        let block = self.list.pop()?;

        self.mark.take_off(&block);
        Some(block)
    }

    /// Calls `each` with the runs of guest pages within `frames` that are in here, in ascending order.
    pub(crate) fn for_each(&self, frames: Range<u64>, each: &mut dyn FnMut(Range<u64>)) {
        // SAFETY: By the type invariants; nothing leaves the list during the call.
        unsafe { for_each_marked(frames, self.mark, None, each) };
    }
}
