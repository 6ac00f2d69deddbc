// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What goes over the control socket.
//!
//! Fields are only ever added within a version; a client ignores those it does not know, the daemon
//! refuses a request with one it does not know.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a client asks, one object a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Sets how much memory the balloon is to take from the guest. Answered by [`Reply::Target`].
    Target {
        /// A size as [`crate::size`] reads it, or a number of bytes.
        size: SizeField,
        /// Allows a target above the guest's memory.
        #[serde(default)]
        force: bool,
    },
    /// Asks for everything the daemon knows. Answered by [`Reply::Status`].
    Status {
        /// Has the guest refresh its statistics first, waiting for up to a second.
        #[serde(default)]
        stats: bool,
    },
    /// Waits until the balloon has its target size. Answered by [`Reply::Wait`].
    Wait {
        /// How long to wait, in milliseconds; without it, for ever.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
    },
    /// Begins or ends a round of free page hinting. Answered by [`Reply::FreePageHint`].
    FreePageHint {
        /// What is wanted.
        action: HintAction,
        /// Answers only when the guest has told all its free memory, or the time is up; with
        /// [`HintAction::Start`].
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        wait: bool,
        /// How long to wait, in milliseconds; without it, for ever.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
    },
    /// Has the guest forget what it can read or compute again. Answered by [`Reply::DropCaches`].
    DropCaches {
        /// Clean pages of files.
        #[serde(default)]
        page_cache: bool,
        /// Directory entries, inodes, and whatever else can be shrunk. If neither is said, both are
        /// meant.
        #[serde(default)]
        slab: bool,
        /// Enough when so much of the guest's memory is free.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<SizeField>,
        /// How long to wait, in milliseconds; without it, for ever.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
    },
    /// Has the guest move its pages together. Answered by [`Reply::Compact`].
    Compact {
        /// As for [`Request::DropCaches`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
    },
    /// Has the guest name its free pages. Answered by [`Reply::FreePages`].
    FreePages {
        /// Those in the balloon as well; not together with `hold`.
        #[serde(default)]
        balloon: bool,
        /// Keeps them out of use until they are released.
        #[serde(default)]
        hold: bool,
        /// For how long at most, in milliseconds; without it, or if it is 0, as the guest thinks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hold_ms: Option<u64>,
        /// Not longer than this connection is there, either.
        #[serde(default)]
        bound: bool,
        /// As for [`Request::DropCaches`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
    },
    /// Asks for a part of the pages that were named last. Answered by [`Reply::FreePageMap`].
    FreePageMap {
        /// The id of [`Reply::FreePages`].
        id: u32,
        /// The guest physical address to begin at.
        #[serde(default)]
        from: u64,
    },
    /// Releases the pages that the guest holds. Answered by [`Reply::Release`].
    Release {
        /// As for [`Request::DropCaches`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
    },
    /// Writes the memory of a guest that stands still into a new file. Answered by
    /// [`Reply::SaveMemory`].
    SaveMemory {
        /// The file, as an absolute path of the daemon's.
        path: String,
        /// The request whose pages the guest holds; they are left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<u32>,
        /// Only looks whether the file can be made, and writes nothing.
        #[serde(default)]
        check: bool,
    },
    /// Turns the connection into a stream of [`Event`]s, the first of which tells the state now.
    Watch {},
    /// Sets the faults of a daemon that was started with `--fault`; for tests. Answered by
    /// [`Reply::Fault`].
    Fault {
        /// The faults from now on, as `--fault` takes them; none ends them all and completes what
        /// was withheld.
        set: Vec<String>,
    },
}

/// What is wanted of free page hinting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HintAction {
    /// A new round: the guest tells its free memory, and keeps it out of use.
    Start,
    /// No more hints for now.
    Stop,
    /// The end: the guest may use the memory again.
    Done,
}

/// A size in a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "size is neither a number of bytes nor a text like \"1G\" or \"25%\""
)]
pub enum SizeField {
    /// Bytes.
    Bytes(u64),
    /// As people write it.
    Text(String),
}

/// A request together with what may stand around it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Response {
    /// [`crate::VERSION`].
    pub v: u32,
    /// Whether the request was carried out.
    pub ok: bool,
    /// The answer, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Reply>,
    /// What was wrong, if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For programs.
    pub code: FailureCode,
    /// For people: what was wrong and what is allowed.
    pub message: String,
}

