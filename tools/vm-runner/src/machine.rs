// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A guest that runs: its process, its console, its command channel.
//!
//! [`uml`] and [`qemu`] know how to start one; from then on all are alike.

pub mod qemu;
pub mod uml;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::channel::{Channel, Job};
use crate::console::{Console, Life};
use crate::folder;
use crate::initramfs;
use crate::paths::Guest;
use crate::process::{self, Process};
use crate::size::MIB;
use crate::wire::{Outcome, Request};

/// How long a command may take if nothing else is said.
pub const COMMAND: Duration = Duration::from_secs(120);

/// What a machine is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Which kernel, and so which kind of machine.
    pub guest: Guest,
    /// Guest memory, in bytes.
    pub memory: u64,
    /// Virtual processors; in User Mode Linux there is one.
    pub cpus: u32,
    /// More for the kernel's command line.
    pub command_line: String,
    /// Its balloons; nearly always one.
    pub balloons: Vec<Balloon>,
    /// Has QEMU allocate all of the guest's memory before it starts.
    pub populated: bool,
    /// Bytes of a disk, empty and sparse; 0 for none.
    pub disk: u64,
    /// What QEMU plays.
    pub board: qemu::Board,
    /// More for QEMU's command line, before the balloon; a word `slots=…` belongs to `-m`.
    pub hardware: Vec<&'static str>,
    /// The guest comes from another machine: QEMU waits for it.
    pub incoming: bool,
    /// How QEMU runs the guest.
    pub accelerator: qemu::Accelerator,
}

/// A balloon device of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Balloon {
    /// A vhost-user daemon that listens on this socket.
    VhostUser {
        /// The socket, relative to the run folder.
        socket: String,
        /// Virtqueues the device has.
        queues: u32,
        /// Bytes of its config space.
        config_bytes: u32,
    },
    /// QEMU's own, with these properties beside its id.
    Qemu(Vec<String>),
}

/// A guest that runs. Dropping it kills it.
pub struct Machine {
    guest: Guest,
    memory: u64,
    started: Instant,
    process: Arc<Process>,
    console: Mutex<Console>,
    life: Arc<Life>,
    channel: Channel,
    transcript: Transcript,
}

/// The open ends of a machine that was just started.
struct Ends {
    process: Process,
    console: Box<dyn Read + Send>,
    read: Box<dyn Read + Send>,
    write: Box<dyn Write + Send>,
}

/// How long a guest may take to boot; emulation on a busy machine is slow.
fn boot_time(guest: Guest) -> Duration {
    Duration::from_secs(if guest.is_uml() { 60 } else { 90 })
}

impl Machine {
    /// Boots a machine whose files lie in `folder`, and waits for its agent.
    ///
    /// # Errors
    ///
    /// If something is missing, or the guest does not come up; the message has its last words.
    pub fn boot(plan: &Plan, folder: &Path) -> Result<Self> {
        let machine = Self::start(plan, folder)?;
        machine.await_boot()?;
        Ok(machine)
    }

    /// Starts a machine and does not wait for the guest in it.
    ///
    /// # Errors
    ///
    /// If something is missing or the machine does not start.
    pub fn start(plan: &Plan, folder: &Path) -> Result<Self> {
        let initramfs = folder.join("initramfs.cpio");
        std::fs::write(&initramfs, &*initramfs::of(plan.guest)?).context("write the initramfs")?;
        if !plan.hardware.is_empty() {
            // Some hand it to the guest as well.
            let kernel = folder.join("kernel");
            std::os::unix::fs::symlink(plan.guest.kernel()?, kernel)?;
        }
        let started = Instant::now();
        let ends = if plan.guest.is_uml() {
            uml::start(plan, folder)?
        } else {
            qemu::start(plan, folder)?
        };
        let life = Arc::new(Life::default());
        let console =
            Console::follow(ends.console, &folder.join("console.log"), Arc::clone(&life))?;
        let process = Arc::new(ends.process);
        watch(Arc::clone(&process), Arc::clone(&life))?;
        let channel = Channel::open(ends.read, ends.write, Arc::clone(&life))?;
        Ok(Self {
            guest: plan.guest,
            memory: plan.memory,
            started,
            process,
            console: Mutex::new(console),
            life,
            channel,
            transcript: Transcript::create(folder)?,
        })
    }

