// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Loading, unloading, unbinding and powering off, at any moment.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{After, Scenario, only};
use crate::host::{Dialect, Host};
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE};

const FULL: u64 = 144 * MIB + 5 * PAGE;
const SOON: Duration = Duration::from_secs(60);

/// What the host was told to be the guest's again, so far, if it counts that.
fn told_back(s: &Session) -> Result<Option<u64>> {
    match s.host() {
        Host::Daemon(daemon) => Ok(Some(daemon.status()?.counters.deflated_pages * PAGE)),
        _ => Ok(None),
    }
}

/// A host that was told nothing would go on for ever as if it had the pages.
fn all_told(s: &Session, before: Option<u64>) -> Result<()> {
    if let (Some(now), Some(before)) = (told_back(s)?, before) {
        ensure!(
            now - before == FULL,
            "the host is told of {} bytes",
            now - before
        );
    }
    Ok(())
}

pub(super) fn reload(s: &Session) -> Result<()> {
    for _ in 0..3 {
        s.resize(FULL)?;
        let before = told_back(s)?;
        s.unload()?;
        all_told(s, before)?;
        s.sentinel_intact()?;
        // The target has stayed, so the driver goes there by itself.
        s.load("")?;
        s.await_actual(FULL, SOON)?;
        s.balanced(FULL)?;
    }
    Ok(())
}

pub(super) fn unbind(s: &Session) -> Result<()> {
    s.inflate(FULL)?;
    let full = s.account()?.free()?;
    let before = told_back(s)?;
    s.bind(false)?;
    ensure!(!s.bound()?);
    all_told(s, before)?;
    let free = s.account()?.free()?;
    ensure!(
        free >= full + FULL - s.slack(),
        "unbinding gives back {} bytes",
        free - full
    );
    s.bind(true)?;
    s.await_actual(FULL, SOON)?;
    s.balanced(FULL)
}

fn many_reloads(s: &Session) -> Result<()> {
    const TIMES: u64 = 16;

    for i in 0..TIMES {
        s.target((i % 4) * 20 * MIB + i * PAGE)?;
        // Some are cut short, and some meet their target.
        if i % 3 == 0 {
            s.await_actual((i % 4) * 20 * MIB + i * PAGE, SOON)?;
        }
        s.unload()?;
        s.load("")?;
    }
    s.target(0)
}

pub(super) fn unload_in_flight(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    daemon.faults(&["delay=50"])?;
    for target in [FULL, 0] {
        let here = s.actual()?;
        s.target(target)?;
        s.await_balloon(SOON, "on its way", |actual| {
            actual != here || target == here
        })?;
        let begun = Instant::now();
        s.unload()?;
        ensure!(
            begun.elapsed() < SOON,
            "unloading takes {:.1?}",
            begun.elapsed()
        );
        s.load("")?;
    }
    daemon.faults(&[])
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "reload",
        about: "unloads with a full balloon, comes back and fills it again, three times",
        parts: &[only(reload)],
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "unbind-bind",
        about: "gives everything back when unbound, and fills the balloon again when bound",
        parts: &[only(unbind)],
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "many-reloads",
        about: "loses nothing in 16 times of loading and unloading with changing targets",
        parts: &[only(many_reloads)],
        seconds: 8,
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "unload-in-flight",
        about: "unloads while a slow host keeps it on its way",
        setup: Setup {
            device: Device::Daemon {
                dialect: Dialect::Bitmap,
                options: &["--fault", "none"],
            },
            ..Setup::USUAL
        },
        parts: &[only(unload_in_flight)],
        seconds: 5,
        ..Scenario::USUAL
    },
    Scenario {
        name: "power-off",
        about: "powers off with a full balloon",
        parts: &[only(|s| s.inflate(FULL).map(drop))],
        after: After::PowerOff,
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "power-off-in-flight",
        about: "powers off while it inflates",
        parts: &[only(|s| {
            s.target(FULL)?;
            Ok(())
        })],
        after: After::PowerOff,
        any_driver: true,
        ..Scenario::USUAL
    },
];
