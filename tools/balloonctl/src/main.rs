// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Steers and watches a `vhost-device-balloon` over its control socket.

#![forbid(unsafe_code)]

mod args;
mod ask;
mod map;
mod progress;
mod qmp;
mod restore;
mod show;
mod sink;
mod snapshot;
mod timeout;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use balloon_control::client::{ClientError, Waited};
use balloon_control::message::{
    Failure, FailureCode, HintAction, HintState, Reply, Request, SizeField,
};
use balloon_control::{Client, Size};
use serde_json::json;

use crate::args::{Args, Command, Hint};
use crate::progress::Progress;
use crate::qmp::Qmp;
use crate::sink::Sink;
use crate::snapshot::Machine;

/// What scripts can tell from the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Done = 0,
    Failed = 1,
    Usage = 2,
    NoDaemon = 3,
    TimeUp = 4,
}

/// Why a command ended early.
enum Trouble {
    Client(ClientError),
    Output(io::Error),
    File {
        path: PathBuf,
        error: io::Error,
    },
    /// What has nothing to do with the daemon: the guest cannot be stopped, or an image is not good.
    Machine(String),
}

impl Trouble {
    /// What is told, in the form in which the daemon tells it.
    fn failure(&self) -> Failure {
        let message = match self {
            Self::Client(ClientError::Refused(failure)) => return failure.clone(),
            Self::Client(error) => error.to_string(),
            Self::Output(error) => error.to_string(),
            Self::File { path, error } => format!("{} cannot be written: {error}", path.display()),
            Self::Machine(text) => text.clone(),
        };
        Failure {
            code: FailureCode::Other,
            message,
        }
    }

    fn status(&self) -> Status {
        match self {
            Self::Client(ClientError::Connect { .. } | ClientError::Gone) => Status::NoDaemon,
            Self::Client(ClientError::Refused(Failure { code, .. })) => match code {
                FailureCode::BadValue => Status::Usage,
                FailureCode::TimeOut => Status::TimeUp,
                _ => Status::Failed,
            },
            _ => Status::Failed,
        }
    }
}

