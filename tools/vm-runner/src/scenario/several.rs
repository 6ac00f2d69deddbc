// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! More than one balloon in a guest, and what QEMU's traces show of the first moments of one.

use anyhow::{Context, Result, ensure};

use super::{Scenario, only, stats};
use crate::host::{Daemon, Dialect};
use crate::machine::qemu::Board;
use crate::paths::Guest;
use crate::process::poll;
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE};

const SMALL: u64 = 8 * MIB + 3 * PAGE;

/// Whether the driver has the `number`th device.
fn bound(s: &Session, number: usize) -> Result<bool> {
    let driver = s.driver().bus_name();
    let there = s.sh(&format!(
        "test -e /sys/bus/virtio/drivers/{driver}/virtio{number} && echo yes || echo no"
    ))?;
    Ok(there == "yes")
}

/// Whether the driver has taken a feature that this daemon offers.
fn takes(daemon: &Daemon, feature: &str) -> Result<bool> {
    let features = daemon.status()?.frontend.features;
    Ok(features.iter().any(|f| f == feature))
}

/// Where a host wants reports of free pages, one gets some: the kernel has but one who reports.
fn reported(s: &Session) -> Result<()> {
    let mut wanted = Vec::new();
    for daemon in std::iter::once(s.host().daemon()?).chain(s.others()) {
        if takes(daemon, "reporting")? {
            wanted.push(daemon);
        }
    }
    let any = || {
        let told = |daemon: &&Daemon| {
            daemon
                .status()
                .is_ok_and(|now| now.counters.reported_bytes > 0)
        };
        wanted.iter().any(told).then_some(())
    };
    match wanted.is_empty() {
        true => Ok(()),
        false => poll(s.patience(), any).context("free pages are not reported"),
    }
}

/// Every balloon works, whatever else there is.
fn all_work(s: &Session) -> Result<()> {
    for number in 0..=s.others().len() {
        ensure!(bound(s, number)?, "the driver has no balloon {number}");
    }
    for (number, daemon) in (1..).zip(s.others()) {
        daemon.target(SMALL)?;
        let there = poll(s.patience(), || {
            let actual = daemon.status().ok()?.balloon.actual_bytes;
            (actual == SMALL).then_some(())
        });
        there.with_context(|| format!("balloon {number} is not filled in time"))?;
    }
    s.target(SMALL)?;
    s.await_actual(SMALL, s.patience())?;
    let all = SMALL * (s.others().len() as u64 + 1);
    let counted = s.account()?.balloon()?;
    ensure!(counted == all, "Balloon in meminfo is {counted}, not {all}");
    for daemon in s.others() {
        if takes(daemon, "stats")? {
            daemon.stats()?;
        }
        let errors = daemon.status()?.errors;
        ensure!(errors.is_empty(), "{errors:?}");
        daemon.target(0)?;
    }
    s.target(0)?;
    let empty = poll(s.patience(), || {
        let empty = s.account().and_then(|a| a.balloon()).ok()? == 0;
        empty.then_some(())
    });
    empty.context("the balloons do not get empty")?;
    // Not before: the kernel reports nothing while less than 128 MiB are free.
    reported(s)
}

/// No queue is kicked before the driver has said that it is ready.
fn first_kick(s: &Session) -> Result<()> {
    const DRIVER_OK: u32 = 4;

    s.inflate(SMALL)?;
    stats::agree(s)?;
    let log = std::fs::read_to_string(s.folder().join("qemu.log"))?;
    let (mut status, mut kicks) = (0, 0);
    for line in log.lines() {
        if let Some((_, value)) = line
            .strip_prefix("virtio_set_status ")
            .and_then(|rest| rest.rsplit_once(' '))
        {
            status = value.parse()?;
        } else if line.starts_with("virtio_queue_notify ") {
            kicks += 1;
            ensure!(
                status & DRIVER_OK != 0,
                "kick {kicks} comes with status {status:#x}: {line}"
            );
        }
    }
    ensure!(kicks >= 2, "only {kicks} kicks are traced");
    s.note(format!("{kicks} kicks"));
    Ok(())
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "two-balloons",
        about: "drives two balloons; only one of them can report free pages",
        setup: Setup {
            device: Device::Daemon {
                dialect: Dialect::PfnArray,
                options: &["--features", "stats,reporting"],
            },
            others: &[(Dialect::PfnArray, &["--features", "stats,reporting"])],
            ..Setup::USUAL
        },
        parts: &[only(all_work)],
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "queue-combinations",
        about: "finds the queues of balloons with every combination of statistics, hints and reports",
        setup: Setup {
            device: Device::Daemon {
                dialect: Dialect::PfnArray,
                options: &["--features", "none"],
            },
            others: &[
                (Dialect::PfnArray, &["--features", "stats"]),
                (Dialect::PfnArray, &["--features", "free-page-hint"]),
                (Dialect::PfnArray, &["--features", "stats,free-page-hint"]),
                (Dialect::PfnArray, &["--features", "reporting"]),
                (Dialect::PfnArray, &["--features", "stats,reporting"]),
                (
                    Dialect::PfnArray,
                    &["--features", "free-page-hint,reporting"],
                ),
                (
                    Dialect::PfnArray,
                    &["--features", "stats,free-page-hint,reporting"],
                ),
                (Dialect::Bitmap, &["--features", "none"]),
                (Dialect::Bitmap, &["--features", "stats,reporting"]),
                (Dialect::Bitmap, &["--features", "stats,free-page-hint"]),
                (
                    Dialect::Bitmap,
                    &["--features", "stats,free-page-hint,reporting"],
                ),
            ],
            ..Setup::USUAL
        },
        parts: &[only(all_work)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "first-kick",
        about: "kicks no queue before it is ready, as QEMU sees it",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: 384 * MIB,
            device: Device::Qemu(&["ioeventfd=off"]),
            hardware: &[
                "-trace",
                "virtio_queue_notify",
                "-trace",
                "virtio_set_status",
            ],
            populated: false,
            ..Setup::USUAL
        },
        parts: &[only(first_kick)],
        any_driver: true,
        seconds: 15,
        ..Scenario::USUAL
    },
    Scenario {
        name: "microvm",
        about: "drives QEMU's balloon on virtio-mmio, in a machine without PCI",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: 384 * MIB,
            board: Board::Microvm,
            device: Device::Qemu(&["free-page-reporting=on"]),
            ..Setup::USUAL
        },
        parts: &[only(|s| {
            s.inflate(96 * MIB + 3 * PAGE)?;
            stats::agree(s)?;
            s.deflate().map(drop)
        })],
        any_driver: true,
        seconds: 15,
        ..Scenario::USUAL
    },
];
