// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Sleeping and waking up. The kernel goes all the way but for the last step, by its own `pm_test`: nobody
//! could wake an emulated machine that sleeps soundly.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Part, Scenario, only};
use crate::host::Dialect;
use crate::paths::Guest;
use crate::process::poll;
use crate::session::{Device, Session, Setup};
use crate::size::{GIB, MIB, PAGE};

const FULL: u64 = 144 * MIB + 5 * PAGE;
const SOON: Duration = Duration::from_secs(60);
const STATES: [&str; 3] = ["freeze", "mem", "disk"];

/// Goes to sleep up to a step of it, and wakes up.
fn sleep(s: &Session, state: &str) -> Result<()> {
    s.sh(&format!(
        "echo 1 > /sys/module/suspend/parameters/pm_test_delay; \
         echo 1 > /sys/module/hibernate/parameters/pm_test_delay; \
         echo platform > /sys/power/pm_test; echo {state} > /sys/power/state"
    ))
    .with_context(|| format!("sleep ({state})"))
    .map(drop)
}

/// The driver gives everything back for the time it sleeps, and takes it again.
fn full(s: &Session) -> Result<()> {
    s.inflate(FULL)?;
    for state in STATES {
        sleep(s, state)?;
        s.await_actual(FULL, SOON)?;
        s.sentinel_intact()?;
        s.balanced(FULL)?;
    }
    Ok(())
}

/// The target changes all the time, while it falls asleep, too.
fn in_flight(s: &Session) -> Result<()> {
    for (i, state) in STATES.into_iter().cycle().take(6).enumerate() {
        let target = if i % 2 == 0 { FULL } else { PAGE };
        s.target(target)?;
        sleep(s, state)?;
        s.await_actual(target, SOON)?;
    }
    s.sentinel_intact()
}

/// A file of the device's power management.
fn power(file: &str) -> String {
    format!("cat /sys/bus/virtio/drivers/virtio_balloon*/virtio*/power/{file}")
}

/// The system is kept awake while there is something to do, and not while it cannot be done.
fn awake(s: &Session) -> Result<()> {
    s.sh("echo enabled | tee /sys/bus/virtio/drivers/virtio_balloon*/virtio*/power/wakeup")?;
    s.inflate(FULL)?;
    ensure!(s.sh(&power("wakeup_active"))?.trim() == "0", "still awake");
    let count: u64 = s.sh(&power("wakeup_active_count"))?.trim().parse()?;
    ensure!(count > 0, "it was never kept awake");

    s.target(4 * GIB)?;
    s.await_standstill(Duration::from_millis(1500))?;
    ensure!(
        s.sh(&power("wakeup_active"))?.trim() == "0",
        "a target that cannot be met keeps the system awake"
    );
    sleep(s, "mem")?;
    s.resize(FULL)?;
    s.sentinel_intact()
}

/// A host that takes what it is sent, and never answers again, does not keep the guest from sleeping.
fn host_is_dead(s: &Session) -> Result<()> {
    s.inflate(FULL)?;
    s.host().daemon()?.faults(&["withhold"])?;
    s.target(FULL + 16 * MIB)?;
    let begun = Instant::now();
    sleep(s, "mem")?;
    ensure!(
        begun.elapsed() < Duration::from_secs(120),
        "falling asleep takes {:.0?}",
        begun.elapsed()
    );
    s.host().daemon()?.faults(&[])?;
    s.await_actual(FULL + 16 * MIB, SOON)?;
    s.sentinel_intact()
}

/// A device that was asleep knows nothing of what it asked for before: what was hinted is the guest's again,
/// and an id that comes again is a new round.
fn hinted(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    let before = s.account_as_is()?.free()?;
    let hint = daemon.hint_round(SOON)?;
    ensure!(
        hint.bytes > before / 2,
        "only {} bytes are hinted",
        hint.bytes
    );
    sleep(s, "mem")?;
    s.await_free(before, SOON)?;

    let rounds = daemon.status()?.counters.hint_requests;
    let id: String = hint.id.to_le_bytes().map(|b| format!("{b:02x}")).concat();
    daemon.faults(&[&format!("config=8:{id}")])?;
    s.target(PAGE)?;
    poll(SOON, || match daemon.status() {
        Ok(status) => (status.counters.hint_requests > rounds + 1).then_some(Ok(())),
        Err(e) => Some(Err(e)),
    })
    .context("an id that comes again after sleep is not answered")??;
    daemon.faults(&["config=8:01000000"])?;
    s.target(0)?;
    s.await_free(before, SOON)?;
    daemon.faults(&[])?;
    s.sentinel_intact()
}

const PARTS: &[Part] = &[
    Part {
        name: "full",
        run: full,
    },
    Part {
        name: "in-flight",
        run: in_flight,
    },
    Part {
        name: "kept-awake",
        run: awake,
    },
];

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "pm-test",
        about: "sleeps and wakes up with a full balloon and while it moves, and keeps awake for work alone",
        guests: &[Guest::Debug],
        parts: PARTS,
        seconds: 60,
        ..Scenario::USUAL
    },
    Scenario {
        name: "pm-test-qemu",
        about: "the same with all that QEMU's own balloon offers",
        guests: &[Guest::Debug],
        setup: Setup {
            device: Device::Qemu(&[
                "deflate-on-oom=on",
                "free-page-reporting=on",
                "free-page-hint=on",
                "iothread=balloon-io",
            ]),
            ..Setup::USUAL
        },
        parts: &[only(full)],
        seconds: 40,
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "pm-test-host",
        about: "forgets what the host asked for while it sleeps, and sleeps although it never answers again",
        guests: &[Guest::Debug],
        setup: Setup {
            device: Device::Daemon {
                dialect: Dialect::Bitmap,
                options: &[
                    "--features",
                    "must-tell-host,stats,free-page-hint",
                    "--fault",
                    "none",
                ],
            },
            ..Setup::USUAL
        },
        parts: &[
            Part {
                name: "hinted",
                run: hinted,
            },
            Part {
                name: "dead",
                run: host_is_dead,
            },
        ],
        seconds: 40,
        ..Scenario::USUAL
    },
];
