// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What a host can ask the guest for: the requests, the answers, and whose turn it is.
//!
//! `Documentation/protocol.rst` ("Host requests") is the specification. One request is worked on at a
//! time; a newer one ends it; each gets one terminal answer.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

use super::wire::{
    le16,
    le32,
    le64,
    put, //
};

/// [`Command::DropCaches`]: pages that cache files.
pub const PAGE_CACHE: u16 = 1 << 0;
/// [`Command::DropCaches`]: directory entries, inodes, and whatever else can be shrunk.
pub const SLAB: u16 = 1 << 1;
/// [`Command::GetFreePages`]: keep the pages out of use until they are released.
pub const HOLD: u16 = 1 << 0;
/// [`Command::GetFreePages`]: name the pages in the balloon as well.
pub const INCLUDE_BALLOON: u16 = 1 << 1;

/// [`Answer::state`]: caches are dropped when the host asks for it.
pub const STATE_CACHES: u16 = 1 << 0;
/// [`Answer::state`]: pages are held.
pub const STATE_HOLDING: u16 = 1 << 1;

/// What a host can ask for; the number is the bit in the announcement's `requests`, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// End what is under way.
    Cancel,
    /// Forget what can be read or computed again.
    DropCaches,
    /// Move pages together.
    Compact,
    /// Name the pages that are free.
    GetFreePages,
    /// Give back the pages that are held.
    Release,
}

impl Command {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 5] = [
        Self::Cancel,
        Self::DropCaches,
        Self::Compact,
        Self::GetFreePages,
        Self::Release,
    ];

    /// The number on the wire.
    pub const fn number(self) -> u16 {
        match self {
            Self::Cancel => 0,
            Self::DropCaches => 1,
            Self::Compact => 2,
            Self::GetFreePages => 3,
            Self::Release => 4,
        }
    }

    /// The command with this number.
    pub const fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            0 => Self::Cancel,
            1 => Self::DropCaches,
            2 => Self::Compact,
            3 => Self::GetFreePages,
            4 => Self::Release,
            _ => return None,
        })
    }

    /// The bit in the announcement's `requests`.
    pub const fn bit(self) -> u32 {
        1 << self.number()
    }
}

/// A request of the host, as it goes over the wire.
///
/// | offset | type | field |
/// |---|---|---|
/// | 0 | le32 | `id` |
/// | 4 | le16 | `command` |
/// | 6 | le16 | `flags` |
/// | 8 | le64 | `argument` |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Names the request in its answers; not 0.
    pub id: u32,
    /// The number of a [`Command`].
    pub command: u16,
    /// By command.
    pub flags: u16,
    /// By command.
    pub argument: u64,
}

impl Request {
    /// Size on the wire, in bytes.
    pub const LEN: usize = 16;

