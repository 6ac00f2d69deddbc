// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the runner and the guest's agent say to each other: one JSON object a line.
//!
//! The channel is a serial line of its own, so no kernel message can fall between two bytes of it.
//! The runner speaks only after it has read [`Reply::Hello`]. Requests carry an id; several may
//! be under way, and replies come in any order.

use serde::{Deserialize, Serialize};

/// Changes whenever a runner could no longer talk to an older agent.
pub const VERSION: u32 = 1;

/// The most output of one command that is kept, in bytes; the rest is counted, not sent.
pub const OUTPUT_MAX: usize = 4 << 20;

/// From the runner to the guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Request {
    /// Run a command line with `/bin/sh -c`, and answer with [`Reply::Done`] when it has ended.
    Run {
        /// Comes back in the answer.
        id: u64,
        /// The command line.
        command: String,
        /// After this time the command and its children are killed.
        timeout_ms: u64,
    },
    /// Kill the command with this id, and its children. [`Reply::Done`] follows for the command.
    Kill {
        /// The id of the [`Request::Run`].
        id: u64,
    },
    /// Turn the line into a terminal with a login shell. The agent ends with the shell.
    Shell {
        /// Height of the terminal.
        rows: u16,
        /// Width of the terminal.
        columns: u16,
    },
    /// End the agent; init then powers the machine off.
    Quit,
}

/// From the guest to the runner.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Reply {
    /// The agent is ready.
    Hello {
        /// [`VERSION`] of the agent.
        version: u32,
    },
    /// A command has ended.
    Done {
        /// The id of the request.
        id: u64,
        /// How it ended.
        outcome: Outcome,
    },
}

/// How a command in the guest ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// How the command's process ended.
    pub end: End,
    /// Standard output and standard error, as they came; bytes that are no UTF-8 are replaced.
    pub output: String,
    /// Bytes of output beyond [`OUTPUT_MAX`].
    pub lost: u64,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// It exited with this status.
    Status(i32),
    /// A signal ended it.
    Signal(i32),
    /// It took longer than was allowed, and was killed.
    TimedOut,
    /// It could not be started at all.
    NotStarted(String),
}

impl Outcome {
    /// Whether the command exited with status 0.
    pub fn ok(&self) -> bool {
        self.end == End::Status(0)
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => write!(f, "exit status {status}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::TimedOut => write!(f, "no end in time"),
            Self::NotStarted(why) => write!(f, "not started: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line() {
        let request = Request::Run {
            id: 7,
            command: "echo 'a\nb'\u{7f}".into(),
            timeout_ms: 10,
        };
        let line = serde_json::to_string(&request).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(
            line,
            "{\"do\":\"run\",\"id\":7,\"command\":\"echo 'a\\nb'\u{7f}\",\"timeout_ms\":10}"
        );
    }

    #[test]
    fn ends_read_back() {
        for end in [
            End::Status(3),
            End::Signal(9),
            End::TimedOut,
            End::NotStarted("x".into()),
        ] {
            let text = serde_json::to_string(&end).unwrap();
            assert_eq!(serde_json::from_str::<End>(&text).unwrap(), end);
        }
    }
}
