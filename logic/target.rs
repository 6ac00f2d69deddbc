// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the balloon does next: how far to go, what to leave to the guest, when to try again.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

/// What to do next, in guest pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The target is met.
    Rest,
    /// Take this many pages from the guest.
    Inflate(u64),
    /// Give this many pages back.
    Deflate(u64),
    /// The target is above what the guest can spare now.
    Starved,
}

/// Decides the next step: towards `target` from `actual`, leaving `reserve` of the `available`
/// pages to the guest, in steps of at most `limit` pages.
pub const fn step(target: u64, actual: u64, available: u64, reserve: u64, limit: u64) -> Step {
    if target < actual {
        return Step::Deflate(least(actual - target, limit));
    }
    if target == actual {
        return Step::Rest;
    }
    let spare = available.saturating_sub(reserve);
    if spare == 0 {
        return Step::Starved;
    }
    Step::Inflate(least(least(target - actual, spare), limit))
}

const fn least(a: u64, b: u64) -> u64 {
    if a < b {
        a
    } else {
        b
    }
}

/// What the driver leaves to the guest by default, in bytes, for a guest with `ram` bytes.
///
/// A 32nd of the memory, at least 16 MiB (a quarter of the memory in tiny guests), at most 512 MiB.
/// It comes on top of the kernel's own watermarks, which the estimate of available memory leaves
/// out.
pub const fn default_reserve(ram: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    let floor = least(16 * MIB, ram / 4);
    let share = least(ram / 32, 512 * MIB);
    if share > floor {
        share
    } else {
        floor
    }
}

/// The next smaller order of blocks to try when there are no more of `order`, or fewer pages are
/// wanted; `None` below single pages.
///
/// After whole blocks, of `block` order, come chunks that are cheaper to get than as many single pages,
/// and then single pages. The allocator takes those from the smallest pieces it has; were there chunks
/// of smaller orders, the guest would be left with nothing but single pages, and could not even start
/// a thread.
pub const fn next_order(order: u32, block: u32) -> Option<u32> {
    match order {
        0 => None,
        _ if order > block => Some(block),
        _ if order > CHUNK_ORDER => Some(CHUNK_ORDER),
        _ => Some(0),
    }
}

/// The order of chunks that become single pages in the balloon: 64 KiB with 4 KiB pages.
const CHUNK_ORDER: u32 = 4;

/// Exponential back-off while a target cannot be met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    next_ms: u32,
}

impl Backoff {
    /// The first delay, in milliseconds.
    pub const FIRST_MS: u32 = 200;
    /// The longest delay, in milliseconds.
    pub const LAST_MS: u32 = 10_000;

    /// Starts with the first delay.
    pub const fn new() -> Self {
        Self {
            next_ms: Self::FIRST_MS,
        }
    }

    /// The delay before the next try, in milliseconds; the one after it is twice as long.
    pub fn delay_ms(&mut self) -> u32 {
        let now = self.next_ms;
        self.next_ms = now.saturating_mul(2).min(Self::LAST_MS);
        now
    }

    /// Starts anew: there was progress, or another target.
    pub fn reset(&mut self) {
        *self = Self::new();
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

/// Lets one log line through in a while.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogLimit {
    last_ms: Option<u64>,
}

impl LogLimit {
    /// Shortest time between two lines, in milliseconds.
    pub const INTERVAL_MS: u64 = 60_000;

    /// No line has been written.
    pub const fn new() -> Self {
        Self { last_ms: None }
    }

    /// Whether a line may be written at `now_ms`, a clock that does not go back.
    pub fn admit(&mut self, now_ms: u64) -> bool {
        match self.last_ms {
            Some(last) if now_ms.saturating_sub(last) < Self::INTERVAL_MS => false,
            _ => {
                self.last_ms = Some(now_ms);
                true
            }
        }
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_target))]
mod tests {
    use super::*;

    #[test]
    fn steps_go_towards_the_target() {
        for (target, actual, available, reserve, limit, expected) in [
            (0, 0, 100, 10, 50, Step::Rest),
            (7, 7, 0, 10, 50, Step::Rest),
            (20, 0, 100, 10, 50, Step::Inflate(20)),
            (200, 0, 100, 10, 50, Step::Inflate(50)),
            (200, 0, 100, 60, 50, Step::Inflate(40)),
            (200, 0, 60, 60, 50, Step::Starved),
            (200, 0, 0, 60, 50, Step::Starved),
            (200, 0, u64::MAX, 0, u64::MAX, Step::Inflate(200)),
            (5, 9, 0, 60, 50, Step::Deflate(4)),
            (0, 900, 0, 60, 50, Step::Deflate(50)),
        ] {
            assert!(step(target, actual, available, reserve, limit) == expected);
        }
    }

    #[test]
    fn the_reserve_grows_with_the_guest_within_bounds() {
        let mib = 1 << 20;
        assert!(default_reserve(16 * mib) == 4 * mib);
        assert!(default_reserve(256 * mib) == 16 * mib);
        assert!(default_reserve(4096 * mib) == 128 * mib);
        assert!(default_reserve(1 << 40) == 512 * mib);
    }

    #[test]
    fn orders_go_down_to_single_pages() {
        assert!(next_order(10, 9) == Some(9));
        assert!(next_order(9, 9) == Some(4));
        assert!(next_order(4, 9) == Some(0));
        assert!(next_order(0, 9).is_none());
        // 64 KiB pages: a block of 2 MiB has order 5.
        assert!(next_order(13, 5) == Some(5));
    }

    #[test]
    fn back_off_doubles_from_200_ms_to_10_s() {
        let mut backoff = Backoff::new();
        for expected in [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000] {
            assert_eq!(backoff.delay_ms(), expected);
        }
        backoff.reset();
        assert_eq!(backoff.delay_ms(), 200);
    }

    #[test]
    fn one_line_a_minute() {
        let mut limit = LogLimit::new();
        assert!(limit.admit(5));
        assert!(!limit.admit(6));
        assert!(!limit.admit(60_004));
        assert!(limit.admit(60_005));
        assert!(!limit.admit(0));
    }
}