    /// Writes the request as it goes over the wire.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, &self.id.to_le_bytes());
        put(&mut out, 4, &self.command.to_le_bytes());
        put(&mut out, 6, &self.flags.to_le_bytes());
        put(&mut out, 8, &self.argument.to_le_bytes());
        out
    }

    /// Reads a request without judging it; `None` if there are too few bytes for one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < Self::LEN {
            return None;
        }
        Some(Self {
            id: le32(bytes, 0),
            command: le16(bytes, 4),
            flags: le16(bytes, 6),
            argument: le64(bytes, 8),
        })
    }

    /// What is to be done, or why not.
    pub fn judge(&self, guest: &Guest) -> Result<Task, No> {
        if self.id == 0 {
            return Err(No(Status::Invalid, Reason::Id));
        }
        let command =
            Command::from_number(self.command).ok_or(No(Status::Unsupported, Reason::Command))?;
        if guest.announced & command.bit() == 0 {
            return Err(No(Status::Unsupported, Reason::NotAnnounced));
        }
        let (flags, argument) = (self.flags, self.argument);
        let flags_good = match command {
            Command::DropCaches => flags != 0 && flags & !(PAGE_CACHE | SLAB) == 0,
            Command::GetFreePages => matches!(flags, 0 | HOLD | INCLUDE_BALLOON),
            Command::Cancel | Command::Compact | Command::Release => flags == 0,
        };
        if !flags_good {
            return Err(No(Status::Invalid, Reason::Flags));
        }
        let takes_argument = match command {
            Command::DropCaches => true,
            Command::GetFreePages => flags & HOLD != 0,
            Command::Cancel | Command::Compact | Command::Release => false,
        };
        if argument != 0 && !takes_argument {
            return Err(No(Status::Invalid, Reason::Argument));
        }
        match command {
            Command::Cancel => Ok(Task::Cancel),
            Command::DropCaches if !guest.drops_caches => {
                Err(No(Status::Refused, Reason::NotAllowed))
            }
            Command::DropCaches => Ok(Task::DropCaches {
                page_cache: flags & PAGE_CACHE != 0,
                slab: flags & SLAB != 0,
                until: (argument != 0).then_some(argument),
            }),
            Command::Compact => Ok(Task::Compact),
            Command::GetFreePages if flags & HOLD != 0 => Ok(Task::HoldFreePages {
                ms: hold_ms(argument),
            }),
            // What is held is filled anew when it is given back, what is merely free is not.
            Command::GetFreePages if guest.poisons => Err(No(Status::Refused, Reason::Poison)),
            Command::GetFreePages => Ok(Task::NameFreePages {
                balloon: flags & INCLUDE_BALLOON != 0,
            }),
            Command::Release => Ok(Task::Release),
        }
    }
}

/// How long pages are held if the host does not say, in milliseconds.
pub const HOLD_DEFAULT_MS: u32 = 30_000;
/// How long pages are held at most, in milliseconds.
pub const HOLD_MAX_MS: u32 = 600_000;

/// How long to hold pages for whoever asks for `argument` milliseconds.
fn hold_ms(argument: u64) -> u32 {
    match u32::try_from(argument) {
        Ok(0) => HOLD_DEFAULT_MS,
        Ok(ms) => ms.min(HOLD_MAX_MS),
        Err(_) => HOLD_MAX_MS,
    }
}

/// How the guest is, as far as that decides on requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guest {
    /// The commands that the device has announced, as bits.
    pub announced: u32,
    /// Whether the guest's administrator lets the host drop caches.
    pub drops_caches: bool,
    /// Whether free memory is filled with something that the guest relies on.
    pub poisons: bool,
}

/// What is to be done for a good request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Nothing: a newer request ends the older one anyway.
    Cancel,
    /// Drop caches.
    DropCaches {
        /// Pages that cache files.
        page_cache: bool,
        /// What else can be shrunk.
        slab: bool,
        /// Stop when so many balloon pages are free.
        until: Option<u64>,
    },
    /// Compact memory.
    Compact,
    /// Name the pages that are free.
    NameFreePages {
        /// Those in the balloon as well.
        balloon: bool,
    },
    /// Take pages that are free, keep them, and name them.
    HoldFreePages {
        /// For how long at most, in milliseconds.
        ms: u32,
    },
    /// Give back the pages that are held.
    Release,
}

/// Why a request is not carried out, or not to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct No(pub Status, pub Reason);

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok,
    /// A part of the answer, with records.
    Partial,
    /// Ended early.
    Cancelled,
    /// Neither this driver nor this guest can do that.
    Unsupported,
    /// Not now, or not as it is set up.
    Refused,
    /// The request is not as it should be.
    Invalid,
    /// Begun, and not brought to its end.
    Failed,
    /// Pages that were held for this request are given up.
    HoldEnded,
}

