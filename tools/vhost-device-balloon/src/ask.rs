// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the guest is asked to do, and what it answers: the host's side of host requests.
//!
//! Whoever asks waits in [`Asks::ask`]; one does at a time, as a newer request ends an older one. The
//! device's thread takes requests from here to the guest and brings the answers. Nothing that the
//! guest says is relied on but for what it is asked about: itself.
//!
//! The lock of [`Asks`] is a leaf.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use balloon_control::BALLOON_PAGE_BYTES;
use balloon_control::message::{AskedState, AskedStatus, HoldStatus};
use balloon_wire::logic::request::{
    Answer, Command, HOLD, INCLUDE_BALLOON, PAGE_CACHE, Reason, Request, SLAB, Status,
};

use crate::page_set::PageSet;
use crate::ram::Ram;
use crate::ranges::Range;
use crate::refusal::Refusal;
use crate::request::Format;
use crate::state::lock;

/// Commands that the device announces: all there are.
pub const COMMANDS: u32 = {
    let mut set = 0;
    let mut i = 0;
    while i < Command::ALL.len() {
        set |= Command::ALL[i].bit();
        i += 1;
    }
    set
};

/// How long the guest may take to end what it is doing.
const CANCEL_PATIENCE: Duration = Duration::from_secs(2);
/// How long others may ask before it is too late to release what is held; it has its own bound.
const RELEASE_PATIENCE: Duration = Duration::from_secs(600);
/// How long the device's thread may take to look at the answers that are there.
const DRAIN_PATIENCE: Duration = Duration::from_secs(10);
/// How often whoever waits looks whether that is still wanted.
const LOOK: Duration = Duration::from_millis(200);
/// Requests without an answer that are remembered.
const OPEN_MAX: usize = 64;

/// Something to ask the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// To forget what it can read or compute again.
    DropCaches {
        /// Clean pages of files.
        page_cache: bool,
        /// Directory entries, inodes, and whatever else can be shrunk.
        slab: bool,
        /// Enough when so many balloon pages are free.
        until: Option<u64>,
    },
    /// To move its pages together.
    Compact,
    /// To name its free pages. Each was free at some moment after this was asked, and may be in use
    /// again: see "Free pages" in `Documentation/protocol.rst` before relying on it.
    FreePages {
        /// To name the pages of the balloon as well.
        balloon: bool,
    },
    /// To name its free pages, and keep them out of use until they are released.
    HoldFreePages {
        /// For how long at most; zero leaves it to the guest.
        time: Duration,
    },
    /// To release the pages that it holds.
    Release,
}

impl Question {
    const fn command(self) -> Command {
        match self {
            Self::DropCaches { .. } => Command::DropCaches,
            Self::Compact => Command::Compact,
            Self::FreePages { .. } | Self::HoldFreePages { .. } => Command::GetFreePages,
            Self::Release => Command::Release,
        }
    }

    fn request(self, id: u32) -> Request {
        let (flags, argument) = match self {
            Self::DropCaches {
                page_cache,
                slab,
                until,
            } => {
                let page_cache = if page_cache { PAGE_CACHE } else { 0 };
                let slab = if slab { SLAB } else { 0 };
                (page_cache | slab, until.unwrap_or(0))
            }
            Self::FreePages { balloon } => (if balloon { INCLUDE_BALLOON } else { 0 }, 0),
            Self::HoldFreePages { time } => {
                (HOLD, u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
            }
            Self::Compact | Self::Release => (0, 0),
        };
        Request {
            id,
            command: self.command().number(),
            flags,
            argument,
        }
    }
}

/// The name of a command, as people see it.
const fn name(command: Command) -> &'static str {
    match command {
        Command::Cancel => "cancel",
        Command::DropCaches => "drop-caches",
        Command::Compact => "compact",
        Command::GetFreePages => "free-pages",
        Command::Release => "release",
    }
}

/// Pages that the guest has named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// The id of the request.
    pub id: u32,
    /// The pages, as far as they are guest memory.
    pub set: PageSet,
}

