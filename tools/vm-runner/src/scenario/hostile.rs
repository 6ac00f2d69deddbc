// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Hosts that are slow, broken or hostile. The guest must live on, and the driver must unload.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{After, Scenario, only};
use crate::host::Dialect;
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE};

const FULL: u64 = 96 * MIB + 3 * PAGE;
/// However the host behaves, unloading ends within this time.
const UNLOAD: Duration = Duration::from_secs(20);

const HOSTILE: Setup = Setup {
    device: Device::Daemon {
        dialect: Dialect::Bitmap,
        options: &["--fault", "none"],
    },
    ..Setup::USUAL
};

/// Unloads in time, and the guest has all of its memory again.
fn unloads(s: &Session) -> Result<()> {
    let begun = Instant::now();
    s.machine()
        .sh_within(&format!("rmmod {}", s.driver().module()), UNLOAD)
        .context("unloading beside a hostile host")?;
    s.note(format!("unloads in {:.1?}", begun.elapsed()));
    s.alive_and_well()?;
    s.left_nothing()
}

fn withheld(s: &Session) -> Result<()> {
    s.host().daemon()?.faults(&["withhold=1"])?;
    s.target(FULL)?;
    std::thread::sleep(Duration::from_millis(500));
    s.alive_and_well()?;
    unloads(s)
}

fn withheld_while_full(s: &Session) -> Result<()> {
    s.inflate(FULL)?;
    s.host().daemon()?.faults(&["withhold"])?;
    s.target(0)?;
    std::thread::sleep(Duration::from_millis(500));
    s.alive_and_well()?;
    unloads(s)
}

/// What was withheld is completed in the end, and the driver goes on as if nothing had been.
fn withheld_and_released(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    daemon.faults(&["withhold=1"])?;
    s.target(FULL)?;
    std::thread::sleep(Duration::from_millis(500));
    daemon.faults(&[])?;
    s.await_actual(FULL, s.patience())?;
    s.balanced(FULL)?;
    s.sentinel_intact()
}

/// With MUST_TELL_HOST, no page is used again before the host knows.
fn told_first(s: &Session) -> Result<()> {
    ensure!(
        s.negotiated(0)?,
        "MUST_TELL_HOST is offered and not acknowledged"
    );
    s.inflate(FULL)?;
    let daemon = s.host().daemon()?;
    daemon.faults(&["withhold"])?;
    let before = s.account()?.free()?;
    s.target(0)?;
    std::thread::sleep(Duration::from_secs(1));
    let meanwhile = s.account()?.free()?;
    ensure!(
        meanwhile < before + s.slack(),
        "{} KiB came back before the host was told",
        (meanwhile - before) >> 10
    );
    daemon.faults(&[])?;
    s.await_actual(0, s.patience())?;
    s.balanced(0)
}

fn bad_id(s: &Session) -> Result<()> {
    s.resize(8 * MIB)?;
    s.host().daemon()?.faults(&["used-id=12345"])?;
    s.target(FULL)?;
    s.await_log("id 12345 out of range", s.patience())?;
    s.alive_and_well()?;
    unloads(s)
}

fn bad_length(s: &Session) -> Result<()> {
    s.host().daemon()?.faults(&["used-len=4294967295"])?;
    s.inflate(FULL)?;
    s.deflate()?;
    s.host().daemon()?.faults(&[])
}

fn silent(s: &Session) -> Result<()> {
    s.host().daemon()?.faults(&["no-interrupt"])?;
    s.target(FULL)?;
    std::thread::sleep(Duration::from_millis(500));
    s.alive_and_well()?;
    unloads(s)
}

fn slow(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    daemon.faults(&["delay=100"])?;
    let took = s.inflate(FULL)?;
    s.note(format!("{took:.1?} with 100 ms a request"));
    s.alive_and_well()?;
    s.deflate()?;
    daemon.faults(&[])
}

pub(super) fn storm(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    daemon.faults(&["storm=1000"])?;
    s.inflate(FULL)?;
    s.alive_and_well()?;
    s.inflate(17 * PAGE)?;
    daemon.faults(&["flip=10"])?;
    std::thread::sleep(Duration::from_secs(2));
    s.alive_and_well()?;
    daemon.faults(&[])?;
    s.inflate(FULL)?;
    s.sentinel_intact()
}

fn storm_unload(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    s.target(FULL)?;
    daemon.faults(&["flip=50"])?;
    std::thread::sleep(Duration::from_secs(1));
    unloads(s)?;
    daemon.faults(&[])
}

fn killed(s: &Session) -> Result<()> {
    // The transport of User Mode Linux wonders about the end of its connection.
    s.expect_in_log("virtio_uml.c");
    s.inflate(FULL)?;
    s.host().daemon()?.kill();
    s.alive_and_well()?;
    s.sentinel_intact()?;
    unloads(s)
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "withheld",
        about: "unloads while the host acknowledges no inflated page",
        setup: HOSTILE,
        parts: &[only(withheld)],
        after: After::PowerOff,
        seconds: 12,
        ..Scenario::USUAL
    },
    Scenario {
        name: "withheld-while-full",
        about: "unloads with a full balloon while the host acknowledges no deflated page",
        setup: HOSTILE,
        parts: &[only(withheld_while_full)],
        after: After::PowerOff,
        seconds: 12,
        ..Scenario::USUAL
    },
    Scenario {
        name: "withheld-and-released",
        about: "goes on when a host that acknowledged nothing for a while does so again",
        setup: HOSTILE,
        parts: &[only(withheld_and_released)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "must-tell-host",
        about: "with MUST_TELL_HOST, uses no page before the host has acknowledged it",
        setup: Setup {
            device: Device::Daemon {
                dialect: Dialect::Bitmap,
                options: &["--fault", "none", "--features", "must-tell-host"],
            },
            ..Setup::USUAL
        },
        parts: &[only(told_first)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "bad-used-id",
        about: "unloads after the host has put a false id into the used ring",
        setup: HOSTILE,
        parts: &[only(bad_id)],
        after: After::PowerOff,
        seconds: 5,
        ..Scenario::USUAL
    },
    Scenario {
        name: "bad-used-length",
        about: "does not believe the lengths in the used ring",
        setup: HOSTILE,
        parts: &[only(bad_length)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "no-interrupt",
        about: "unloads while the host completes requests and never says so",
        setup: HOSTILE,
        parts: &[only(silent)],
        after: After::PowerOff,
        seconds: 12,
        ..Scenario::USUAL
    },
    Scenario {
        name: "slow-host",
        about: "inflates and deflates with a host that takes 100 ms for each request",
        setup: HOSTILE,
        parts: &[only(slow)],
        seconds: 8,
        ..Scenario::USUAL
    },
    Scenario {
        name: "config-storm",
        about: "converges under 1000 config changes a second and a target that flips",
        setup: HOSTILE,
        parts: &[only(storm)],
        seconds: 8,
        ..Scenario::USUAL
    },
    Scenario {
        name: "unload-under-storm",
        about: "unloads while the target flips 50 times a second",
        setup: HOSTILE,
        parts: &[only(storm_unload)],
        after: After::PowerOff,
        ..Scenario::USUAL
    },
    Scenario {
        name: "daemon-killed",
        about: "lives on and unloads when the daemon is killed with a full balloon",
        setup: HOSTILE,
        parts: &[only(killed)],
        after: After::Nothing,
        seconds: 5,
        ..Scenario::USUAL
    },
];
