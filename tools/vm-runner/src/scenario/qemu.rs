// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The distribution's kernel in QEMU, the product's real target.

use anyhow::ensure;

use super::{Part, Scenario};
use crate::host::Dialect;
use crate::paths::{Driver, Guest};
use crate::session::{Device, Session, Setup};
use crate::size::{GIB, MIB};

/// 4 GiB whose memory the host has allocated.
const LARGE: Setup = Setup {
    memory: 4 * GIB,
    load: None,
    populated: true,
    ..Setup::USUAL
};

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

/// By what the pages were told, where the driver says it.
fn by(s: &Session) -> anyhow::Result<String> {
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
];