/// What came of a question.
#[derive(Clone, Debug)]
pub struct Answered {
    /// The guest's last word.
    pub answer: Answer,
    /// From asking to that.
    pub took: Duration,
    /// The pages it has named, if it was asked for any.
    pub named: Option<Arc<Named>>,
    /// The bytes of all its answers.
    pub wire_bytes: u64,
}

/// Why there is no good answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AskError {
    /// There is no guest, or it cannot be asked.
    #[error("{0}")]
    NotSupported(String),
    /// The guest did not do it, or not to the end.
    #[error("{}", sentence(.0))]
    Guest(Answer),
    /// The guest's answers contradict each other.
    #[error("the guest's answers are not good, see the daemon's log")]
    Nonsense,
    /// The time is up, and the guest was told to end.
    #[error("the time is up{}", if *.sent { "" } else { "; the guest's driver has not even taken the request" })]
    TimeOut {
        /// Whether the guest's driver has the request.
        sent: bool,
    },
    /// The driver let the device go, or the guest ended.
    #[error("the guest's driver went away")]
    Gone,
    /// Whoever asked does not want to know any more.
    #[error("nobody waits for the answer")]
    Unwanted,
}

fn sentence(answer: &Answer) -> String {
    let who = match answer.status {
        Status::Refused => "the guest refuses",
        Status::Unsupported => "the guest cannot do that",
        Status::Cancelled => "the guest ended it early",
        _ => "the guest failed",
    };
    let why = match answer.reason {
        Reason::None => return who.to_owned(),
        Reason::Command | Reason::NotAnnounced => "its driver does not know the command",
        Reason::Id | Reason::Flags | Reason::Argument => "it does not like the request",
        Reason::NotAllowed => "its administrator does not want that",
        Reason::NoInterface => "its kernel has no way to do that",
        Reason::Poison => "it relies on what is in free pages",
        Reason::NoMemory => "it has no memory for that",
        Reason::Newer => "it was asked for something else",
        Reason::TimeOut => "the time for holding pages was over",
        Reason::Pressure => "it needs its memory",
        Reason::Stopping => "its driver is being stopped",
        Reason::Error => "an error that its log may say more about",
    };
    format!("{who}: {why}")
}

/// How long to wait for an answer.
pub struct Patience<'a> {
    /// Not beyond this moment.
    pub until: Option<Instant>,
    /// Not when this says that nobody wants the answer any more.
    pub unwanted: &'a mut dyn FnMut() -> bool,
}

/// A request that has had no terminal answer, or one that nobody has looked at.
#[derive(Debug)]
struct Open {
    id: u32,
    command: Command,
    sent: bool,
    /// Nobody waits for it.
    given_up: bool,
    /// Partial answers so far, pages named in them, and where the last one ended.
    parts: u64,
    pages: u64,
    end: u64,
    /// Bytes of all answers so far.
    wire: u64,
    set: PageSet,
    bad: bool,
    holds: bool,
    terminal: Option<Answer>,
    asked: Instant,
}

/// A hold that the guest has confirmed.
#[derive(Clone, Debug)]
struct Held {
    id: u32,
    pages: u64,
    ended: Option<Reason>,
    /// The pages, once somebody has the answer.
    named: Option<Arc<Named>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Whether the driver takes requests.
    ready: bool,
    /// Where the answer queue was stopped, if it is.
    suspended: Option<u16>,
    /// Whether somebody is asking.
    busy: bool,
    id: u32,
    /// What is to be sent: the id, or 0 for what a fault sends, and the bytes.
    unsent: VecDeque<(u32, Vec<u8>)>,
    open: VecDeque<Open>,
    held: Option<Held>,
    named: Option<Arc<Named>>,
    last: Option<AskedStatus>,
    /// How often all answers that are there were wanted, and how often they were taken since.
    drains: u64,
    drained: u64,
}

/// All requests to one guest after the other.
#[derive(Debug, Default)]
pub struct Asks {
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// Ends one's turn.
struct Turn<'a>(&'a Asks);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.inner).busy = false;
        self.0.changed.notify_all();
    }
}

