// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Which window of the bitmap a frame falls into, and what of a window is sent.
//!
//! The frames are cut into windows of equal size, aligned to that size. While pages are collected a
//! few windows are open; a frame that falls into none of them opens one, and if all places are taken
//! the window that has been quiet for longest is sent to make room. So each page is visited once,
//! no window is empty, and no frame is sent twice. Of a window only the words from the first to the
//! last set bit go over the wire.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

use super::wire::{
    Header,
    BITMAP_BYTES_MAX,
    BITMAP_BYTES_MIN, //
};
use core::ops::Range;

const WORD_BITS: u64 = 64;
const WORD_BYTES: u64 = 8;

/// The size of a window's bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSize {
    /// log2 of the number of frames, so that nothing is divided by what could be zero.
    shift: u32,
}

impl WindowSize {
    /// From the size in bytes: a power of two from [`BITMAP_BYTES_MIN`] to [`BITMAP_BYTES_MAX`].
    pub const fn new(bytes: u32) -> Option<Self> {
        if !bytes.is_power_of_two() || bytes < BITMAP_BYTES_MIN || bytes > BITMAP_BYTES_MAX {
            return None;
        }
        Some(Self {
            shift: (bytes * 8).ilog2(),
        })
    }

    /// The largest size that is neither above this one nor above `limit` bytes; `None` if the limit
    /// is below the smallest size.
    pub const fn at_most(self, limit: u32) -> Option<Self> {
        let mut bytes = self.bytes();
        while bytes > limit {
            bytes /= 2;
        }
        Self::new(bytes)
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u32 {
        1 << (self.shift - 3)
    }

    /// The number of frames a window has.
    pub const fn frames(self) -> u64 {
        1 << self.shift
    }

    /// The window that `frame` falls into, and the bit in it.
    pub const fn locate(self, frame: u64) -> (u64, usize) {
        // CAST: a window has at most 2^23 frames.
        (frame >> self.shift, (frame & (self.frames() - 1)) as usize)
    }
}

/// A window with at least one bit set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    number: u64,
    /// The first and the last word with a set bit.
    first: usize,
    last: usize,
}

impl Window {
    /// The window `number` with one bit set.
    pub const fn new(number: u64, bit: usize) -> Self {
        let word = bit / WORD_BITS as usize;
        Self {
            number,
            first: word,
            last: word,
        }
    }

    /// Takes note of a bit that was set.
    pub fn note(&mut self, bit: usize) {
        let word = bit / WORD_BITS as usize;
        self.first = self.first.min(word);
        self.last = self.last.max(word);
    }

    /// Which window it is.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// The words of the window's bitmap that are sent.
    pub const fn words(&self) -> Range<usize> {
        self.first..self.last + 1
    }

    /// The header to send before the words.
    ///
    /// A frame that fits into a 64-bit address has a number far from where this could overflow.
    pub const fn header(&self, size: WindowSize, id: u32, page_shift: u32) -> Header {
        Header {
            id,
            page_shift,
            base_pfn: self
                .number
                .wrapping_mul(size.frames())
                .wrapping_add(self.first as u64 * WORD_BITS),
            bmap_len: (self.last - self.first + 1) as u64 * WORD_BYTES,
        }
    }
}

/// What to do for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Its window is open in this slot.
    Open(usize),
    /// This slot is free for its window.
    Free(usize),
    /// All slots are taken; the window in this one is to be sent first.
    Evict(usize),
}

/// The windows that are open.
#[derive(Debug)]
pub struct WindowTable<const N: usize> {
    slots: [Option<Window>; N],
    /// When each slot was last used, in calls.
    used: [u64; N],
    calls: u64,
}

impl<const N: usize> WindowTable<N> {
    /// No window is open.
    pub const fn new() -> Self {
        const { assert!(N > 0) };
        Self {
            slots: [None; N],
            used: [0; N],
            calls: 0,
        }
    }