impl Status {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Ok,
        Self::Partial,
        Self::Cancelled,
        Self::Unsupported,
        Self::Refused,
        Self::Invalid,
        Self::Failed,
        Self::HoldEnded,
    ];

    /// The number on the wire.
    pub const fn number(self) -> u16 {
        match self {
            Self::Ok => 0,
            Self::Partial => 1,
            Self::Cancelled => 2,
            Self::Unsupported => 3,
            Self::Refused => 4,
            Self::Invalid => 5,
            Self::Failed => 6,
            Self::HoldEnded => 7,
        }
    }

    /// The status with this number; one that is not known counts as [`Status::Failed`].
    pub const fn from_number(number: u16) -> Self {
        match number {
            0 => Self::Ok,
            1 => Self::Partial,
            2 => Self::Cancelled,
            3 => Self::Unsupported,
            4 => Self::Refused,
            5 => Self::Invalid,
            7 => Self::HoldEnded,
            _ => Self::Failed,
        }
    }

    /// Whether no other answer to the request follows, but for [`Status::HoldEnded`].
    pub const fn is_terminal(self) -> bool {
        !matches!(self, Self::Partial | Self::HoldEnded)
    }
}

/// Why a request was not carried out, or not to its end, or why a hold has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There is nothing to say.
    None,
    /// The command is not known.
    Command,
    /// The command is not among those that the device has announced.
    NotAnnounced,
    /// `id` is 0.
    Id,
    /// Flags that the command does not have, or none where it needs one.
    Flags,
    /// An argument that the command does not have.
    Argument,
    /// The guest's administrator does not want that.
    NotAllowed,
    /// The guest's kernel has no such thing, or none for modules.
    NoInterface,
    /// The guest relies on what is in free pages.
    Poison,
    /// There is no memory for that.
    NoMemory,
    /// A newer request came.
    Newer,
    /// The time for holding pages is over.
    TimeOut,
    /// The guest needs the pages.
    Pressure,
    /// The driver is being stopped.
    Stopping,
    /// An error that was not expected.
    Error,
}

impl Reason {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 15] = [
        Self::None,
        Self::Command,
        Self::NotAnnounced,
        Self::Id,
        Self::Flags,
        Self::Argument,
        Self::NotAllowed,
        Self::NoInterface,
        Self::Poison,
        Self::NoMemory,
        Self::Newer,
        Self::TimeOut,
        Self::Pressure,
        Self::Stopping,
        Self::Error,
    ];

    /// The number on the wire.
    pub const fn number(self) -> u16 {
        match self {
            Self::None => 0,
            Self::Command => 1,
            Self::NotAnnounced => 2,
            Self::Id => 3,
            Self::Flags => 4,
            Self::Argument => 5,
            Self::NotAllowed => 6,
            Self::NoInterface => 7,
            Self::Poison => 8,
            Self::NoMemory => 9,
            Self::Newer => 10,
            Self::TimeOut => 11,
            Self::Pressure => 12,
            Self::Stopping => 13,
            Self::Error => 14,
        }
    }

    /// The reason with this number; one that is not known counts as [`Reason::Error`].
    pub const fn from_number(number: u16) -> Self {
        match number {
            0 => Self::None,
            1 => Self::Command,
            2 => Self::NotAnnounced,
            3 => Self::Id,
            4 => Self::Flags,
            5 => Self::Argument,
            6 => Self::NotAllowed,
            7 => Self::NoInterface,
            8 => Self::Poison,
            9 => Self::NoMemory,
            10 => Self::Newer,
            11 => Self::TimeOut,
            12 => Self::Pressure,
            13 => Self::Stopping,
            _ => Self::Error,
        }
    }
}

/// An answer of the guest, as it goes over the wire; records follow if it is a partial one.
///
/// | offset | type | field |
/// |---|---|---|
/// | 0 | le32 | `id` |
/// | 4 | le16 | `command` |
/// | 6 | le16 | `status` |
/// | 8 | le64 | `value` |
/// | 16 | le64 | `detail` |
/// | 24 | le32 | `microseconds` |
/// | 28 | le16 | `reason` |
/// | 30 | le16 | `state` |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// That of the request.
    pub id: u32,
    /// That of the request, whether known or not.
    pub command: u16,
    /// What became of it.
    pub status: Status,
    /// By command and status.
    pub value: u64,
    /// By command and status.
    pub detail: u64,
    /// Time since the driver has taken the request.
    pub microseconds: u32,
    /// Why it is not [`Status::Ok`].
    pub reason: Reason,
    /// [`STATE_CACHES`] and [`STATE_HOLDING`].
    pub state: u16,
}