impl Asks {
    /// Another driver, or none: whoever waits for answers waits in vain.
    pub fn reset(&self, ready: bool) {
        let mut inner = lock(&self.inner);
        inner.ready = ready;
        inner.unsent.clear();
        inner.open.clear();
        inner.held = None;
        inner.suspended = None;
        drop(inner);
        self.changed.notify_all();
    }

    /// A driver takes the device. If the queues were only stopped it may be the one that was there.
    pub fn begin(&self, ready: bool) {
        let suspended = lock(&self.inner).suspended.is_some();
        if !(ready && suspended) {
            self.reset(ready);
        }
    }

    /// The answer queue is stopped, at this place; all answers are taken.
    pub fn suspend(&self, next: u16) {
        lock(&self.inner).suspended = Some(next);
        self.changed.notify_all();
    }

    /// Queues are looked at again, the answer queue from this place on. A driver that is new begins
    /// at 0.
    pub fn resume(&self, next: Option<u16>) {
        let Some(suspended) = lock(&self.inner).suspended else {
            return;
        };
        match next {
            Some(next) if next != 0 && next == suspended => lock(&self.inner).suspended = None,
            next => self.reset(next.is_some()),
        }
    }

    /// Asks the guest and waits for its last word. `wake` makes the device's thread look for what is
    /// to be sent.
    ///
    /// # Errors
    ///
    /// If the guest did not do it. If the time is up it is told to end, and gets two seconds for that.
    pub fn ask(
        &self,
        question: Question,
        wake: impl Fn(),
        patience: &mut Patience<'_>,
    ) -> Result<Answered, AskError> {
        let turn = self.take_turn(patience)?;
        let answered = self.ask_in_turn(question, &wake, patience)?;
        if matches!(question, Question::HoldFreePages { .. }) && (patience.unwanted)() {
            // Nobody knows of this hold, so nobody would end it.
            self.let_go(&turn, &wake);
            return Err(AskError::Unwanted);
        }
        Ok(answered)
    }

    /// Has the guest release what it holds for request `id`, if it does. Waits for whoever else asks, as long
    /// as a hold can be, and some seconds for the guest; if it stands still, it does so later.
    pub fn release(&self, id: u32, wake: impl Fn()) {
        let mut patience = Patience {
            until: Instant::now().checked_add(RELEASE_PATIENCE),
            unwanted: &mut || false,
        };
        if let Ok(turn) = self.take_turn(&mut patience) {
            if self.holds(id) {
                self.let_go(&turn, &wake);
            }
        }
    }

    fn let_go(&self, _turn: &Turn<'_>, wake: &impl Fn()) {
        let request = |id| Question::Release.request(id);
        let Ok(id) = self.push(Command::Release, request, false) else {
            return;
        };
        wake();
        let mut patience = Patience {
            until: Instant::now().checked_add(CANCEL_PATIENCE),
            unwanted: &mut || false,
        };
        if self.wait(id, &mut patience).is_err() {
            self.forsake(id);
        }
    }

    fn ask_in_turn(
        &self,
        question: Question,
        wake: &impl Fn(),
        patience: &mut Patience<'_>,
    ) -> Result<Answered, AskError> {
        let asked = Instant::now();
        let id = self.push(question.command(), |id| question.request(id), false)?;
        wake();
        let error = match self.wait(id, patience) {
            Ok(open) => return self.conclude(open, asked),
            Err(error @ (AskError::TimeOut { .. } | AskError::Unwanted)) => error,
            Err(error) => return Err(error),
        };
        // The guest is to stop, and may even be done by now.
        if self.give_up(id) {
            let cancel = |id| Request {
                id,
                command: Command::Cancel.number(),
                flags: 0,
                argument: 0,
            };
            self.push(Command::Cancel, cancel, true)?;
            wake();
            let mut patience = Patience {
                until: Instant::now().checked_add(CANCEL_PATIENCE),
                unwanted: &mut || false,
            };
            if let Ok(open) = self.wait(id, &mut patience) {
                if open.terminal.is_some_and(|a| a.status == Status::Ok) {
                    return self.conclude(open, asked);
                }
            }
            self.forsake(id);
        }
        Err(error)
    }

