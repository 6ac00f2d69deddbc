// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Memory that is taken out of use while it is in the balloon.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::requests::{OFFLINE, frames};
use super::{Scenario, only};
use crate::paths::Guest;
use crate::session::{Session, Setup};
use crate::size::{MIB, PAGE};

const FULL: u64 = 512 * MIB;
const SOON: Duration = Duration::from_secs(60);

/// Takes each section of memory out of use and puts it back, one after the other; says how many went.
const ONE_BY_ONE: &str = "n=0; for m in /sys/devices/system/memory/memory[0-9]*; do \
     if echo offline > $m/state; then n=$((n + 1)); echo online > $m/state || exit 1; fi; \
     done 2> /dev/null; echo $n";

/// What a section has, in hexadecimal.
const SIZE: &str = "cat /sys/devices/system/memory/block_size_bytes";

/// The sections of which nearly all is in the balloon.
fn ballooned(s: &Session, size: u64) -> Result<Vec<u64>> {
    let balloon = frames(s, OFFLINE)?;
    let pages = size / PAGE;
    let is_full = |section: &u64| {
        let there = balloon.range(section * pages..(section + 1) * pages);
        there.count() as u64 >= pages / 10 * 9
    };
    let last = balloon.last().copied().unwrap_or(0) / pages;
    Ok((0..=last).filter(is_full).collect())
}

fn offline(s: &Session) -> Result<()> {
    s.inflate(FULL)?;

    let size = u64::from_str_radix(s.sh(SIZE)?.trim(), 16).context("the size of a section")?;
    let full = ballooned(s, size)?;
    ensure!(!full.is_empty(), "no section is full of balloon pages");
    let section = full[full.len() / 2];
    let state = format!("/sys/devices/system/memory/memory{section}/state");
    s.sh(&format!("echo offline >{state} && echo online >{state}"))
        .with_context(|| format!("section {section}, which is in the balloon, cannot be taken"))?;

    let went: u64 = s.sh(ONE_BY_ONE)?.trim().parse()?;
    let sections = s.machine().memory() / size;

    s.note(format!(
        "{went} of {sections} sections of {} MiB",
        size / MIB
    ));
    // Half of the memory is in the balloon and much of the rest is free; the kernel itself stays, in more or fewer
    // sections. Of ten, five to eight go.
    ensure!(
        went * 5 >= sections * 2,
        "only {went} of {sections} sections of memory could be taken out of use"
    );
    s.await_actual(FULL, SOON)?;
    s.sentinel_intact()?;
    s.balanced(FULL)
}

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "memory-offline",
    about: "gives blocks back when their memory goes offline, and takes others",
    guests: &[Guest::Stock, Guest::Debug],
    setup: Setup {
        memory: 1280 * MIB,
        ..Setup::USUAL
    },
    parts: &[only(offline)],
    seconds: 30,
    any_driver: true,
    ..Scenario::USUAL
}];
