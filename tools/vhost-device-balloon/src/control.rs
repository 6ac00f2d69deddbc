// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The control socket: line-delimited JSON, a thread for each connection.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use balloon_control::draft::Draft;
use balloon_control::message::{
    AskedStatus, Event, EventKind, Failure, FailureCode, HintAction, HintState, HintStatus, Reply,
    Request, Response, SizeField, Took,
};
use balloon_control::size::{Size, SizeError, human};
use balloon_control::{LINE_MAX, VERSION};
use balloon_wire::logic::request::Status;
use serde::Serialize;
use tracing::{debug, error};

use crate::ask::{Answered, AskError, Patience, Question};
use crate::fault::{FAULTS_MAX, Fault};
use crate::image::Written;
use crate::page_set::PageSet;
use crate::state::{State, View};

/// Connections served at a time.
const CONNECTIONS_MAX: usize = 64;
/// Runs of pages in an answer; of the longest numbers they have as many bytes as fit into a line.
const RUNS_MAX: usize = 1000;
/// The longest message of a failure, in characters.
const MESSAGE_MAX: usize = 1000;
/// How long a client may take to read what it asked for.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the guest may take to refresh its statistics.
const STATS_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a waiting thread looks whether its client is still there.
const LOOK: Duration = Duration::from_millis(500);

/// Serves connections for as long as the process lives.
///
/// # Errors
///
/// If no thread can be started.
pub fn spawn(state: Arc<State>, listener: UnixListener) -> io::Result<()> {
    let connections = Arc::new(AtomicUsize::new(0));
    thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || {
            let mut short = false;
            for stream in listener.incoming() {
                match stream {
                    Ok(stream) => {
                        short = false;
                        admit(&state, &connections, stream);
                    }
                    Err(e) => {
                        if !std::mem::replace(&mut short, true) {
                            error!("a control connection cannot be accepted: {e}; trying again");
                        }
                        // Out of file descriptors, most likely: let some go.
                        thread::sleep(Duration::from_millis(100));
                    }
                }
            }
        })?;
    Ok(())
}

fn admit(state: &Arc<State>, connections: &Arc<AtomicUsize>, stream: UnixStream) {
    if stream.set_write_timeout(Some(WRITE_TIMEOUT)).is_err() {
        return;
    }
    let connection = Connection {
        state: Arc::clone(state),
        stream,
        bound: Cell::new(None),
    };
    if connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
        connections.fetch_sub(1, Ordering::Relaxed);
        let failure = fail(
            FailureCode::Busy,
            format!("there are {CONNECTIONS_MAX} connections already; close one"),
        );
        let _ = connection.answer(Err(failure));
        return;
    }
    let count = Arc::clone(connections);
    let spawned = thread::Builder::new()
        .name("control-client".to_owned())
        .spawn(move || {
            if let Err(e) = connection.serve() {
                debug!("a control connection ended: {e}");
            }
            count.fetch_sub(1, Ordering::Relaxed);
        });
    if let Err(e) = spawned {
        connections.fetch_sub(1, Ordering::Relaxed);
        error!("a control connection cannot be served: {e}");
    }
}

/// A failure to be told; what it quotes of a request is cut, as it may be long.
fn fail(code: FailureCode, message: impl Into<String>) -> Failure {
    let mut message = message.into();
    let mut last = message.char_indices().skip(MESSAGE_MAX - 1);
    if let (Some((end, _)), Some(_)) = (last.next(), last.next()) {
        message.truncate(end);
        message.push('…');
    }
    Failure { code, message }
}

struct Connection {
    state: Arc<State>,
    stream: UnixStream,
    /// The request whose pages are held as long as the connection is there.
    bound: Cell<Option<u32>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(id) = self.bound.get() {
            self.state.release(id);
        }
    }
}

