// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A set of balloon pages: which of a guest's pages are free, for instance.

use std::collections::BTreeMap;

use balloon_control::BALLOON_PAGE_BYTES;
use balloon_wire::bitmap::{PfnBitmap, Runs};

use crate::ranges::Range;

/// Pages in a chunk: 128 MiB of guest memory in 4 KiB.
const CHUNK: u64 = 1 << 15;
const WORDS: usize = CHUNK as usize / u64::BITS as usize;

/// Pages by number. It takes a bit for each page, where there are any; the guest decides which, and
/// has only so many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageSet {
    chunks: BTreeMap<u64, Vec<u64>>,
}

impl PageSet {
    /// Adds the pages of a range of addresses, as far as they are in it as a whole.
    pub fn add(&mut self, range: Range) {
        let mut page = range.start.div_ceil(BALLOON_PAGE_BYTES);
        let end = range.end / BALLOON_PAGE_BYTES;
        while page < end {
            let (chunk, at) = (page / CHUNK, page % CHUNK);
            let count = (CHUNK - at).min(end - page);
            let words = self.chunks.entry(chunk).or_insert_with(|| vec![0; WORDS]);
            PfnBitmap::new(words).set_run(at as usize, count as usize);
            page += count;
        }
    }

    /// Whether there is no page in it.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        let words = self.chunks.values().flatten();
        words.map(|word| u64::from(word.count_ones())).sum()
    }

    /// The pages at `from` and above, as maximal ranges of addresses, ascending.
    pub fn ranges(&self, from: u64) -> impl Iterator<Item = Range> + '_ {
        let runs = self
            .chunks
            .range(from / BALLOON_PAGE_BYTES / CHUNK..)
            .flat_map(|(chunk, words)| {
                Runs::new(words).map(move |run| {
                    let start = (chunk * CHUNK + run.start as u64) * BALLOON_PAGE_BYTES;
                    let end = start + run.len as u64 * BALLOON_PAGE_BYTES;
                    Range { start, end }
                })
            })
            .map(move |range| Range {
                start: range.start.max(from),
                ..range
            })
            .filter(|range| !range.is_empty());
        Joined {
            runs: runs.peekable(),
        }
    }
}

/// Joins what only the border of a chunk has cut.
struct Joined<I: Iterator<Item = Range>> {
    runs: std::iter::Peekable<I>,
}

impl<I: Iterator<Item = Range>> Iterator for Joined<I> {
    type Item = Range;

    fn next(&mut self) -> Option<Range> {
        let mut range = self.runs.next()?;
        while let Some(next) = self.runs.next_if(|next| next.start == range.end) {
            range.end = next.end;
        }
        Some(range)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = BALLOON_PAGE_BYTES;

    fn set(ranges: &[(u64, u64)]) -> PageSet {
        let mut set = PageSet::default();
        for (start, end) in ranges {
            set.add(Range {
                start: *start,
                end: *end,
            });
        }
        set
    }

    fn ranges(set: &PageSet, from: u64) -> Vec<(u64, u64)> {
        set.ranges(from).map(|r| (r.start, r.end)).collect()
    }

    #[test]
    fn borders_of_chunks_cut_nothing() {
        let border = CHUNK * PAGE;
        let three = set(&[(border - PAGE, 3 * border + PAGE)]);
        assert_eq!(three.pages(), 2 * CHUNK + 2);
        assert_eq!(ranges(&three, 0), [(border - PAGE, 3 * border + PAGE)]);
        assert_eq!(ranges(&three, border), [(border, 3 * border + PAGE)]);
        assert_eq!(ranges(&three, 3 * border + PAGE), []);
        // Its last page and the first of the next are no neighbours of what is between.
        let two = set(&[(0, PAGE), (border, border + PAGE)]);
        assert_eq!(ranges(&two, 0), [(0, PAGE), (border, border + PAGE)]);
    }

    #[test]
    fn parts_of_pages_are_left_out() {
        assert!(set(&[(1, PAGE), (PAGE + 1, 2 * PAGE), (5, 5)]).is_empty());
        assert_eq!(ranges(&set(&[(1, 3 * PAGE - 1)]), 0), [(PAGE, 2 * PAGE)]);
        let last = u64::MAX / PAGE * PAGE;
        assert_eq!(set(&[(last - PAGE, u64::MAX)]).pages(), 1);
    }

    proptest! {
        #[test]
        fn as_ranges_would(list in prop::collection::vec((0..100_000u64, 0..40_000u64), 0..20), from in 0..100_000u64) {
            let mut all = crate::ranges::Ranges::default();
            let mut set = PageSet::default();
            for (start, pages) in list {
                let range = Range { start: start * PAGE, end: (start + pages) * PAGE };
                all.push(range);
                set.add(range);
            }
            let merged = all.merge();
            prop_assert!(set.ranges(0).eq(merged.iter().copied()));
            prop_assert_eq!(set.pages(), merged.iter().map(|r| r.len()).sum::<u64>() / PAGE);
            let from = from * PAGE;
            let rest = merged.iter().map(|r| r.and(Range { start: from, end: u64::MAX }));
            prop_assert!(set.ranges(from).eq(rest.filter(|r| !r.is_empty())));
        }
    }
}