    /// Where the window `number` is, or could be.
    pub fn find(&self, number: u64) -> Place {
        let mut free = None;
        let mut oldest = (0, u64::MAX);
        for (i, (slot, used)) in self.slots.iter().zip(self.used.iter()).enumerate() {
            match slot {
                Some(window) if window.number == number => return Place::Open(i),
                None => free = free.or(Some(i)),
                Some(_) if *used < oldest.1 => oldest = (i, *used),
                Some(_) => (),
            }
        }
        free.map_or(Place::Evict(oldest.0), Place::Free)
    }

    /// Takes note of a bit of window `number` in the slot that [`WindowTable::find`] gave; opens the
    /// window if the slot is free.
    pub fn note(&mut self, slot: usize, number: u64, bit: usize) {
        self.calls += 1;
        if let (Some(window), Some(used)) = (self.slots.get_mut(slot), self.used.get_mut(slot)) {
            *used = self.calls;
            match window {
                Some(window) => window.note(bit),
                None => *window = Some(Window::new(number, bit)),
            }
        }
    }

    /// Takes the window out of a slot.
    pub fn close(&mut self, slot: usize) -> Option<Window> {
        self.slots.get_mut(slot)?.take()
    }
}

impl<const N: usize> Default for WindowTable<N> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_window))]
mod tests {
    use super::*;

    const SMALLEST: WindowSize = WindowSize { shift: 9 };

    #[test]
    fn sizes_are_powers_of_two_within_bounds() {
        for bytes in [64, 128, 4096, 32768, 1 << 20] {
            assert!(WindowSize::new(bytes).map(WindowSize::bytes) == Some(bytes));
        }
        for bytes in [0, 1, 32, 63, 65, 96, 4095, (1 << 20) - 1, 1 << 21, u32::MAX] {
            assert!(WindowSize::new(bytes).is_none());
        }
    }

    #[test]
    fn a_limit_rounds_down() {
        let size = WindowSize { shift: 18 };
        assert!(size.at_most(u32::MAX) == Some(size));
        assert!(size.at_most(32767).map(WindowSize::bytes) == Some(16384));
        assert!(size.at_most(100) == Some(SMALLEST));
        assert!(size.at_most(63).is_none());
        assert!(size.at_most(0).is_none());
    }

    #[test]
    fn frames_at_the_borders_of_windows() {
        assert!(SMALLEST.locate(0) == (0, 0));
        assert!(SMALLEST.locate(511) == (0, 511));
        assert!(SMALLEST.locate(512) == (1, 0));
        assert!(SMALLEST.locate(u64::MAX) == (u64::MAX >> 9, 511));
    }

    #[test]
    fn only_the_words_between_set_bits_are_sent() {
        let mut window = Window::new(3, 200);
        assert!(window.words() == (3..4));
        window.note(130);
        window.note(320);
        assert!(window.words() == (2..6));
        assert!(
            window.header(SMALLEST, 0, 12)
                == Header {
                    id: 0,
                    page_shift: 12,
                    base_pfn: 3 * 512 + 128,
                    bmap_len: 32
                }
        );
    }

    #[test]
    fn frames_above_16_tib_keep_all_their_bits() {
        let frame = (1u64 << 40) + 777;
        let (number, bit) = SMALLEST.locate(frame);
        let header = Window::new(number, bit).header(SMALLEST, 0, 12);
        assert!(header.base_pfn + (bit as u64 % 64) == frame);
        assert!(header.bmap_len == 8);
    }

    #[test]
    fn the_quietest_window_makes_room() {
        let mut table = WindowTable::<2>::new();
        assert!(table.find(7) == Place::Free(0));
        table.note(0, 7, 1);
        assert!(table.find(9) == Place::Free(1));
        table.note(1, 9, 1);
        assert!(table.find(7) == Place::Open(0));
        table.note(0, 7, 2);
        assert!(table.find(8) == Place::Evict(1));
        assert!(table.close(1).map(|w| w.number()) == Some(9));
        assert!(table.find(8) == Place::Free(1));
        assert!(table.close(1).is_none());
        assert!(table.close(2).is_none());
    }
}