impl Answer {
    /// Size on the wire, in bytes.
    pub const LEN: usize = 32;

    /// Writes the answer as it goes over the wire.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, &self.id.to_le_bytes());
        put(&mut out, 4, &self.command.to_le_bytes());
        put(&mut out, 6, &self.status.number().to_le_bytes());
        put(&mut out, 8, &self.value.to_le_bytes());
        put(&mut out, 16, &self.detail.to_le_bytes());
        put(&mut out, 24, &self.microseconds.to_le_bytes());
        put(&mut out, 28, &self.reason.number().to_le_bytes());
        put(&mut out, 30, &self.state.to_le_bytes());
        out
    }

    /// Reads an answer; `None` if there are too few bytes for one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < Self::LEN {
            return None;
        }
        Some(Self {
            id: le32(bytes, 0),
            command: le16(bytes, 4),
            status: Status::from_number(le16(bytes, 6)),
            value: le64(bytes, 8),
            detail: le64(bytes, 16),
            microseconds: le32(bytes, 24),
            reason: Reason::from_number(le16(bytes, 28)),
            state: le16(bytes, 30),
        })
    }
}

/// What was done for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// See [`Answer::value`].
    pub value: u64,
    /// See [`Answer::detail`].
    pub detail: u64,
}

/// A request that is worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Current {
    request: Request,
    /// When it was taken, in microseconds.
    since: u64,
    /// What was done so far.
    done: Done,
}

impl Current {
    fn answer(&self, status: Status, reason: Reason, done: Done, now: u64) -> Answer {
        Answer {
            id: self.request.id,
            command: self.request.command,
            status,
            value: done.value,
            detail: done.detail,
            microseconds: u32::try_from(now.saturating_sub(self.since)).unwrap_or(u32::MAX),
            reason,
            state: 0,
        }
    }
}

/// What a new request leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The terminal answer to the older request, if one was worked on; to be sent first.
    pub older: Option<Answer>,
    /// What is to be done now, or the terminal answer to the new request.
    pub task: Result<Task, Answer>,
}

/// Where requests come in and answers go out: knows which request is worked on, and sees to it that
/// each gets one terminal answer. Whoever sends the answers fills in [`Answer::state`].
///
/// Times are in microseconds, from whatever moment.
#[derive(Debug, Default)]
pub struct Desk {
    current: Option<Current>,
}

impl Desk {
    /// Nothing was asked yet.
    pub const fn new() -> Self {
        Self { current: None }
    }

    /// Whether a request is worked on.
    pub const fn is_busy(&self) -> bool {
        self.current.is_some()
    }

    /// The id of the request that is worked on.
    pub fn id(&self) -> Option<u32> {
        self.current.map(|current| current.request.id)
    }

    /// When the request that is worked on was taken, in microseconds.
    pub fn since(&self) -> Option<u64> {
        self.current.map(|current| current.since)
    }

    /// What was done so far for the request that is worked on.
    pub fn done(&self) -> Done {
        self.current.map_or(Done::default(), |current| current.done)
    }

    /// The answers that must be at hand before another request is taken: its own, and that of the
    /// one which it ends. So the one that is worked on has its answer at hand at any time.
    pub const fn answers_needed(&self) -> usize {
        if self.is_busy() {
            2
        } else {
            1
        }
    }

    /// Takes a new request; an older one ends here.
    pub fn take(&mut self, request: Request, guest: &Guest, now: u64) -> Turn {
        let older = self.give_up(Reason::Newer, now);
        let new = Current {
            request,
            since: now,
            done: Done::default(),
        };
        let task = match request.judge(guest) {
            Ok(task) => {
                self.current = Some(new);
                Ok(task)
            }
            Err(No(status, reason)) => Err(new.answer(status, reason, Done::default(), now)),
        };

        Turn { older, task }
    }

