// SPDX-License-Identifier: GPL-2.0

//! Which pages are free.
//!
//! C header: [`include/linux/mmzone.h`](srctree/include/linux/mmzone.h)

use super::block::Block;
use crate::bindings;
use core::{
    ops::Range,
    ptr::NonNull, //
};
use kernel::{
    num::casts::usize_as_u64,
    prelude::*, //
};

/// The guest pages from the first one to the last one that there may be.
pub(crate) fn all_frames() -> Range<u64> {
    // SAFETY: Both look at what changes only when memory comes or goes as a whole.
    unsafe { usize_as_u64(bindings::first_pfn())..usize_as_u64(bindings::end_pfn()) }
}

/// The guest pages in free blocks of at least `1 << order` pages.
pub(crate) fn pages_in_free_blocks(order: u32) -> u64 {
    // SAFETY: Looks at counters.
    usize_as_u64(unsafe { bindings::pages_in_free_blocks(order) })
}

/// The guest pages that are free, with those that a processor has for itself.
pub(crate) fn free_pages() -> u64 {
    // SAFETY: Looks at counters.
    usize_as_u64(unsafe { bindings::free_pages() })
}

/// Calls `each` with the runs of guest pages within `frames` that are in free blocks, in ascending order.
///
/// The allocator is locked and interrupts are off for a page block at a time, so `each` must be short and
/// must neither sleep nor allocate. What is free may be in use right after that. Free pages that a processor
/// has for itself are not told.
///
/// Must be called from a context that may sleep, for no more frames than take a few milliseconds.
pub(crate) fn for_each_free(frames: Range<u64>, each: &mut dyn FnMut(Range<u64>)) {
    for piece in pieces(frames) {
        let Some(page) = page_at(piece.start) else {
            continue;
        };

        free_in_piece(page, piece, each);
    }
}

/// Cuts frames at the borders of page blocks.
pub(super) fn pieces(frames: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    // SAFETY: Looks at a constant, or at a variable that does not change after boot.
    let size = usize_as_u64(unsafe { bindings::pageblock_pages() }).max(1);
    let mut at = frames.start;

    core::iter::from_fn(move || {
        let start = at;

        if start >= frames.end {
            return None;
        }
        // A power of two.
        at = (start | (size - 1)).saturating_add(1).min(frames.end);
        Some(start..at)
    })
}

/// The page of a frame, if that is memory in use by the kernel. Those behind it in the same page block are
/// valid, too.
pub(super) fn page_at(pfn: u64) -> Option<Page> {
    let pfn = usize::try_from(pfn).ok()?;
    // SAFETY: Can be called for any frame.
    let page = unsafe { bindings::pfn_to_online_page(pfn) };

    // INVARIANT: It has just been looked up.
    NonNull::new(page).map(Page)
}

/// A page that may be anybody's.
///
/// # Invariants
///
/// The pointer is to a valid `struct page`.
#[derive(Clone, Copy)]
pub(super) struct Page(NonNull<kernel::bindings::page>);

impl Page {
    /// The page that is `n` behind, in the same page block.
    ///
    /// # Safety
    ///
    /// It must be in the same page block.
    pub(super) unsafe fn nth(self, n: u64) -> Self {
        // CAST: below the size of a page block.
        //
        // SAFETY: The array of pages is contiguous within a page block.
        let page = unsafe { bindings::nth_page(self.as_ptr(), n as usize) };

        // INVARIANT: By the safety requirements.
        NonNull::new(page).map_or(self, Self)
    }

    /// The C object.
    pub(super) fn as_ptr(self) -> *mut kernel::bindings::page {
        self.0.as_ptr()
    }
}

/// The lock of the zone that a page belongs to, held as long as this exists.
struct ZoneGuard {
    zone: *mut kernel::bindings::zone,
    flags: c_ulong,
}

impl ZoneGuard {
    fn new(page: Page) -> Self {
        // SAFETY: The page is valid, and so is its zone, which stays.
        unsafe {
            let zone = bindings::page_zone(page.as_ptr());
            let flags = bindings::zone_lock(zone);

            Self { zone, flags }
        }
    }

    /// The order of the free block that begins with a page of the zone.
    fn free_order(&self, page: Page) -> Option<u32> {
        // SAFETY: The page is valid, and the zone locked; for a page of another zone that is not enough.
        unsafe {
            if bindings::page_zone(page.as_ptr()) != self.zone {
                return None;
            }
            u32::try_from(bindings::free_order(page.as_ptr())).ok()
        }
    }

    /// Whether a free block that begins before the page reaches beyond it, and if so to where.
    fn free_until(&self, pfn: u64) -> Option<u64> {
        (1..=Block::MAX_ORDER).find_map(|order| {
            let start = pfn >> order << order;
            let found = self.free_order(page_at(start)?)?;
            let end = start.saturating_add(1 << found.min(Block::MAX_ORDER));

            (start < pfn && pfn < end).then_some(end)
        })
    }
}

impl Drop for ZoneGuard {
    fn drop(&mut self) {
        // SAFETY: It was locked in `new`.
        unsafe { bindings::zone_unlock(self.zone, self.flags) };
    }
}

/// Finds the free pages in a piece of a page block, which begins with `page`.
fn free_in_piece(page: Page, piece: Range<u64>, each: &mut dyn FnMut(Range<u64>)) {
    let zone = ZoneGuard::new(page);
    let mut at = piece.start;

    if let Some(end) = zone.free_until(at) {
        let end = end.min(piece.end);

        each(at..end);
        at = end;
    }
    while at < piece.end {
        // SAFETY: `at` is within the piece, here and below.
        let here = unsafe { page.nth(at - piece.start) };
        // CAST: at most the size of a page block.
        let left = (piece.end - at) as usize;
        // SAFETY: There are so many pages.
        at += usize_as_u64(unsafe { bindings::pages_in_use(here.as_ptr(), left) });
        if at >= piece.end {
            break;
        }
        // SAFETY: See above.
        let head = unsafe { page.nth(at - piece.start) };
        let Some(order) = zone.free_order(head) else {
            at += 1;
            continue;
        };
        let end = at.saturating_add(1 << order.min(Block::MAX_ORDER));

        each(at..end.min(piece.end));
        at = end;
    }
}