impl Connection {
    fn serve(&self) -> io::Result<()> {
        let mut reader = BufReader::new(&self.stream);
        let mut line = Vec::new();
        loop {
            line.clear();
            // Room for the line feed, and to see that a line is too long.
            let limit = LINE_MAX as u64 + 1;
            let read = (&mut reader).take(limit).read_until(b'\n', &mut line)?;
            if read == 0 {
                return Ok(());
            }
            if line.last() == Some(&b'\n') {
                line.pop();
            } else if line.len() > LINE_MAX {
                let text = format!("the line is longer than {LINE_MAX} bytes");
                return self.answer(Err(fail(FailureCode::BadRequest, text)));
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match parse(&line) {
                Err(failure) => self.answer(Err(failure))?,
                Ok(Request::Watch {}) => return self.watch(),
                Ok(Request::Wait { timeout_ms }) => match self.wait(timeout_ms)? {
                    Some(reply) => self.answer(Ok(reply))?,
                    None => return Ok(()),
                },
                Ok(Request::Target { size, force }) => self.answer(self.target(&size, force))?,
                Ok(Request::Status { stats }) => {
                    if stats {
                        self.refresh_stats();
                    }
                    let status = Box::new(self.state.status());
                    self.answer(Ok(Reply::Status(status)))?;
                }
                Ok(Request::FreePageHint {
                    action,
                    wait,
                    timeout_ms,
                }) => match self.hint(action, wait, timeout_ms)? {
                    Some(answer) => self.answer(answer)?,
                    None => return Ok(()),
                },
                Ok(Request::DropCaches {
                    page_cache,
                    slab,
                    until,
                    timeout_ms,
                }) => match self.until(until.as_ref()) {
                    Ok(until) => {
                        let both = !page_cache && !slab;
                        let question = Question::DropCaches {
                            page_cache: page_cache || both,
                            slab: slab || both,
                            until,
                        };
                        self.ask(question, timeout_ms)?;
                    }
                    Err(failure) => self.answer(Err(failure))?,
                },
                Ok(Request::Compact { timeout_ms }) => self.ask(Question::Compact, timeout_ms)?,
                Ok(Request::FreePages {
                    balloon,
                    hold,
                    hold_ms,
                    bound,
                    timeout_ms,
                }) => match free_pages(balloon, hold, hold_ms, bound) {
                    Ok(question) => self.ask_bound(question, bound, timeout_ms)?,
                    Err(failure) => self.answer(Err(failure))?,
                },
                Ok(Request::FreePageMap { id, from }) => {
                    self.answer(self.free_page_map(id, from))?
                }
                Ok(Request::Release { timeout_ms }) => self.ask(Question::Release, timeout_ms)?,
                Ok(Request::SaveMemory { path, id, check }) => {
                    self.answer(self.save_memory(&path, id, check))?
                }
                Ok(Request::Fault { set }) => self.answer(self.fault(&set))?,
            }
        }
    }

    fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        (&self.stream).write_all(&line)
    }

    fn answer(&self, answer: Result<Reply, Failure>) -> io::Result<()> {
        let ok = answer.is_ok();
        let (result, error) = match answer {
            Ok(reply) => (Some(reply), None),
            Err(failure) => (None, Some(failure)),
        };
        self.send(&Response {
            v: VERSION,
            ok,
            result,
            error,
        })
    }

    fn target(&self, size: &SizeField, force: bool) -> Result<Reply, Failure> {
        let ram = self.state.memory_bytes();
        let pages = self.pages(size)?;
        let bytes = u64::from(pages) * balloon_control::BALLOON_PAGE_BYTES;
        if !force && ram != 0 && bytes > ram {
            let text = format!(
                "a balloon of {} is more than the guest's {}; force it if that is meant",
                human(bytes),
                human(ram)
            );
            return Err(fail(FailureCode::BadValue, text));
        }
        Ok(Reply::Target {
            target_bytes: bytes,
            movement: self.state.set_target(pages),
        })
    }

    /// Waits until the target is reached or the time is up; `None` if the client went away.
    fn wait(&self, timeout_ms: Option<u64>) -> io::Result<Option<Reply>> {
        let view = self.view_when(timeout_ms, |view| view.balloon.reached)?;
        Ok(view.map(|view| Reply::Wait {
            reached: view.balloon.reached,
            actual_bytes: view.balloon.actual_bytes,
            movement: view.movement,
        }))
    }

