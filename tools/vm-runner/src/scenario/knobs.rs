// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What a user can see and tune: sysfs files and module parameters.

use anyhow::{Result, ensure};

use super::{Scenario, only};
use crate::session::{Session, Setup};
use crate::size::{MIB, PAGE};

/// What `bitmap_bytes` must refuse: below and above its bounds, no powers of two, no numbers.
const BAD: [&str; 16] = [
    "0",
    "1",
    "32",
    "63",
    "65",
    "96",
    "100",
    "1048575",
    "1048577",
    "2097152",
    "-64",
    "64k",
    "x",
    " ",
    "18446744073709551680",
    "4294967360",
];

/// What the driver may use for itself with the largest windows.
const BUFFERS: u64 = 16 * MIB;

fn bitmap_bytes(s: &Session) -> Result<()> {
    for shift in 6..=20 {
        let bytes = (1 << shift).to_string();
        ensure!(
            s.set_attribute("bitmap_bytes", &bytes)?,
            "{bytes} is refused"
        );
        ensure!(s.attribute("bitmap_bytes")? == bytes);
        for bad in BAD {
            ensure!(!s.set_attribute("bitmap_bytes", bad)?, "{bad:?} is taken");
        }
        ensure!(
            s.attribute("bitmap_bytes")? == bytes,
            "what was refused has changed it"
        );
    }
    // A line feed is what echo adds.
    s.sh("echo 4096 >/sys/bus/virtio/devices/virtio0/balloon/bitmap_bytes")?;
    ensure!(s.attribute("bitmap_bytes")? == "4096");
    s.allow_buffers(BUFFERS);
    for bytes in ["64", "1048576"] {
        ensure!(s.set_attribute("bitmap_bytes", bytes)?);
        s.inflate(90 * MIB + 7 * PAGE)?;
        s.deflate()?;
    }
    Ok(())
}

fn parameter(s: &Session) -> Result<()> {
    for bad in ["0", "63", "96", "2097152"] {
        ensure!(
            s.load(&format!("bitmap_bytes={bad}")).is_err(),
            "bitmap_bytes={bad} is taken"
        );
        ensure!(
            !s.loaded()?,
            "bitmap_bytes={bad} has left the driver loaded"
        );
    }
    s.allow_buffers(BUFFERS);
    for good in ["64", "1048576"] {
        s.load(&format!("bitmap_bytes={good}"))?;
        ensure!(s.attribute("bitmap_bytes")? == good);
        s.inflate(40 * MIB + PAGE)?;
        s.deflate()?;
        s.unload()?;
    }
    s.load("")?;
    ensure!(s.attribute("bitmap_bytes")? == "32768");
    Ok(())
}

/// The largest block to take: an order, the page allocator's largest at most.
fn max_order(s: &Session) -> Result<()> {
    ensure!(
        s.attribute("max_order")? == "9",
        "max_order is {}",
        s.attribute("max_order")?
    );
    for bad in ["-1", "11", "64", "4294967296", "x", "9 9"] {
        ensure!(!s.set_attribute("max_order", bad)?, "{bad:?} is taken");
    }
    ensure!(
        s.attribute("max_order")? == "9",
        "what was refused has changed it"
    );
    for good in ["0", "4", "10"] {
        ensure!(s.set_attribute("max_order", good)?, "{good} is refused");
        ensure!(s.attribute("max_order")? == good);
        s.inflate(90 * MIB + 7 * PAGE)?;
        s.deflate()?;
    }
    Ok(())
}

fn read_only(s: &Session) -> Result<()> {
    let bytes = 32 * MIB + 3 * PAGE;
    s.inflate(bytes)?;
    let pages = (bytes / PAGE).to_string();
    ensure!(
        s.attribute("target")? == pages,
        "target is {}",
        s.attribute("target")?
    );
    ensure!(
        s.attribute("actual")? == pages,
        "actual is {}",
        s.attribute("actual")?
    );
    ensure!(s.attribute("protocol")? == "page-bitmap-v1");
    for name in ["target", "actual", "protocol"] {
        ensure!(!s.set_attribute(name, "0")?, "{name} can be written");
        let mode = s.sh(&format!(
            "stat -c %a /sys/bus/virtio/devices/virtio0/balloon/{name}"
        ))?;
        ensure!(mode == "444", "{name} has mode {mode}");
    }
    s.inflate(0)?;
    ensure!(s.attribute("target")? == "0" && s.attribute("actual")? == "0");
    Ok(())
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "bitmap-bytes",
        about: "takes powers of two from 64 to 1 MiB as bitmap_bytes, and nothing else",
        parts: &[only(bitmap_bytes)],
        seconds: 8,
        ..Scenario::USUAL
    },
    Scenario {
        name: "bitmap-bytes-parameter",
        about: "the same of the module parameter: else the module does not load",
        setup: Setup {
            load: None,
            ..Setup::USUAL
        },
        parts: &[only(parameter)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "max-order",
        about: "takes orders up to the allocator's largest as max_order, and keeps to it",
        parts: &[only(max_order)],
        seconds: 5,
        ..Scenario::USUAL
    },
    Scenario {
        name: "read-only-files",
        about: "shows target, actual and protocol, and lets nobody write them",
        parts: &[only(read_only)],
        ..Scenario::USUAL
    },
];
