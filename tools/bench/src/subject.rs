// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A guest with a driver whose balloon is moved and timed.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use balloon_control::Client;
use balloon_control::message::Counters;
use vm_runner::host::{Dialect, Host};
use vm_runner::machine::{self, qemu::Accelerator};
use vm_runner::paths::{Driver, Guest};
use vm_runner::session::{Choice, Device, Session, Setup};
use vm_runner::size::{GIB, KIB, MIB};

use crate::case::{Figures, Run};
use crate::helper;
use crate::host;
use crate::stats::tidy;

/// How a guest is made.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// What its folder is called.
    pub name: &'static str,
    /// Which guest.
    pub guest: Guest,
    /// Its memory, in bytes.
    pub memory: u64,
    /// Who offers the balloon.
    pub device: Device,
    /// The driver.
    pub driver: Driver,
    /// Whether the host allocates all of the guest's memory before it boots.
    pub populated: bool,
    /// Bytes of a disk; 0 for none.
    pub disk: u64,
    /// More for the kernel's command line.
    pub command_line: &'static str,
    /// How QEMU runs it.
    pub accelerator: Accelerator,
}

impl Plan {
    /// An idle guest of User Mode Linux with 4 GiB.
    pub const UML: Self = Self {
        name: "bench-uml",
        guest: Guest::UmlLean,
        memory: 4 * GIB,
        device: Device::speaking(Dialect::Bitmap),
        driver: Driver::Rust,
        populated: false,
        disk: 0,
        command_line: "",
        accelerator: Accelerator::Auto,
    };

    /// An idle stock guest in QEMU with 4 GiB.
    pub const QEMU: Self = Self {
        name: "bench-qemu",
        guest: Guest::Stock,
        ..Self::UML
    };

    /// The same with the kernel's own driver.
    #[must_use]
    pub const fn c(self) -> Self {
        Self {
            driver: Driver::C,
            ..self
        }
    }

    /// The same with another device.
    #[must_use]
    pub const fn device(self, device: Device) -> Self {
        Self { device, ..self }
    }
}

/// A guest that runs, with its driver loaded.
pub struct Subject {
    session: Session,
    folder: PathBuf,
    /// A connection of our own, whose wait ends when the target is reached.
    client: Option<Mutex<Client>>,
    loaded_kib: f64,
    release: String,
}

/// What a resize took.
#[derive(Clone, Debug)]
pub struct Resize {
    /// From setting the target to reaching it, by the host's clock, in milliseconds.
    pub ms: f64,
    /// Of this, time that the daemon spent in the system calls that give memory back.
    pub discard_ms: Option<f64>,
    /// What else was seen.
    pub figures: Figures,
}

impl Resize {
    /// As a run.
    pub fn run(self, side: &str, round: u32) -> Run {
        Run::new(side, round, self.ms).with(self.figures)
    }
}

impl Subject {
    /// Boots a guest and loads its driver.
    ///
    /// # Errors
    ///
    /// If something is missing or does not come up.
    pub fn boot(plan: Plan) -> Result<Self> {
        let begun = Instant::now();
        let folder = machine::run_folder(plan.name)?;
        let setup = Setup {
            memory: plan.memory,
            cpus: 1,
            device: plan.device,
            load: None,
            populated: plan.populated,
            disk: plan.disk,
            sentinel: 0,
            command_line: plan.command_line,
            ..Setup::USUAL
        };
        let choice = Choice {
            driver: plan.driver,
            accelerator: plan.accelerator,
        };
        let session = Session::start(plan.guest, setup, choice, &folder)
            .with_context(|| format!("everything is in {}", folder.display()))?;
        let client = match session.host() {
            Host::Daemon(daemon) => Some(Mutex::new(Client::connect(daemon.control_path())?)),
            _ => None,
        };
        let free = session.account()?.free()?;
        session.load("")?;
        let this = Self {
            loaded_kib: less_kib(free, session.account()?.free()?),
            release: session.sh("uname -r")?,
            session,
            folder,
            client,
        };
        tracing::info!(
            "{}: ready after {:.1?}",
            this.folder.display(),
            begun.elapsed()
        );
        Ok(this)
    }

    /// The guest.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The version of its kernel.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Brings `vbrs-bench-guest` into it.
    ///
    /// # Errors
    ///
    /// If that fails.
    pub fn bring_helper(&self) -> Result<()> {
        let begun = Instant::now();
        helper::bring(self.session.machine())?;
        tracing::info!(
            "{}: has the helper after {:.1?}",
            self.folder.display(),
            begun.elapsed()
        );
        Ok(())
    }

    /// Free memory of the guest now, in bytes.
    ///
    /// # Errors
    ///
    /// If the guest dies.
    pub fn free(&self) -> Result<u64> {
        self.session.account()?.free()
    }

    /// Tells what memory the driver takes for itself: when it was loaded, and while the balloon holds
    /// `balloon` bytes, if `before` was free with it empty. The rest of the guest takes and gives some, too.
    ///
    /// # Errors
    ///
    /// If the guest dies.
    pub fn memory_note(&self, before: u64, balloon: u64) -> Result<String> {
        Ok(format!(
            "{}: loading it took {:.0} KiB of the guest (code included), the full balloon {:.0} KiB more",
            self.session.driver().module(),
            self.loaded_kib,
            less_kib(before, self.free()? + balloon),
        ))
    }

