// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The host's end of a balloon: our daemon, or QEMU's own device. Both take a target and tell the
//! size; all amounts are bytes in the balloon.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use balloon_control::message::{GuestStats, HintAction, HintStatus, Reply, Request, SizeField};
use balloon_control::{Client, Status};

use crate::machine::qemu;
use crate::paths;
use crate::process::{Process, bound, poll};
use crate::qmp::Qmp;
use crate::size::PAGE;

/// The name of the vhost-user socket of the daemon with this number in the run folder.
pub fn socket(number: usize) -> String {
    format!("balloon{number}")
}

/// The name of its control socket.
fn control(number: usize) -> String {
    format!("control{number}")
}

/// How long the daemon may take to listen, or to end.
const DAEMON: Duration = Duration::from_secs(10);

/// What the daemon speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Page bitmaps on bit 23, announced in config space.
    Bitmap,
    /// Page bitmaps as proposed in 2016.
    Draft2016,
    /// PFN arrays only.
    PfnArray,
}

impl Dialect {
    /// Its name on the daemon's command line.
    fn name(self) -> &'static str {
        match self {
            Self::Bitmap => "bitmap",
            Self::Draft2016 => "2016",
            Self::PfnArray => "pfn-array",
        }
    }

    /// What the driver's `protocol` file says when it is spoken.
    pub fn protocol(self) -> &'static str {
        match self {
            Self::Bitmap => "page-bitmap-v1",
            Self::Draft2016 => "page-bitmap-2016",
            Self::PfnArray => "pfn-array",
        }
    }

    /// Bytes of config space of such a device.
    pub fn config_bytes(self) -> u32 {
        match self {
            Self::Bitmap => 64,
            Self::Draft2016 => 8,
            Self::PfnArray => 16,
        }
    }
}

/// The host's end of a balloon.
pub enum Host {
    /// Our daemon.
    Daemon(Daemon),
    /// QEMU's own device.
    Qemu {
        /// The machine's control connection.
        qmp: Mutex<Qmp>,
        /// All of the guest's memory, in bytes.
        memory: u64,
    },
    /// The guest has no balloon.
    None,
}

impl Host {
    /// The QEMU whose files lie in `folder`, for a guest of `memory` bytes.
    ///
    /// # Errors
    ///
    /// If it does not answer.
    pub fn of_qemu(folder: &Path, memory: u64) -> Result<Self> {
        Ok(Self::Qemu {
            qmp: Mutex::new(Qmp::connect(&folder.join(qemu::QMP))?),
            memory,
        })
    }

    /// Sets how much the balloon is to take from the guest.
    ///
    /// # Errors
    ///
    /// If the host refuses it or is gone.
    pub fn target(&self, bytes: u64) -> Result<()> {
        match self {
            Self::Daemon(daemon) => {
                // Some tests ask for more than there is.
                daemon.target(bytes)
            }
            Self::Qemu { qmp, memory } => {
                let keep = memory
                    .checked_sub(bytes)
                    .context("QEMU takes no target above memory")?;
                lock(qmp).balloon(keep)
            }
            Self::None => bail!("the guest has no balloon"),
        }
    }

    /// What the balloon holds, as the guest's driver has told the host.
    ///
    /// # Errors
    ///
    /// If the host is gone.
    pub fn actual(&self) -> Result<u64> {
        match self {
            Self::Daemon(daemon) => Ok(daemon.status()?.balloon.actual_bytes),
            Self::Qemu { qmp, memory } => {
                let has = lock(qmp).query_balloon()?;
                memory
                    .checked_sub(has)
                    .context("the guest has more memory than it was given")
            }
            Self::None => bail!("the guest has no balloon"),
        }
    }

    /// QEMU's control connection, where QEMU itself is the host.
    ///
    /// # Errors
    ///
    /// If the balloon is another one.
    pub fn qmp(&self) -> Result<MutexGuard<'_, Qmp>> {
        match self {
            Self::Qemu { qmp, .. } => Ok(lock(qmp)),
            _ => bail!("the balloon is not QEMU's own"),
        }
    }

    /// Our daemon, for what only it can do.
    ///
    /// # Errors
    ///
    /// If the balloon is another one.
    pub fn daemon(&self) -> Result<&Daemon> {
        match self {
            Self::Daemon(daemon) => Ok(daemon),
            _ => bail!("the balloon is not our daemon's"),
        }
    }
}

/// A running `vhost-device-balloon`.
pub struct Daemon {
    process: Process,
    control: PathBuf,
    log: PathBuf,
    client: Mutex<Option<Client>>,
}

