// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Inflating and deflating by page bitmap: sizes, targets that change, windows.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Part, Scenario, only};
use crate::host::Dialect;
use crate::random::Random;
use crate::session::{Device, Session, Setup};
use crate::size::{BLOCK, GIB, MIB, PAGE, show};

/// A daemon that can be told to be slow.
const SLOWABLE: Setup = Setup {
    device: Device::Daemon {
        dialect: Dialect::Bitmap,
        options: &["--fault", "none"],
    },
    ..Setup::USUAL
};

/// Up to half of the guest and down again.
pub(super) fn up_and_down(s: &Session) -> Result<()> {
    let up = s.inflate(128 * MIB)?;
    s.sentinel_intact()?;
    let down = s.deflate()?;
    s.sentinel_intact()?;
    s.note(format!("up in {up:.0?}, down in {down:.0?}"));
    Ok(())
}

/// Targets that are no multiples of a block, in an order that adds to blocks and splits them.
pub(super) fn odd_sizes(s: &Session) -> Result<()> {
    for pages in [1, 0, 511, 512, 513, 3, 12_345, 12_344, 24_577, 1023, 1, 0] {
        s.inflate(pages * PAGE)?;
    }
    s.sentinel_intact()
}

/// 200 random targets, most of them replaced by the next before they are met.
pub(super) fn random_flips(s: &Session) -> Result<()> {
    const FLIPS: u64 = 200;

    let mut random = Random::new();
    s.note(format!("seed {}", random.seed()));
    let most = s.machine().memory() / 2 / PAGE;
    for i in 1..=FLIPS {
        // Whole blocks as often as odd numbers of pages.
        let pages = random.below(most);
        let pages = if random.below(2) == 0 {
            pages
        } else {
            pages & !511
        };
        s.target(pages * PAGE)?;
        if i % 50 == 0 {
            s.await_actual(pages * PAGE, s.patience())?;
            s.balanced(pages * PAGE)?;
        } else {
            std::thread::sleep(Duration::from_millis(random.below(15)));
        }
    }
    s.sentinel_intact()
}

/// The target changes while the driver is on its way, in both directions.
pub(super) fn mid_flight(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    daemon.faults(&["delay=20"])?;
    for (first, then) in [(128, 32), (0, 96), (128, 0), (64, 128), (17, 0)] {
        let (first, then) = (first * MIB, then * MIB);
        let here = s.actual()?;
        s.target(first)?;
        // On the way, if it is not there at once.
        s.await_balloon(s.patience(), "on its way", |actual| {
            actual != here || first == here
        })?;
        s.target(then)?;
        s.await_actual(then, s.patience())?;
        s.balanced(then)?;
    }
    daemon.faults(&[])?;
    s.inflate(100 * MIB + PAGE)?;
    s.sentinel_intact()
}

/// Whole blocks go first, and cost next to nothing on the wire.
fn blocks_first(s: &Session) -> Result<()> {
    let counters = || -> Result<_> { Ok(s.host().daemon()?.status()?.counters) };
    let before = counters()?;
    s.inflate(128 * MIB)?;
    let up = counters()?.since(&before);
    ensure!(
        up.inflated_pages == 128 * MIB / PAGE,
        "{} pages were told",
        up.inflated_pages
    );
    ensure!(
        up.discarded_bytes == 128 * MIB,
        "{} bytes were discarded",
        up.discarded_bytes
    );
    ensure!(
        up.inflate_requests <= 8 && up.wire_bytes <= 1024,
        "{} requests with {} bytes for 64 blocks",
        up.inflate_requests,
        up.wire_bytes
    );
    let before = counters()?;
    s.deflate()?;
    let down = counters()?.since(&before);
    ensure!(
        down.deflated_pages == up.inflated_pages,
        "{} pages came back",
        down.deflated_pages
    );
    s.note(format!(
        "{} requests with {} bytes for 64 blocks",
        up.inflate_requests, up.wire_bytes
    ));
    ensure!(
        counters()?.errors == 0,
        "{:?}",
        s.host().daemon()?.status()?.errors
    );
    Ok(())
}

