// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Ranges of guest memory, collected and merged.

/// A range of guest physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range {
    /// The first byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

impl Range {
    /// Size in bytes.
    pub const fn len(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether there is nothing in it.
    pub const fn is_empty(self) -> bool {
        self.end <= self.start
    }

    /// What is in both.
    pub fn and(self, other: Self) -> Self {
        Self {
            start: self.start.max(other.start),
            end: self.end.min(other.end),
        }
    }
}

/// Collects ranges in any order and gives them back sorted, disjoint and merged.
///
/// It holds at most [`Ranges::MAX`] of them; the guest decides how many there are, not how much
/// memory they need.
#[derive(Debug, Default)]
pub struct Ranges {
    ranges: Vec<Range>,
    unsorted: bool,
}

impl Ranges {
    /// The most ranges that are held at a time; 1 MiB of them.
    pub const MAX: usize = 1 << 16;

    /// Adds a range. Returns whether there is room for another; if not, call [`Ranges::merge`].
    pub fn push(&mut self, range: Range) -> bool {
        if range.is_empty() {
            return true;
        }
        match self.ranges.last_mut() {
            Some(last) if range.start == last.end => last.end = range.end,
            // Page allocators hand out descending pages as often as ascending ones.
            Some(last) if range.end == last.start => {
                last.start = range.start;
                self.unsorted = true;
            }
            last => {
                self.unsorted |= last.is_some_and(|l| range.start < l.end);
                self.ranges.push(range);
            }
        }
        self.ranges.len() < Self::MAX
    }

    /// Sorts and merges what was collected. Call [`Ranges::clear`] when done with it.
    pub fn merge(&mut self) -> &[Range] {
        if self.unsorted {
            self.ranges.sort_unstable();
            self.ranges.dedup_by(|next, kept| {
                let joins = next.start <= kept.end;
                if joins {
                    kept.end = kept.end.max(next.end);
                }
                joins
            });
            self.unsorted = false;
        }
        &self.ranges
    }

    /// Forgets what was collected.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.unsorted = false;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn merged(ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let mut all = Ranges::default();
        for (start, end) in ranges {
            all.push(Range {
                start: *start,
                end: *end,
            });
        }
        all.merge().iter().map(|r| (r.start, r.end)).collect()
    }

    #[test]
    fn neighbours_join() {
        assert_eq!(merged(&[]), []);
        assert_eq!(merged(&[(5, 5), (6, 2)]), []);
        assert_eq!(merged(&[(0, 1), (1, 2), (3, 4)]), [(0, 2), (3, 4)]);
        assert_eq!(merged(&[(3, 4), (2, 3), (1, 2)]), [(1, 4)]);
        assert_eq!(merged(&[(8, 9), (0, 4), (4, 8)]), [(0, 9)]);
        assert_eq!(merged(&[(0, 9), (2, 3), (2, 3)]), [(0, 9)]);
        assert_eq!(merged(&[(4, 6), (2, 4), (5, 8)]), [(2, 8)]);
    }

    #[test]
    fn room_is_bounded() {
        let mut all = Ranges::default();
        let mut pushed = 0;
        loop {
            let start = pushed * 2;
            pushed += 1;
            if !all.push(Range {
                start,
                end: start + 1,
            }) {
                break;
            }
        }
        assert_eq!(pushed as usize, Ranges::MAX);
        assert_eq!(all.merge().len(), Ranges::MAX);
    }

    proptest! {
        #[test]
        fn as_a_set_of_points(list in prop::collection::vec((0..200u64, 0..20u64), 0..100)) {
            let list: Vec<_> = list.into_iter().map(|(start, len)| (start, start + len)).collect();
            let points: BTreeSet<u64> = list.iter().flat_map(|(s, e)| *s..*e).collect();
            let merged = merged(&list);
            let found: Vec<u64> = merged.iter().flat_map(|(s, e)| *s..*e).collect();
            prop_assert!(found.into_iter().eq(points));
            // Maximal: there is a gap between any two.
            prop_assert!(merged.windows(2).all(|w| w[0].1 < w[1].0));
        }
    }
}
