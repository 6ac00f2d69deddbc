// SPDX-License-Identifier: GPL-2.0

//! How the attempts to reach the target go.

use crate::logic::target::{
    Backoff,
    LogLimit, //
};

/// How the attempts to reach the target go.
pub(super) struct Pace {
    backoff: Backoff,
    log: LogLimit,
    /// The number of config changes that were seen at the last attempt.
    seen: u32,
}

impl Pace {
    /// No attempt yet.
    pub(super) const fn new() -> Self {
        Self {
            backoff: Backoff::new(),
            log: LogLimit::new(),
            seen: 0,
        }
    }

    /// A new attempt, when there have been `changes` config changes: a new target starts the back-off
    /// anew.
    pub(super) fn attempt(&mut self, changes: u32) {
        if self.seen != changes {
            self.seen = changes;
            self.backoff.reset();
        }
    }

    /// There was progress, or the target is met.
    pub(super) fn moved(&mut self) {
        self.backoff.reset();
    }

    /// The guest cannot spare more at `now_ms`. Returns when to try again, in milliseconds, and whether
    /// to say so in the log.
    pub(super) fn starved(&mut self, now_ms: u64) -> (u32, bool) {
        (self.backoff.delay_ms(), self.log.admit(now_ms))
    }
}