impl From<ClientError> for Trouble {
    fn from(error: ClientError) -> Self {
        Self::Client(error)
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

fn main() -> ExitCode {
    let args = Args::read();
    let status = match run(&args) {
        Ok(status) => status,
        // Who reads has seen enough, as in `balloonctl watch | head`.
        Err(Trouble::Output(e)) if e.kind() == io::ErrorKind::BrokenPipe => Status::Done,
        Err(trouble) => {
            let failure = trouble.failure();
            if args.json {
                eprintln!("{}", json!({ "error": failure }));
            } else {
                eprintln!("error: {}", failure.message);
            }
            trouble.status()
        }
    };
    ExitCode::from(status as u8)
}

fn run(args: &Args) -> Result<Status, Trouble> {
    let mut out = io::stdout().lock();
    if let Command::Restore {
        image,
        file,
        region,
    } = &args.command
    {
        let restored = restore::restore(image, file, region).map_err(Trouble::Machine)?;
        match args.json {
            true => print_json(&mut out, &restored)?,
            false => show::restored(&mut out, &restored)?,
        }
        return Ok(Status::Done);
    }
    let mut client = Client::connect(args.control_path())?;
    match &args.command {
        Command::Target {
            size,
            force,
            drop_caches,
            wait,
            timeout,
        } => {
            if *drop_caches {
                ask::make_room(
                    &mut client,
                    size.0,
                    *force,
                    *timeout,
                    &mut Output::new(args, &mut out),
                )?;
            }
            let movement = client.target(field(size.0), *force)?;
            if *wait || timeout.is_some() {
                return wait_for(&mut client, args, *timeout, &mut out);
            }
            match args.json {
                true => print_json(&mut out, &movement)?,
                false => show::target(&mut out, &movement)?,
            }
        }
        Command::Wait { timeout } => return wait_for(&mut client, args, *timeout, &mut out),
        Command::Status { stats } => {
            let status = client.status(*stats)?;
            match args.json {
                true => print_json(&mut out, &status)?,
                false => show::status(&mut out, &status)?,
            }
        }
        Command::FreePageHint(what) => return hint(&mut client, args, what, &mut out),
        Command::DropCaches {
            page_cache,
            slab,
            until,
            timeout,
        } => {
            let until = until.map(|size| field(size.0));
            let progress = Progress::start(args);
            let reply = client.drop_caches((*page_cache, *slab), until, Some(*timeout))?;
            drop(progress);
            Output::new(args, &mut out).reply(&reply)?;
        }
        Command::Compact { timeout } => {
            let timeout_ms = Some(millis(*timeout));
            let reply = client.ask(&Request::Compact { timeout_ms })?;
            Output::new(args, &mut out).reply(&reply)?;
        }
        Command::FreePages {
            balloon,
            hold,
            out: file,
            map,
            timeout,
        } => {
            let request = Request::FreePages {
                balloon: *balloon,
                hold: hold.is_some(),
                hold_ms: hold.filter(|time| !time.is_zero()).map(millis),
                bound: false,
                timeout_ms: Some(millis(*timeout)),
            };
            let file = file.as_deref().map(Sink::open).transpose()?;
            let map = map.as_deref().map(Sink::open).transpose()?;
            if let (Some(file), Some(map)) = (&file, &map) {
                if file.is_same(map)? {
                    let text = "--out and --map cannot be the same file".to_owned();
                    return Err(Trouble::Machine(text));
                }
            }
            let progress = Progress::start(args);
            let reply = client.ask(&request)?;
            drop(progress);
            // First, so that it is not lost if a file cannot be written.
            Output::new(args, &mut out).reply(&reply)?;
            ask::keep(&mut client, &reply, file, map)?;
        }
        Command::Release { timeout } => {
            let timeout_ms = Some(millis(*timeout));
            let reply = client.ask(&Request::Release { timeout_ms })?;
            Output::new(args, &mut out).reply(&reply)?;
        }
        Command::Snapshot {
            file,
            qmp,
            stop,
            go_on,
            full,
            timeout,
        } => {
            let _alone = snapshot::alone(args.control_path())?;
            let machine = match (qmp, stop, go_on) {
                (Some(socket), ..) => Machine::Qmp(Qmp::connect(socket).map_err(Trouble::Machine)?),
                (None, Some(stop), Some(go_on)) => Machine::Commands { stop, go_on },
                _ => Machine::Stopped,
            };
            let taken = snapshot::take(&mut client, file, machine, (!full).then_some(*timeout))?;
            match args.json {
                true => print_json(&mut out, &taken)?,
                false => show::snapshot(&mut out, &taken)?,
            }
        }
        // It has nothing to do with a daemon.
        Command::Restore { .. } => {}
        Command::Watch => {
            for event in client.watch()? {
                let event = event?;
                match args.json {
                    true => print_json(&mut out, &event)?,
                    false => show::event(&mut out, &event)?,
                }
                out.flush()?;
            }
            return Err(ClientError::Gone.into());
        }
        Command::Fault { set } => {
            let set: Vec<_> = set.iter().map(String::as_str).collect();
            client.fault(&set)?;
        }
    }
    Ok(Status::Done)
}

/// A size as it is sent.
fn field(size: Size) -> SizeField {
    match size {
        Size::Bytes(bytes) => SizeField::Bytes(bytes),
        Size::Share(_) => SizeField::Text(size.to_string()),
    }
}

fn millis(time: Duration) -> u64 {
    // Up, since 0 means something else than a short time.
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Where answers go, and in which form.
struct Output<'a, W> {
    json: bool,
    to: &'a mut W,
}

impl<'a, W: io::Write> Output<'a, W> {
    fn new(args: &Args, to: &'a mut W) -> Self {
        Self {
            json: args.json,
            to,
        }
    }

    fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        match self.json {
            true => print_json(self.to, reply)?,
            false => show::reply(self.to, reply)?,
        }
        self.to.flush()
    }
}

fn hint(
    client: &mut Client,
    args: &Args,
    what: &Hint,
    out: &mut impl io::Write,
) -> Result<Status, Trouble> {
    let (waits, hint) = match what {
        Hint::Start { wait, timeout } if *wait || timeout.is_some() => {
            (true, client.free_page_hint_round(*timeout)?)
        }
        Hint::Start { .. } => (false, client.free_page_hint(HintAction::Start)?),
        Hint::Stop => (false, client.free_page_hint(HintAction::Stop)?),
        Hint::Done => (false, client.free_page_hint(HintAction::Done)?),
    };
    match args.json {
        true => print_json(out, &hint)?,
        false => show::hint(out, &hint)?,
    }
    Ok(match hint.state {
        HintState::Requested | HintState::Running if waits => Status::TimeUp,
        _ => Status::Done,
    })
}

fn wait_for(
    client: &mut Client,
    args: &Args,
    timeout: Option<Duration>,
    out: &mut impl io::Write,
) -> Result<Status, Trouble> {
    let Waited {
        reached,
        actual_bytes,
        movement,
    } = client.wait(timeout)?;
    if args.json {
        let answer = json!({
            "reached": reached,
            "actual_bytes": actual_bytes,
            "movement": movement,
        });
        print_json(out, &answer)?;
    } else {
        show::waited(out, reached, actual_bytes, &movement)?;
    }
    Ok(if reached {
        Status::Done
    } else {
        Status::TimeUp
    })
}

fn print_json(out: &mut impl io::Write, value: &impl serde::Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)
}
