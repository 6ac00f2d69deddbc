// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The checks themselves: something is broken on purpose, and the test must fail for that reason.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Scenario, only};
use crate::paths::Guest;
use crate::session::{Session, Setup};
use crate::size::MIB;

const SMALL: Setup = Setup {
    memory: 128 * MIB,
    ..Setup::USUAL
};

/// A scenario that must fail with `why`.
const fn broken(
    name: &'static str,
    about: &'static str,
    why: &'static str,
    parts: &'static [super::Part],
) -> Scenario {
    Scenario {
        name,
        about,
        setup: SMALL,
        parts,
        fails_with: Some(why),
        any_driver: true,
        ..Scenario::USUAL
    }
}

fn sh(s: &Session, command: &str) -> Result<()> {
    s.sh(command).map(drop)
}

pub(super) const SCENARIOS: &[Scenario] = &[
    broken(
        "sees-warning",
        "a test fails when the kernel warns",
        "the kernel complains: ",
        &[only(|s| {
            sh(s, "echo '<4>WARNING: made up for a test' >/dev/kmsg")
        })],
    ),
    broken(
        "sees-taint",
        "a test fails when the kernel is tainted",
        "the kernel is tainted: W",
        &[only(|s| sh(s, "echo 512 >/proc/sys/kernel/tainted"))],
    ),
    broken(
        "sees-changed-byte",
        "a test fails when one byte of the file that must survive is another",
        "/mem/sentinel: differs first at byte 9000000",
        &[only(|s| {
            s.inflate(40 * MIB)?;
            sh(
                s,
                "printf x | dd of=/mem/sentinel bs=1 seek=9000000 conv=notrunc",
            )
        })],
    ),
    broken(
        "sees-lost-memory",
        "a test fails when memory is missing afterwards",
        "afterwards, without the driver: free memory is",
        &[only(|s| {
            s.inflate(40 * MIB)?;
            s.deflate()?;
            s.unload()?;
            sh(s, "vbrs-guest fill /mem/forgotten 12M 1")
        })],
    ),
    broken(
        "sees-wrong-account",
        "a test fails when the guest counts another page than the host",
        "Balloon in meminfo is 40 MiB, not 40964 KiB",
        &[only(|s| {
            s.resize(40 * MIB)?;
            s.balanced(40 * MIB + 4096)
        })],
    ),
    broken(
        "sees-nothing-returned",
        "a test fails when the host gets nothing back",
        "the host got 0 KiB back of 40 MiB",
        &[only(|s| {
            s.resize(40 * MIB)?;
            s.populate()?;
            s.returned(40 * MIB).map(drop)
        })],
    ),
    broken(
        "sees-target-missed",
        "a test fails when the target is not met in time",
        "the balloon holds ",
        &[only(|s| {
            s.target(1024 * MIB)?;
            s.await_actual(1024 * MIB, Duration::from_secs(1))
        })],
    ),
    broken(
        "sees-oom-kill",
        "a test fails when the guest runs out of memory",
        "the kernel complains: ",
        &[only(|s| {
            s.machine()
                .run("vbrs-guest hog 1G /tmp/hog", Duration::from_secs(30))?;
            Ok(())
        })],
    ),
    broken(
        "sees-dead-guest",
        "a test fails at once when the guest goes away",
        "the guest is dead: its process ended with",
        &[only(|s| {
            // Nothing is awaited of the guest for as long as this.
            let job = s
                .machine()
                .background("poweroff -f", Duration::from_secs(1000))?;
            ensure!(job.wait()?.ok());
            Ok(())
        })],
    ),
    Scenario {
        name: "sees-panic",
        about: "a test fails at once when the kernel panics",
        guests: &[Guest::Debug],
        setup: SMALL,
        parts: &[only(|s| {
            let crash = "echo c >/proc/sysrq-trigger";
            s.machine()
                .background(crash, Duration::from_secs(1000))?
                .wait()?;
            Ok(())
        })],
        fails_with: Some("the kernel complains: "),
        any_driver: true,
        ..Scenario::USUAL
    },
];
