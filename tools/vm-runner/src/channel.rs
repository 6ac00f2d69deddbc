// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The runner's end of the line to a guest's agent.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::console::Life;
use crate::wire::{Outcome, Reply, Request, VERSION};

/// How much longer than the command's own time-out its answer is awaited.
const GRACE: Duration = Duration::from_secs(10);
/// How often a waiter looks whether the guest is dead.
const LIFE_CHECK: Duration = Duration::from_millis(20);

/// A line to an agent. Dropping it closes the runner's writing end.
pub struct Channel {
    life: Arc<Life>,
    write: Mutex<Box<dyn Write + Send>>,
    waiting: Arc<Waiting>,
    hello: Mutex<Receiver<u32>>,
    next: AtomicU64,
}

/// What the reading thread serves.
#[derive(Default)]
struct Waiting {
    outcomes: Mutex<HashMap<u64, Sender<Outcome>>>,
    /// While this is set, what comes over the line goes there as it is.
    terminal: Mutex<Option<Box<dyn Write + Send>>>,
}

/// A command that runs in the guest.
pub struct Job<'a> {
    channel: &'a Channel,
    id: u64,
    outcome: Receiver<Outcome>,
    timeout: Duration,
    command: String,
}

impl Channel {
    /// Takes the two ends of a line, and a guest's life to watch meanwhile.
    ///
    /// # Errors
    ///
    /// If the reading thread cannot be started.
    pub fn open(
        read: impl Read + Send + 'static,
        write: impl Write + Send + 'static,
        life: Arc<Life>,
    ) -> Result<Self> {
        let waiting = Arc::new(Waiting::default());
        let reader = Arc::clone(&waiting);
        let (hello_in, hello) = mpsc::channel();
        std::thread::Builder::new()
            .name("channel".into())
            .spawn(move || reader.read(read, &hello_in))?;
        Ok(Self {
            life,
            write: Mutex::new(Box::new(write)),
            waiting,
            hello: Mutex::new(hello),
            next: AtomicU64::new(1),
        })
    }

    /// Waits for the agent to say that it is there.
    ///
    /// # Errors
    ///
    /// If it does not in time, dies, or speaks another version.
    pub fn await_hello(&self, timeout: Duration) -> Result<()> {
        let version = self.receive(&lock(&self.hello), timeout, "the guest's agent")?;
        ensure!(
            version == VERSION,
            "the guest's agent speaks version {version}, the runner {VERSION}"
        );
        Ok(())
    }

    /// Starts a command in the guest. After `timeout` it is killed there.
    ///
    /// # Errors
    ///
    /// If the guest is dead.
    pub fn start(&self, command: &str, timeout: Duration) -> Result<Job<'_>> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, outcome) = mpsc::channel();
        lock(&self.waiting.outcomes).insert(id, sender);
        self.send(&Request::Run {
            id,
            command: command.to_owned(),
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
        })?;
        Ok(Job {
            channel: self,
            id,
            outcome,
            timeout,
            command: command.to_owned(),
        })
    }

    /// The answer to command `id`, which was given over another line before the guest moved here.
    pub fn inherit(&self, id: u64, command: &str, timeout: Duration) -> Job<'_> {
        let (sender, outcome) = mpsc::channel();
        lock(&self.waiting.outcomes).insert(id, sender);
        // What is asked from now on is none of what was asked there.
        self.next.fetch_max(id + 1, Ordering::Relaxed);
        Job {
            channel: self,
            id,
            outcome,
            timeout,
            command: command.to_owned(),
        }
    }

    /// Sends a request that has no answer, or one that the caller awaits otherwise.
    ///
    /// # Errors
    ///
    /// If the guest is dead.
    pub fn send(&self, request: &Request) -> Result<()> {
        if let Some(why) = self.life.death() {
            bail!("the guest is dead: {why}");
        }
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.write(line.as_bytes())
    }

    /// Writes raw bytes, for a terminal.
    ///
    /// # Errors
    ///
    /// If the guest is gone.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut write = lock(&self.write);
        write
            .write_all(bytes)
            .and_then(|()| write.flush())
            .context("write to the guest's agent")
    }

    /// From now on, all that comes over the line goes to `terminal` as it is.
    pub fn attach(&self, terminal: impl Write + Send + 'static) {
        *lock(&self.waiting.terminal) = Some(Box::new(terminal));
    }

    fn receive<T>(&self, receiver: &Receiver<T>, timeout: Duration, what: &str) -> Result<T> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(left.min(LIFE_CHECK)) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Disconnected) => {
                    // The line ends when the machine does: give the other side the time to say why.
                    let why = crate::process::poll(Duration::from_secs(2), || self.life.death());
                    bail!(
                        "the guest is dead: {}",
                        why.as_deref().unwrap_or("its line has ended")
                    );
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(why) = self.life.death() {
                bail!("the guest is dead: {why}");
            }
            if left.is_zero() {
                bail!("{what}: no answer within {:.0?}", timeout);
            }
        }
    }
}

