// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! An interactive guest.

use std::io::{IsTerminal, Read, Write};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::folder;
use crate::host::{Dialect, Host};
use crate::initramfs::{DRIVER_FOLDER, PROMPT};
use crate::paths::{self, Guest};
use crate::session::{Choice, Device, Session, Setup};
use crate::size::show;
use crate::wire::{End, Request};

/// The key that ends the machine whatever the guest does: Ctrl and the closing bracket.
const ESCAPE: u8 = 0x1d;
/// What the daemon offers: all that can be played with.
const FEATURES: &str = "must-tell-host,stats,deflate-on-oom,free-page-hint,reporting,host-request";
/// How long the guest's shell may take to be there.
const PROMPT_TIME: Duration = Duration::from_secs(20);
/// What is typed when standard input ends.
const END_OF_INPUT: &[u8] = b"\nexit\n";

/// Boots `guest` with the driver and the daemon, and connects this terminal to a shell in it; or runs
/// `command` in it instead.
///
/// # Errors
///
/// If the guest does not come up.
pub fn run(
    guest: Guest,
    choice: Choice,
    memory: u64,
    parameters: &str,
    command: Option<&str>,
) -> Result<ExitCode> {
    let folder = folder::create(&format!("{guest}-shell"))?;
    let setup = Setup {
        memory,
        device: Device::Daemon {
            dialect: Dialect::Bitmap,
            options: &["--features", FEATURES],
        },
        load: None,
        populated: false,
        sentinel: 0,
        ..Setup::USUAL
    };
    let session = Session::start(guest, setup, choice, &folder)?;
    let loaded = session.load(parameters);
    let code = match command {
        Some(command) => {
            loaded?;
            once(&session, command)?
        }
        None => {
            if let Err(e) = loaded {
                eprintln!("The driver does not load: {e:#}");
            }
            interact(&session)?;
            ExitCode::SUCCESS
        }
    };
    session.machine().kill();
    if let Host::Daemon(daemon) = session.host() {
        daemon.stop()?;
    }
    folder::remove(&folder);
    Ok(code)
}

fn once(session: &Session, command: &str) -> Result<ExitCode> {
    let outcome = session.machine().run(command, Duration::from_secs(3600))?;
    print!("{}", outcome.output);
    std::io::stdout().flush()?;
    match outcome.end {
        End::Status(status) => Ok(ExitCode::from(u8::try_from(status & 0xff)?)),
        end => bail!("{command}: {end}"),
    }
}

fn interact(session: &Session) -> Result<()> {
    let guest = session.machine().guest();
    let control = session
        .host()
        .daemon()?
        .control_path()
        .display()
        .to_string();
    eprintln!("A {guest} guest with {}.", show(session.machine().memory()));
    eprintln!(
        "  The driver is loaded; in the guest it is {DRIVER_FOLDER}/{}.ko.",
        session.driver().module()
    );
    eprintln!("  Leave it: type exit or Ctrl-D; Ctrl-] ends it whatever it does.");
    let balloonctl = paths::sibling("balloonctl")?.display().to_string();
    eprintln!(
        "  Resize it from another terminal: tools/setup/in-root {balloonctl} --control-path {control} target 512M"
    );
    eprintln!("  (Files that it names are in the folder with this tree, or in one of VBRS_BIND.)");
    eprintln!(
        "  The kernel's console: {}",
        session.folder().join("console.log").display()
    );

    let terminal = Terminal::raw()?;
    let (rows, columns) = terminal.size();
    let channel = session.machine().channel();
    let (prompt, shows_prompt) = mpsc::channel();
    channel.attach(Watched {
        out: std::io::stdout(),
        tail: Vec::new(),
        prompt: Some(prompt),
    });
    channel.send(&Request::Shell { rows, columns })?;
    // The thread that reads standard input cannot be woken, so it is left to the program's end.
    std::thread::scope(|scope| -> Result<()> {
        let typed = spawn_reader();
        let typing = scope.spawn(move || -> Result<()> {
            // What is typed while the guest still sets up the terminal gets lost.
            let _late = shows_prompt.recv_timeout(PROMPT_TIME);
            loop {
                match typed.recv_timeout(Duration::from_millis(50)) {
                    Ok(bytes) if bytes.contains(&ESCAPE) => return Ok(()),
                    Ok(bytes) => channel.write(&bytes)?,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        std::thread::sleep(Duration::from_millis(50));
                    }
                }
                if session.machine().life().death().is_some() {
                    return Ok(());
                }
            }
        });
        typing.join().unwrap_or(Ok(()))
    })?;
    drop(terminal);
    if let Some(why) = session.machine().life().death() {
        // Not if it was powered off.
        if why.contains("panic") || why.contains("signal") {
            bail!("the guest died: {why}");
        }
    }
    Ok(())
}

/// Reads standard input in a thread; in the end, the guest's shell is left.
fn spawn_reader() -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut chunk = [0; 1024];
        let mut input = std::io::stdin();
        loop {
            match input.read(&mut chunk) {
                Ok(0) | Err(_) => {
                    let _gone = sender.send(END_OF_INPUT.to_vec());
                    return;
                }
                Ok(n) => {
                    if sender.send(chunk[..n].to_vec()).is_err() {
                        return;
                    }
                }
            }
        }
    });
    receiver
}

/// Where the guest's terminal is shown, until its first prompt with an eye on it.
struct Watched<W> {
    out: W,
    /// What may be the beginning of a prompt.
    tail: Vec<u8>,
    prompt: Option<Sender<()>>,
}

impl<W: Write> Write for Watched<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.out.write(bytes)?;
        if let Some(prompt) = &self.prompt {
            self.tail.extend_from_slice(&bytes[..n]);
            let words = PROMPT.as_bytes();
            if self.tail.windows(words.len()).any(|w| w == words) {
                let _gone = prompt.send(());
                self.prompt = None;
            }
            self.tail
                .drain(..self.tail.len().saturating_sub(words.len()));
        }
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

/// This terminal, set so that each key goes to the guest; set back when it is dropped.
struct Terminal(Option<Termios>);

impl Terminal {
    fn raw() -> Result<Self> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(Self(None));
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Drain, &raw)?;
        Ok(Self(Some(before)))
    }

    /// Its rows and columns.
    fn size(&self) -> (u16, u16) {
        match tcgetwinsize(std::io::stdout()) {
            Ok(size) if size.ws_row > 0 => (size.ws_row, size.ws_col),
            _ => (24, 80),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _gone = tcsetattr(std::io::stdin(), OptionalActions::Drain, before);
            eprintln!();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_is_seen_in_pieces() {
        let (prompt, seen) = mpsc::channel();
        let mut watched = Watched {
            out: Vec::new(),
            tail: Vec::new(),
            prompt: Some(prompt),
        };
        let (half, rest) = PROMPT.as_bytes().split_at(3);
        watched.write_all(b"welcome\r\ngue").unwrap();
        watched.write_all(half).unwrap();
        assert!(seen.try_recv().is_err());
        watched.write_all(rest).unwrap();
        assert!(seen.try_recv().is_ok());
        watched.write_all(PROMPT.as_bytes()).unwrap();
        assert!(watched.out.ends_with(PROMPT.as_bytes()));
    }
}