/// More memory than a window covers: several windows, each page in one of them.
fn windows(s: &Session) -> Result<()> {
    // A window of 64 bytes has room for 512 blocks, which are 1 GiB.
    const FULL: u64 = GIB + 64 * MIB;

    ensure!(s.attribute("bitmap_bytes")? == "64");
    s.inflate(FULL)?;
    let counters = s.host().daemon()?.status()?.counters;
    ensure!(
        counters.records >= 2,
        "{} records for {}",
        counters.records,
        show(FULL)
    );
    ensure!(
        counters.inflated_pages == FULL / PAGE,
        "{} pages told",
        counters.inflated_pages
    );
    s.note(format!("{} records for {}", counters.records, show(FULL)));
    s.inflate(GIB / 2 + 5 * PAGE)?;
    s.sentinel_intact()
}

/// Everything that came back can be written and read, every byte of it.
fn every_byte(s: &Session) -> Result<()> {
    const SEED: u64 = 3;

    s.inflate(192 * MIB)?;
    s.deflate()?;
    let bytes = s.account()?.available()?.saturating_sub(24 * MIB) / PAGE * PAGE;
    s.machine().sh_within(
        &format!("vbrs-guest fill /mem/f {bytes} {SEED} && vbrs-guest verify /mem/f {SEED}"),
        Duration::from_secs(120),
    )?;
    let taken = s.host_memory()?;
    ensure!(
        taken >= bytes,
        "the guest uses {} and takes {} of the host",
        show(bytes),
        show(taken)
    );
    s.sh("rm /mem/f").map(drop)
}

/// Several processors of the guest work on its memory while the balloon moves.
pub(super) fn under_load(s: &Session) -> Result<()> {
    let seconds = Duration::from_secs;
    let writer = "for i in 1 2 3; do vbrs-guest fill /mem/w$$ 24M $i && \
         vbrs-guest verify /mem/w$$ $i || exit 1; done; rm /mem/w$$";
    let jobs = [
        s.machine().background(writer, seconds(120))?,
        s.machine().background(writer, seconds(120))?,
    ];
    let mut moves = 0;
    while jobs.iter().any(|job| !job.is_over()) {
        for target in [96 * MIB, 33 * MIB + PAGE, 0] {
            s.resize(target)?;
            moves += 1;
        }
    }
    for job in jobs {
        let outcome = job.wait()?;
        ensure!(outcome.ok(), "{}: {}", outcome.end, outcome.output);
    }
    s.note(format!("{moves} moves"));
    s.balanced(0)
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "inflate-deflate",
        about: "inflates half of the guest by page bitmap and deflates",
        parts: &[only(|s| {
            ensure!(s.attribute("protocol")? == "page-bitmap-v1");
            up_and_down(s)
        })],
        ..Scenario::USUAL
    },
    Scenario {
        name: "blocks-first",
        about: "takes whole blocks first, in few and short requests",
        setup: Setup {
            populated: false,
            ..Setup::USUAL
        },
        parts: &[only(blocks_first)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "odd-sizes",
        about: "meets targets that are no multiples of a block, to the page",
        parts: &[only(odd_sizes)],
        seconds: 5,
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "mid-flight",
        about: "follows a target that changes while a slow host keeps it on its way",
        setup: SLOWABLE,
        parts: &[only(mid_flight)],
        seconds: 5,
        ..Scenario::USUAL
    },
    Scenario {
        name: "flips",
        about: "follows 200 random targets",
        parts: &[only(random_flips)],
        seconds: 10,
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "windows",
        about: "inflates more than a window covers",
        setup: Setup {
            memory: 1280 * MIB,
            load: Some("bitmap_bytes=64"),
            ..Setup::USUAL
        },
        parts: &[only(windows)],
        seconds: 20,
        ..Scenario::USUAL
    },
    Scenario {
        name: "every-byte",
        about: "every byte of what came back can be written and read",
        parts: &[only(every_byte)],
        seconds: 5,
        any_driver: true,
        ..Scenario::USUAL
    },
    Scenario {
        name: "under-load",
        about: "moves while two processes write and verify memory",
        parts: &[only(under_load)],
        seconds: 5,
        any_driver: true,
        ..Scenario::USUAL
    },
];

/// The same steps for another kind of guest.
pub(super) const CORE: &[Part] = &[
    Part {
        name: "inflate-deflate",
        run: up_and_down,
    },
    Part {
        name: "odd-sizes",
        run: odd_sizes,
    },
    Part {
        name: "flips",
        run: random_flips,
    },
    Part {
        name: "blocks-split",
        run: |s| {
            s.inflate(64 * BLOCK)?;
            s.inflate(3 * BLOCK + 7 * PAGE)?;
            s.deflate().map(drop)
        },
    },
];