impl Daemon {
    /// Starts one, the `number`th of its guest, with its sockets and its log in `folder`, and waits
    /// until it listens.
    ///
    /// # Errors
    ///
    /// If it is not there or ends at once; the message has what it said.
    pub fn start(folder: &Path, number: usize, dialect: Dialect, options: &[&str]) -> Result<Self> {
        let program = paths::sibling("vhost-device-balloon")?;
        let log = match number {
            0 => folder.join("daemon.log"),
            n => folder.join(format!("daemon{n}.log")),
        };
        let (socket, control) = (socket(number), control(number));
        let mut command = bound(&program.to_string_lossy());
        command
            .args(["--socket-path", &socket, "--control-path", &control])
            .args(["--dialect", dialect.name()])
            .args(options)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&log)?)
            .stderr(std::fs::File::options().append(true).open(&log)?);
        let process = Process::start("vhost-device-balloon", command)?;
        let this = Self {
            process,
            control: folder.join(control),
            log,
            client: Mutex::default(),
        };
        let up = poll(DAEMON, || {
            if let Some(status) = this.process.ended() {
                return Some(Err(anyhow::anyhow!(
                    "the daemon ended with {status}: {}",
                    this.log_tail()
                )));
            }
            let both = this.control.exists() && folder.join(&socket).exists();
            let client = both
                .then(|| Client::connect(&this.control).ok())
                .flatten()?;
            *lock(&this.client) = Some(client);
            Some(Ok(()))
        });
        up.with_context(|| format!("the daemon does not listen: {}", this.log_tail()))??;
        Ok(this)
    }

    /// The path of its control socket.
    pub fn control_path(&self) -> &Path {
        &self.control
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Sets how much its balloon is to take.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub fn target(&self, bytes: u64) -> Result<()> {
        self.client()?.target(SizeField::Bytes(bytes), true)?;
        Ok(())
    }

    /// Everything it knows.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub fn status(&self) -> Result<Status> {
        Ok(self.client()?.status(false)?)
    }

    /// What the guest reports when asked now.
    ///
    /// # Errors
    ///
    /// If the daemon is gone or the guest reports nothing.
    pub fn stats(&self) -> Result<GuestStats> {
        let status = self.client()?.status(true)?;
        status
            .guest_stats
            .context("the guest reports no statistics")
    }

    /// Says what is wanted of free page hinting.
    ///
    /// # Errors
    ///
    /// If the guest does not hint.
    pub fn hint(&self, action: HintAction) -> Result<HintStatus> {
        Ok(self.client()?.free_page_hint(action)?)
    }

    /// Begins a round of free page hinting and waits for its end, so long at most.
    ///
    /// # Errors
    ///
    /// If the guest does not hint.
    pub fn hint_round(&self, timeout: Duration) -> Result<HintStatus> {
        Ok(self.client()?.free_page_hint_round(Some(timeout))?)
    }

    /// Asks it, or the guest through it, for something.
    ///
    /// # Errors
    ///
    /// If the daemon is gone, or it or the guest refuses.
    pub fn ask(&self, request: &Request) -> Result<Reply> {
        Ok(self.client()?.ask(request)?)
    }

    /// The runs of free pages that the guest named last, as frame and number of pages.
    ///
    /// # Errors
    ///
    /// If the daemon is gone, or does not know them any more.
    pub fn free_page_runs(&self, id: u32) -> Result<Vec<(u64, u64)>> {
        let runs = self.client()?.free_page_runs(id)?;
        Ok(runs
            .into_iter()
            .map(|(address, bytes)| (address / PAGE, bytes / PAGE))
            .collect())
    }

    /// Plays these faults from now on, and none of those before.
    ///
    /// # Errors
    ///
    /// If it does not know them.
    pub fn faults(&self, set: &[&str]) -> Result<()> {
        Ok(self.client()?.fault(set)?)
    }

    /// Kills it, as a crash would.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Asks it to end.
    ///
    /// # Errors
    ///
    /// If it does not in time, ended with a failure, or had panicked.
    pub fn stop(&self) -> Result<()> {
        lock(&self.client).take();
        let status = self.process.terminate(DAEMON);
        let status = status.context("the daemon does not end when asked to")?;
        ensure!(
            status.success(),
            "the daemon ended with {status}: {}",
            self.log_tail()
        );
        let log = std::fs::read_to_string(&self.log)?;
        ensure!(
            !log.contains("panicked at"),
            "the daemon panicked: {}",
            self.log_tail()
        );
        Ok(())
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        const LINES: usize = 10;

        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    fn client(&self) -> Result<ClientGuard<'_>> {
        let guard = lock(&self.client);
        ensure!(guard.is_some(), "the daemon was stopped");
        Ok(ClientGuard(guard))
    }
}

/// The client, locked and known to be there.
struct ClientGuard<'a>(MutexGuard<'a, Option<Client>>);

impl std::ops::Deref for ClientGuard<'_> {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.0.as_ref().expect("checked when it was locked")
    }
}

impl std::ops::DerefMut for ClientGuard<'_> {
    fn deref_mut(&mut self) -> &mut Client {
        self.0.as_mut().expect("checked when it was locked")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
