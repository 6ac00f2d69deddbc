// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The distribution's kernel in QEMU, the product's real target.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Part, Scenario, only, pressure};
use crate::host::Dialect;
use crate::paths::{Driver, Guest};
use crate::process::poll;
use crate::session::{Device, Session, Setup};
use crate::size::{GIB, MIB, PAGE};

/// 4 GiB whose memory the host has allocated.
const LARGE: Setup = Setup {
    memory: 4 * GIB,
    load: None,
    populated: true,
    ..Setup::USUAL
};

/// What a small balloon has.
const SMALL: u64 = 100 * MIB + 3 * PAGE;

const PARTS: &[Part] = &[
    Part {
        name: "load",
        run: |s| {
            s.load("")?;
            ensure!(
                s.bound()?,
                "the driver is loaded and has not taken the device"
            );
            s.balanced(0)
        },
    },
    Part {
        name: "inflate-3-of-4-GiB",
        run: |s| {
            let took = s.inflate(3 * GIB)?;
            let got = s.returned(3 * GIB)? / MIB;
            s.note(format!("{got} MiB back in {took:.2?}{}", by(s)?));
            s.alive_and_well()?;
            s.sentinel_intact()
        },
    },
    Part {
        name: "deflate",
        run: |s| {
            let took = s.deflate()?;
            s.note(format!("{took:.2?}"));
            s.sentinel_intact()
        },
    },
    Part {
        name: "unload-with-a-full-balloon",
        run: |s| {
            s.resize(GIB)?;
            s.unload()
        },
    },
];

/// QEMU says so to whoever listens when the balloon has another size.
fn tells(s: &Session) -> Result<()> {
    let left = s.machine().memory() - SMALL;

    s.resize(SMALL)?;
    let told = poll(s.patience(), || {
        let mut qmp = s.host().qmp().ok()?;
        // Events come with answers.
        qmp.query_balloon().ok()?;
        let here =
            |event: &Value| event["event"] == "BALLOON_CHANGE" && event["data"]["actual"] == left;
        qmp.events().iter().any(here).then_some(())
    });
    told.context("QEMU tells nobody of the size that was met")?;
    s.deflate().map(drop)
}

/// How long the kernel may take to report free pages: it does so after two seconds, a part at a time.
const REPORTED: Duration = Duration::from_secs(60);

/// A guest that fills freed pages with zeroes says so, and may report them.
fn fills(s: &Session) -> Result<()> {
    ensure!(s.negotiated(4)?, "PAGE_POISON is not negotiated");
    ensure!(s.negotiated(5)?, "REPORTING is not negotiated");
    s.inflate(SMALL)?;
    s.deflate()?;
    // All of it was allocated; what is free is reported after a while.
    let most = s.machine().memory() - 128 * MIB;
    let reported = poll(REPORTED, || s.host_memory().ok().filter(|now| *now < most));
    reported.context("free pages are not reported")?;
    s.sentinel_intact()
}

/// By what the pages were told, where the driver says it.
fn by(s: &Session) -> Result<String> {
    Ok(match s.driver() {
        Driver::Rust => format!(" by {}", s.attribute("protocol")?),
        Driver::C => String::new(),
    })
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "page-bitmap",
        about: "the stock kernel gives 3 of 4 GiB to our daemon by page bitmap",
        guests: &[Guest::Stock],
        setup: Setup {
            device: Device::speaking(Dialect::Bitmap),
            ..LARGE
        },
        parts: PARTS,
        any_driver: true,
        seconds: 60,
        ..Scenario::USUAL
    },
    Scenario {
        name: "qemu-balloon",
        about: "the stock kernel gives 3 of 4 GiB to QEMU's own balloon by PFN arrays",
        guests: &[Guest::Stock],
        setup: Setup {
            device: Device::Qemu(&[]),
            ..LARGE
        },
        parts: PARTS,
        any_driver: true,
        seconds: 60,
        ..Scenario::USUAL
    },
    Scenario {
        name: "qemu-oom",
        about: "gives memory of QEMU's own balloon back when the guest needs it, and QEMU tells of it",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: 384 * MIB,
            device: Device::Qemu(&["deflate-on-oom=on"]),
            ..Setup::USUAL
        },
        parts: &[
            Part {
                name: "events",
                run: tells,
            },
            Part {
                name: "deflate-on-oom",
                run: pressure::deflate_on_oom,
            },
        ],
        any_driver: true,
        seconds: 60,
        ..Scenario::USUAL
    },
    Scenario {
        name: "init-on-free",
        about: "reports free pages of a guest that fills them, to QEMU, which knows of that",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: 384 * MIB,
            device: Device::Qemu(&["free-page-reporting=on"]),
            command_line: "init_on_free=1",
            ..Setup::USUAL
        },
        parts: &[only(fills)],
        any_driver: true,
        seconds: 20,
        ..Scenario::USUAL
    },
];
