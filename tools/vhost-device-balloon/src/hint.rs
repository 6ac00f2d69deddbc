// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Free page hinting: rounds in which the guest names memory whose contents nobody needs.
//!
//! The host begins a round by a new id in config space. The guest answers on the hinting queue with
//! the id, then with its free memory, and at the end with 0. Its memory stays out of use until the
//! host is done; still it is only a hint, as the guest may take it back at any time. So nothing is
//! discarded for it.

use std::time::{Duration, Instant};

use balloon_control::message::{HintState, HintStatus};
use balloon_wire::logic::hint::{DONE, STOP};

/// The first id, and the least, as QEMU has it: far from [`STOP`] and [`DONE`].
const FIRST_ID: u32 = 0x8000_0000;

/// What the guest said by an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It begins with the round that is asked for.
    Begun,
    /// It is at the end of that.
    Finished,
    /// Nothing about that: it belongs to another round.
    Stale,
}

/// The rounds with one driver.
#[derive(Clone, Debug)]
pub struct Hinting {
    /// Counts on over drivers, so that no id comes twice in a row.
    id: u32,
    state: HintState,
    /// The round that the guest is in, by its own word.
    guest_id: u32,
    hints: u64,
    bytes: u64,
    begun: Instant,
    took: Option<Duration>,
}

impl Default for Hinting {
    fn default() -> Self {
        Self {
            id: 0,
            state: HintState::Idle,
            guest_id: STOP,
            hints: 0,
            bytes: 0,
            begun: Instant::now(),
            took: None,
        }
    }
}

impl Hinting {
    /// Asks for a new round. What the guest still says of the one before does not count.
    pub fn start(&mut self) {
        *self = Self {
            id: self.id.checked_add(1).unwrap_or(FIRST_ID).max(FIRST_ID),
            state: HintState::Requested,
            ..Self::default()
        };
    }

    /// Wants no more hints for now; the guest keeps its memory out of use.
    pub fn stop(&mut self) {
        self.leave(HintState::Stopped);
    }

    /// Needs the hints no longer: the guest may use its memory.
    pub fn done(&mut self) {
        self.leave(HintState::Done);
    }

    fn leave(&mut self, state: HintState) {
        self.state = state;
        self.took.get_or_insert(self.begun.elapsed());
    }

    /// Another driver, which knows of no round.
    pub fn forget(&mut self) {
        *self = Self {
            id: self.id,
            ..Self::default()
        };
    }

    /// What config space says.
    pub const fn command(&self) -> u32 {
        match self.state {
            HintState::Idle | HintState::Stopped | HintState::Other => STOP,
            HintState::Done => DONE,
            HintState::Requested | HintState::Running | HintState::Finished => self.id,
        }
    }

    /// The guest sent an id, or 0.
    pub fn told(&mut self, id: u32) -> Told {
        let before = std::mem::replace(&mut self.guest_id, id);
        match (self.state, id) {
            (HintState::Requested, id) if id == self.id => {
                self.state = HintState::Running;
                Told::Begun
            }
            (HintState::Running, STOP) if before == self.id => {
                self.leave(HintState::Finished);
                Told::Finished
            }
            _ => Told::Stale,
        }
    }

    /// Whether hints of the guest belong to the round that is asked for.
    pub fn wanted(&self) -> bool {
        self.state == HintState::Running && self.guest_id == self.id
    }

    /// Counts a hint.
    pub fn note(&mut self, bytes: u64) {
        self.hints += 1;
        self.bytes += bytes;
    }

    /// What people see.
    pub fn status(&self) -> HintStatus {
        let elapsed = match self.state {
            HintState::Idle => Duration::ZERO,
            _ => self.took.unwrap_or_else(|| self.begun.elapsed()),
        };
        HintStatus {
            id: self.id,
            state: self.state,
            hints: self.hints,
            bytes: self.bytes,
            elapsed_ms: elapsed.as_micros() as f64 / 1000.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_from_start_to_done() {
        let mut hinting = Hinting::default();
        assert_eq!((hinting.command(), hinting.wanted()), (STOP, false));
        hinting.start();
        assert_eq!((hinting.command(), hinting.wanted()), (FIRST_ID, false));
        assert_eq!(hinting.told(FIRST_ID), Told::Begun);
        assert!(hinting.wanted());
        hinting.note(4096);
        assert_eq!(hinting.told(STOP), Told::Finished);
        assert!(!hinting.wanted());
        let status = hinting.status();
        assert_eq!((status.hints, status.bytes), (1, 4096));
        assert_eq!(status.state, HintState::Finished);
        assert_eq!(hinting.command(), FIRST_ID);
        hinting.done();
        assert_eq!(hinting.command(), DONE);
        // What was counted can still be read, and the time stands.
        assert_eq!(hinting.status().elapsed_ms, status.elapsed_ms);
    }

    #[test]
    fn what_belongs_to_an_older_round_is_stale() {
        let mut hinting = Hinting::default();
        assert_eq!(hinting.told(FIRST_ID), Told::Stale);
        hinting.start();
        assert_eq!(hinting.told(STOP), Told::Stale);
        assert_eq!(hinting.told(FIRST_ID), Told::Begun);
        // The host wants another round while the guest is in this one.
        hinting.start();
        assert_eq!(hinting.command(), FIRST_ID + 1);
        assert!(!hinting.wanted());
        assert_eq!(hinting.told(STOP), Told::Stale);
        assert_eq!(hinting.told(FIRST_ID), Told::Stale);
        assert!(!hinting.wanted());
        assert_eq!(hinting.told(FIRST_ID + 1), Told::Begun);
        // A guest that names another round is not in this one, and cannot end it.
        assert_eq!(hinting.told(7), Told::Stale);
        assert!(!hinting.wanted());
        assert_eq!(hinting.told(STOP), Told::Stale);
        assert_eq!(hinting.status().state, HintState::Running);
        hinting.stop();
        assert_eq!(hinting.told(FIRST_ID + 1), Told::Stale);
        assert_eq!(hinting.command(), STOP);
    }

    #[test]
    fn ids_are_never_words() {
        let mut hinting = Hinting {
            id: u32::MAX,
            ..Hinting::default()
        };
        hinting.start();
        assert_eq!(hinting.command(), FIRST_ID);
        hinting.forget();
        assert_eq!((hinting.command(), hinting.status().hints), (STOP, 0));
        hinting.start();
        assert_eq!(hinting.command(), FIRST_ID + 1, "no id twice in a row");
    }
}