    /// Waits until nobody else asks.
    fn take_turn(&self, patience: &mut Patience<'_>) -> Result<Turn<'_>, AskError> {
        let mut inner = lock(&self.inner);
        while inner.busy {
            inner = self.sleep(inner, patience, false)?;
        }
        if !inner.ready {
            return Err(AskError::Gone);
        }
        inner.busy = true;
        Ok(Turn(self))
    }

    /// Sleeps until something changes.
    fn sleep<'a>(
        &'a self,
        inner: MutexGuard<'a, Inner>,
        patience: &mut Patience<'_>,
        sent: bool,
    ) -> Result<MutexGuard<'a, Inner>, AskError> {
        let left = patience
            .until
            .map_or(LOOK, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Err(AskError::TimeOut { sent });
        }
        if (patience.unwanted)() {
            return Err(AskError::Unwanted);
        }
        let (inner, _) = self
            .changed
            .wait_timeout(inner, left.min(LOOK))
            .unwrap_or_else(PoisonError::into_inner);
        Ok(inner)
    }

    fn push(
        &self,
        command: Command,
        request: impl FnOnce(u32) -> Request,
        given_up: bool,
    ) -> Result<u32, AskError> {
        let mut inner = lock(&self.inner);
        if !inner.ready {
            return Err(AskError::Gone);
        }
        inner.id = inner.id.checked_add(1).unwrap_or(1);
        let id = inner.id;
        let request = request(id);
        if inner.open.len() >= OPEN_MAX {
            inner.open.pop_front();
        }
        inner.open.push_back(Open {
            id,
            command,
            sent: false,
            given_up,
            parts: 0,
            pages: 0,
            end: 0,
            wire: 0,
            set: PageSet::default(),
            bad: false,
            holds: command == Command::GetFreePages && request.flags & HOLD != 0,
            terminal: None,
            asked: Instant::now(),
        });
        inner.unsent.push_back((id, request.encode().to_vec()));
        Ok(id)
    }

    /// Waits for the terminal answer to a request.
    fn wait(&self, id: u32, patience: &mut Patience<'_>) -> Result<Open, AskError> {
        let mut inner = lock(&self.inner);
        loop {
            // It is gone after a reset.
            let at = inner.open.iter().position(|o| o.id == id);
            let at = at.ok_or(AskError::Gone)?;
            let open = inner.open.get(at).ok_or(AskError::Gone)?;
            if open.terminal.is_some() {
                return inner.open.remove(at).ok_or(AskError::Gone);
            }
            let sent = open.sent;
            inner = self.sleep(inner, patience, sent)?;
        }
    }

    /// Takes back a request that was not sent. Returns whether it was sent.
    fn give_up(&self, id: u32) -> bool {
        let mut inner = lock(&self.inner);
        let unsent = inner.unsent.iter().position(|(i, _)| *i == id);
        if let Some(at) = unsent {
            inner.unsent.remove(at);
            inner.open.retain(|o| o.id != id);
        }
        unsent.is_none()
    }

    /// Leaves a request to itself: its answers are taken and forgotten.
    fn forsake(&self, id: u32) {
        let mut inner = lock(&self.inner);
        for open in inner.open.iter_mut().filter(|o| o.id == id) {
            open.given_up = true;
            open.set = PageSet::default();
        }
    }

    fn conclude(&self, open: Open, asked: Instant) -> Result<Answered, AskError> {
        let answer = open.terminal.ok_or(AskError::Gone)?;
        if answer.status != Status::Ok {
            return Err(AskError::Guest(answer));
        }
        if open.bad {
            return Err(AskError::Nonsense);
        }
        let named = (open.command == Command::GetFreePages).then(|| {
            Arc::new(Named {
                id: open.id,
                set: open.set,
            })
        });
        if named.is_some() {
            let mut inner = lock(&self.inner);
            inner.named.clone_from(&named);
            for held in inner.held.iter_mut().filter(|held| held.id == open.id) {
                held.named.clone_from(&named);
            }
        }
        Ok(Answered {
            answer,
            took: asked.elapsed(),
            named,
            wire_bytes: open.wire,
        })
    }

    /// Sends bytes that need not be a request; a fault. Answers to them are not asked for.
    pub fn push_raw(&self, bytes: Vec<u8>) {
        lock(&self.inner).unsent.push_back((0, bytes));
    }

    /// What is to be sent next, if anything.
    pub fn next(&self) -> Option<Vec<u8>> {
        let inner = lock(&self.inner);
        inner.unsent.front().map(|(_, bytes)| bytes.clone())
    }

    /// What was next is sent.
    pub fn sent(&self) {
        let mut inner = lock(&self.inner);
        if let Some((id, _)) = inner.unsent.pop_front() {
            for open in inner.open.iter_mut().filter(|o| o.id == id) {
                open.sent = true;
            }
            inner.show(id);
        }
    }

    /// Takes an answer of the guest.
    ///
    /// # Errors
    ///
    /// What is wrong with it. Then nothing is believed of what else was told for that request.
    pub fn answer(&self, bytes: &[u8], format: &Format, ram: &Ram) -> Result<(), Refusal> {
        let answer = Answer::decode(bytes).ok_or(Refusal::AnswerLength(bytes.len()))?;
        let records = bytes.get(Answer::LEN..).unwrap_or_default();
        if answer.status != Status::Partial && !records.is_empty() {
            return Err(Refusal::AnswerLength(bytes.len()));
        }
        let result = lock(&self.inner).answer(&answer, records, format, ram);
        self.changed.notify_all();
        result
    }

    /// Takes all answers that the guest has made available before this was called.
    ///
    /// # Errors
    ///
    /// If the driver goes away, or the device's thread has more to do than it can in some seconds.
    pub fn drain(&self, wake: impl Fn()) -> Result<(), AskError> {
        let mut inner = lock(&self.inner);
        inner.drains += 1;
        let wanted = inner.drains;
        drop(inner);
        wake();
        let mut patience = Patience {
            until: Instant::now().checked_add(DRAIN_PATIENCE),
            unwanted: &mut || false,
        };
        let mut inner = lock(&self.inner);
        // Of a queue that is stopped all were taken.
        while inner.drained < wanted && inner.suspended.is_none() {
            if !inner.ready {
                return Err(AskError::Gone);
            }
            inner = self.sleep(inner, &mut patience, true)?;
        }
        Ok(())
    }

    /// How often answers were wanted so far; to be told to [`Asks::drained`] when they are taken.
    pub fn drains(&self) -> u64 {
        lock(&self.inner).drains
    }

    /// All answers are taken that were there when `drains` was looked at.
    pub fn drained(&self, drains: u64) {
        lock(&self.inner).drained = drains;
        self.changed.notify_all();
    }

    /// Whether the guest holds the pages that request `id` named, by what it has said so far.
    pub fn holds(&self, id: u32) -> bool {
        let inner = lock(&self.inner);
        let held = inner.held.as_ref();
        held.is_some_and(|held| held.id == id && held.ended.is_none())
    }

    /// The pages that request `id` named, if it was the last one to name any, or they are held.
    pub fn named(&self, id: u32) -> Option<Arc<Named>> {
        let inner = lock(&self.inner);
        let held = inner.held.as_ref().and_then(|held| held.named.as_ref());
        let mut known = [held, inner.named.as_ref()].into_iter().flatten();
        known.find(|named| named.id == id).cloned()
    }

    /// The last request, as people see it.
    pub fn status(&self) -> Option<AskedStatus> {
        let inner = lock(&self.inner);
        let open = inner.open.iter().rev().find(|o| !o.given_up);
        open.map(Open::status).or_else(|| inner.last.clone())
    }

    /// What the guest holds, as people see it.
    pub fn hold_status(&self) -> Option<HoldStatus> {
        let inner = lock(&self.inner);
        inner.held.as_ref().map(|held| HoldStatus {
            id: held.id,
            bytes: held.pages.saturating_mul(BALLOON_PAGE_BYTES),
            held: held.ended.is_none(),
        })
    }
}

