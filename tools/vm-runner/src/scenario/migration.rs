// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Live migration from one QEMU into another, with free page hinting.
//!
//! The guest tells QEMU which of its memory is free, and QEMU does not send that.

use std::os::unix::net::UnixListener;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{After, Part, Scenario};
use crate::paths::{Driver, Guest};
use crate::process::poll;
use crate::session::{Device, Migrated, Session, Setup};
use crate::size::{GIB, MIB};

/// The feature bit of free page hinting.
const FREE_PAGE_HINT: usize = 3;
/// Memory that the guest has used once, and that is free now.
const TOUCHED: u64 = 1536 * MIB;
/// What may go over with hints, in hundredths of what goes over without.
const MOST: u64 = 40;
/// What a program uses while the guest moves.
const WORKING_SET: u64 = 24 * MIB;
/// What another one takes meanwhile; more than is free while all free pages are hinted.
const TAKEN: u64 = 320 * MIB;
/// What the driver may take to give back what it has hinted, once the guest has moved.
const SETTLE: Duration = Duration::from_secs(30);
/// What the driver lends QEMU at a time, about.
const LENT: u64 = 240 * MIB;
/// Bytes a second that go over, where the figure does not depend on it.
const FAST: u64 = 4 * GIB;

/// Lets so many bytes a second go over.
fn bandwidth(s: &Session, bytes: u64) -> Result<()> {
    let arguments = json!({ "max-bandwidth": bytes });
    s.host()
        .qmp()?
        .execute("migrate-set-parameters", &arguments)?;
    Ok(())
}

fn figures(what: &str, moved: Migrated) -> String {
    format!(
        "{what} {} MiB and {} zero pages in {:.1?}, still for {:.0?}",
        moved.transferred / MIB,
        moved.zero_pages,
        moved.took,
        moved.downtime
    )
}

/// An idle guest with much memory that it has used once and freed goes over without that memory.
fn idle(s: &Session) -> Result<()> {
    let megabytes = TOUCHED / MIB;
    s.machine().sh_within(
        &format!("vbrs-guest stamp /mem/once {megabytes}M 5 1 && rm /mem/once"),
        s.patience(),
    )?;
    // The same guest, before there is a driver.
    bandwidth(s, FAST)?;
    let without = s.migrate()?;
    s.sentinel_intact()?;
    ensure!(
        without.transferred > TOUCHED,
        "without hints only {} MiB go over",
        without.transferred / MIB
    );

    s.load("")?;
    ensure!(
        s.negotiated(FREE_PAGE_HINT)?,
        "free page hinting is not negotiated"
    );
    let free = s.account()?.free()?;
    let with = s.migrate()?;
    s.sentinel_intact()?;
    s.note(figures("without", without));
    s.note(figures("with", with));
    let percent = with.transferred * 100 / without.transferred;
    s.note(format!("{percent} %"));
    ensure!(
        percent <= MOST,
        "with hints {percent} % of what goes over without them: {} and {} MiB",
        with.transferred / MIB,
        without.transferred / MIB
    );
    s.await_free(free, SETTLE)
}

/// Programs that use memory all the time find every byte as they wrote it, wherever they run: one with a
/// steady working set, and one that needs more than is free while the driver holds free pages.
fn writer(s: &Session) -> Result<()> {
    bandwidth(s, 128 * MIB)?;
    let free = s.account()?.free()?;
    // In the background of the guest, not of the runner: nothing is said while the guest moves.
    s.sh(&format!(
        "vbrs-guest churn {WORKING_SET} /tmp/churning >/tmp/churned 2>&1 &"
    ))?;
    s.sh_until("test -e /tmp/churning")?;
    s.sh(&format!(
        "(sleep 0.3; vbrs-guest fill /mem/taken {TAKEN} 9; echo $? >/tmp/taken) >/dev/console 2>&1 &"
    ))?;
    let moved = s.migrate()?;
    s.note(figures("under a writer", moved));
    s.sh_until("test -e /tmp/taken")?;
    let status = s.sh("cat /tmp/taken")?;
    ensure!(status == "0", "taking memory meanwhile: status {status}");
    s.sh("vbrs-guest verify /mem/taken 9")?;
    s.sh("rm /tmp/churning")?;
    s.sh_until("grep . /tmp/churned")?;
    let churned = s.sh("cat /tmp/churned")?;
    let pieces: u64 = churned
        .parse()
        .ok()
        .with_context(|| format!("the program that writes all the time: {churned}"))?;
    ensure!(pieces > 24, "only {pieces} pieces were checked");
    s.note(format!("{pieces} pieces checked"));
    s.sentinel_intact()?;
    s.sh("rm /mem/taken")?;
    s.await_free(free, SETTLE)
}

/// A migration that is given up leaves the guest with all of its memory, and the balloon works.
fn cancelled(s: &Session) -> Result<()> {
    let free = s.account()?.free()?;
    // Nobody reads there. Before long QEMU waits for that with what its hints need, too, so it has to do with what
    // the driver lends it at a time, or little more.
    let nowhere = s.folder().join("nowhere");
    let _listener = UnixListener::bind(&nowhere)?;
    let uri = format!("unix:{}", nowhere.display());
    s.host().qmp()?.execute("migrate", &json!({ "uri": uri }))?;
    // Without dropping caches: what is hinted counts as one.
    let mut held = 0;
    let hinted = poll(s.patience(), || {
        match s.account_as_is().and_then(|a| a.free()) {
            Ok(now) => {
                held = free.saturating_sub(now);
                (held > LENT / 2).then_some(Ok(()))
            }
            Err(e) => Some(Err(e)),
        }
    });
    hinted.with_context(|| format!("the driver hints only {} MiB", held / MIB))??;
    s.host().qmp()?.execute("migrate_cancel", &json!({}))?;
    let over = poll(s.patience(), || {
        let mut qmp = s.host().qmp().ok()?;
        let report = qmp.execute("query-migrate", &json!({})).ok()?;
        (report["status"] == "cancelled").then_some(())
    });
    over.context("the migration is not cancelled in time")?;
    s.await_free(free, SETTLE)?;
    s.note(format!(
        "{} MiB were hinted when it was cancelled",
        held / MIB
    ));
    s.alive_and_well()?;
    if s.driver() == Driver::Rust {
        ensure!(s.attribute("protocol")? == "pfn-array");
    }
    s.resize(GIB)?;
    s.balanced(GIB)?;
    s.resize(0)?;
    s.balanced(0)
}

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "migration",
    about: "moves into another QEMU with free page hinting: few bytes, none of them wrong",
    guests: &[Guest::Stock],
    setup: Setup {
        memory: 2 * GIB,
        device: Device::Qemu(&["iothread=balloon-io", "free-page-hint=on"]),
        load: None,
        populated: false,
        sentinel: 32 * MIB,
        // Else pages are zeroed when the driver takes them to tell of them, and cost next to nothing
        // even if it does not.
        command_line: "init_on_alloc=0",
        ..Setup::USUAL
    },
    parts: &[
        Part {
            name: "idle",
            run: idle,
        },
        Part {
            name: "cancelled",
            run: cancelled,
        },
        Part {
            name: "writer",
            run: writer,
        },
    ],
    after: After::Clean,
    any_driver: true,
    seconds: 90,
    ..Scenario::USUAL
}];
