// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Guests that move: into another QEMU by live migration, or through a disk by hibernation.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::Session;
use crate::host::Host;
use crate::host_memory::MemoryFile;
use crate::machine::{Machine, Plan, qemu};
use crate::process::poll;

/// The name of the socket that memory goes over, in the folder of where it goes.
const MIGRATION: &str = "migration";

/// Where a guest lives.
pub(super) struct Body {
    pub(super) machine: Machine,
    pub(super) host: Host,
    pub(super) memory_file: MemoryFile,
}

/// What a migration took.
#[derive(Clone, Copy, Debug)]
pub struct Migrated {
    /// Bytes of guest memory that went over.
    pub transferred: u64,
    /// Pages that went over as nothing but their address, since they were zero.
    pub zero_pages: u64,
    /// From the command to the end.
    pub took: Duration,
    /// How long the guest stood still.
    pub downtime: Duration,
}

impl Body {
    pub(super) fn new(machine: Machine, host: Host) -> Result<Self> {
        Ok(Self {
            memory_file: MemoryFile::of(machine.pid(), machine.memory())?,
            machine,
            host,
        })
    }
}

impl Session {
    /// Where the guest lives now.
    pub(super) fn body(&self) -> &Body {
        let mut bodies = self.bodies.iter().rev();
        bodies
            .find_map(std::sync::OnceLock::get)
            .expect("it has lived somewhere from the start")
    }

    /// From now on the guest lives there.
    pub(super) fn move_into(&self, body: Body) -> Result<()> {
        let free = self.bodies.iter().find(|place| place.get().is_none());
        let free = free.context("the guest has moved too often")?;
        ensure!(free.set(body).is_ok(), "two move at a time");
        Ok(())
    }

    /// A folder for the next machine.
    fn next_folder(&self) -> Result<PathBuf> {
        let number = self.bodies.iter().filter(|b| b.get().is_some()).count();
        let folder = self.folder.join(number.to_string());
        std::fs::create_dir(&folder)?;
        Ok(folder)
    }

    /// Moves the guest, as it runs, into a second QEMU. No command may run in it meanwhile.
    ///
    /// # Errors
    ///
    /// If it does not get there.
    pub fn migrate(&self) -> Result<Migrated> {
        let folder = self.next_folder()?;
        let plan = Plan {
            incoming: true,
            populated: false,
            ..self.plan.clone()
        };
        let machine = Machine::start(&plan, &folder)?;
        let host = Host::of_qemu(&folder, self.setup.memory)?;
        let uri = format!("unix:{}", folder.join(MIGRATION).display());
        host.qmp()?
            .execute("migrate-incoming", &json!({ "uri": uri }))?;

        let begun = Instant::now();
        self.host()
            .qmp()?
            .execute("migrate", &json!({ "uri": uri }))?;
        let report = self.await_migration()?;
        let took = begun.elapsed();
        let runs = poll(self.patience(), || match host.qmp() {
            Ok(mut qmp) => match qmp.execute("query-status", &json!({})) {
                Ok(status) => (status["status"] == "running").then_some(Ok(())),
                Err(e) => Some(Err(e)),
            },
            Err(e) => Some(Err(e)),
        });
        runs.context("the guest does not run where it went")??;
        self.machine().kill();
        self.move_into(Body::new(machine, host)?)?;

        let figure = |value: &Value, name: &str| {
            value[name]
                .as_u64()
                .with_context(|| format!("query-migrate tells no {name}: {report}"))
        };
        Ok(Migrated {
            transferred: figure(&report["ram"], "transferred")?,
            zero_pages: figure(&report["ram"], "duplicate")?,
            took,
            downtime: Duration::from_millis(figure(&report, "downtime")?),
        })
    }

    /// Waits for the end of a migration; gives what QEMU says of it.
    fn await_migration(&self) -> Result<Value> {
        let end = poll(self.patience(), || {
            let answer = self
                .host()
                .qmp()
                .and_then(|mut qmp| qmp.execute("query-migrate", &json!({})));
            match answer {
                Ok(report) => match report["status"].as_str() {
                    Some("completed") => Some(Ok(report)),
                    Some("failed" | "cancelled") => {
                        Some(Err(anyhow::anyhow!("the migration has failed: {report}")))
                    }
                    _ => None,
                },
                Err(e) => Some(Err(e)),
            }
        });
        end.context("the migration does not end")?
    }

    /// Writes the guest's memory to its disk, ends the machine, and wakes it up in another one.
    ///
    /// # Errors
    ///
    /// If it does not go to sleep or does not wake up as what it was.
    pub fn hibernate(&self) -> Result<()> {
        const SLEEP: Duration = Duration::from_secs(60);
        const COMMAND: &str = "echo platform >/sys/power/disk; echo disk >/sys/power/state";

        let job = self.machine().background(COMMAND, SLEEP)?;
        let id = job.id();
        let slept = poll(SLEEP, || {
            if !job.is_over() {
                return None;
            }
            // Its line ends a moment before its process.
            Some(poll(Duration::from_secs(3), || {
                self.machine().life().death()
            }))
        });
        match slept.context("the guest does not go to sleep")? {
            // The process of a guest that has gone to sleep ends well.
            Some(why) if why.contains("exit status: 0") => {}
            Some(why) => bail!("instead of going to sleep: {why}"),
            None => {
                let outcome = job.wait()?;
                bail!("the guest stays awake: {}: {}", outcome.end, outcome.output);
            }
        }
        let folder = self.next_folder()?;
        std::fs::rename(self.last_disk(), folder.join(qemu::DISK))?;
        let plan = Plan {
            populated: false,
            ..self.plan.clone()
        };
        let machine = Machine::start(&plan, &folder)?;
        // What answers is the command of before: the guest is what it was.
        let outcome = machine.channel().inherit(id, COMMAND, SLEEP).wait()?;
        ensure!(
            outcome.ok(),
            "awake again: {}: {}",
            outcome.end,
            outcome.output
        );
        let host = match self.host() {
            Host::Qemu { memory, .. } => Host::of_qemu(&folder, *memory)?,
            _ => bail!("a daemon cannot be used twice"),
        };
        self.move_into(Body::new(machine, host)?)
    }

    fn last_disk(&self) -> PathBuf {
        let number = self.bodies.iter().filter(|b| b.get().is_some()).count();
        let folder: &Path = &self.folder;
        match number {
            0 | 1 => folder.join(qemu::DISK),
            n => folder.join((n - 1).to_string()).join(qemu::DISK),
        }
    }
}
