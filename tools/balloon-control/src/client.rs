// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A blocking client.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::message::{
    Event, Failure, HintAction, HintStatus, Movement, Reply, Request, Response, SizeField, Status,
};
use crate::{LINE_MAX, VERSION};

/// Why a request got no answer, or not the one hoped for.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens on the socket.
    #[error("no daemon listens on {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There may be a daemon, but it cannot be reached.
    #[error("{} cannot be connected to: {source}{}", path.display(), hint(source))]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the daemon went away")]
    Gone,
    /// Reading or writing failed.
    #[error("the daemon cannot be talked to: {0}")]
    Io(#[from] io::Error),
    /// The answer is not one of this protocol.
    #[error("the daemon's answer is not understood: {0}")]
    Answer(String),
    /// The daemon speaks another version.
    #[error(
        "the daemon speaks version {0} of the control protocol, this program version {VERSION}"
    )]
    Version(u32),
    /// The daemon did not do what was asked.
    #[error("{}", .0.message)]
    Refused(Failure),
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; only the user that the daemon runs as may",
        _ => "",
    }
}

/// Whether the target was reached, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Waited {
    /// Whether the balloon has its target size.
    pub reached: bool,
    /// The size of the balloon, in bytes.
    pub actual_bytes: u64,
    /// The movement waited for.
    pub movement: Movement,
}

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the daemon's control socket.
    ///
    /// # Errors
    ///
    /// If nobody listens there, or whoever does cannot be reached.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ClientError> {
        let failed = |source: io::Error| {
            let path = path.as_ref().to_owned();
            match source.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    ClientError::Connect { path, source }
                }
                _ => ClientError::Unreachable { path, source },
            }
        };
        let writer = UnixStream::connect(&path).map_err(failed)?;
        let reader = BufReader::new(writer.try_clone().map_err(failed)?);
        Ok(Self { writer, reader })
    }

    /// Bounds how long an answer or event may take; without a bound, and at first, for ever.
    ///
    /// A wait takes as long as it takes: give it a shorter timeout of its own.
    ///
    /// # Errors
    ///
    /// If the time is 0.
    pub fn set_answer_timeout(&self, timeout: Option<Duration>) -> Result<(), ClientError> {
        Ok(self.writer.set_read_timeout(timeout)?)
    }

    /// Sends a request and waits for the answer.
    ///
    /// # Errors
    ///
    /// [`ClientError::Refused`] if the daemon did not do it, else trouble with the connection.
    pub fn ask(&mut self, request: &Request) -> Result<Reply, ClientError> {
        self.send(request)?;
        let line = self.line()?.ok_or(ClientError::Gone)?;
        let response: Response =
            serde_json::from_str(&line).map_err(|e| ClientError::Answer(e.to_string()))?;
        match response {
            Response { v, .. } if v != VERSION => Err(ClientError::Version(v)),
            Response {
                result: Some(reply),
                ok: true,
                ..
            } => Ok(reply),
            Response {
                error: Some(failure),
                ..
            } => Err(ClientError::Refused(failure)),
            _ => Err(ClientError::Answer("neither result nor error".to_owned())),
        }
    }

    /// Sets the target: what the balloon is to take from the guest.
    ///
    /// # Errors
    ///
    /// As [`Client::ask`].
    pub fn target(&mut self, size: SizeField, force: bool) -> Result<Movement, ClientError> {
        match self.ask(&Request::Target { size, force })? {
            Reply::Target { movement, .. } => Ok(movement),
            other => Err(unexpected(&other)),
        }
    }

    /// Sets the target in bytes.
    ///
    /// # Errors
    ///
    /// As [`Client::ask`].
    pub fn target_bytes(&mut self, bytes: u64) -> Result<Movement, ClientError> {
        self.target(SizeField::Bytes(bytes), false)
    }

    /// Everything the daemon knows; with `stats`, after asking the guest for its statistics.
    ///
    /// # Errors
    ///
    /// As [`Client::ask`].
    pub fn status(&mut self, stats: bool) -> Result<Status, ClientError> {
        match self.ask(&Request::Status { stats })? {
            Reply::Status(status) => Ok(*status),
            other => Err(unexpected(&other)),
        }
    }

    /// Waits until the balloon has its target size or the time is up.
    ///
    /// # Errors
    ///
    /// As [`Client::ask`]; that the time was up is no error.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Waited, ClientError> {
        let timeout_ms = timeout.map(millis);
        match self.ask(&Request::Wait { timeout_ms })? {
            Reply::Wait {
                reached,
                actual_bytes,
                movement,
            } => Ok(Waited {
                reached,
                actual_bytes,
                movement,
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins or ends a round of free page hinting.
    ///
    /// # Errors
    ///
    /// As [`Client::ask`].
    pub fn free_page_hint(&mut self, action: HintAction) -> Result<HintStatus, ClientError> {
        self.hint(action, false, None)
    }

    /// Begins a round of free page hinting, and waits until the guest has told all its free memory or
    /// the time is up.
    ///
    /// # Errors
    ///
    /// As [`Client::ask`]; that the time was up is no error, but to be seen in the state.
    pub fn free_page_hint_round(
        &mut self,
        timeout: Option<Duration>,
    ) -> Result<HintStatus, ClientError> {
        self.hint(HintAction::Start, true, timeout)
    }

    fn hint(
        &mut self,
        action: HintAction,
        wait: bool,
        timeout: Option<Duration>,
    ) -> Result<HintStatus, ClientError> {
        let request = Request::FreePageHint {
            action,
            wait,
            timeout_ms: timeout.map(millis),
        };
        match self.ask(&request)? {
            Reply::FreePageHint { hint } => Ok(hint),
            other => Err(unexpected(&other)),
        }
    }

    /// Has the guest drop its caches: [`Request::DropCaches`], answered by [`Reply::DropCaches`].
    ///
    /// # Errors
    ///
    /// As [`Client::ask`]; the guest may refuse, or not be able to.
    pub fn drop_caches(
        &mut self,
        (page_cache, slab): (bool, bool),
        until: Option<SizeField>,
        timeout: Option<Duration>,
    ) -> Result<Reply, ClientError> {
        self.ask(&Request::DropCaches {
            page_cache,
            slab,
            until,
            timeout_ms: timeout.map(millis),
        })
    }

    /// All runs of the free pages that request `id` named: address and bytes, ascending.
    ///
    /// # Errors
    ///
    /// As [`Client::ask`]; they are forgotten when others are named.
    pub fn free_page_runs(&mut self, id: u32) -> Result<Vec<(u64, u64)>, ClientError> {
        let mut all = Vec::new();
        let mut from = Some(0);
        while let Some(at) = from {
            match self.ask(&Request::FreePageMap { id, from: at })? {
                // What does not go on would go on for ever.
                Reply::FreePageMap { runs, next } if next.is_none_or(|next| next > at) => {
                    all.extend(runs);
                    from = next;
                }
                other => return Err(unexpected(&other)),
            }
        }
        Ok(all)
    }

    /// Sets the faults of a daemon that was started with `--fault`.
    ///
    /// # Errors
    ///
    /// As [`Client::ask`].
    pub fn fault(&mut self, set: &[&str]) -> Result<(), ClientError> {
        let set = set.iter().map(|s| (*s).to_owned()).collect();
        self.ask(&Request::Fault { set }).map(drop)
    }

    /// Turns the connection into a stream of events.
    ///
    /// # Errors
    ///
    /// If the request cannot be sent.
    pub fn watch(mut self) -> Result<Events, ClientError> {
        self.send(&Request::Watch {})?;
        Ok(Events { client: self })
    }

    fn send(&mut self, request: &Request) -> Result<(), ClientError> {
        let mut line =
            serde_json::to_string(request).map_err(|e| ClientError::Answer(e.to_string()))?;
        line.push('\n');
        match self.writer.write_all(line.as_bytes()) {
            // A daemon that refuses the connection says why before it closes it.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => Ok(other?),
        }
    }

    /// A line without its end, or `None` at the end of the stream.
    fn line(&mut self) -> Result<Option<String>, ClientError> {
        let mut line = String::new();
        let read = (&mut self.reader)
            .take(LINE_MAX as u64 + 1)
            .read_line(&mut line);
        match read {
            Ok(0) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(e) => Err(e.into()),
            Ok(_) if line.ends_with('\n') => Ok(Some(line)),
            Ok(n) if n > LINE_MAX => Err(ClientError::Answer("the line is too long".to_owned())),
            Ok(_) => Ok(None),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn unexpected(reply: &Reply) -> ClientError {
    ClientError::Answer(format!("an answer to another request: {reply:?}"))
}

/// A stream of events; ends when the daemon goes away.
#[derive(Debug)]
pub struct Events {
    client: Client,
}

impl Iterator for Events {
    type Item = Result<Event, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = match self.client.line() {
            Ok(line) => line?,
            Err(e) => return Some(Err(e)),
        };
        let event =
            serde_json::from_str::<Event>(&line).map_err(|error| {
                match serde_json::from_str::<Response>(&line) {
                    Ok(Response {
                        error: Some(failure),
                        ..
                    }) => ClientError::Refused(failure),
                    _ => ClientError::Answer(error.to_string()),
                }
            });
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_connect_is_told_so() {
        let text = |kind: io::ErrorKind| {
            let error = ClientError::Unreachable {
                path: "/run/control".into(),
                source: kind.into(),
            };
            error.to_string()
        };
        let denied = text(io::ErrorKind::PermissionDenied);
        assert_eq!(
            denied,
            "/run/control cannot be connected to: permission denied; only the user that the daemon \
             runs as may"
        );
        assert!(!text(io::ErrorKind::NotADirectory).contains("only the user"));
    }
}