    /// The partial answer for `pages` balloon pages that are named, if a request is worked on.
    pub fn part(&mut self, pages: u64, now: u64) -> Option<Answer> {
        let current = self.current.as_mut()?;
        let number = current.done.detail;

        current.done.value = current.done.value.saturating_add(pages);
        current.done.detail = number.saturating_add(1);
        let done = Done {
            value: pages,
            detail: number,
        };
        Some(current.answer(Status::Partial, Reason::None, done, now))
    }

    /// What was done so far for the request that is worked on, for when it is given up.
    pub fn note(&mut self, done: Done) {
        if let Some(current) = &mut self.current {
            current.done = done;
        }
    }

    /// The request that is worked on is done. Gives the terminal answer.
    pub fn finish(&mut self, now: u64) -> Option<Answer> {
        let current = self.current.take()?;

        Some(current.answer(Status::Ok, Reason::None, current.done, now))
    }

    /// The request that is worked on cannot be brought to its end. Gives the terminal answer.
    pub fn fail(&mut self, no: No, now: u64) -> Option<Answer> {
        let current = self.current.take()?;

        Some(current.answer(no.0, no.1, current.done, now))
    }

    /// Ends the request that is worked on, if there is one. Gives the terminal answer.
    pub fn give_up(&mut self, reason: Reason, now: u64) -> Option<Answer> {
        self.fail(No(Status::Cancelled, reason), now)
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_request))]
mod tests {
    use super::*;

    const GUEST: Guest = Guest {
        announced: 0x1f,
        drops_caches: true,
        poisons: false,
    };

    const FREE_PAGES: Request = Request {
        id: 7,
        command: 3,
        flags: 0,
        argument: 0,
    };

    fn judge(command: u16, flags: u16, argument: u64) -> Result<Task, No> {
        let request = Request {
            id: 1,
            command,
            flags,
            argument,
        };
        request.judge(&GUEST)
    }

    #[test]
    fn request_bytes() {
        let request = Request {
            id: 0x0403_0201,
            command: 0x0605,
            flags: 0x0807,
            argument: 0x100f_0e0d_0c0b_0a09,
        };
        let golden = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        assert!(request.encode() == golden);
        assert!(Request::decode(&golden) == Some(request));
        assert!(Request::decode(&golden[..15]).is_none());
    }

    #[test]
    fn numbers_come_back() {
        for command in Command::ALL {
            assert!(Command::from_number(command.number()) == Some(command));
        }
        assert!(Command::from_number(5).is_none());
        for status in Status::ALL {
            assert!(Status::from_number(status.number()) == status);
        }
        assert!(Status::from_number(8) == Status::Failed);
        for reason in Reason::ALL {
            assert!(Reason::from_number(reason.number()) == reason);
        }
        assert!(Reason::from_number(15) == Reason::Error);
    }

    #[test]
    fn good_requests_become_tasks() {
        let drop = |page_cache, slab, until| {
            Ok(Task::DropCaches {
                page_cache,
                slab,
                until,
            })
        };
        assert!(judge(0, 0, 0) == Ok(Task::Cancel));
        assert!(judge(1, 1, 0) == drop(true, false, None));
        assert!(judge(1, 2, 9) == drop(false, true, Some(9)));
        assert!(judge(1, 3, u64::MAX) == drop(true, true, Some(u64::MAX)));
        assert!(judge(2, 0, 0) == Ok(Task::Compact));
        assert!(judge(3, 0, 0) == Ok(Task::NameFreePages { balloon: false }));
        assert!(judge(3, 2, 0) == Ok(Task::NameFreePages { balloon: true }));
        assert!(judge(3, 1, 0) == Ok(Task::HoldFreePages { ms: 30_000 }));
        assert!(judge(3, 1, 5) == Ok(Task::HoldFreePages { ms: 5 }));
        assert!(judge(3, 1, 1 << 40) == Ok(Task::HoldFreePages { ms: 600_000 }));
        assert!(judge(4, 0, 0) == Ok(Task::Release));
    }

