// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Which protocol is spoken with which host, and what is refused.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Scenario, only};
use crate::host::Dialect;
use crate::paths::{Driver, Guest};
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE};

const SOON: Duration = Duration::from_secs(30);

/// The guest speaks PFN arrays, and they work.
fn arrays_work(s: &Session) -> Result<()> {
    if s.driver() == Driver::Rust {
        ensure!(
            s.attribute("protocol")? == "pfn-array",
            "{} is spoken",
            s.attribute("protocol")?
        );
    }
    s.inflate(64 * MIB + 3 * PAGE)?;
    s.sentinel_intact()?;
    s.deflate().map(drop)
}

/// The 2016 dialect is refused with a line that contains `reason`, and the guest speaks arrays.
fn refused(s: &Session, reason: &str) -> Result<()> {
    s.await_log("the page-bitmap dialect of 2016 is refused", SOON)?;
    s.await_log(reason, SOON)?;
    arrays_work(s)
}

const fn daemon(dialect: Dialect, options: &'static [&'static str], load: &'static str) -> Setup {
    Setup {
        device: Device::Daemon { dialect, options },
        load: Some(load),
        ..Setup::USUAL
    }
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "pfn-array",
        about: "inflates and deflates by PFN arrays, on a host that knows nothing else",
        setup: daemon(Dialect::PfnArray, &[], ""),
        parts: &[only(|s| {
            arrays_work(s)?;
            let up = s.inflate(128 * MIB)?;
            let down = s.deflate()?;
            s.note(format!("up in {up:.0?}, down in {down:.0?}"));
            let errors = s.host().daemon()?.status()?.errors;
            ensure!(errors.is_empty(), "{errors:?}");
            Ok(())
        })],
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "dialect-2016",
        about: "inflates and deflates by the page bitmap of 2016 when asked to",
        setup: daemon(Dialect::Draft2016, &[], "dialect_2016=1"),
        parts: &[only(|s| {
            ensure!(
                s.attribute("protocol")? == "page-bitmap-2016",
                "{}",
                s.attribute("protocol")?
            );
            s.inflate(128 * MIB + 5 * PAGE)?;
            s.deflate()?;
            let status = s.host().daemon()?.status()?;
            ensure!(
                status.frontend.protocol == "page-bitmap-2016",
                "{}",
                status.frontend.protocol
            );
            ensure!(status.errors.is_empty(), "{:?}", status.errors);
            // Its config space ends at byte 8, and some transports do not survive a look beyond.
            ensure!(status.counters.config_reads_beyond == 0);
            Ok(())
        })],
        ..Scenario::USUAL
    },
    Scenario {
        name: "2016-not-asked-for",
        about: "never takes bit 3 for a page bitmap without the parameter",
        setup: daemon(Dialect::Draft2016, &[], ""),
        parts: &[only(|s| {
            arrays_work(s)?;
            ensure!(!s.negotiated(3)?, "bit 3 is acknowledged");
            Ok(())
        })],
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "2016-refused-reporting",
        about: "refuses the dialect of 2016 where bit 5 is offered",
        setup: daemon(
            Dialect::Draft2016,
            &["--features", "reporting"],
            "dialect_2016=1",
        ),
        parts: &[only(|s| refused(s, "REPORTING (5)"))],
        ..Scenario::USUAL
    },
    Scenario {
        name: "2016-refused-poison",
        about: "refuses the dialect of 2016 where bit 4 is offered",
        setup: daemon(
            Dialect::Draft2016,
            &["--features", "page-poison"],
            "dialect_2016=1",
        ),
        parts: &[only(|s| refused(s, "PAGE_POISON (4)"))],
        ..Scenario::USUAL
    },
    Scenario {
        name: "2016-refused-absent",
        about: "says so where the dialect of 2016 is asked for and bit 3 is not offered",
        setup: daemon(Dialect::PfnArray, &[], "dialect_2016=1"),
        parts: &[only(|s| refused(s, "does not offer feature bit 3"))],
        ..Scenario::USUAL
    },
    Scenario {
        name: "2016-refused-free-page-queue",
        about: "refuses the dialect of 2016 where bit 3 is QEMU's free page hinting",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: 512 * MIB,
            device: Device::Qemu(&[
                "iothread=balloon-io",
                "free-page-hint=on",
                "page-poison=off",
            ]),
            load: Some("dialect_2016=1"),
            ..Setup::USUAL
        },
        parts: &[only(|s| {
            // Only a look at the queues shows it, when it is too late to negotiate anew.
            s.await_log("the page-bitmap dialect of 2016 is refused", SOON)?;
            s.await_log("free page queue", SOON)?;
            ensure!(!s.bound()?, "the driver has taken the device all the same");
            s.unload()?;
            s.load("")?;
            arrays_work(s)
        })],
        seconds: 20,
        ..Scenario::USUAL
    },
    Scenario {
        name: "bad-magic",
        about: "does not take bit 23 for a page bitmap without the magic in config space",
        setup: daemon(Dialect::Bitmap, &["--fault", "config=32:00"], ""),
        parts: &[only(|s| {
            s.await_log("without a page-bitmap announcement to rely on", SOON)?;
            ensure!(!s.negotiated(23)?, "bit 23 is acknowledged");
            arrays_work(s)
        })],
        ..Scenario::USUAL
    },
    Scenario {
        name: "bad-version",
        about: "does not take bit 23 for a page bitmap of a version it does not know",
        setup: daemon(Dialect::Bitmap, &["--fault", "config=36:0200"], ""),
        parts: &[only(|s| {
            s.await_log("without a page-bitmap announcement to rely on", SOON)?;
            arrays_work(s)
        })],
        ..Scenario::USUAL
    },
    Scenario {
        name: "small-limits",
        about: "keeps to a host's limits: small bitmaps, single pages only",
        setup: daemon(
            Dialect::Bitmap,
            &[
                "--max-bitmap-bytes",
                "64",
                "--page-shifts",
                "12",
                "--block-shift",
                "0",
            ],
            "",
        ),
        parts: &[only(|s| {
            s.inflate(96 * MIB + PAGE)?;
            s.deflate()?;
            let status = s.host().daemon()?.status()?;
            ensure!(status.errors.is_empty(), "{:?}", status.errors);
            s.note(format!("{} records", status.counters.records));
            Ok(())
        })],
        ..Scenario::USUAL
    },
];