    /// Begins or ends a round of free page hinting, and may wait for its end; `None` if the client
    /// went away.
    fn hint(
        &self,
        action: HintAction,
        wait: bool,
        timeout_ms: Option<u64>,
    ) -> io::Result<Option<Result<Reply, Failure>>> {
        let begun = match self.state.hint(action) {
            Ok(hint) => hint,
            Err(why) => return Ok(Some(Err(fail(FailureCode::NotSupported, why)))),
        };
        if !wait {
            return Ok(Some(Ok(Reply::FreePageHint { hint: begun })));
        }
        let under_way = |hint: &HintStatus| {
            let state = hint.state;
            hint.id == begun.id && matches!(state, HintState::Requested | HintState::Running)
        };
        let view = self.view_when(timeout_ms, |view| !under_way(&view.hint))?;
        Ok(view.map(|view| Ok(Reply::FreePageHint { hint: view.hint })))
    }

    /// Waits until the state is as wanted or the time is up; `None` if the client went away.
    fn view_when(
        &self,
        timeout_ms: Option<u64>,
        wanted: impl Fn(&View) -> bool,
    ) -> io::Result<Option<View>> {
        let deadline =
            timeout_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
        let mut view = self.state.view();
        loop {
            let left = deadline.map_or(LOOK, |d| d.saturating_duration_since(Instant::now()));
            if wanted(&view) || left.is_zero() {
                return Ok(Some(view));
            }
            if self.gone()? {
                return Ok(None);
            }
            view = self.state.view_after(view.version, left.min(LOOK));
        }
    }

    /// How much has to be free, in balloon pages.
    fn until(&self, size: Option<&SizeField>) -> Result<Option<u64>, Failure> {
        match size.map(|size| self.pages(size)).transpose()? {
            // For the guest it would be no bound at all.
            Some(0) => {
                let text = "until is less than a page of 4096 bytes, which is always free; leave it out to drop \
                            everything";
                Err(fail(FailureCode::BadValue, text))
            }
            pages => Ok(pages.map(u64::from)),
        }
    }

    fn pages(&self, size: &SizeField) -> Result<u32, Failure> {
        let size = match size {
            SizeField::Bytes(bytes) => Ok(Size::Bytes(*bytes)),
            SizeField::Text(text) => text.parse(),
        };
        size.and_then(|size| size.pages(self.state.memory_bytes()))
            .map_err(|e: SizeError| fail(FailureCode::BadValue, e.to_string()))
    }

    /// Asks the guest something, and answers with what it says.
    fn ask(&self, question: Question, timeout_ms: Option<u64>) -> io::Result<()> {
        self.ask_bound(question, false, timeout_ms)
    }

    /// The same; what is held then is released with the connection, if it is `bound` to it.
    fn ask_bound(
        &self,
        question: Question,
        bound: bool,
        timeout_ms: Option<u64>,
    ) -> io::Result<()> {
        let until = timeout_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
        let mut patience = Patience {
            until,
            unwanted: &mut || self.gone().unwrap_or(true),
        };
        match self.state.ask(question, &mut patience) {
            Ok(answered) => {
                if bound {
                    self.bound.set(Some(answered.answer.id));
                    self.state.bind(answered.answer.id);
                }
                self.answer(Ok(told(question, &answered)))
            }
            Err(AskError::Unwanted) => Err(io::ErrorKind::ConnectionAborted.into()),
            Err(error) => self.answer(Err(fail(code(&error), error.to_string()))),
        }
    }

