// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Free page hinting: what the device wants, and what to do about it.
//!
//! The device asks for hints by a command in config space. Each round has an id of its own; the driver
//! sends the id, then blocks of free memory, then the stop word. Between rounds the blocks stay out of
//! use; when the device is done they go back to the guest.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

/// The word in config space, and on the queue, that stands for no round.
pub const STOP: u32 = 0;
/// The word in config space that ends hinting.
pub const DONE: u32 = 1;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Todo {
    /// Nothing: the device wants nothing, or nothing new.
    Nothing,
    /// Begin the round with this id.
    Begin(u32),
    /// Give all blocks back to the guest.
    Release,
}

/// What the device was answered so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hinting {
    /// The id of the last round that was begun, since the device was started or done.
    begun: Option<u32>,
}

impl Hinting {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self { begun: None }
    }

    /// Decides by what config space says now.
    pub fn next(&mut self, word: u32) -> Todo {
        match word {
            STOP => Todo::Nothing,
            DONE => {
                self.begun = None;
                Todo::Release
            }
            id if self.begun == Some(id) => Todo::Nothing,
            id => {
                self.begun = Some(id);
                Todo::Begin(id)
            }
        }
    }

    /// Whether the round that was begun last is still wanted, by what config space says now.
    pub fn goes_on(&self, word: u32) -> bool {
        self.begun == Some(word)
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_hint))]
mod tests {
    use super::*;

    #[test]
    fn each_round_begins_once() {
        let mut hinting = Hinting::new();

        assert!(hinting.next(STOP) == Todo::Nothing);
        assert!(hinting.next(0x8000_0000) == Todo::Begin(0x8000_0000));
        assert!(hinting.goes_on(0x8000_0000));
        assert!(hinting.next(0x8000_0000) == Todo::Nothing);
        assert!(!hinting.goes_on(STOP) && !hinting.goes_on(DONE));
        // The device stops it while it looks at the memory that has changed, and asks again.
        assert!(hinting.next(STOP) == Todo::Nothing);
        assert!(hinting.next(0x8000_0001) == Todo::Begin(0x8000_0001));
        assert!(!hinting.goes_on(0x8000_0000));
    }

    #[test]
    fn done_releases_and_forgets() {
        let mut hinting = Hinting::new();

        assert!(hinting.next(DONE) == Todo::Release);
        assert!(hinting.next(7) == Todo::Begin(7));
        assert!(hinting.next(DONE) == Todo::Release);
        assert!(hinting.next(DONE) == Todo::Release);
        assert!(hinting.next(7) == Todo::Begin(7));
    }

    #[test]
    fn stop_and_done_are_no_rounds() {
        let hinting = Hinting::new();

        assert!(!hinting.goes_on(STOP) && !hinting.goes_on(DONE));
    }
}
