// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the cases are and what must hold.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a case compares, and what must come out.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Its name.
    pub name: &'static str,
    /// What is measured, in one sentence.
    pub what: &'static str,
    /// What it is measured against.
    pub against: &'static str,
    /// The unit of the values.
    pub unit: &'static str,
    /// How the ratio is made.
    pub ratio: Ratio,
    /// What the ratio must be.
    pub bound: Bound,
}

/// How the ratio of a case is made from the values of its runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ratio {
    /// Median of the reference by median of ours: so many times as fast, where values are times.
    TimesAsFast,
    /// Median of ours by median of the reference.
    Share,
    /// Ours by the reference of the same round; the median of these.
    PairedShare,
    /// Sides are sizes: the largest and the smallest of their medians, by how much either is away
    /// from the value between them.
    Deviation,
}

/// What a ratio must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// So much or more.
    AtLeast(f64),
    /// So much or less.
    AtMost(f64),
}

/// Which way a bound points, for the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// More is better.
    AtLeast,
    /// Less is better.
    AtMost,
}

impl Bound {
    /// The number.
    pub fn value(self) -> f64 {
        match self {
            Self::AtLeast(value) | Self::AtMost(value) => value,
        }
    }

    /// The direction.
    pub fn direction(self) -> Direction {
        match self {
            Self::AtLeast(_) => Direction::AtLeast,
            Self::AtMost(_) => Direction::AtMost,
        }
    }

    /// Whether `ratio` is as it must be.
    pub fn holds(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(value) => ratio >= value,
            Self::AtMost(value) => ratio <= value,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AtLeast => "≥",
            Self::AtMost => "≤",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_include_their_value() {
        assert!(Bound::AtLeast(80.0).holds(80.0));
        assert!(!Bound::AtLeast(80.0).holds(79.99));
        assert!(Bound::AtMost(1.1).holds(1.1));
        assert!(!Bound::AtMost(1.1).holds(1.11));
        assert!(!Bound::AtLeast(1.0).holds(f64::NAN));
        assert!(!Bound::AtMost(1.0).holds(f64::NAN));
    }
}
