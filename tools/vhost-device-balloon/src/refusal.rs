// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What a guest or frontend got wrong: one sentence, one counter, one log line at a time.

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use balloon_wire::wire::{Header, RecordError};
use tracing::warn;

use crate::counters::Counter;
use crate::state::lock;

/// Log lines of one kind that are written in [`WINDOW`] before the rest is only counted.
const BURST: u32 = 5;
/// How long that count holds.
const WINDOW: Duration = Duration::from_secs(10);

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// Kinds of [`Refusal`], as they are counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
        }

        impl Kind {
            /// All kinds, in the order of the enum.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// The name in `status`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }
    };
}

kinds! {
    /// A request ends within a record's header.
    HeaderShort = "header-short",
    /// A record's `id`.
    RecordId = "record-id",
    /// A record's `page_shift`.
    PageShift = "page-shift",
    /// A record's `base_pfn`.
    BasePfn = "base-pfn",
    /// A record's `bmap_len`.
    BmapLen = "bmap-len",
    /// A record's bitmap is longer than the request.
    Truncated = "truncated",
    /// Bytes after the only record of a 2016 request.
    Trailing = "trailing",
    /// The length of an array of page frame numbers.
    PfnArrayLength = "pfn-array-length",
    /// Pages that are no guest memory.
    OutsideRam = "outside-ram",
    /// A descriptor chain without descriptors.
    ChainEmpty = "chain-empty",
    /// A descriptor chain that loops or leaves its table.
    ChainEndless = "chain-endless",
    /// A writable descriptor where the guest gives data, or the reverse.
    ChainDirection = "chain-direction",
    /// A descriptor that points outside guest memory.
    ChainMemory = "chain-memory",
    /// A chain with more bytes than any request has.
    ChainBytes = "chain-bytes",
    /// The ring's index of available buffers.
    AvailIndex = "avail-index",
    /// The ring itself cannot be used.
    Ring = "ring",
    /// A buffer on a queue that has no use.
    QueueUnused = "queue-unused",
    /// The length of statistics.
    StatsLength = "stats-length",
    /// The length of a word of free page hinting.
    HintId = "hint-id",
    /// A buffer that has no room for a request of the host.
    RequestRoom = "request-room",
    /// The length of an answer.
    AnswerLength = "answer-length",
    /// An answer that nobody waits for.
    AnswerUnasked = "answer-unasked",
    /// Free pages that are not named in order, or none at all.
    AnswerOrder = "answer-order",
    /// Free pages that do not add up.
    AnswerSum = "answer-sum",
    /// A config write that fits no field the driver may write.
    ConfigWrite = "config-write",
    /// Giving memory back failed.
    Discard = "discard",
    /// Populating memory failed.
    Prefetch = "prefetch",
    /// The frontend cannot be told that config space changed.
    ConfigChange = "config-change",
    /// The guest cannot be interrupted.
    Interrupt = "interrupt",
}