    /// Brings the balloon to `bytes` and times it on the host.
    ///
    /// # Errors
    ///
    /// If it does not get there.
    pub fn resize(&self, bytes: u64) -> Result<Resize> {
        /// What a driver still does after it has told that it is done is part of its work.
        const AFTER: Duration = Duration::from_millis(20);

        let guest = self.session.machine().pid();
        let daemon = self.session.host().daemon().ok().map(|daemon| daemon.pid());
        let cpu = |pid: Option<i32>| pid.map_or(Ok(0.0), host::cpu_ms);
        let (guest_before, daemon_before) = (cpu(Some(guest))?, cpu(daemon)?);
        let from = self.session.actual()?;
        let interrupts = self.interrupts()?;
        let (ms, counters) = self.travel(bytes)?;
        std::thread::sleep(AFTER);
        let gib = from.abs_diff(bytes) as f64 / GIB as f64;
        let mut figures = Figures::new();
        let mut note = |name: &str, value: f64| {
            figures.insert(name.to_owned(), tidy(value));
        };
        note("total_ms", ms);
        let guest_cpu = cpu(Some(guest))? - guest_before;
        note("guest_cpu_ms", guest_cpu);
        note("guest_cpu_ms_per_gib", guest_cpu / gib);
        let mut discard_ms = None;
        if let Some(counters) = counters {
            let daemon_cpu = cpu(daemon)? - daemon_before;
            note("daemon_cpu_ms", daemon_cpu);
            note("daemon_cpu_ms_per_gib", daemon_cpu / gib);
            let ms = counters.discard_ns as f64 / 1e6;
            discard_ms = Some(ms);
            note("discard_ms", ms);
            note("discard_calls", counters.discard_calls as f64);
            for (name, count) in [
                ("requests_per_gib", counters.requests),
                ("kicks_per_gib", counters.kicks),
                ("interrupts_per_gib", counters.interrupts),
                ("config_writes_per_gib", counters.config_writes),
                ("wire_bytes_per_gib", counters.wire_bytes),
            ] {
                note(name, count as f64 / gib);
            }
            ensure!(
                counters.errors == 0,
                "the daemon refused {} times",
                counters.errors
            );
        }
        if let (Some(before), Some(after)) = (interrupts, self.interrupts()?) {
            figures.insert(
                "interrupts_per_gib".to_owned(),
                tidy((after - before) / gib),
            );
        }
        Ok(Resize {
            ms,
            discard_ms,
            figures,
        })
    }

    /// Interrupts of the balloon so far, as the guest counts them; our daemon counts its own.
    fn interrupts(&self) -> Result<Option<f64>> {
        if self.client.is_some() {
            return Ok(None);
        }
        let lines = self.session.sh("grep virtio0 /proc/interrupts || true")?;
        let counts = lines.lines().map(|line| {
            let words = line.split_whitespace().skip(1);
            words
                .map_while(|word| word.parse::<f64>().ok())
                .sum::<f64>()
        });
        Ok(Some(counts.sum()))
    }

    /// Brings the balloon to `bytes`; gives the time in milliseconds, and what the daemon has counted.
    ///
    /// # Errors
    ///
    /// If it does not get there.
    pub fn travel(&self, bytes: u64) -> Result<(f64, Option<Counters>)> {
        let moved = self.try_travel(bytes)?;
        tracing::info!(
            "{}: {} MiB after {:.1} ms",
            self.folder.display(),
            bytes / MIB,
            moved.0
        );
        Ok(moved)
    }

    fn try_travel(&self, bytes: u64) -> Result<(f64, Option<Counters>)> {
        match &self.client {
            Some(client) => by_daemon(
                &mut client.lock().unwrap_or_else(PoisonError::into_inner),
                bytes,
            ),
            None => Ok((by_qemu(&self.session, bytes)?, None)),
        }
    }

    /// Looks whether the guest has anything to complain of, and ends it.
    ///
    /// # Errors
    ///
    /// If it has.
    pub fn close(self) -> Result<()> {
        self.session.log_is_clean()?;
        self.session.machine().kill();
        drop(self.session);
        std::fs::remove_dir_all(&self.folder).context("remove the guest's folder")
    }
}

/// By how much less is free, in KiB.
fn less_kib(before: u64, after: u64) -> f64 {
    (before as f64 - after as f64) / KIB as f64
}

/// How long a driver may take.
const PATIENCE: Duration = Duration::from_secs(120);

fn by_daemon(client: &mut Client, bytes: u64) -> Result<(f64, Option<Counters>)> {
    client.target_bytes(bytes)?;
    let waited = client.wait(Some(PATIENCE))?;
    ensure!(
        waited.reached && waited.actual_bytes == bytes,
        "the balloon holds {} bytes after {PATIENCE:.0?}, not {bytes}",
        waited.actual_bytes
    );
    Ok((waited.movement.elapsed_ms, Some(waited.movement.counters)))
}

fn by_qemu(session: &Session, bytes: u64) -> Result<f64> {
    /// QEMU tells no more than the size, so it must be asked again and again; not too often, since it
    /// answers in the thread that also serves the balloon.
    const POLL: Duration = Duration::from_millis(2);

    let begun = Instant::now();
    session.target(bytes)?;
    loop {
        let actual = session.actual()?;
        let took = begun.elapsed();
        if actual == bytes {
            return Ok(took.as_secs_f64() * 1000.0);
        }
        ensure!(
            took < PATIENCE,
            "the balloon holds {actual} bytes after {PATIENCE:.0?}, not {bytes}"
        );
        std::thread::sleep(POLL);
    }
}