/// Kinds of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureCode {
    /// The line is not a request.
    BadRequest,
    /// The request asks for a version the daemon does not speak.
    BadVersion,
    /// A value is out of what is allowed.
    BadValue,
    /// The request is not allowed on this daemon.
    NotAllowed,
    /// There is no guest, or it cannot do this.
    NotSupported,
    /// The guest does not want to.
    Refused,
    /// The guest did not manage to, or went away.
    Failed,
    /// The time was up.
    TimeOut,
    /// There are too many connections.
    Busy,
    /// A kind that this version of the client does not know.
    #[serde(other)]
    Other,
}

/// The answer to a request that was carried out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Reply {
    /// To [`Request::Target`].
    Target {
        /// The target now, in bytes.
        target_bytes: u64,
        /// The movement that this target began.
        movement: Movement,
    },
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Wait`].
    Wait {
        /// Whether the balloon has its target size; else the time was up.
        reached: bool,
        /// The size of the balloon, in bytes.
        actual_bytes: u64,
        /// The movement that is waited for.
        movement: Movement,
    },
    /// To [`Request::FreePageHint`].
    FreePageHint {
        /// The round.
        hint: HintStatus,
    },
    /// To [`Request::DropCaches`].
    DropCaches {
        /// By how much the guest's free memory has grown, in bytes.
        freed_bytes: u64,
        /// How much the balloon could grow by now, as far as the guest can tell, in bytes.
        spare_bytes: u64,
        /// What it took.
        #[serde(flatten)]
        took: Took,
    },
    /// To [`Request::Compact`].
    Compact {
        /// By how much the guest's memory in free blocks has grown, in bytes.
        gained_bytes: u64,
        /// How much there is in free blocks now, in bytes.
        block_bytes: u64,
        /// What it took.
        #[serde(flatten)]
        took: Took,
    },
    /// To [`Request::FreePages`].
    FreePages {
        /// The id, for [`Request::FreePageMap`].
        id: u32,
        /// How much memory the guest has named, in bytes.
        bytes: u64,
        /// In how many runs.
        runs: u64,
        /// In how many answers.
        answers: u64,
        /// The bytes of all its answers.
        wire_bytes: u64,
        /// Whether it keeps that out of use.
        held: bool,
        /// What it took.
        #[serde(flatten)]
        took: Took,
    },
    /// To [`Request::FreePageMap`].
    FreePageMap {
        /// Runs of pages: guest physical address and bytes, ascending.
        runs: Vec<(u64, u64)>,
        /// Where to ask on, if there is more.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        next: Option<u64>,
    },
    /// To [`Request::Release`].
    Release {
        /// How much was held, in bytes.
        bytes: u64,
        /// What it took.
        #[serde(flatten)]
        took: Took,
    },
    /// To [`Request::SaveMemory`].
    SaveMemory {
        /// Bytes written.
        written_bytes: u64,
        /// Bytes left out because the guest does not need them.
        skipped_bytes: u64,
        /// Bytes left out because they are zeros.
        zero_bytes: u64,
        /// How long it took, in milliseconds.
        elapsed_ms: f64,
    },
    /// To [`Request::Fault`].
    Fault {
        /// The faults now.
        set: Vec<String>,
    },
}

/// What a question to the guest took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Took {
    /// The guest's time for it, in milliseconds, as the guest has it.
    pub guest_ms: f64,
    /// From asking to the guest's last word, in milliseconds.
    pub elapsed_ms: f64,
}

/// The way from one target to the next.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Movement {
    /// Counts targets; 0 is the time before the first.
    pub id: u64,
    /// The size of the balloon when the target was set, in bytes.
    pub from_bytes: u64,
    /// The target, in bytes.
    pub target_bytes: u64,
    /// Whether the balloon has had this size since.
    pub reached: bool,
    /// From setting the target to reaching it, or to now, in milliseconds.
    pub elapsed_ms: f64,
    /// What happened in that time.
    pub counters: Counters,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What the daemon has counted; all begin at 0 and never fall.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// What was counted since `earlier`.
            pub fn since(&self, earlier: &Self) -> Self {
                Self {
                    $($name: self.$name.saturating_sub(earlier.$name),)*
                }
            }

            /// Each counter with its name.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

/// Calls a macro with the list of all counters, so that there is one list of them.
#[macro_export]
macro_rules! for_each_counter {
    ($then:ident) => {
        $then! {
            /// Notifications of the guest that queues were looked at for.
            kicks,
            /// Requests taken from the inflate and deflate queues.
            requests,
            /// Of these, from the inflate queue.
            inflate_requests,
            /// Of these, from the deflate queue.
            deflate_requests,
            /// Page-bitmap records in them.
            records,
            /// Merged runs of pages in them.
            runs,
            /// Bytes of these requests, headers included.
            wire_bytes,
            /// Balloon pages of 4096 bytes taken from the guest.
            inflated_pages,
            /// Balloon pages of 4096 bytes given back to the guest.
            deflated_pages,
            /// Requests taken from the reporting queue.
            report_requests,
            /// Bytes of free pages reported.
            reported_bytes,
            /// Bytes given back to the host.
            discarded_bytes,
            /// System calls that gave them back.
            discard_calls,
            /// Time spent in these, in nanoseconds.
            discard_ns,
            /// Bytes not given back because they cover only a part of a host page.
            partial_bytes,
            /// Bytes populated for the guest before it uses them again.
            prefetched_bytes,
            /// Statistics received.
            stats_requests,
            /// Requests taken from the hinting queue.
            hint_requests,
            /// Of these, such as belong to no round that was asked for.
            stale_hints,
            /// Bytes of free pages hinted in rounds that were asked for.
            hinted_bytes,
            /// Answers of the guest to what it was asked.
            answers,
            /// Interrupts sent to the guest.
            interrupts,
            /// Times the frontend read config space.
            config_reads,
            /// Times the frontend wrote config space.
            config_writes,
            /// Reads that went past the end of config space.
            config_reads_beyond,
            /// Config-change notifications sent.
            config_changes,
            /// Everything that was refused or failed; `errors` has it by kind.
            errors,
        }
    };
}

for_each_counter!(counters);

/// Everything the daemon knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The daemon itself.
    pub daemon: DaemonStatus,
    /// Who is connected.
    pub frontend: FrontendStatus,
    /// The guest's memory.
    pub memory: MemoryStatus,
    /// The balloon.
    pub balloon: BalloonStatus,
    /// The way to the target now.
    pub movement: Movement,
    /// The last round of free page hinting.
    #[serde(default)]
    pub hint: HintStatus,
    /// What the guest was asked last, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<AskedStatus>,
    /// The pages that the guest holds, or held last, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<HoldStatus>,
    /// All that was counted since the daemon started.
    pub counters: Counters,
    /// What was refused or failed, by kind; kinds that never happened are left out.
    pub errors: BTreeMap<String, u64>,
    /// The newest statistics of the guest, if it ever sent any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_stats: Option<GuestStats>,
}

/// The daemon itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Version of the program.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Time since its start, in milliseconds.
    pub uptime_ms: u64,
    /// `bitmap`, `2016` or `pfn-array`: what it was told to speak.
    pub dialect: String,
    /// Names of the balloon features it offers.
    pub features: Vec<String>,
    /// Faults it plays, see `--fault`.
    pub faults: Vec<String>,
}

/// Who is connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendStatus {
    /// Whether a frontend is connected.
    pub connected: bool,
    /// Whether the guest's driver has taken the device into use.
    pub driver: bool,
    /// Names of the features the driver acknowledged.
    pub features: Vec<String>,
    /// `page-bitmap-v1`, `page-bitmap-2016` or `pfn-array`; empty before negotiation.
    pub protocol: String,
    /// What the queues are for, by number.
    pub queues: Vec<String>,
}

/// The guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// All of it, in bytes; 0 without a guest.
    pub bytes: u64,
    /// Its regions, by ascending address.
    pub regions: Vec<RegionStatus>,
    /// How many more there are, if there are too many to list.
    #[serde(default, skip_serializing_if = "is_none")]
    pub regions_left_out: usize,
}

fn is_none(count: &usize) -> bool {
    *count == 0
}

/// A region of guest memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionStatus {
    /// Guest physical address.
    pub guest_addr: u64,
    /// Size, in bytes.
    pub bytes: u64,
    /// `shared` (a file, given back by hole punching) or `private` (by DONTNEED).
    pub backing: String,
    /// Size of a page on the host, in bytes.
    pub host_page_bytes: u64,
    /// Where it begins in the file behind it, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_offset: Option<u64>,
}

/// The balloon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonStatus {
    /// What it is to hold, in bytes.
    pub target_bytes: u64,
    /// The same in balloon pages of 4096 bytes, as it stands in config space.
    pub target_pages: u32,
    /// What it holds according to the guest, in bytes.
    pub actual_bytes: u64,
    /// The same in balloon pages of 4096 bytes, as it stands in config space.
    pub actual_pages: u32,
    /// Whether both are equal.
    pub reached: bool,
}

/// A round of free page hinting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HintStatus {
    /// The id of the round; 0 before the first.
    pub id: u32,
    /// How far it is.
    pub state: HintState,
    /// How many hints there were in it.
    pub hints: u64,
    /// How much memory they named, in bytes.
    pub bytes: u64,
    /// From asking for the round to its end, or to now, in milliseconds.
    pub elapsed_ms: f64,
}

/// How far a round of free page hinting is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HintState {
    /// None was asked for, since the guest's driver took the device.
    #[default]
    Idle,
    /// The guest was asked, and did not begin yet.
    Requested,
    /// The guest is telling its free memory.
    Running,
    /// It has told all.
    Finished,
    /// The host wants no more hints.
    Stopped,
    /// The host is done with them.
    Done,
    /// A state that this version of the client does not know.
    #[serde(other)]
    Other,
}

impl HintState {
    /// The name people see.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Requested => "requested",
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Done => "done",
            Self::Other => "other",
        }
    }
}

/// Something that the guest was asked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AskedStatus {
    /// Its id.
    pub id: u32,
    /// `drop-caches`, `compact`, `free-pages`, `release` or `cancel`.
    pub command: String,
    /// How far it is.
    pub state: AskedState,
    /// Partial answers so far.
    pub answers: u64,
    /// How much memory they name, in bytes.
    pub bytes: u64,
    /// From asking to the last answer, in milliseconds.
    pub elapsed_ms: f64,
}

/// How far something is that the guest was asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AskedState {
    /// The guest's driver has no room for it yet.
    #[default]
    Waiting,
    /// The guest has it.
    Sent,
    /// The guest did it.
    Done,
    /// The guest did not do it.
    Failed,
    /// A state that this version of the client does not know.
    #[serde(other)]
    Other,
}

impl AskedState {
    /// The name people see.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Sent => "sent",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Other => "other",
        }
    }
}

/// Pages that the guest keeps out of use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldStatus {
    /// The id of the request for them.
    pub id: u32,
    /// How much that is, in bytes.
    pub bytes: u64,
    /// Whether it still does; else it has given them up.
    pub held: bool,
}

/// Statistics of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStats {
    /// How old they are, in milliseconds.
    pub age_ms: u64,
    /// Values by name, as the virtio specification names them; unknown tags as `tag-N`.
    pub values: BTreeMap<String, u64>,
}

/// What a watcher is told, one object a line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// [`crate::VERSION`].
    pub v: u32,
    /// Time since the daemon's start, in milliseconds.
    pub at_ms: u64,
    /// What happened.
    #[serde(flatten)]
    pub what: EventKind,
}

/// What happened. States in quick succession are told as the last of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EventKind {
    /// The first event of a stream, and whenever a frontend comes, goes or negotiates.
    Frontend(FrontendStatus),
    /// Target or size of the balloon changed; also sent at the start of a stream.
    Balloon(BalloonStatus),
    /// A round of free page hinting began, ended or came to another state.
    FreePageHint(HintStatus),
    /// The guest was asked something, answered, or named a part of its free pages.
    Asked(AskedStatus),
    /// The guest sent statistics.
    Stats(GuestStats),
    /// More was refused or failed; all kinds with their count.
    Errors {
        /// Count by kind.
        errors: BTreeMap<String, u64>,
    },
}