    /// Writes the guest's memory into a new file, or only looks whether that can be made.
    fn save_memory(&self, path: &str, id: Option<u32>, check: bool) -> Result<Reply, Failure> {
        let path = Path::new(path);
        if !path.is_absolute() {
            let text = "the path of an image has to be an absolute one";
            return Err(fail(FailureCode::BadValue, text));
        }
        let begun = Instant::now();
        let not_made = |e| {
            let text = format!("{} cannot be made: {e}", path.display());
            fail(FailureCode::Failed, text)
        };
        let file = Draft::new(path).map_err(not_made)?;
        let mut written = Written::default();
        if !check {
            let saved = self.state.save_memory(id, file.file());
            written = saved.map_err(|e| fail(FailureCode::Failed, e.to_string()))?;
            // Then nobody can tell whether the guest stood still all the time.
            if self.gone().unwrap_or(true) {
                return Err(fail(FailureCode::Failed, "whoever asked is gone"));
            }
            file.finish().map_err(not_made)?;
        }
        Ok(Reply::SaveMemory {
            written_bytes: written.data,
            skipped_bytes: written.skipped,
            zero_bytes: written.zeros,
            elapsed_ms: begun.elapsed().as_micros() as f64 / 1000.0,
        })
    }

    /// A part of the pages that were named last.
    fn free_page_map(&self, id: u32, from: u64) -> Result<Reply, Failure> {
        let named = self.state.asks.named(id).ok_or_else(|| {
            let text = format!("the free pages of request {id} are not known any more");
            fail(FailureCode::BadValue, text)
        })?;
        let mut ranges = named.set.ranges(from).map(|r| (r.start, r.len()));
        let runs = ranges.by_ref().take(RUNS_MAX).collect();
        let next = ranges.next().map(|(start, _)| start);
        Ok(Reply::FreePageMap { runs, next })
    }

    /// Streams events until the client goes away.
    fn watch(&self) -> io::Result<()> {
        let mut last: Option<View> = None;
        let mut errors = BTreeMap::new();
        loop {
            let version = last.as_ref().map_or(0, |v| v.version);
            let view = self.state.view_after(version, LOOK);
            if self.gone()? {
                return Ok(());
            }
            if last.as_ref().is_none_or(|l| l.frontend != view.frontend) {
                self.tell(EventKind::Frontend(view.frontend.clone()))?;
            }
            if last.as_ref().is_none_or(|l| l.balloon != view.balloon) {
                self.tell(EventKind::Balloon(view.balloon.clone()))?;
            }
            let round = |view: &View| (view.hint.id, view.hint.state);
            if round(&view) != last.as_ref().map_or((0, HintState::Idle), round) {
                self.tell(EventKind::FreePageHint(view.hint.clone()))?;
            }
            let progress = |asked: &AskedStatus| (asked.id, asked.state, asked.answers);
            let now = view.asked.as_ref().map(progress);
            if now != last.as_ref().and_then(|l| l.asked.as_ref()).map(progress) {
                if let Some(asked) = view.asked.clone() {
                    self.tell(EventKind::Asked(asked))?;
                }
            }
            let fresh = last
                .as_ref()
                .is_none_or(|l| l.stats_count != view.stats_count);
            if let Some(stats) = view.stats.clone().filter(|_| fresh) {
                self.tell(EventKind::Stats(stats))?;
            }
            let errors_now = self.state.complaints.by_kind();
            if errors_now != errors {
                errors = errors_now;
                self.tell(EventKind::Errors {
                    errors: errors.clone(),
                })?;
            }
            last = Some(view);
        }
    }

    fn tell(&self, what: EventKind) -> io::Result<()> {
        self.send(&Event {
            v: VERSION,
            at_ms: self.state.uptime_ms(),
            what,
        })
    }

    /// Has the guest send statistics, if there is one that does.
    fn refresh_stats(&self) {
        let Some(session) = self.state.session() else {
            return;
        };
        let deadline = Instant::now() + STATS_TIMEOUT;
        let mut view = self.state.view();
        let before = view.stats_count;
        if !view.frontend.queues.iter().any(|q| q == "stats") {
            return;
        }
        session.poll_stats();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if view.stats_count != before || left.is_zero() {
                return;
            }
            view = self.state.view_after(view.version, left);
        }
    }

    fn fault(&self, set: &[String]) -> Result<Reply, Failure> {
        if set.len() > FAULTS_MAX {
            let text = format!(
                "these are {} faults, at most {FAULTS_MAX} are allowed",
                set.len()
            );
            return Err(fail(FailureCode::BadValue, text));
        }
        let faults = set
            .iter()
            .map(|text| text.parse::<Fault>())
            .collect::<Result<_, _>>()
            .map_err(|e| fail(FailureCode::BadValue, e.to_string()))?;
        if !self.state.faults.replace(faults) {
            let text = "faults are only played by a daemon that was started with --fault";
            return Err(fail(FailureCode::NotAllowed, text));
        }
        for bytes in self.state.faults.requests() {
            self.state.asks.push_raw(bytes);
        }
        if let Some(session) = self.state.session() {
            session.look();
        }
        Ok(Reply::Fault {
            set: self.state.faults.list(),
        })
    }

    /// Whether the client closed the connection. What it may have sent is left unread.
    fn gone(&self) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = rustix::event::Timespec::default();
        match poll(&mut fds, Some(&now)) {
            Ok(_) => Ok(fds.iter().any(|fd| {
                let over = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
                fd.revents().intersects(over)
            })),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}

