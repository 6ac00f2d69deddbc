// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! For whom free pages are held, and who has to be told when that ends.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

use super::request::{
    Answer,
    Command,
    Reason,
    Status, //
};

/// The pages that are held for a request, as far as the host knows of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hold {
    /// Nothing is held.
    #[default]
    Nothing,
    /// Pages are being taken; the host has not been told that they are held.
    Taking,
    /// The host was told that pages are held.
    Told {
        /// The id of the request.
        id: u32,
        /// The number of balloon pages.
        pages: u64,
        /// When the request was taken, in microseconds.
        since: u64,
    },
    /// The hold was ended while pages were being taken.
    Failed(Reason),
}

impl Hold {
    /// Begins to take pages. What was held before must have been ended.
    pub fn begin(&mut self) {
        *self = Self::Taking;
    }

    /// Whether pages may be taken: the hold was not ended meanwhile.
    pub fn is_taking(&self) -> bool {
        *self == Self::Taking
    }

    /// Whether the host relies on the pages.
    pub fn is_told(&self) -> bool {
        matches!(self, Self::Told { .. })
    }

    /// The host is told now that the pages are held.
    ///
    /// # Errors
    ///
    /// Why the hold was ended meanwhile; nothing is held then.
    pub fn tell(&mut self, id: u32, pages: u64, since: u64) -> Result<(), Reason> {
        match *self {
            Self::Taking => {
                *self = Self::Told { id, pages, since };
                Ok(())
            }
            Self::Failed(reason) => {
                *self = Self::Nothing;
                Err(reason)
            }
            Self::Nothing | Self::Told { .. } => Err(Reason::Error),
        }
    }

    /// Ends the hold. Gives what the host must be told *before* the first page is given up.
    pub fn end(&mut self, reason: Reason, now: u64) -> Option<Answer> {
        match *self {
            Self::Told { id, pages, since } => {
                *self = Self::Nothing;
                Some(Answer {
                    id,
                    command: Command::GetFreePages.number(),
                    status: Status::HoldEnded,
                    value: pages,
                    detail: 0,
                    microseconds: u32::try_from(now.saturating_sub(since)).unwrap_or(u32::MAX),
                    reason,
                    state: 0,
                })
            }
            Self::Taking => {
                *self = Self::Failed(reason);
                None
            }
            Self::Nothing | Self::Failed(_) => None,
        }
    }

    /// Ends the hold because the host says so, or knows it from the terminal answer. Gives the number
    /// of balloon pages that the host thought held.
    pub fn release(&mut self) -> u64 {
        match core::mem::take(self) {
            Self::Told { pages, .. } => pages,
            Self::Nothing | Self::Taking | Self::Failed(_) => 0,
        }
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_hold))]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_told_only_of_what_it_knows() {
        let mut hold = Hold::default();
        assert!(hold.end(Reason::TimeOut, 0).is_none() && hold == Hold::Nothing);
        hold.begin();
        assert!(hold.is_taking() && !hold.is_told());
        assert!(hold.end(Reason::Pressure, 0).is_none() && !hold.is_taking());
        // The first reason counts.
        assert!(hold.end(Reason::TimeOut, 0).is_none());
        assert!(hold.tell(1, 2, 3) == Err(Reason::Pressure));
        assert!(hold == Hold::Nothing);
    }

    #[test]
    fn a_hold_ends_once() {
        let mut hold = Hold::default();
        hold.begin();
        assert!(hold.tell(9, 1000, 40) == Ok(()) && hold.is_told());
        let told = hold.end(Reason::TimeOut, 45);
        assert!(told.is_some_and(|a| a.id == 9
            && a.command == 3
            && a.status == Status::HoldEnded
            && a.value == 1000
            && a.microseconds == 5
            && a.reason == Reason::TimeOut));
        assert!(hold.end(Reason::TimeOut, 45).is_none() && hold.release() == 0);
    }

    #[test]
    fn the_host_is_not_told_of_what_it_ends() {
        let mut hold = Hold::default();
        hold.begin();
        assert!(hold.tell(9, 1000, 0) == Ok(()));
        assert!(hold.release() == 1000 && hold.release() == 0);
        assert!(hold.end(Reason::Pressure, 0).is_none());
        hold.begin();
        assert!(hold.release() == 0 && hold == Hold::Nothing);
    }
}
