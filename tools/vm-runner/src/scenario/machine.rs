// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The machines themselves: what all other tests rely on.

use std::time::Duration;

use anyhow::ensure;

use super::{After, Scenario, only};
use crate::paths::Guest;
use crate::session::{Device, Setup};
use crate::wire::End;

const BARE: Setup = Setup {
    device: Device::None,
    load: None,
    populated: false,
    ..Setup::USUAL
};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "commands",
    about: "runs commands in a guest without a balloon: output, status, time-out, background, kill",
    guests: &[Guest::Uml, Guest::Stock, Guest::Debug],
    setup: BARE,
    parts: &[only(|s| {
        let vm = s.machine();
        let second = Duration::from_secs(1);
        let outcome = vm.run("echo out; echo err >&2; exit 3", 20 * second)?;
        ensure!(
            outcome.end == End::Status(3) && outcome.output == "out\nerr\n",
            "{outcome:?}"
        );
        let outcome = vm.run("echo begun; sleep 1000", 2 * second)?;
        ensure!(
            outcome.end == End::TimedOut && outcome.output == "begun\n",
            "{outcome:?}"
        );

        let hangs = vm.background("sleep 1000", 2000 * second)?;
        ensure!(s.sh("echo meanwhile")? == "meanwhile");
        ensure!(!hangs.is_over());
        hangs.kill()?;
        ensure!(hangs.wait()?.end == End::Signal(9));

        // What the kernel says meanwhile falls into no output, and nothing is lost of a long one.
        let noise = vm.background(
            "for i in $(seq 100); do echo noise >/dev/kmsg; done",
            20 * second,
        )?;
        let long = s.sh("seq 5000")?;
        ensure!(long.lines().count() == 5_000 && !long.contains("noise"));
        noise.wait()?;
        s.await_log("noise", 10 * second)?;
        s.sentinel_intact()
    })],
    after: After::PowerOff,
    any_driver: true,
    ..Scenario::USUAL
}];
