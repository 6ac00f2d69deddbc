// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Units of memory, and the only place that converts between them.
//!
//! A *balloon page* is 4 KiB on every machine; `num_pages` and `actual` count those. A *guest page*
//! has the size of the guest's `PAGE_SIZE`: 4, 16 or 64 KiB. A *frame* of a page-bitmap record has
//! the size that the record's `page_shift` says.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

use super::wire::BALLOON_PAGE_SHIFT;

/// The size of a guest page, at least that of a balloon page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSize {
    shift: u32,
}

impl PageSize {
    /// From log2 of the size in bytes; `None` below a balloon page or above 1 GiB.
    pub const fn from_shift(shift: u32) -> Option<Self> {
        if shift < BALLOON_PAGE_SHIFT || shift > 30 {
            return None;
        }
        Some(Self { shift })
    }

    /// log2 of the size in bytes.
    pub const fn shift(self) -> u32 {
        self.shift
    }

    /// log2 of the number of balloon pages in a guest page.
    const fn balloon_shift(self) -> u32 {
        self.shift - BALLOON_PAGE_SHIFT
    }

    /// How many guest pages a target of `num_pages` balloon pages is, rounded up, so that a target
    /// between two guest pages does not make the balloon go back and forth for ever.
    pub const fn guest_pages(self, num_pages: u32) -> u64 {
        (num_pages as u64).div_ceil(1 << self.balloon_shift())
    }

    /// How many balloon pages `pages` guest pages are.
    ///
    /// A target rounded up can be more than the 32-bit `actual` can hold; that is then the largest
    /// value it has.
    pub const fn actual(self, pages: u64) -> u32 {
        let balloon = self.balloon_count(pages);
        if balloon > u32::MAX as u64 {
            return u32::MAX;
        }
        balloon as u32
    }

    /// How many balloon pages `pages` guest pages are; also the first balloon page of a guest page.
    pub const fn balloon_count(self, pages: u64) -> u64 {
        pages.saturating_mul(1 << self.balloon_shift())
    }

    /// How many guest pages `count` balloon pages are, rounded down; also the guest page of a balloon page.
    pub const fn guest_count(self, count: u64) -> u64 {
        count >> self.balloon_shift()
    }

    /// The first balloon page frame of the guest page `pfn`, if such an array entry can hold it.
    pub fn balloon_pfn(self, pfn: u64) -> Option<u32> {
        let first = pfn.checked_mul(1 << self.balloon_shift())?;
        u32::try_from(first).ok()
    }

    /// How many balloon pages a block of `order` has.
    pub const fn balloon_pages(self, order: u32) -> u64 {
        1 << (self.balloon_shift() + order)
    }

    /// How many guest pages `bytes` are, rounded down.
    pub const fn pages_in(self, bytes: u64) -> u64 {
        bytes >> self.shift
    }

    /// How many bytes `pages` guest pages are.
    pub const fn bytes(self, pages: u64) -> u64 {
        pages.saturating_mul(1 << self.shift)
    }

    /// The order of the block whose size is `1 << page_shift` bytes; `None` below a guest page.
    pub const fn order(self, page_shift: u32) -> Option<u32> {
        page_shift.checked_sub(self.shift)
    }

    /// The frames, of `1 << page_shift` bytes each, that the block of `order` at guest page `pfn`
    /// covers: the first one, and how many.
    ///
    /// `None` if the block does not start and end at such frames.
    pub fn frames(self, pfn: u64, order: u32, page_shift: u32) -> Option<(u64, u64)> {
        let block_shift = self.shift + order;
        let count = 1u64 << block_shift.checked_sub(page_shift)?;
        let first = if page_shift <= self.shift {
            pfn.checked_mul(1 << (self.shift - page_shift))?
        } else {
            let per_frame = 1u64 << (page_shift - self.shift);
            if pfn % per_frame != 0 {
                return None;
            }
            pfn / per_frame
        };
        Some((first, count))
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_units))]
mod tests {
    use super::*;

    fn size(shift: u32) -> PageSize {
        PageSize { shift }
    }

    #[test]
    fn page_sizes_below_a_balloon_page_are_refused() {
        assert!(PageSize::from_shift(11).is_none());
        assert!(PageSize::from_shift(12) == Some(size(12)));
        assert!(PageSize::from_shift(16) == Some(size(16)));
        assert!(PageSize::from_shift(31).is_none());
    }

    #[test]
    fn targets_are_rounded_up_and_never_wrap() {
        for (shift, num_pages, pages) in [
            (12, 0, 0),
            (12, 1, 1),
            (12, u32::MAX, 0xffff_ffff),
            (14, 1, 1),
            (14, 4, 1),
            (14, 5, 2),
            (14, u32::MAX, 0x4000_0000),
            (16, 16, 1),
            (16, 17, 2),
            (16, 0xffff_fff1, 0x1000_0000),
            (16, u32::MAX, 0x1000_0000),
        ] {
            assert!(size(shift).guest_pages(num_pages) == pages);
        }
    }

    #[test]
    fn actual_meets_the_target_and_saturates() {
        assert_eq!(size(12).actual(7), 7);
        assert_eq!(size(14).actual(2), 8);
        assert_eq!(size(16).actual(0x0fff_ffff), 0xffff_fff0);
        assert_eq!(size(16).actual(0x1000_0000), u32::MAX);
        assert_eq!(size(12).actual(u64::MAX), u32::MAX);
    }

    #[test]
    fn array_entries_end_at_16_tib() {
        assert!(size(12).balloon_pfn(0xffff_ffff) == Some(u32::MAX));
        assert!(size(12).balloon_pfn(0x1_0000_0000).is_none());
        assert!(size(16).balloon_pfn(0x0fff_ffff) == Some(0xffff_fff0));
        assert!(size(16).balloon_pfn(0x1000_0000).is_none());
        assert!(size(16).balloon_pfn(u64::MAX).is_none());
    }

    #[test]
    fn frames_of_blocks() {
        for (shift, pfn, order, page_shift, frames) in [
            (12, 5, 0, 12, Some((5, 1))),
            (12, 512, 9, 12, Some((512, 512))),
            (12, 512, 9, 21, Some((1, 1))),
            (12, 1024, 10, 21, Some((2, 2))),
            (12, 513, 9, 21, None),
            (12, 512, 8, 21, None),
            (12, 1 << 34, 9, 21, Some((1 << 25, 1))),
            (16, 3, 0, 12, Some((48, 16))),
            (16, 32, 5, 21, Some((1, 1))),
            (14, 128, 7, 21, Some((1, 1))),
            (16, u64::MAX, 0, 12, None),
        ] {
            assert!(size(shift).frames(pfn, order, page_shift) == frames);
        }
    }
}
