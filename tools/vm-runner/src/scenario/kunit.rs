// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The module's own unit tests, run in a kernel.

use std::time::Duration;

use anyhow::ensure;

use super::{Scenario, only};
use crate::ktap;
use crate::session::Setup;
use crate::size::MIB;

/// How the module's suites are called.
const PREFIX: &str = "virtio_balloon_rs_";

/// The taint bit that KUnit sets.
const TESTS_HAVE_RUN: u32 = 18;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "kunit",
    about: "runs the module's KUnit suites; each case counts as a test",
    setup: Setup {
        command_line: "kunit.enable=1 kunit.autorun=1",
        ..Setup::USUAL
    },
    parts: &[only(|s| {
        s.expect_taint(TESTS_HAVE_RUN);
        s.await_log(PREFIX, Duration::from_secs(5))?;
        let log = s.log()?;
        let cases = ktap::parse(log.iter().map(String::as_str), PREFIX)?;
        ensure!(cases.len() >= 10, "only {} cases have run", cases.len());
        let suites: std::collections::BTreeSet<&str> =
            cases.iter().map(|c| c.suite.as_str()).collect();
        s.note(format!("{} cases in {} suites", cases.len(), suites.len()));
        s.report_unit_tests(cases);
        s.inflate(8 * MIB).map(drop)
    })],
    ..Scenario::USUAL
}];
