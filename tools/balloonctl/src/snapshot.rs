// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Memory of a guest in a file, without what is free.
//!
//! The guest holds its free pages, then it is stopped, then its memory is written, then it goes on and
//! releases them. The daemon makes sure that they were held when it stood still.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use balloon_control::Client;
use balloon_control::client::ClientError;
use balloon_control::message::{Reply, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};
use serde::Serialize;
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::qmp::Qmp;
use crate::{Trouble, millis};

/// How long the guest is to hold its free pages at most; it is given up if that is not enough.
const HOLD: Duration = Duration::from_secs(600);
/// How long a guest that still stands still may take to release them.
const STANDING: Duration = Duration::from_secs(1);
/// How often it is looked whether a command that stops the guest is to be ended.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
const INTERRUPTED: &str = "interrupted by a signal";

/// How the guest is stopped.
pub(crate) enum Machine<'a> {
    /// By QEMU.
    Qmp(Qmp),
    /// By shell commands.
    Commands {
        /// Stops it.
        stop: &'a str,
        /// Lets it go on.
        go_on: &'a str,
    },
    /// It is, by whoever runs this.
    Stopped,
}

/// What was taken.
#[derive(Debug, Serialize)]
pub(crate) struct Taken {
    pub(crate) written_bytes: u64,
    pub(crate) skipped_bytes: u64,
    pub(crate) zero_bytes: u64,
    pub(crate) stopped_ms: f64,
}

/// Keeps others from stopping the same guest and letting it go on, as long as what is returned is there.
///
/// # Errors
///
/// If somebody else does so already.
pub(crate) fn alone(control: &Path) -> Result<UnixListener, Trouble> {
    let socket = std::fs::metadata(control)?;
    // A name that goes with whoever has it, also if that is killed.
    let name = format!("balloonctl-snapshot-{}-{}", socket.dev(), socket.ino());
    let address = SocketAddr::from_abstract_name(name)?;
    UnixListener::bind_addr(&address).map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => {
            Trouble::Machine("another snapshot of this guest is being taken".to_owned())
        }
        _ => e.into(),
    })
}

/// Takes a snapshot. With `free`, of what is not free; the guest may take so long to say what that is.
pub(crate) fn take(
    client: &mut Client,
    file: &Path,
    mut machine: Machine<'_>,
    free: Option<Duration>,
) -> Result<Taken, Trouble> {
    let path = std::path::absolute(file)?;
    let path = path
        .to_str()
        .ok_or_else(|| Trouble::Machine(format!("{} is not UTF-8", file.display())))?;
    // A file that cannot be made is no reason to stop a guest.
    client.ask(&Request::SaveMemory {
        path: path.to_owned(),
        id: None,
        check: true,
    })?;
    let id = match free {
        None => None,
        Some(_) if matches!(machine, Machine::Stopped) => {
            let text = "a guest that stands still cannot say what is free: let it run, and say how to \
                        stop it (--qmp, or --stop and --go-on); or write everything (--full)";
            return Err(Trouble::Machine(text.to_owned()));
        }
        Some(timeout) => Some(hold(client, timeout)?),
    };
    let saved = save(client, path, &mut machine, id);
    if saved.is_err() && id.is_some() {
        // Nothing was done, and the guest runs.
        let timeout_ms = free.map(millis);
        client.ask(&Request::Release { timeout_ms })?;
    }
    let Saved { image, taken, runs } = saved?;
    // Whatever came of it, the guest is to have its memory back; but it can say nothing while it stands still.
    let released = match id {
        None => Ok(()),
        Some(_) => {
            let timeout = if runs.is_ok() { free } else { Some(STANDING) };
            let timeout_ms = timeout.map(millis);
            client.ask(&Request::Release { timeout_ms }).map(drop)
        }
    };
    if let Err(why) = runs {
        let image = match image {
            true => "the image is complete",
            false => "there is no image",
        };
        return Err(Trouble::Machine(format!("{why}; {image}")));
    }
    let taken = taken?;
    released?;
    Ok(taken)
}

fn hold(client: &mut Client, timeout: Duration) -> Result<u32, ClientError> {
    let request = Request::FreePages {
        balloon: false,
        hold: true,
        hold_ms: Some(millis(HOLD)),
        // Should this program be killed, the guest has its memory back.
        bound: true,
        timeout_ms: Some(millis(timeout)),
    };
    match client.ask(&request)? {
        Reply::FreePages { id, .. } => Ok(id),
        other => Err(ClientError::Answer(format!("{other:?}"))),
    }
}

