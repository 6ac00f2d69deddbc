// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Guests that have not got what the host wants, or only in pieces.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Scenario, only};
use crate::host::Dialect;
use crate::paths::Driver;
use crate::session::{Device, Session, Setup};
use crate::size::{BLOCK, GIB, MIB, PAGE, show};

const STILL: Duration = Duration::from_millis(1500);
/// The longest pause between two attempts is 10 s.
const RESUME: Duration = Duration::from_secs(30);

/// What a driver says when the guest cannot spare more.
fn starved(driver: Driver) -> &'static str {
    match driver {
        Driver::Rust => "cannot spare more memory",
        Driver::C => "Out of puff",
    }
}

/// A target above the guest's memory is approached, not met, and the guest stays usable; when memory
/// becomes free, the driver goes on by itself.
pub(super) fn unreachable(s: &Session) -> Result<()> {
    let total = s.before().available()?;
    let file = total / 3 / MIB * MIB;
    s.sh(&format!("vbrs-guest fill /mem/held {file} 1"))?;

    s.target(4 * GIB)?;
    let stuck = s.await_standstill(STILL)?;
    ensure!(stuck > total / 4, "the balloon stops at {}", show(stuck));
    s.alive_and_well()?;
    let left = s.account()?.available()?;
    ensure!(
        left > 8 * MIB,
        "only {} KiB are left to the guest",
        left >> 10
    );
    s.sh("vbrs-guest verify /mem/held 1")?;

    s.sh("rm /mem/held")?;
    s.await_balloon(RESUME, "on its way again", |actual| {
        actual > stuck + file / 2
    })?;
    let stuck = s.await_standstill(STILL)?;
    s.alive_and_well()?;
    // The guest can spare a bit more whenever something ends: have it stay where it is.
    let stuck = s.actual()?.min(stuck);
    s.inflate(stuck)?;

    let lines = s
        .log()?
        .iter()
        .filter(|line| line.contains(starved(s.driver())))
        .count();
    ensure!((1..=2).contains(&lines), "{lines} lines in the log");
    s.note(format!("{} of {}", show(stuck), show(s.machine().memory())));
    s.sentinel_intact()
}

/// All that the driver takes of a small guest leaves it usable.
fn small_guest(s: &Session) -> Result<()> {
    s.target(s.machine().memory())?;
    let most = s.await_standstill(STILL)?;
    ensure!(most >= 8 * MIB, "the balloon stops at {}", show(most));
    for _ in 0..3 {
        s.alive_and_well()?;
    }
    // A program that needs a bit of memory gets it.
    s.sh("vbrs-guest fill /mem/bit 4M 1 && vbrs-guest verify /mem/bit 1 && rm /mem/bit")?;
    s.note(format!("{} of {}", show(most), show(s.machine().memory())));
    s.alive_and_well()
}

fn reserve_parameter(s: &Session) -> Result<()> {
    s.target(GIB)?;
    s.await_standstill(STILL)?;
    let left = s.account()?.available()?;
    ensure!(
        (60 * MIB..=90 * MIB).contains(&left),
        "{} KiB are left with reserve_mb=64",
        left >> 10
    );
    s.alive_and_well()
}

/// Page cache is no reason to leave the target unmet.
fn cache_heavy(s: &Session) -> Result<()> {
    // The cache of a disk goes with the last one who has it open.
    let open = s
        .machine()
        .background("sleep 1000 </dev/ubda", Duration::from_secs(1000))?;
    s.sh("dd if=/dev/ubda of=/dev/null bs=1M count=160")?;
    let before = s.account_as_is()?;
    let cached = before.meminfo("Buffers")? + before.meminfo("Cached")?;
    let free = before.free()?;
    ensure!(cached > 140 * MIB, "only {} KiB are cached", cached >> 10);
    let target = (free + 80 * MIB) / PAGE * PAGE;
    s.resize(target)
        .with_context(|| format!("{} KiB were free, {} KiB cached", free >> 10, cached >> 10))?;
    s.alive_and_well()?;
    s.balanced(target)?;
    s.note(format!("{} with {} KiB free", show(target), free >> 10));
    open.kill()
}

/// Free pages in blocks of 2 MiB and more, from /proc/buddyinfo.
fn free_in_blocks(s: &Session) -> Result<u64> {
    let order = (BLOCK / PAGE).ilog2();
    let text = s.sh("cat /proc/buddyinfo")?;
    let mut bytes = 0;
    for line in text.lines() {
        // "Node 0, zone   Normal   1   2 …": the first number is of order 0.
        let counts = line.split_whitespace().skip(4);
        for (i, count) in (0..).zip(counts) {
            if i >= order {
                bytes += count.parse::<u64>()? << i;
            }
        }
    }
    Ok(bytes * PAGE)
}

