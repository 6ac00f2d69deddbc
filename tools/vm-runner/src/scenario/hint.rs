// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Free page hinting with our daemon: rounds, shortage of memory, and hosts that keep what they get.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use balloon_control::message::{HintAction, HintState, HintStatus};

use super::{After, Part, Scenario, only};
use crate::host::Dialect;
use crate::process::poll;
use crate::session::{Device, Session, Setup};
use crate::size::{GIB, MIB, show};

/// The feature bit.
const BIT: usize = 3;
const SOON: Duration = Duration::from_secs(30);

const HINTING: Setup = Setup {
    device: Device::Daemon {
        dialect: Dialect::Bitmap,
        options: &[
            "--features",
            "must-tell-host,stats,free-page-hint,page-poison,reporting",
            "--fault",
            "none",
        ],
    },
    ..Setup::USUAL
};

/// What nobody uses now. Without dropping caches, as what is hinted counts as one.
fn free(s: &Session) -> Result<u64> {
    s.account_as_is()?.free()
}

/// A whole round: the guest tells all that it can spare.
fn round(s: &Session) -> Result<HintStatus> {
    let hint = s.host().daemon()?.hint_round(SOON)?;
    ensure!(
        hint.state == HintState::Finished,
        "the round is {} after {SOON:.0?}",
        hint.state.name()
    );
    Ok(hint)
}

/// The host is done, and the guest has its memory again.
fn done(s: &Session, before: u64) -> Result<()> {
    s.host().daemon()?.hint(HintAction::Done)?;
    s.await_free(before, SOON)
}

fn rounds(s: &Session) -> Result<()> {
    ensure!(s.negotiated(BIT)?, "free page hinting is not negotiated");
    let before = free(s)?;
    let first = round(s)?;
    let during = free(s)?;
    ensure!(
        first.bytes > before / 2,
        "only {} of {} are hinted",
        show(first.bytes),
        show(before)
    );
    ensure!(
        during + first.bytes < before + s.slack(),
        "{} are hinted, and {} of {} are still free",
        show(first.bytes),
        show(during),
        show(before)
    );
    s.alive_and_well()?;

    // What is hinted stays so: another round has little to add.
    s.host().daemon()?.hint(HintAction::Stop)?;
    let second = round(s)?;
    ensure!(second.id != first.id);
    ensure!(
        second.bytes < first.bytes / 4,
        "{} are hinted once more",
        show(second.bytes)
    );
    done(s, before)?;
    let third = round(s)?;
    ensure!(
        third.bytes > first.bytes / 2,
        "only {} are hinted after the host was done",
        show(third.bytes)
    );
    s.note(format!("{} hinted of {}", show(first.bytes), show(before)));
    done(s, before)?;
    s.sentinel_intact()
}

/// A program gets the memory that it needs, although all of it is hinted.
fn pressed(s: &Session) -> Result<()> {
    let before = free(s)?;
    let hinted = round(s)?;
    let need = (before * 3 / 4) / MIB * MIB;
    s.sh(&format!("vbrs-guest fill /mem/needed {need} 3"))?;
    s.sh("vbrs-guest verify /mem/needed 3")?;
    s.note(format!(
        "{} for a program while {} of {} were hinted",
        show(need),
        show(hinted.bytes),
        show(before)
    ));
    s.alive_and_well()?;
    s.sh("rm /mem/needed")?;
    done(s, before)
}

/// The balloon works beside the hints.
fn beside(s: &Session) -> Result<()> {
    let before = free(s)?;
    round(s)?;
    done(s, before)?;
    s.inflate(96 * MIB)?;
    // What is hinted is no memory that the balloon could not have.
    round(s)?;
    s.resize(160 * MIB)?;
    s.host().daemon()?.hint(HintAction::Done)?;
    s.await_free(before - 160 * MIB, SOON)?;
    s.balanced(160 * MIB)?;
    s.deflate().map(drop)
}

/// Blocks that come back in another order than they went.
fn reversed(s: &Session) -> Result<()> {
    let before = free(s)?;
    s.host().daemon()?.faults(&["reverse=4", "queue=hint"])?;
    s.host().daemon()?.hint(HintAction::Start)?;
    std::thread::sleep(Duration::from_millis(500));
    s.host().daemon()?.faults(&[])?;
    done(s, before)?;
    s.sentinel_intact()
}

/// All that the kernel has ever allocated, in pages.
fn allocations(s: &Session) -> Result<u64> {
    s.sh("awk '/^pgalloc_/ { n += $2 } END { printf \"%d\", n }' /proc/vmstat")?
        .trim()
        .parse()
        .context("the allocations")
}

/// A host that keeps all it gets: the driver lends it no more than the guest can do without, waits, does not
/// spin, and unloads.
fn kept(s: &Session) -> Result<()> {
    const CALM: u64 = 64 * MIB / 4096;
    /// What the driver lends at most; of a guest of 2 GiB a little less.
    const MOST: u64 = 256 * MIB;

    let before = free(s)?;
    s.host().daemon()?.faults(&["withhold", "queue=hint"])?;
    s.host().daemon()?.hint(HintAction::Start)?;
    poll(SOON, || match free(s) {
        Ok(free) => (free + MOST / 2 < before).then_some(Ok(())),
        Err(e) => Some(Err(e)),
    })
    .context("the driver does not hint")??;
    std::thread::sleep(Duration::from_millis(500));
    let (begun, lent) = (allocations(s)?, free(s)?);
    std::thread::sleep(Duration::from_secs(1));
    let grown = allocations(s)? - begun;
    ensure!(
        grown < CALM,
        "{grown} pages were allocated while the host had enough"
    );
    let kept = before.saturating_sub(lent);
    ensure!(
        kept > MOST * 3 / 4 && kept < MOST + s.slack(),
        "the host has {} of {}",
        show(kept),
        show(before)
    );
    s.alive_and_well()?;

    // Not even when the host is done: it may still write what it holds.
    s.host().daemon()?.hint(HintAction::Done)?;
    std::thread::sleep(Duration::from_millis(500));
    let held = free(s)?;
    ensure!(
        held < lent + s.slack() + 8 * MIB,
        "{} came back that the host still had",
        show(held - lent)
    );
    s.host().daemon()?.faults(&[])?;
    s.await_free(before, SOON)?;

    s.host().daemon()?.faults(&["withhold", "queue=hint"])?;
    s.host().daemon()?.hint(HintAction::Start)?;
    std::thread::sleep(Duration::from_millis(500));
    s.unload()?;
    s.await_free(before, SOON)?;
    s.host().daemon()?.faults(&[])?;
    s.load("")
}

const PARTS: &[Part] = &[
    Part {
        name: "rounds",
        run: rounds,
    },
    Part {
        name: "pressed",
        run: pressed,
    },
    Part {
        name: "beside-the-balloon",
        run: beside,
    },
    Part {
        name: "reversed",
        run: reversed,
    },
];

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "hint",
        about: "tells free memory in rounds, and gives it back when it is needed",
        setup: HINTING,
        parts: PARTS,
        seconds: 5,
        ..Scenario::USUAL
    },
    Scenario {
        name: "hint-kept",
        about: "waits for a host that keeps what is hinted, and unloads beside it",
        setup: Setup {
            memory: 2 * GIB,
            populated: false,
            ..HINTING
        },
        parts: &[only(kept)],
        // All of that memory has been looked at; to use it all takes long.
        after: After::PowerOff,
        any_driver: true,
        seconds: 8,
        ..Scenario::USUAL
    },
];
