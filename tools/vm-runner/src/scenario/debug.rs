// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The core of it under a kernel that checks locks, sleeping and memory, on a real x86 with PCI.

use super::{Part, Scenario, hostile, inflate, lifecycle, pressure, requests};
use crate::paths::Guest;
use crate::session::{Device, Setup};
use crate::size::MIB;

const MORE: &[Part] = &[
    Part {
        name: "fragmented",
        run: pressure::fragmented,
    },
    Part {
        name: "unreachable",
        run: pressure::unreachable,
    },
    Part {
        name: "reload",
        run: lifecycle::reload,
    },
    Part {
        name: "unbind-bind",
        run: lifecycle::unbind,
    },
];

/// What goes wrong only if two processors are at it, if at all. Without unloading under a storm of config changes:
/// by a change while there is no driver, QEMU dies.
const RACES: &[Part] = &[
    Part {
        name: "under-load",
        run: inflate::under_load,
    },
    Part {
        name: "mid-flight",
        run: inflate::mid_flight,
    },
    Part {
        name: "config-storm",
        run: hostile::storm,
    },
    Part {
        name: "unload-in-flight",
        run: lifecycle::unload_in_flight,
    },
    Part {
        name: "unload-while-asked",
        run: requests::unload_while_asked,
    },
];

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "core",
        about: "inflates, deflates, follows random targets under a kernel that checks everything",
        guests: &[Guest::Debug],
        parts: inflate::CORE,
        seconds: 30,
        ..Scenario::USUAL
    },
    Scenario {
        name: "pressure",
        about: "fragmented memory, unreachable targets, reloading under a kernel that checks everything",
        guests: &[Guest::Debug],
        parts: MORE,
        seconds: 40,
        ..Scenario::USUAL
    },
    Scenario {
        name: "races",
        about: "moves, is unloaded and asked at the same time, on two processors, under a kernel that checks everything",
        guests: &[Guest::Debug],
        setup: requests::ASKING,
        parts: RACES,
        seconds: 40,
        ..Scenario::USUAL
    },
    Scenario {
        name: "qemu-balloon",
        about: "QEMU's own balloon under a kernel that checks everything",
        guests: &[Guest::Debug],
        setup: Setup {
            device: Device::Qemu(&[]),
            ..Setup::USUAL
        },
        parts: &[super::only(|s| {
            s.inflate(100 * MIB)?;
            s.deflate().map(drop)
        })],
        seconds: 20,
        any_driver: true,
        ..Scenario::USUAL
    },
];