/// What came of a snapshot.
struct Saved {
    /// Whether the image is there, whatever else came of it.
    image: bool,
    taken: Result<Taken, Trouble>,
    /// Whether the guest runs again; if not, why.
    runs: Result<(), String>,
}

/// Stops the guest, has its memory written and lets it go on. From the first to the last nobody may end this but
/// with SIGKILL, since the guest would stand still for ever; what a signal asked for is done afterwards. Only a
/// command that stops the guest is ended with it, which may take for ever, too.
///
/// # Errors
///
/// If nothing was done at all.
fn save(
    client: &mut Client,
    path: &str,
    machine: &mut Machine<'_>,
    id: Option<u32>,
) -> Result<Saved, Trouble> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
    }
    let interrupted = || interrupted.load(Ordering::Relaxed);
    let begun = Instant::now();
    // One that stands still already is left so.
    let machine = match machine.runs().map_err(Trouble::Machine)? {
        true => machine,
        false => &mut Machine::Stopped,
    };
    let stopped = machine.set(false, interrupted).map_err(Trouble::Machine);
    let stands = stopped.is_ok();
    let reply = stopped.and_then(|()| {
        if interrupted() {
            return Err(Trouble::Machine(INTERRUPTED.to_owned()));
        }
        let path = path.to_owned();
        Ok(client.ask(&Request::SaveMemory {
            path,
            id,
            check: false,
        })?)
    });
    // Also if it could not be stopped: perhaps it was, and only that is not known.
    let runs = machine
        .set(true, || false)
        .map_err(|why| match (stands, &reply) {
            (false, Err(Trouble::Machine(before))) => {
                format!("THE GUEST MAY STAND STILL, look after it: {before}; {why}")
            }
            _ => format!("THE GUEST STANDS STILL, let it go on: {why}"),
        });
    let stopped_ms = begun.elapsed().as_micros() as f64 / 1000.0;
    let taken = reply.and_then(|reply| match reply {
        Reply::SaveMemory {
            written_bytes,
            skipped_bytes,
            zero_bytes,
            ..
        } => Ok(Taken {
            written_bytes,
            skipped_bytes,
            zero_bytes,
            stopped_ms,
        }),
        other => Err(ClientError::Answer(format!("{other:?}")).into()),
    });
    Ok(Saved {
        image: taken.is_ok(),
        taken: taken.and_then(|taken| match interrupted() {
            true => Err(Trouble::Machine(format!(
                "{INTERRUPTED}; the image is complete"
            ))),
            false => Ok(taken),
        }),
        runs,
    })
}

impl Machine<'_> {
    /// Whether the guest runs, as far as that can be known.
    fn runs(&mut self) -> Result<bool, String> {
        match self {
            Self::Qmp(qmp) => {
                let status = qmp.run("query-status").map_err(about_qemu)?;
                Ok(status.get("running") != Some(&Value::Bool(false)))
            }
            Self::Stopped | Self::Commands { .. } => Ok(true),
        }
    }

    /// Lets the guest run, or stops it; a command for that is ended as soon as `give_up` says so.
    fn set(&mut self, run: bool, give_up: impl Fn() -> bool) -> Result<(), String> {
        match self {
            Self::Stopped => Ok(()),
            Self::Qmp(qmp) => {
                let said = qmp.run(if run { "cont" } else { "stop" });
                said.map(drop).map_err(about_qemu)
            }
            Self::Commands { stop, go_on } => shell(if run { go_on } else { stop }, give_up),
        }
    }
}

fn about_qemu(error: String) -> String {
    format!("QEMU: {error}")
}

fn shell(command: &str, give_up: impl Fn() -> bool) -> Result<(), String> {
    let cannot = |error| format!("'{command}' cannot be run: {error}");
    // In a group of its own, so that whoever types Ctrl-C does not end it halfway.
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).process_group(0);
    let mut shell = shell.spawn().map_err(cannot)?;
    let group = Pid::from_child(&shell);
    let ended = pidfd_open(group, PidfdFlags::empty());
    // A signal ends this wait, too. Without the file it is a plain wait, below.
    let runs = || match &ended {
        Ok(ended) => !matches!(
            poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&LOOK)),
            Ok(1..)
        ),
        Err(_) => false,
    };
    while runs() {
        if give_up() {
            // Whatever it has become, it is not waited for any longer.
            let _gone = (
                kill_process_group(group, Signal::KILL),
                kill_process(group, Signal::KILL),
            );
            return Err(format!("'{command}' did not end: {INTERRUPTED}"));
        }
    }
    match shell.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("'{command}' failed: {status}")),
        Err(error) => Err(cannot(error)),
    }
}
