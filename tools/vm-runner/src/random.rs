// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Random numbers for tests: good enough, and repeatable from the seed that a test prints.

use std::hash::{BuildHasher, RandomState};

/// A source of random numbers (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    /// A new one, seeded with `VBRS_SEED` or at random.
    pub fn new() -> Self {
        let given = std::env::var("VBRS_SEED")
            .ok()
            .and_then(|text| text.parse().ok());
        Self::seeded(given.unwrap_or_else(|| RandomState::new().hash_one(0) >> 32))
    }

    /// One that gives the same numbers again.
    pub fn seeded(seed: u64) -> Self {
        Self {
            seed,
            // Never zero, and far apart for seeds that are close together.
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    /// What it was seeded with.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }
}

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let numbers = |seed| {
            let mut random = Random::seeded(seed);
            (0..8).map(|_| random.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(numbers(0), numbers(0));
        assert_ne!(numbers(1), numbers(2));
        assert!(numbers(3).iter().all(|&n| n < 1000));
    }
}