impl Waiting {
    fn read(&self, mut read: impl Read, hello: &Sender<u32>) {
        let mut rest = Vec::new();
        let mut chunk = [0; 16 << 10];
        while let Ok(n @ 1..) = read.read(&mut chunk) {
            rest.extend_from_slice(&chunk[..n]);
            if lock(&self.terminal).is_some() {
                self.show(&std::mem::take(&mut rest));
                continue;
            }
            while let Some(end) = rest.iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                self.line(&line, hello);
            }
        }
        // Whoever still waits learns from the end of its sender that nothing comes any more.
        lock(&self.outcomes).clear();
        lock(&self.terminal).take();
    }

    fn line(&self, line: &[u8], hello: &Sender<u32>) {
        match serde_json::from_slice(line) {
            Ok(Reply::Hello { version }) => {
                let _gone = hello.send(version);
            }
            Ok(Reply::Done { id, outcome }) => {
                if let Some(sender) = lock(&self.outcomes).remove(&id) {
                    let _gone = sender.send(outcome);
                }
            }
            // Firmware and early boot may write to the line.
            Err(e) => tracing::debug!("not the agent's: {:?}: {e}", String::from_utf8_lossy(line)),
        }
    }

    fn show(&self, bytes: &[u8]) {
        if let Some(terminal) = lock(&self.terminal).as_mut() {
            let _closed = terminal.write_all(bytes).and_then(|()| terminal.flush());
        }
    }
}

impl Job<'_> {
    /// Its number, by which its answer is known.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Waits for the command's end.
    ///
    /// # Errors
    ///
    /// If the guest dies meanwhile, or does not answer within the command's time and some seconds.
    pub fn wait(self) -> Result<Outcome> {
        self.channel.receive(
            &self.outcome,
            self.timeout.saturating_add(GRACE),
            &self.command,
        )
    }

    /// Whether the command has ended, or the guest with it.
    pub fn is_over(&self) -> bool {
        let waiting = lock(&self.channel.waiting.outcomes);
        !waiting.contains_key(&self.id) || self.channel.life.death().is_some()
    }

    /// Kills the command and its children.
    ///
    /// # Errors
    ///
    /// If the guest is dead.
    pub fn kill(&self) -> Result<()> {
        self.channel.send(&Request::Kill { id: self.id })
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::End;
    use std::os::unix::net::UnixStream;

    fn line() -> (UnixStream, Channel, Arc<Life>) {
        let (guest, host) = UnixStream::pair().unwrap();
        let life = Arc::new(Life::default());
        let channel = Channel::open(host.try_clone().unwrap(), host, life.clone()).unwrap();
        (guest, channel, life)
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn answers_find_their_commands() {
        let (mut guest, channel, _life) = line();
        let first = channel.start("a", SECOND).unwrap();
        let second = channel.start("b", SECOND).unwrap();
        guest.write_all(b"noise\n{\"is\":\"done\",\"id\":2,\"outcome\":{\"end\":{\"status\":0},\"output\":\"two\",\"lost\":0}}\n").unwrap();
        guest.write_all(b"{\"is\":\"done\",\"id\":1,\"outcome\":{\"end\":\"timed-out\",\"output\":\"\",\"lost\":0}}\n").unwrap();
        assert_eq!(second.wait().unwrap().output, "two");
        assert_eq!(first.wait().unwrap().end, End::TimedOut);
    }

    #[test]
    fn a_dead_guest_ends_the_wait_at_once() {
        let (_guest, channel, life) = line();
        let job = channel.start("a", 100 * SECOND).unwrap();
        life.died(|| "it fell over".into());
        let why = job.wait().unwrap_err().to_string();
        assert_eq!(why, "the guest is dead: it fell over");
        assert!(channel.start("b", SECOND).is_err());
    }

    #[test]
    fn a_closed_line_ends_the_wait() {
        let (guest, channel, life) = line();
        let job = channel.start("a", 100 * SECOND).unwrap();
        drop(guest);
        life.died(|| "gone".into());
        assert!(job.wait().is_err());
    }

    #[test]
    fn another_version_is_refused() {
        let (mut guest, channel, _life) = line();
        guest
            .write_all(b"{\"is\":\"hello\",\"version\":99}\n")
            .unwrap();
        let why = channel.await_hello(SECOND).unwrap_err().to_string();
        assert!(why.contains("version 99"), "{why}");
    }
}
