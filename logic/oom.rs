// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! How much to give back when the guest is out of memory, and how to come back to the target.
//!
//! The first time a small part is given back; if that was not enough, which shows by the guest being
//! out of memory again soon, twice as much each time. Afterwards nothing is taken for a pause, which
//! grows in the same way, and then only little at a time, so that the balloon and the guest do not
//! play ping-pong.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

/// What may be taken from the guest after it has been out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// As much as it can spare.
    Free,
    /// At most [`OomPace::SLOW_BYTES`], and the same again after [`OomPace::SLOW_MS`].
    Slow,
    /// Nothing for this many milliseconds.
    Pause(u32),
}

/// What is known of the times when the guest was out of memory.
#[derive(Clone, Copy, Debug)]
pub struct OomPace {
    /// Of the last time, in milliseconds.
    last_ms: Option<u64>,
    bytes: u64,
    pause_ms: u32,
}

impl OomPace {
    /// What is given back first, in bytes.
    pub const FIRST_BYTES: u64 = 16 << 20;
    /// The most that is given back at a time, in bytes.
    pub const MOST_BYTES: u64 = 512 << 20;
    /// Out of memory again within this time means that it was not enough, in milliseconds.
    pub const AGAIN_MS: u64 = 2_000;
    /// The first pause, in milliseconds.
    pub const FIRST_PAUSE_MS: u32 = 5_000;
    /// The longest pause, in milliseconds.
    pub const LAST_PAUSE_MS: u32 = 60_000;
    /// For how long after a pause only little is taken, in milliseconds.
    pub const CAREFUL_MS: u64 = 60_000;
    /// What is taken at a time then, in bytes.
    pub const SLOW_BYTES: u64 = 64 << 20;
    /// How long to wait between two times then, in milliseconds.
    pub const SLOW_MS: u32 = 1_000;

    /// The guest has never been out of memory.
    pub const fn new() -> Self {
        Self {
            last_ms: None,
            bytes: Self::FIRST_BYTES,
            pause_ms: Self::FIRST_PAUSE_MS,
        }
    }

    /// The guest is out of memory at `now_ms`, a clock that does not go back. Returns how many bytes
    /// to give back.
    pub fn hit(&mut self, now_ms: u64) -> u64 {
        let since = self.last_ms.map(|last| now_ms.saturating_sub(last));

        match since {
            Some(since) if since < Self::AGAIN_MS => {
                self.bytes = (self.bytes * 2).min(Self::MOST_BYTES);
            }
            Some(since) if since < u64::from(self.pause_ms) + Self::CAREFUL_MS => {
                self.bytes = Self::FIRST_BYTES;
                self.pause_ms = (self.pause_ms * 2).min(Self::LAST_PAUSE_MS);
            }
            _ => *self = Self::new(),
        }
        self.last_ms = Some(now_ms);
        self.bytes
    }

    /// What may be taken from the guest at `now_ms`.
    pub fn leave(&self, now_ms: u64) -> Leave {
        let Some(last) = self.last_ms else {
            return Leave::Free;
        };
        let since = now_ms.saturating_sub(last);
        let pause = u64::from(self.pause_ms);

        if since < pause {
            // CAST: at most `pause_ms`.
            return Leave::Pause((pause - since) as u32);
        }
        if since < pause + Self::CAREFUL_MS {
            return Leave::Slow;
        }
        Leave::Free
    }
}

impl Default for OomPace {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_oom))]
mod tests {
    use super::*;

    #[test]
    fn more_is_given_back_while_it_is_not_enough() {
        let mut pace = OomPace::new();
        let mib = 1 << 20;
        for (now, expected) in [(0, 16), (10, 32), (20, 64), (2019, 128), (9000, 16)] {
            assert!(pace.hit(now) == expected * mib);
        }
        for _ in 0..20 {
            assert!(pace.hit(9001) <= OomPace::MOST_BYTES);
        }
    }

    #[test]
    fn a_pause_and_a_slow_approach_follow() {
        let mut pace = OomPace::new();
        assert!(pace.leave(0) == Leave::Free);
        pace.hit(1000);
        assert!(pace.leave(1000) == Leave::Pause(5000));
        assert!(pace.leave(5999) == Leave::Pause(1));
        assert!(pace.leave(6000) == Leave::Slow);
        assert!(pace.leave(65_999) == Leave::Slow);
        assert!(pace.leave(66_000) == Leave::Free);
    }

    #[test]
    fn pauses_grow_while_it_happens_again_and_are_forgotten() {
        let mut pace = OomPace::new();
        let mut now = 0;
        for expected in [5000, 10_000, 20_000, 40_000, 60_000, 60_000] {
            pace.hit(now);
            assert!(pace.leave(now) == Leave::Pause(expected));
            now += u64::from(expected) + 1000;
        }
        now += 200_000;
        pace.hit(now);
        assert!(pace.leave(now) == Leave::Pause(5000));
    }
}
