// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A bitmap of page frames over lent memory, as it goes over the wire.
//!
//! Words are 64 bits wide and little-endian in memory, so that their bytes are the wire format: bit
//! i is bit `i % 8` of byte `i / 8`, on every machine.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

/// Bits in a word.
pub const WORD_BITS: usize = 64;
/// Bytes in a word.
pub const WORD_BYTES: usize = 8;

/// A bitmap of page frames in lent words.
///
/// Out-of-range bits cannot be set and read as clear.
#[derive(Debug)]
pub struct PfnBitmap<'a> {
    words: &'a mut [u64],
}

impl<'a> PfnBitmap<'a> {
    /// Lends `words`, whatever they hold.
    pub fn new(words: &'a mut [u64]) -> Self {
        Self { words }
    }

    /// Number of bits.
    pub fn len(&self) -> usize {
        self.words.len() * WORD_BITS
    }

    /// Whether there is no bit at all, set or clear.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Sets a bit. Returns whether it is in range and was clear before.
    pub fn set(&mut self, bit: usize) -> bool {
        self.change(bit, |word, mask| word | mask)
    }

    /// Sets `len` bits from `start` on, as far as they are in range. Takes a step for each word.
    pub fn set_run(&mut self, start: usize, len: usize) {
        let end = start.saturating_add(len).min(self.len());
        let mut at = start;

        while at < end {
            let skip = at % WORD_BITS;
            let n = (WORD_BITS - skip).min(end - at);
            let mask = u64::MAX >> (WORD_BITS - n) << skip;

            if let Some(word) = self.words.get_mut(at / WORD_BITS) {
                *word |= mask.to_le();
            }
            at += n;
        }
    }

    /// Clears a bit. Returns whether it is in range and was set before.
    pub fn clear(&mut self, bit: usize) -> bool {
        self.change(bit, |word, mask| word & !mask)
    }

    /// Whether a bit is set.
    pub fn get(&self, bit: usize) -> bool {
        self.words
            .get(bit / WORD_BITS)
            .is_some_and(|w| u64::from_le(*w) >> (bit % WORD_BITS) & 1 == 1)
    }

    /// Number of set bits.
    pub fn weight(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// The runs of set bits.
    pub fn runs(&self) -> Runs<'_> {
        Runs::new(self.words)
    }

    fn change(&mut self, bit: usize, f: impl FnOnce(u64, u64) -> u64) -> bool {
        let Some(word) = self.words.get_mut(bit / WORD_BITS) else {
            return false;
        };
        let before = *word;
        *word = f(before, (1u64 << (bit % WORD_BITS)).to_le());
        *word != before
    }
}

/// A run of set bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first set bit.
    pub start: usize,
    /// Number of set bits, at least 1.
    pub len: usize,
}

/// Iterates over the runs of set bits: disjoint, maximal, ascending.
///
/// Takes a step for each word and each run, not for each bit.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    words: &'a [u64],
    /// The next bit to look at.
    at: usize,
}

impl<'a> Runs<'a> {
    /// Iterates over little-endian words.
    pub fn new(words: &'a [u64]) -> Self {
        Self { words, at: 0 }
    }

    /// The first bit at or after `from` that is set (or clear, if `inverted`); the end if none is.
    fn seek(&self, from: usize, inverted: bool) -> usize {
        let flip = if inverted { u64::MAX } else { 0 };
        let mut skip = from % WORD_BITS;
        for (i, word) in self.words.iter().enumerate().skip(from / WORD_BITS) {
            let hits = (u64::from_le(*word) ^ flip) & (u64::MAX << skip);
            if hits != 0 {
                return i * WORD_BITS + hits.trailing_zeros() as usize;
            }
            skip = 0;
        }
        self.words.len() * WORD_BITS
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let start = self.seek(self.at, false);
        if start == self.words.len() * WORD_BITS {
            self.at = start;
            return None;
        }
        self.at = self.seek(start, true);
        Some(Run {
            start,
            len: self.at - start,
        })
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_bitmap))]
mod tests {
    use super::*;

    struct Case<'a> {
        words: &'a [u64],
        runs: &'static [(usize, usize)],
    }

    fn check(case: &Case<'_>) -> bool {
        let mut runs = Runs::new(case.words);
        for (start, len) in case.runs {
            if runs.next()
                != Some(Run {
                    start: *start,
                    len: *len,
                })
            {
                return false;
            }
        }
        runs.next().is_none() && runs.next().is_none()
    }

    #[test]
    fn runs_at_the_borders_of_words() {
        for case in [
            Case {
                words: &[],
                runs: &[],
            },
            Case {
                words: &[0],
                runs: &[],
            },
            Case {
                words: &[1u64.to_le()],
                runs: &[(0, 1)],
            },
            Case {
                words: &[(1u64 << 63).to_le()],
                runs: &[(63, 1)],
            },
            Case {
                words: &[u64::MAX],
                runs: &[(0, 64)],
            },
            Case {
                words: &[(1u64 << 63).to_le(), 1u64.to_le()],
                runs: &[(63, 2)],
            },
            Case {
                words: &[u64::MAX, u64::MAX, 0, u64::MAX],
                runs: &[(0, 128), (192, 64)],
            },
            Case {
                words: &[0x0ff0_0000_0000_0005u64.to_le()],
                runs: &[(0, 1), (2, 1), (52, 8)],
            },
        ] {
            assert!(check(&case));
        }
    }

    #[test]
    fn set_and_clear_tell_what_changed() {
        let mut words = [0; 2];
        let mut map = PfnBitmap::new(&mut words);
        assert!(map.set(0) && map.set(64) && map.set(127));
        assert!(!map.set(0));
        assert!(!map.set(128) && !map.clear(128) && !map.get(128));
        assert!(map.get(64) && !map.get(63));
        assert_eq!(map.weight(), 3);
        assert!(map.clear(64) && !map.clear(64));
        assert_eq!(map.weight(), 2);
    }

    #[test]
    fn runs_are_set_as_if_bit_by_bit() {
        for (start, len) in [
            (0usize, 0usize),
            (0, 1),
            (63, 1),
            (63, 2),
            (0, 64),
            (1, 127),
            (5, 130),
            (100, 92),
            (190, 5),
            (192, 1),
            (500, 1),
            (3, usize::MAX),
        ] {
            let (mut words, mut expected) = ([0; 3], [0; 3]);
            let mut one_by_one = PfnBitmap::new(&mut expected);
            for bit in (start..start.saturating_add(len)).take(200) {
                one_by_one.set(bit);
            }
            PfnBitmap::new(&mut words).set_run(start, len);
            assert!(words == expected);
        }
    }

    #[test]
    fn bytes_are_least_significant_bit_first() {
        let mut words = [0];
        PfnBitmap::new(&mut words).set(11);
        assert!(words[0].to_ne_bytes() == [0, 8, 0, 0, 0, 0, 0, 0]);
    }
}