fn free_pages(
    balloon: bool,
    hold: bool,
    hold_ms: Option<u64>,
    bound: bool,
) -> Result<Question, Failure> {
    if hold && balloon {
        let text = "pages of the balloon cannot be held; ask for one or the other";
        return Err(fail(FailureCode::BadValue, text));
    }
    if !hold && hold_ms.is_some() {
        let text = "hold_ms has a meaning only with hold";
        return Err(fail(FailureCode::BadValue, text));
    }
    if !hold && bound {
        let text = "bound has a meaning only with hold";
        return Err(fail(FailureCode::BadValue, text));
    }
    Ok(match hold {
        true => Question::HoldFreePages {
            time: Duration::from_millis(hold_ms.unwrap_or(0)),
        },
        false => Question::FreePages { balloon },
    })
}

/// A good answer, as it is told.
fn told(question: Question, answered: &Answered) -> Reply {
    let answer = &answered.answer;
    let bytes = |pages: u64| pages.saturating_mul(balloon_control::BALLOON_PAGE_BYTES);
    let took = Took {
        guest_ms: f64::from(answer.microseconds) / 1000.0,
        elapsed_ms: answered.took.as_micros() as f64 / 1000.0,
    };
    match question {
        Question::DropCaches { .. } => Reply::DropCaches {
            freed_bytes: bytes(answer.value),
            spare_bytes: bytes(answer.detail),
            took,
        },
        Question::Compact => Reply::Compact {
            gained_bytes: bytes(answer.value),
            block_bytes: bytes(answer.detail),
            took,
        },
        Question::FreePages { .. } | Question::HoldFreePages { .. } => {
            let set = answered.named.as_ref().map(|named| &named.set);
            Reply::FreePages {
                id: answer.id,
                bytes: bytes(set.map_or(0, PageSet::pages)),
                runs: set.map_or(0, |set| set.ranges(0).count() as u64),
                answers: answer.detail,
                wire_bytes: answered.wire_bytes,
                held: matches!(question, Question::HoldFreePages { .. }),
                took,
            }
        }
        Question::Release => Reply::Release {
            bytes: bytes(answer.value),
            took,
        },
    }
}

/// What an error is for programs.
const fn code(error: &AskError) -> FailureCode {
    match error {
        AskError::NotSupported(_) => FailureCode::NotSupported,
        AskError::Guest(answer) => match answer.status {
            Status::Unsupported => FailureCode::NotSupported,
            Status::Refused => FailureCode::Refused,
            _ => FailureCode::Failed,
        },
        AskError::TimeOut { .. } => FailureCode::TimeOut,
        AskError::Nonsense | AskError::Gone | AskError::Unwanted => FailureCode::Failed,
    }
}