impl Open {
    fn status(&self) -> AskedStatus {
        let state = match &self.terminal {
            Some(answer) if answer.status == Status::Ok && !self.bad => AskedState::Done,
            Some(_) => AskedState::Failed,
            None if !self.sent => AskedState::Waiting,
            None => AskedState::Sent,
        };
        AskedStatus {
            id: self.id,
            command: name(self.command).to_owned(),
            state,
            answers: self.parts,
            bytes: self.pages.saturating_mul(BALLOON_PAGE_BYTES),
            elapsed_ms: self.asked.elapsed().as_micros() as f64 / 1000.0,
        }
    }

    /// Takes the records of a partial answer.
    fn part(
        &mut self,
        answer: &Answer,
        records: &[u8],
        format: &Format,
        ram: &Ram,
    ) -> Result<(), Refusal> {
        let mut pages = 0u64;
        let mut end = self.end;
        let mut ascending = true;
        let mut ranges = Vec::new();
        format.read_answer(self.id, records, |range: Range| {
            ascending &= range.start >= end;
            end = range.end;
            pages += range.len() / BALLOON_PAGE_BYTES;
            ranges.extend(ram.inside(range));
        })?;
        if !ascending || pages == 0 {
            return Err(Refusal::AnswerOrder(self.id));
        }
        if pages != answer.value || self.parts != answer.detail {
            return Err(Refusal::AnswerSum(self.id));
        }
        self.parts += 1;
        self.pages = self.pages.saturating_add(pages);
        self.end = end;
        if !self.given_up {
            ranges.into_iter().for_each(|range| self.set.add(range));
        }
        Ok(())
    }
}