/// Something that was refused, or that failed, and with which value.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A record that cannot be relied on.
    #[error("record {record} at byte {offset} is refused: {}", record_sentence(.error))]
    Record {
        /// Which one in the request, from 0.
        record: usize,
        /// Where it begins in the request.
        offset: usize,
        /// What is wrong.
        error: RecordError,
    },
    /// More than one record in the 2016 dialect.
    #[error("{0} bytes follow the only record of a request")]
    Trailing(usize),
    /// No whole number of page frame numbers.
    #[error("an array of page frame numbers has {0} bytes, not a multiple of 4 above 0")]
    PfnArrayLength(usize),
    /// Pages that are no guest memory; they are skipped.
    #[error("pages of {bytes} bytes, the first at {addr:#x}, are outside guest memory")]
    OutsideRam {
        /// The first address outside.
        addr: u64,
        /// How many bytes in all.
        bytes: u64,
    },
    /// No descriptor at all.
    #[error("descriptor chain {head} has no descriptor in the table")]
    ChainEmpty {
        /// The chain's first descriptor.
        head: u16,
    },
    /// It does not end.
    #[error(
        "descriptor chain {head} does not end: after {count} descriptors it loops, leaves its table or exceeds 4 GiB"
    )]
    ChainEndless {
        /// The chain's first descriptor.
        head: u16,
        /// Descriptors seen.
        count: usize,
    },
    /// A descriptor of the wrong direction.
    #[error("descriptor {index} of chain {head} is {} by the device, {} is expected", .writable.then_some("writable").unwrap_or("readable"), .writable.then_some("readable").unwrap_or("writable"))]
    ChainDirection {
        /// The chain's first descriptor.
        head: u16,
        /// Which one in the chain, from 0.
        index: usize,
        /// What it is.
        writable: bool,
    },
    /// A descriptor outside guest memory.
    #[error(
        "descriptor {index} of chain {head} at {addr:#x} with {len} bytes is outside guest memory"
    )]
    ChainMemory {
        /// The chain's first descriptor.
        head: u16,
        /// Which one in the chain, from 0.
        index: usize,
        /// Guest physical address.
        addr: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Longer than any request.
    #[error("descriptor chain {head} has {bytes} bytes, more than the {max} a request may have")]
    ChainBytes {
        /// The chain's first descriptor.
        head: u16,
        /// Bytes in all.
        bytes: u64,
        /// What is allowed.
        max: usize,
    },
    /// The ring says there is more, but there is not.
    #[error("the available index of the ring is more than a ring ahead or cannot be read")]
    AvailIndex,
    /// The ring cannot be read or written.
    #[error("the ring cannot be used: {0}")]
    Ring(virtio_queue::Error),
    /// A queue that has no use with the negotiated features.
    #[error("queue {0} has no use with the features negotiated")]
    QueueUnused(usize),
    /// No whole number of statistics.
    #[error("statistics have {0} bytes, not a multiple of 10 up to {max}", max = crate::stats::BYTES_MAX)]
    StatsLength(usize),
    /// No word of free page hinting.
    #[error("a word of free page hinting has {0} bytes instead of 4")]
    HintId(usize),
    /// Too small for a request of the host.
    #[error("descriptor chain {head} has room for {room} bytes of a request of {len}")]
    RequestRoom {
        /// The chain's first descriptor.
        head: u16,
        /// The room there is.
        room: u64,
        /// The room that is needed.
        len: usize,
    },
    /// Too short, or with records where none belong.
    #[error("an answer has {0} bytes: less than 32, or more without records")]
    AnswerLength(usize),
    /// To nothing that was asked, or asked no more.
    #[error("an answer to request {id}, command {command}, is not asked for")]
    AnswerUnasked {
        /// The id in it.
        id: u32,
        /// The command in it.
        command: u16,
    },
    /// Not ascending.
    #[error("free pages in an answer to request {0} are not in order, or there are none")]
    AnswerOrder(u32),
    /// Not the number that is said.
    #[error(
        "free pages in answers to request {0} are not as many as it says, or an answer is missing"
    )]
    AnswerSum(u32),
    /// Not a field of the driver's.
    #[error(
        "config space is written at offset {offset} with {len} bytes, which is no field of the driver's"
    )]
    ConfigWrite {
        /// Offset in bytes.
        offset: u32,
        /// Length in bytes.
        len: usize,
    },
    /// The system did not take pages back.
    #[error("{bytes} bytes at {addr:#x} cannot be given back to the host: {error}")]
    Discard {
        /// Guest physical address.
        addr: u64,
        /// Length in bytes.
        bytes: u64,
        /// What the system said.
        error: io::Error,
    },
    /// The system did not populate pages.
    #[error("{bytes} bytes at {addr:#x} cannot be populated: {error}")]
    Prefetch {
        /// Guest physical address.
        addr: u64,
        /// Length in bytes.
        bytes: u64,
        /// What the system said.
        error: io::Error,
    },
    /// The guest does not hear of the new target.
    #[error("the frontend cannot be told of a new target: {0}")]
    ConfigChange(io::Error),
    /// The guest does not hear of used buffers.
    #[error("the guest cannot be interrupted: {0}")]
    Interrupt(io::Error),
}

fn record_sentence(error: &RecordError) -> String {
    match *error {
        RecordError::Short(have) => {
            format!("the header has {have} bytes instead of {}", Header::LEN)
        }
        RecordError::Id(id) => format!("id is {id} instead of 0"),
        RecordError::PageShift(shift) => format!("page_shift is {shift}, which is not announced"),
        RecordError::BasePfn(pfn) => format!("base_pfn is {pfn:#x}, beyond 64-bit addresses"),
        RecordError::BmapLen(len) => {
            format!("bmap_len is {len}: 0, no multiple of 8 or above the limit")
        }
        RecordError::Truncated { bmap_len, have } => {
            format!("bmap_len is {bmap_len}, but only {have} bytes follow")
        }
    }
}