/// Reads a request and says what was wrong if it is none.
fn parse(line: &[u8]) -> Result<Request, Failure> {
    let bad = |text: String| fail(FailureCode::BadRequest, text);
    let mut value: serde_json::Value =
        serde_json::from_slice(line).map_err(|e| bad(format!("the line is not JSON: {e}")))?;
    let object = value
        .as_object_mut()
        .ok_or_else(|| bad("a request is a JSON object".to_owned()))?;
    match object.remove("v") {
        None => {}
        Some(v) if v.as_u64() == Some(VERSION.into()) => {}
        Some(v) => {
            let text = format!("version {v} is not spoken here; allowed is {VERSION}");
            return Err(fail(FailureCode::BadVersion, text));
        }
    }
    serde_json::from_value(value).map_err(|e| {
        bad(format!(
            "the request is not understood: {e}; allowed are target (size, force), wait \
             (timeout_ms), status (stats), watch, free-page-hint (action, wait, timeout_ms), \
             drop-caches (page_cache, slab, until, timeout_ms), compact (timeout_ms), free-pages \
             (balloon, hold, hold_ms, bound, timeout_ms), free-page-map (id, from), release \
             (timeout_ms), save-memory (path, id, check) and fault (set)"
        ))
    })
}

#[cfg(test)]
mod tests {
    use balloon_control::message::GuestStats;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_are_read() {
        assert_eq!(
            parse(br#"{"v":1,"cmd":"target","size":"1G"}"#).ok(),
            Some(Request::Target {
                size: SizeField::Text("1G".to_owned()),
                force: false
            })
        );
        assert_eq!(
            parse(br#"{"cmd":"target","size":4096,"force":true}"#).ok(),
            Some(Request::Target {
                size: SizeField::Bytes(4096),
                force: true
            })
        );
        assert_eq!(
            parse(br#"{"cmd":"wait"}"#).ok(),
            Some(Request::Wait { timeout_ms: None })
        );
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (line, part) in [
            ("nonsense", "not JSON"),
            ("[]", "a JSON object"),
            (r#"{"v":2,"cmd":"status"}"#, "version 2 is not spoken"),
            (r#"{"v":"1","cmd":"status"}"#, "version \"1\" is not"),
            (r#"{}"#, "missing field `cmd`"),
            (r#"{"cmd":"inflate"}"#, "unknown variant `inflate`"),
            (r#"{"cmd":"target"}"#, "missing field `size`"),
            (r#"{"cmd":"target","size":-1}"#, "size is neither"),
            (r#"{"cmd":"target","size":1.5}"#, "size is neither"),
            (
                r#"{"cmd":"target","size":1,"fast":1}"#,
                "unknown field `fast`",
            ),
            (r#"{"cmd":"watch","fast":1}"#, "unknown field `fast`"),
            (r#"{"cmd":"wait","timeout_ms":"1"}"#, "invalid type"),
        ] {
            let failure = parse(line.as_bytes()).expect_err(line);
            assert!(failure.message.contains(part), "{line}: {failure:?}");
            assert!(failure.message.contains("allowed") || part.contains("JSON"));
        }
    }

    /// Everything that can be in a status, as large as it can be, fits into a line.
    #[test]
    fn the_longest_status_is_a_line() {
        use balloon_control::message::{MemoryStatus, RegionStatus, Status};
        let region = RegionStatus {
            guest_addr: u64::MAX,
            bytes: u64::MAX,
            backing: "private".to_owned(),
            host_page_bytes: u64::MAX,
            file_offset: Some(u64::MAX),
        };
        let mut status = Status {
            memory: MemoryStatus {
                bytes: u64::MAX,
                regions: vec![region; crate::ram::REGIONS_SHOWN],
                regions_left_out: usize::MAX,
            },
            ..Status::default()
        };
        let fault = format!("config=100:{}", "ff".repeat(crate::config::READ_MAX));
        status.daemon.faults = vec![fault; FAULTS_MAX];
        let mut stats = GuestStats::default();
        for tag in 0..crate::stats::BYTES_MAX / 10 {
            stats.values.insert(format!("tag-{tag:05}"), u64::MAX);
        }
        status.guest_stats = Some(stats);
        for kind in crate::refusal::Kind::ALL {
            status.errors.insert(kind.name().to_owned(), u64::MAX);
        }
        let line = serde_json::to_string(&Reply::Status(Box::new(status))).expect("JSON");
        // Counters and names are in the rest.
        assert!(line.len() < LINE_MAX - 8000, "{}", line.len());
    }

    proptest! {
        #[test]
        fn no_line_panics(line in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse(&line);
        }
    }
}
