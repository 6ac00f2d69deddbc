// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The agent: reads [`Request`]s from a serial line, runs them, writes [`Reply`]s.
//!
//! Each command runs in a thread and a process group of its own, so that one that hangs hurts nobody
//! else and can be killed with all its children.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::termios::{OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize};

use crate::wire::{End, OUTPUT_MAX, Outcome, Reply, Request, VERSION};

/// How long output is still awaited from children that outlive their command. Long enough for a guest
/// that is not scheduled for a while: what its pipe still holds must not get lost.
const STRAGGLERS: Duration = Duration::from_secs(3);

/// What the threads of the agent share.
struct Agent {
    line: Mutex<File>,
    /// Process groups of the commands that run.
    running: Mutex<HashMap<u64, Pid>>,
}

/// Serves the serial line at `path` until [`Request::Quit`] or its end.
///
/// # Errors
///
/// If the line cannot be opened, set up, read or written.
pub fn serve(path: &str) -> Result<()> {
    // The runner must be able to reach a guest that has no memory left.
    if let Err(e) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        eprintln!("vbrs-guest: oom_score_adj: {e}");
    }
    let line = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| format!("open {path}"))?;
    let cooked = tcgetattr(&line).context("read the line's settings")?;
    let mut raw = cooked.clone();
    raw.make_raw();
    let set = |to| tcsetattr(&line, OptionalActions::Drain, to).context("set up the line");
    set(&raw)?;

    let agent = Arc::new(Agent {
        line: Mutex::new(line.try_clone()?),
        running: Mutex::default(),
    });
    agent.say(&Reply::Hello { version: VERSION })?;
    let mut reader = BufReader::new(line.try_clone()?);
    let mut text = Vec::new();
    loop {
        text.clear();
        if reader
            .read_until(b'\n', &mut text)
            .context("read the line")?
            == 0
        {
            return Ok(());
        }
        match serde_json::from_slice(&text) {
            Ok(Request::Run {
                id,
                command,
                timeout_ms,
            }) => agent.clone().run(id, command, timeout_ms)?,
            Ok(Request::Kill { id }) => {
                if let Some(group) = lock(&agent.running).get(&id) {
                    let _gone = kill_process_group(*group, Signal::KILL);
                }
            }
            Ok(Request::Shell { rows, columns }) => {
                set(&cooked)?;
                let size = Winsize {
                    ws_row: rows,
                    ws_col: columns,
                    ws_xpixel: 0,
                    ws_ypixel: 0,
                };
                if let Err(e) = tcsetwinsize(&line, size) {
                    eprintln!("vbrs-guest: size of the terminal: {e}");
                }
                let shell = Command::new("/bin/setsid")
                    .args(["-c", "/bin/sh", "-l"])
                    .stdin(line.try_clone()?)
                    .stdout(line.try_clone()?)
                    .stderr(line.try_clone()?)
                    .status();
                shell.context("run a shell")?;
                return Ok(());
            }
            Ok(Request::Quit) => return Ok(()),
            // Never silent: the runner sees it in the kernel's console.
            Err(e) => eprintln!("vbrs-guest: bad request: {e}"),
        }
    }
}

impl Agent {
    fn say(&self, reply: &Reply) -> Result<()> {
        let mut text = serde_json::to_string(reply)?;
        text.push('\n');
        lock(&self.line)
            .write_all(text.as_bytes())
            .context("write the line")
    }

    /// Starts `command` and answers later, from a thread.
    fn run(self: Arc<Self>, id: u64, command: String, timeout_ms: u64) -> Result<()> {
        let agent = Arc::clone(&self);
        let started = thread::Builder::new().spawn(move || {
            let outcome = agent.run_now(id, &command, Duration::from_millis(timeout_ms));
            if let Err(e) = agent.say(&Reply::Done { id, outcome }) {
                eprintln!("vbrs-guest: {e:#}");
            }
        });
        if let Err(e) = started {
            self.say(&Reply::Done {
                id,
                outcome: not_started(&e),
            })?;
        }
        Ok(())
    }

