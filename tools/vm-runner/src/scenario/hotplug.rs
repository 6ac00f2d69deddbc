// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! QEMU's own balloon, plugged in and out while the guest runs: every combination of its features and
//! every form of PCI it has, and a device that is gone from one moment to the next.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Part, Scenario, only, stats};
use crate::paths::Guest;
use crate::process::poll;
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE};

const FULL: u64 = 96 * MIB + 3 * PAGE;
const SOON: Duration = Duration::from_secs(60);

/// Its id in QEMU.
const ID: &str = "balloon0";

/// Asks QEMU to take the device out, and waits until guest and QEMU have done so.
fn unplug(s: &Session) -> Result<()> {
    let mut qmp = s.host().qmp()?;
    qmp.execute("device_del", &json!({ "id": ID }))?;
    let gone = poll(SOON, || {
        // Events come with answers.
        if let Err(e) = qmp.execute("query-status", &json!({})) {
            return Some(Err(e));
        }
        let gone =
            |event: &Value| event["event"] == "DEVICE_DELETED" && event["data"]["device"] == ID;
        qmp.events().iter().any(gone).then_some(Ok(()))
    });
    gone.context("the device is not unplugged in time")?
}

/// Plugs one in with these properties, and waits until the driver has it.
fn plug(s: &Session, bus: &str, properties: Value) -> Result<()> {
    add(s, bus, properties)?;
    let bound = poll(SOON, || match s.bound() {
        Ok(bound) => bound.then_some(Ok(())),
        Err(e) => Some(Err(e)),
    });
    bound.context("the driver does not take the device in time")?
}

fn add(s: &Session, bus: &str, mut properties: Value) -> Result<()> {
    for (name, value) in [("driver", "virtio-balloon-pci"), ("id", ID), ("bus", bus)] {
        properties[name] = value.into();
    }
    s.host().qmp()?.execute("device_add", &properties)?;
    Ok(())
}

/// With a full balloon, the device is asked to go: it gets all pages back to the guest first.
fn unplug_full(s: &Session) -> Result<()> {
    s.inflate(FULL)?;
    unplug(s)?;
    ensure!(!s.bound()?);
    s.left_nothing()
}

/// QEMU numbers its queues densely over what it offers: statistics always, hints and reports if asked.
fn combinations(s: &Session) -> Result<()> {
    for (hint, report) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut properties = json!({ "free-page-hint": hint, "free-page-reporting": report });
        if hint {
            properties["iothread"] = "hints".into();
        }
        plug(s, "port1", properties)?;
        let what = || format!("free-page-hint={hint}, free-page-reporting={report}");
        ensure!(
            s.negotiated(5)? == report,
            "{}: reporting is not as offered",
            what()
        );
        s.resize(FULL).with_context(what)?;
        s.balanced(FULL).with_context(what)?;
        stats::agree(s).with_context(what)?;
        s.resize(0).with_context(what)?;
        s.balanced(0).with_context(what)?;
        if report {
            given_back(s).with_context(what)?;
        }
        unplug(s)?;
    }
    s.left_nothing()
}

/// What the guest frees, the host gets by reports.
fn given_back(s: &Session) -> Result<()> {
    const USED: u64 = 128 * MIB;
    const REPORTED: Duration = Duration::from_secs(60);

    s.sh(&format!("vbrs-guest stamp /mem/used {USED} 1 1"))?;
    let used = s.host_memory()?;
    s.sh("rm /mem/used")?;
    let mut got = 0;
    let enough = poll(REPORTED, || match s.host_memory() {
        Ok(now) => {
            got = used.saturating_sub(now);
            (got > USED / 100 * 60).then_some(Ok(()))
        }
        Err(e) => Some(Err(e)),
    });
    enough.with_context(|| format!("of {} MiB the host gets {}", USED / MIB, got / MIB))?
}

/// The interface of virtio before 1.0, the one after it, and both.
fn transports(s: &Session) -> Result<()> {
    for (legacy, modern) in [(true, false), (true, true), (false, true)] {
        let on_off = |on| if on { "off" } else { "on" };
        let properties = json!({ "disable-legacy": on_off(legacy), "disable-modern": !modern });
        let what = || format!("legacy {legacy}, modern {modern}");
        plug(s, "conventional", properties).with_context(what)?;
        ensure!(
            s.negotiated(32)? == modern,
            "{}: VERSION_1 is not as offered",
            what()
        );
        s.resize(FULL).with_context(what)?;
        s.balanced(FULL).with_context(what)?;
        stats::agree(s).with_context(what)?;
        s.resize(0).with_context(what)?;
        unplug(s)?;
    }
    s.left_nothing()
}