impl Inner {
    fn answer(
        &mut self,
        answer: &Answer,
        records: &[u8],
        format: &Format,
        ram: &Ram,
    ) -> Result<(), Refusal> {
        let unasked = || Refusal::AnswerUnasked {
            id: answer.id,
            command: answer.command,
        };
        if answer.status == Status::HoldEnded {
            let held = self.held.as_mut().filter(|held| held.id == answer.id);
            held.ok_or_else(unasked)?.ended = Some(answer.reason);
            return Ok(());
        }
        let waits = |o: &&mut Open| {
            let same = o.id == answer.id && o.command.number() == answer.command;
            same && o.sent && o.terminal.is_none()
        };
        let open = self.open.iter_mut().find(waits).ok_or_else(unasked)?;
        let bytes = Answer::LEN.saturating_add(records.len());
        open.wire = open.wire.saturating_add(bytes as u64);
        let names = open.command == Command::GetFreePages;
        if answer.status == Status::Partial {
            let taken = match (names, open.bad) {
                (false, _) => Err(unasked()),
                // There was an error already; one is enough.
                (true, true) => Ok(()),
                (true, false) => open.part(answer, records, format, ram),
            };
            if taken.is_err() {
                open.bad = true;
                open.set = PageSet::default();
            }
            let id = open.id;
            self.show(id);
            return taken;
        }
        open.terminal = Some(*answer);
        let sums = (open.pages, open.parts);
        let wrong = names && !open.bad && sums != (answer.value, answer.detail);
        // Of a request that was refused there is nothing to sum up.
        let wrong = wrong && answer.status == Status::Ok;
        open.bad |= wrong;
        let (id, holds, given_up) = (open.id, open.holds, open.given_up);
        let ok = answer.status == Status::Ok;
        if ok && holds {
            self.held = Some(Held {
                id,
                pages: answer.value,
                ended: None,
                named: None,
            });
        }
        if ok && answer.command == Command::Release.number() {
            self.held = None;
        }
        self.show(id);
        if given_up {
            self.open.retain(|o| o.id != id);
        }
        match wrong {
            true => Err(Refusal::AnswerSum(id)),
            false => Ok(()),
        }
    }

    /// Notes how far a request is, for people.
    fn show(&mut self, id: u32) {
        if let Some(open) = self.open.iter().find(|o| o.id == id && !o.given_up) {
            self.last = Some(open.status());
        }
    }
}