    /// Waits until the guest has booted, also when it boots anew in the same machine.
    ///
    /// # Errors
    ///
    /// If it does not come up; the message has its last words.
    pub fn await_boot(&self) -> Result<()> {
        self.channel
            .await_hello(boot_time(self.guest))
            .with_context(|| {
                let tail = self.life.tail(15).join("\n  ");
                format!(
                    "the {} guest does not come up; its last words:\n  {tail}",
                    self.guest
                )
            })?;
        tracing::debug!(
            "{} guest is up after {:.1?}",
            self.guest,
            self.started.elapsed()
        );
        Ok(())
    }

    /// Which guest it is.
    pub fn guest(&self) -> Guest {
        self.guest
    }

    /// The process of the host that holds the guest's memory.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Its memory as configured, in bytes.
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// What is known of its life.
    pub fn life(&self) -> &Life {
        &self.life
    }

    /// The line to its agent.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Runs a command, for at most `timeout`.
    ///
    /// # Errors
    ///
    /// If the guest is dead or dies. That the command fails is no error.
    pub fn run(&self, command: &str, timeout: Duration) -> Result<Outcome> {
        let begun = Instant::now();
        let outcome = self.channel.start(command, timeout)?.wait();
        self.transcript.note(self.started, begun, command, &outcome);
        let outcome = outcome?;
        ensure!(
            outcome.lost == 0,
            "{command}: wrote {} bytes more than the agent keeps",
            outcome.lost
        );
        Ok(outcome)
    }

    /// Runs a command that must succeed, and gives its output without the last line feed.
    ///
    /// # Errors
    ///
    /// If it fails, or the guest dies.
    pub fn sh(&self, command: &str) -> Result<String> {
        self.sh_within(command, COMMAND)
    }

    /// As [`Machine::sh`], with a time-out.
    ///
    /// # Errors
    ///
    /// If it fails, takes longer, or the guest dies.
    pub fn sh_within(&self, command: &str, timeout: Duration) -> Result<String> {
        let outcome = self.run(command, timeout)?;
        if !outcome.ok() {
            bail!("{command}: {}: {}", outcome.end, outcome.output.trim_end());
        }
        Ok(outcome.output.trim_end_matches('\n').to_owned())
    }

    /// Starts a command and leaves it running.
    ///
    /// # Errors
    ///
    /// If the guest is dead.
    pub fn background(&self, command: &str, timeout: Duration) -> Result<Job<'_>> {
        self.channel.start(command, timeout)
    }

    /// Powers the guest off and waits until its process has ended.
    ///
    /// # Errors
    ///
    /// If it has died before, or does not go down in time.
    pub fn power_off(&self, timeout: Duration) -> Result<()> {
        self.channel.send(&Request::Quit)?;
        let status = self.process.wait(timeout);
        self.kill();
        match status {
            None => bail!("the guest does not power off within {timeout:.0?}"),
            Some(status) if !status.success() => bail!("the guest ended with {status}"),
            Some(_) => Ok(()),
        }
    }

    /// Kills it, if it still runs, and reads all it has said.
    pub fn kill(&self) {
        self.process.kill();
        lock(&self.console).drain();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Says that the guest is dead once its process has ended.
fn watch(process: Arc<Process>, life: Arc<Life>) -> Result<()> {
    std::thread::Builder::new()
        .name("watch".into())
        .spawn(move || {
            let status = loop {
                if let Some(status) = process.ended() {
                    break status;
                }
                std::thread::sleep(process::POLL * 4);
            };
            life.died(|| format!("its process ended with {status}"));
        })?;
    Ok(())
}

/// A file with every command, its time and its output.
struct Transcript(Mutex<std::fs::File>);

impl Transcript {
    fn create(folder: &Path) -> Result<Self> {
        let file = std::fs::File::create(folder.join("transcript.log"))?;
        Ok(Self(Mutex::new(file)))
    }

    fn note(&self, boot: Instant, begun: Instant, command: &str, outcome: &Result<Outcome>) {
        let at = begun.duration_since(boot).as_secs_f64();
        let took = begun.elapsed().as_secs_f64();
        let text = match outcome {
            Ok(o) => format!("{}\n{}", o.end, o.output),
            Err(e) => format!("{e:#}\n"),
        };
        let _full = writeln!(lock(&self.0), "[{at:8.3} +{took:.3}] {command}\n{text}");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a folder for a machine's files, see [`folder::create`].
///
/// # Errors
///
/// If it cannot be created.
pub fn run_folder(name: &str) -> Result<PathBuf> {
    folder::create(name)
}

/// MiB for a command line; memory is configured in whole ones.
fn mebibytes(bytes: u64) -> Result<u64> {
    ensure!(
        bytes % MIB == 0 && bytes > 0,
        "{bytes} bytes of memory are not whole MiB"
    );
    Ok(bytes / MIB)
}