/// A device that takes only addresses of an IOMMU is driven, or the log says in one line why not.
fn platform_access(s: &Session) -> Result<()> {
    const BIT: usize = 33;
    const WORDS: &str = "ACCESS_PLATFORM";

    let properties = json!({ "iommu_platform": true, "disable-legacy": "on" });
    add(s, "port1", properties)?;
    s.sh_until("test -e /sys/bus/virtio/devices/virtio0")?;
    // Either way it is decided before long.
    let decided = poll(SOON, || {
        let bound = s.bound().ok()?;
        let said = s.log().ok()?.iter().any(|line| line.contains(WORDS));
        (bound || said).then_some(bound)
    });
    let bound = decided.with_context(|| {
        format!("the driver neither takes the device nor says why not ({WORDS} in the log)")
    })?;
    if bound {
        ensure!(s.negotiated(BIT)?);
        s.resize(FULL)?;
        s.balanced(FULL)?;
        s.resize(0)?;
    }
    s.note(format!("driven: {bound}"));
    unplug(s)?;
    s.left_nothing()
}

/// The device is gone from one moment to the next, while the driver has it: the slot's power is
/// switched off behind the kernel's back. The driver lets go of it, and nothing is lost.
fn surprise(s: &Session) -> Result<()> {
    /// Where a port's express capability has the control word of its slot.
    const SLOT_CONTROL: u64 = 0x18;
    /// Power off, and the lamp that says so.
    const OFF: u16 = 0x700;

    s.resize(FULL)?;
    let device = s.sh("basename $(dirname $(readlink -f /sys/bus/virtio/devices/virtio0))")?;
    let port = s.sh(&format!(
        "basename $(dirname $(readlink -f /sys/bus/pci/devices/{device}))"
    ))?;
    let config = format!("/sys/bus/pci/devices/{port}/config");
    let capability = capability(s, &config, 0x10)?;
    // On its way when it is gone, perhaps, and not empty in any case.
    s.target(FULL / 4 * 3)?;
    // In one write, or QEMU takes it for two others.
    let [low, high] = OFF.to_le_bytes();
    s.sh(&format!(
        "printf '\\{low:03o}\\{high:03o}' | dd of={config} bs=2 seek={} conv=notrunc",
        (capability + SLOT_CONTROL) / 2
    ))?;
    let gone = poll(SOON, || {
        let list = s
            .host()
            .qmp()
            .ok()?
            .execute("qom-list", &json!({ "path": "/machine/peripheral" }));
        let list = list.ok()?;
        let there = list.as_array()?.iter().any(|entry| entry["name"] == ID);
        (!there).then_some(())
    });
    gone.context("QEMU keeps the device although its slot has no power")?;
    s.alive_and_well()?;
    // Should the kernel not have noticed by itself: the slot is empty.
    let path = format!("/sys/bus/pci/devices/{device}");
    s.machine()
        .sh_within(&format!("! test -e {path} || echo 1 >{path}/remove"), SOON)
        .context("letting go of a device that is gone")?;
    ensure!(!s.bound()?);
    s.left_nothing()?;
    s.alive_and_well()?;
    // Unloading works, and what comes later is taken.
    s.unload()?;
    s.load("")
}

/// Where a PCI function's config space has the capability `id`.
fn capability(s: &Session, config: &str, id: u8) -> Result<u64> {
    let text = s.sh(&format!("hexdump -v -e '1/1 \"%u \"' {config}"))?;
    let bytes: Vec<u8> = text
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
    let mut at = usize::from(byte(0x34));
    for _ in 0..48 {
        if at != 0 && byte(at) == id {
            return Ok(u64::try_from(at)?);
        }
        at = usize::from(byte(at + 1));
    }
    anyhow::bail!("{config} has no capability {id:#x}")
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "hotplug",
        about: "QEMU's balloon in every form, plugged in and out of a running guest",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: 512 * MIB,
            hardware: &[
                "-object",
                "iothread,id=hints",
                "-device",
                "pcie-root-port,id=port1,chassis=1",
                "-device",
                "pcie-root-port,id=port2,chassis=2",
                "-device",
                "pcie-pci-bridge,id=conventional,bus=port2",
            ],
            device: Device::Qemu(&["bus=port1"]),
            populated: false,
            ..Setup::USUAL
        },
        parts: &[
            Part {
                name: "statistics",
                run: stats::agree,
            },
            Part {
                name: "unplug",
                run: unplug_full,
            },
            Part {
                name: "feature-combinations",
                run: combinations,
            },
            Part {
                name: "transports",
                run: transports,
            },
            Part {
                name: "access-platform",
                run: platform_access,
            },
        ],
        any_driver: true,
        seconds: 60,
        ..Scenario::USUAL
    },
    Scenario {
        name: "surprise-removal",
        about: "lets go of QEMU's balloon when it is gone from one moment to the next",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: 512 * MIB,
            // The port's own form of plugging, in which a slot can lose its power.
            hardware: &[
                "-global",
                "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
                "-device",
                "pcie-root-port,id=port1,chassis=1",
            ],
            device: Device::Qemu(&["bus=port1"]),
            populated: false,
            ..Setup::USUAL
        },
        parts: &[only(surprise)],
        any_driver: true,
        seconds: 20,
        ..Scenario::USUAL
    },
];