/// No whole block is free: single pages, many runs, each page told once.
pub(super) fn fragmented(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    let most = s.account()?.available()?.saturating_sub(14 * MIB) / BLOCK * BLOCK;
    s.machine().sh_within(
        &format!("vbrs-guest fragment /mem/pieces {most}"),
        s.patience(),
    )?;
    let blocks = free_in_blocks(s)?;
    let before = daemon.status()?.counters;
    let migrated = s.account()?.vmstat("balloon_migrate")?;
    let target = most / 4 / PAGE * PAGE + 3 * PAGE;
    // Whole blocks go first. What the kernel keeps for itself leaves some; the rest must be single pages.
    ensure!(
        blocks < target * 3 / 4,
        "{} are free in whole blocks, for a balloon of {}",
        show(blocks),
        show(target)
    );
    s.resize(target)?;
    s.alive_and_well()?;
    s.sentinel_intact()?;

    let counted = daemon.status()?.counters.since(&before);
    // Compaction may already move pages of the balloon, which are told anew then.
    let migrated = s.account()?.vmstat("balloon_migrate")? - migrated;
    let told = target / PAGE..=target / PAGE + migrated;
    ensure!(
        told.contains(&counted.inflated_pages),
        "{} pages told for {}, {migrated} of them moved",
        counted.inflated_pages,
        target / PAGE
    );
    // Pages side by side are rare here.
    let singles = target.saturating_sub(blocks) / PAGE;
    ensure!(
        counted.runs > singles / 4,
        "{} runs for {singles} single pages",
        counted.runs
    );
    s.note(format!(
        "{} runs in {} records",
        counted.runs, counted.records
    ));

    let now = s.account()?;
    ensure!(now.balloon()? == target);
    s.resize(0)?;
    s.sh("rm /mem/pieces")?;
    s.balanced(0)
}

/// Single pages in the balloon can be moved away, so that blocks become free again.
fn compaction(s: &Session) -> Result<()> {
    let most = s.account()?.available()?.saturating_sub(14 * MIB) / BLOCK * BLOCK;
    s.machine().sh_within(
        &format!("vbrs-guest fragment /mem/pieces {most}"),
        s.patience(),
    )?;
    let target = most / 4 / PAGE * PAGE;
    s.resize(target)?;
    let before = s.account()?.vmstat("balloon_migrate")?;
    s.sh("rm /mem/pieces; echo 1 >/proc/sys/vm/compact_memory")?;
    let moved = s.account()?.vmstat("balloon_migrate")? - before;
    ensure!(moved > 0, "compaction moves no page of the balloon");
    s.note(format!("{moved} pages moved"));
    // The host was told of each page that went, and of each that came.
    let told = s.host().daemon()?.status()?.counters;
    ensure!(
        (told.inflated_pages - told.deflated_pages) * PAGE == target,
        "the host was told of {} pages that came and {} that went",
        told.inflated_pages,
        told.deflated_pages
    );
    s.balanced(target)?;
    s.returned(target)?;
    s.sentinel_intact()
}

/// With deflate-on-oom, a guest that needs its memory gets it back instead of losing processes, and
/// the balloon comes back by itself later.
pub(super) fn deflate_on_oom(s: &Session) -> Result<()> {
    /// After an emergency there is a pause, and then it goes slowly.
    const BACK: Duration = Duration::from_secs(60);

    ensure!(s.negotiated(2)?, "DEFLATE_ON_OOM is not acknowledged");
    let target = 152 * MIB;
    s.inflate(target)?;
    let needed = (s.account()?.available()? + 64 * MIB) / MIB * MIB;
    s.machine()
        .sh_within(
            &format!("vbrs-guest fill /mem/big {needed} 1"),
            Duration::from_secs(60),
        )
        .context("use what is in the balloon")?;
    s.alive_and_well()?;
    let left = s.actual()?;
    ensure!(left < target, "the balloon still holds {}", show(left));
    ensure!(
        s.account()?.total()? == s.before().total()?,
        "MemTotal has changed"
    );
    s.sh("vbrs-guest verify /mem/big 1 && rm /mem/big")?;
    s.note(format!("{} were given back", show(target - left)));
    s.await_actual(target, BACK)?;
    s.balanced(target)
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "unreachable",
        about: "approaches a target above memory, leaves a reserve, resumes when memory is freed",
        parts: &[only(unreachable)],
        seconds: 15,
        ..Scenario::USUAL
    },
    Scenario {
        name: "small-guest",
        about: "leaves a guest of 64 MiB usable when asked for all of it",
        setup: Setup {
            memory: 64 * MIB,
            sentinel: MIB,
            ..Setup::USUAL
        },
        parts: &[only(small_guest)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "reserve-parameter",
        about: "leaves to the guest what reserve_mb says",
        setup: Setup {
            load: Some("reserve_mb=64"),
            ..Setup::USUAL
        },
        parts: &[only(reserve_parameter)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "deflate-on-oom",
        about: "gives memory back to a guest that needs it, kills nobody, and comes back later",
        setup: Setup {
            device: Device::Daemon {
                dialect: Dialect::Bitmap,
                options: &["--features", "deflate-on-oom,must-tell-host"],
            },
            ..Setup::USUAL
        },
        parts: &[only(deflate_on_oom)],
        seconds: 20,
        ..Scenario::USUAL
    },
    Scenario {
        name: "cache-heavy",
        about: "takes memory that is only used as page cache",
        setup: Setup {
            disk: 192 * MIB,
            ..Setup::USUAL
        },
        parts: &[only(cache_heavy)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "fragmented",
        about: "inflates a guest without free blocks by single pages",
        parts: &[only(fragmented)],
        seconds: 10,
        ..Scenario::USUAL
    },
    Scenario {
        name: "fragmented-small-windows",
        about: "the same with windows of 64 bytes, a few of which cover the guest's pages only in part",
        setup: Setup {
            load: Some("bitmap_bytes=64"),
            ..Setup::USUAL
        },
        parts: &[only(fragmented)],
        seconds: 10,
        ..Scenario::USUAL
    },
    Scenario {
        name: "compaction",
        about: "single pages of the balloon are moved by compaction, and none is lost",
        parts: &[only(compaction)],
        seconds: 10,
        ..Scenario::USUAL
    },
];
