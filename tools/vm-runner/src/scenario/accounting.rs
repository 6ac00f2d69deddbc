// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the guest's kernel counts.

use anyhow::{Context, Result, ensure};

use super::{Scenario, only};
use crate::host::Dialect;
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE};

/// `MemTotal`, `Balloon:`, the zones and the event counters move by what is in the balloon, to the
/// page.
fn counters(s: &Session) -> Result<()> {
    let events = |s: &Session| -> Result<(u64, u64)> {
        let account = s.account()?;
        Ok((
            account.vmstat("balloon_inflate")?,
            account.vmstat("balloon_deflate")?,
        ))
    };
    let total = s.before().total()?;
    let before = events(s)?;
    let bytes = 70 * MIB + 5 * PAGE;
    // This checks MemTotal, meminfo and the zones.
    s.inflate(bytes)?;
    let keeps = s.negotiated(2)?;
    let now = s.account()?.total()?;
    ensure!(
        now == if keeps { total } else { total - bytes },
        "MemTotal is {now}, was {total}"
    );
    ensure!(s.account()?.vmstat("nr_balloon_pages")? == bytes / PAGE);
    let up = events(s)?;
    ensure!(
        up.0 - before.0 == bytes / PAGE,
        "balloon_inflate grew by {}",
        up.0 - before.0
    );
    s.deflate()?;
    let down = events(s)?;
    ensure!(
        down.1 - before.1 == bytes / PAGE,
        "balloon_deflate grew by {}",
        down.1 - before.1
    );
    ensure!(down.0 == up.0);
    ensure!(s.account()?.managed == s.before().managed);
    s.note(format!(
        "MemTotal {}",
        if keeps { "stays" } else { "shrinks" }
    ));
    Ok(())
}

/// What the guest reports is what it has.
fn statistics(s: &Session) -> Result<()> {
    s.inflate(32 * MIB)?;
    let stats = s.host().daemon()?.stats()?;
    let now = s.account_as_is()?;
    let near = |name: &str, have: u64| -> Result<()> {
        let said = stats.values.get(name);
        let said = *said.with_context(|| format!("no {name} among {:?}", stats.values))?;
        ensure!(
            said.abs_diff(have) <= s.slack(),
            "{name} is {said}, the guest says {have}"
        );
        Ok(())
    };
    near("total-memory", now.total()?)?;
    near("free-memory", now.meminfo("MemFree")?)?;
    near("available-memory", now.available()?)?;
    s.note(format!("{} values", stats.values.len()));
    Ok(())
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "accounting",
        about: "MemTotal, Balloon, vmstat and the zones count the balloon to the page",
        parts: &[only(counters)],
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "accounting-deflate-on-oom",
        about: "the same on a host that offers deflate-on-oom: who takes it keeps MemTotal",
        setup: Setup {
            device: Device::Daemon {
                dialect: Dialect::Bitmap,
                options: &["--features", "deflate-on-oom,must-tell-host"],
            },
            ..Setup::USUAL
        },
        parts: &[only(counters)],
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "statistics",
        about: "reports statistics that agree with /proc/meminfo",
        parts: &[only(statistics)],
        any_driver: true,
        ..Scenario::USUAL
    },
];