    #[test]
    fn bad_flags_and_arguments_are_named() {
        for (command, flags) in [
            (0, 1),
            (1, 0),
            (1, 4),
            (1, 7),
            (2, 1),
            (3, 3),
            (3, 4),
            (4, 1),
        ] {
            assert!(judge(command, flags, 0) == Err(No(Status::Invalid, Reason::Flags)));
        }
        for (command, flags) in [(0, 0), (2, 0), (3, 0), (3, 2), (4, 0)] {
            assert!(judge(command, flags, 1) == Err(No(Status::Invalid, Reason::Argument)));
        }
    }

    #[test]
    fn the_first_thing_that_is_wrong_is_told() {
        let mut request = Request {
            id: 0,
            command: 9,
            flags: 0xffff,
            argument: 1,
        };
        let no = |request: &Request, announced| {
            let guest = Guest {
                announced,
                drops_caches: false,
                poisons: true,
            };
            request.judge(&guest).err()
        };
        assert!(no(&request, 0x1f) == Some(No(Status::Invalid, Reason::Id)));
        request.id = 1;
        assert!(no(&request, u32::MAX) == Some(No(Status::Unsupported, Reason::Command)));
        request.command = 1;
        assert!(no(&request, 0x1d) == Some(No(Status::Unsupported, Reason::NotAnnounced)));
        assert!(no(&request, 0x02) == Some(No(Status::Invalid, Reason::Flags)));
        request.flags = 3;
        assert!(no(&request, 0x02) == Some(No(Status::Refused, Reason::NotAllowed)));
        request.command = 3;
        request.flags = 0;
        assert!(no(&request, 0x08) == Some(No(Status::Invalid, Reason::Argument)));
        request.argument = 0;
        assert!(no(&request, 0x08) == Some(No(Status::Refused, Reason::Poison)));
        request.flags = HOLD;
        assert!(no(&request, 0x08).is_none());
    }

    #[test]
    fn parts_are_numbered_and_summed() {
        let mut desk = Desk::new();
        let turn = desk.take(FREE_PAGES, &GUEST, 100);
        assert!(turn.older.is_none() && turn.task == Ok(Task::NameFreePages { balloon: false }));
        for (number, pages) in [(0, 5), (1, 6)] {
            let part = desk.part(pages, 103);
            assert!(part.is_some_and(|a| a.status == Status::Partial
                && a.id == 7
                && a.value == pages
                && a.detail == number
                && a.microseconds == 3));
        }
        let last = desk.finish(1 << 40);
        assert!(last.is_some_and(|a| a.status == Status::Ok
            && a.value == 11
            && a.detail == 2
            && a.microseconds == u32::MAX));
        assert!(desk.finish(0).is_none() && desk.part(1, 0).is_none() && !desk.is_busy());
    }

    #[test]
    fn a_newer_request_ends_the_older_one() {
        let mut desk = Desk::new();
        assert!(desk.answers_needed() == 1);
        assert!(desk.take(FREE_PAGES, &GUEST, 0).task.is_ok());
        assert!(desk.answers_needed() == 2 && desk.id() == Some(7));
        desk.note(Done {
            value: 3,
            detail: 1,
        });
        // Also one that is not good.
        let bad = Request {
            id: 8,
            command: 99,
            ..FREE_PAGES
        };
        let turn = desk.take(bad, &GUEST, 2);
        assert!(turn.older.is_some_and(|a| a.id == 7
            && a.status == Status::Cancelled
            && a.reason == Reason::Newer
            && a.value == 3));
        assert!(turn.task.is_err_and(|a| a.id == 8
            && a.command == 99
            && a.status == Status::Unsupported
            && a.reason == Reason::Command));
        assert!(!desk.is_busy() && desk.id().is_none());
    }
}