impl Refusal {
    /// The kind it is counted as.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Record { error, .. } => match error {
                RecordError::Short(_) => Kind::HeaderShort,
                RecordError::Id(_) => Kind::RecordId,
                RecordError::PageShift(_) => Kind::PageShift,
                RecordError::BasePfn(_) => Kind::BasePfn,
                RecordError::BmapLen(_) => Kind::BmapLen,
                RecordError::Truncated { .. } => Kind::Truncated,
            },
            Self::Trailing(_) => Kind::Trailing,
            Self::PfnArrayLength(_) => Kind::PfnArrayLength,
            Self::OutsideRam { .. } => Kind::OutsideRam,
            Self::ChainEmpty { .. } => Kind::ChainEmpty,
            Self::ChainEndless { .. } => Kind::ChainEndless,
            Self::ChainDirection { .. } => Kind::ChainDirection,
            Self::ChainMemory { .. } => Kind::ChainMemory,
            Self::ChainBytes { .. } => Kind::ChainBytes,
            Self::AvailIndex => Kind::AvailIndex,
            Self::Ring(_) => Kind::Ring,
            Self::QueueUnused(_) => Kind::QueueUnused,
            Self::StatsLength(_) => Kind::StatsLength,
            Self::HintId(_) => Kind::HintId,
            Self::RequestRoom { .. } => Kind::RequestRoom,
            Self::AnswerLength(_) => Kind::AnswerLength,
            Self::AnswerUnasked { .. } => Kind::AnswerUnasked,
            Self::AnswerOrder(_) => Kind::AnswerOrder,
            Self::AnswerSum(_) => Kind::AnswerSum,
            Self::ConfigWrite { .. } => Kind::ConfigWrite,
            Self::Discard { .. } => Kind::Discard,
            Self::Prefetch { .. } => Kind::Prefetch,
            Self::ConfigChange(_) => Kind::ConfigChange,
            Self::Interrupt(_) => Kind::Interrupt,
        }
    }
}

/// Counts refusals and logs some of them.
#[derive(Debug)]
pub struct Complaints {
    slots: Vec<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    count: Counter,
    gate: Mutex<Gate>,
}

/// Lets [`BURST`] lines through in each [`WINDOW`].
#[derive(Debug, Default)]
struct Gate {
    since: Option<Instant>,
    passed: u32,
    held_back: u64,
}

impl Gate {
    /// Whether a line may be written now; if so, how many were not since the last.
    fn pass(&mut self, now: Instant) -> Option<u64> {
        match self.since {
            Some(since) if now.duration_since(since) < WINDOW => {}
            _ => {
                self.since = Some(now);
                self.passed = 0;
            }
        }
        if self.passed == BURST {
            self.held_back += 1;
            return None;
        }
        self.passed += 1;
        Some(std::mem::take(&mut self.held_back))
    }
}

impl Default for Complaints {
    fn default() -> Self {
        Self {
            slots: Kind::ALL.iter().map(|_| Slot::default()).collect(),
        }
    }
}

impl Complaints {
    /// Counts a refusal, and logs it unless there were many of its kind lately.
    pub fn add(&self, place: &str, refusal: &Refusal) {
        let kind = refusal.kind();
        let Some(slot) = self.slots.get(kind as usize) else {
            return;
        };
        slot.count.add(1);
        match lock(&slot.gate).pass(Instant::now()) {
            Some(0) => warn!("{place}: {refusal}"),
            Some(more) => warn!("{place}: {refusal} ({more} more of this kind were not logged)"),
            None => {}
        }
    }

    /// Count by kind, without those that never happened.
    pub fn by_kind(&self) -> BTreeMap<String, u64> {
        Kind::ALL
            .iter()
            .zip(&self.slots)
            .filter(|(_, slot)| slot.count.get() != 0)
            .map(|(kind, slot)| (kind.name().to_owned(), slot.count.get()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_few_lines() {
        let mut gate = Gate::default();
        let start = Instant::now();
        let lines = (0..1000).filter(|_| gate.pass(start).is_some()).count();
        assert_eq!(lines, BURST as usize);
        assert_eq!(gate.pass(start + WINDOW), Some(1000 - u64::from(BURST)));
        assert_eq!(gate.pass(start + WINDOW), Some(0));
    }

    #[test]
    fn each_kind_has_its_own_count_and_name() {
        let complaints = Complaints::default();
        complaints.add("test", &Refusal::Trailing(8));
        complaints.add("test", &Refusal::Trailing(8));
        complaints.add("test", &Refusal::AvailIndex);
        let counts = complaints.by_kind();
        assert_eq!(counts.len(), 2);
        assert_eq!(counts.get("trailing"), Some(&2));
        assert_eq!(counts.get("avail-index"), Some(&1));
        let mut names: Vec<_> = Kind::ALL.iter().map(|k| k.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Kind::ALL.len());
        for (i, kind) in Kind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, i);
        }
    }

    #[test]
    fn sentences_name_field_and_value() {
        let of = |error| {
            Refusal::Record {
                record: 1,
                offset: 32,
                error,
            }
            .to_string()
        };
        assert_eq!(
            of(RecordError::PageShift(13)),
            "record 1 at byte 32 is refused: page_shift is 13, which is not announced"
        );
        assert!(of(RecordError::BmapLen(7)).contains("bmap_len is 7"));
        assert!(of(RecordError::BasePfn(u64::MAX)).contains("base_pfn is 0xffff"));
    }
}