    fn run_now(&self, id: u64, command: &str, timeout: Duration) -> Outcome {
        let child = Command::new("/bin/sh")
            // One pipe for both streams, so that their lines keep their order.
            .args(["-c", &format!("exec 2>&1\n{command}")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(e) => return not_started(&e),
        };
        let output = child.stdout.take();
        let group = Pid::from_child(&child);
        lock(&self.running).insert(id, group);
        let outcome = supervise(child, group, output, timeout);
        lock(&self.running).remove(&id);
        outcome
    }
}

/// Waits for `child` until `timeout`, and collects what it writes to `output`.
fn supervise(
    mut child: Child,
    group: Pid,
    output: Option<ChildStdout>,
    timeout: Duration,
) -> Outcome {
    let (chunks_in, chunks) = mpsc::channel();
    let (status_in, status) = mpsc::channel();
    let threads = thread::Builder::new()
        .spawn(move || {
            let Some(mut output) = output else { return };
            let mut chunk = [0; 16 << 10];
            while let Ok(n @ 1..) = output.read(&mut chunk) {
                if chunks_in.send(chunk[..n].to_vec()).is_err() {
                    break;
                }
            }
        })
        .and_then(|_| {
            thread::Builder::new().spawn(move || {
                let _receiver_gone = status_in.send(child.wait());
            })
        });
    if let Err(e) = threads {
        let _gone = kill_process_group(group, Signal::KILL);
        return not_started(&e);
    }

    let end = match status.recv_timeout(timeout) {
        Ok(Ok(status)) => match (status.code(), status.signal()) {
            (Some(code), _) => End::Status(code),
            (None, Some(signal)) => End::Signal(signal),
            (None, None) => End::NotStarted(format!("{status}")),
        },
        Ok(Err(e)) => End::NotStarted(e.to_string()),
        Err(_) => {
            let _gone = kill_process_group(group, Signal::KILL);
            End::TimedOut
        }
    };
    let mut kept = Vec::new();
    let mut lost = 0;
    // Until the last holder of the pipe is gone, or nothing has come for a while.
    while let Ok(chunk) = chunks.recv_timeout(STRAGGLERS) {
        let fits = chunk.len().min(OUTPUT_MAX - kept.len());
        kept.extend_from_slice(&chunk[..fits]);
        lost += (chunk.len() - fits) as u64;
    }
    Outcome {
        end,
        output: String::from_utf8_lossy(&kept).into_owned(),
        lost,
    }
}

fn not_started(why: &std::io::Error) -> Outcome {
    Outcome {
        end: End::NotStarted(why.to_string()),
        output: String::new(),
        lost: 0,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(command: &str, timeout: Duration) -> Outcome {
        let agent = Agent {
            line: Mutex::new(File::create("/dev/null").unwrap()),
            running: Mutex::default(),
        };
        agent.run_now(1, command, timeout)
    }

    #[test]
    fn status_and_both_streams_come_back() {
        let outcome = run("echo out; echo err >&2; exit 3", Duration::from_secs(10));
        assert_eq!(outcome.end, End::Status(3));
        assert_eq!(outcome.output, "out\nerr\n");
        assert_eq!(outcome.lost, 0);
    }

    #[test]
    fn a_command_that_hangs_is_killed_with_its_children() {
        let outcome = run(
            "echo begun; sleep 100 & sleep 100",
            Duration::from_millis(300),
        );
        assert_eq!(outcome.end, End::TimedOut);
        assert_eq!(outcome.output, "begun\n");
    }

    #[test]
    fn a_child_that_lives_on_does_not_hold_the_answer() {
        let begun = std::time::Instant::now();
        let outcome = run("sleep 5 & echo done", Duration::from_secs(10));
        assert_eq!(outcome.end, End::Status(0));
        assert_eq!(outcome.output, "done\n");
        assert!(begun.elapsed() < Duration::from_secs(4));
    }

    #[test]
    fn signals_are_told_apart_from_statuses() {
        let outcome = run("kill -TERM $$", Duration::from_secs(10));
        assert_eq!(outcome.end, End::Signal(15));
    }
}
