// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The tests: what each needs, what it does, and the list of them all.

mod accounting;
mod debug;
mod dialect;
mod hint;
mod hostile;
mod hotplug;
mod inflate;
mod knobs;
mod kunit;
mod lifecycle;
mod machine;
mod migration;
mod offline;
mod pm_test;
mod power;
mod pressure;
mod proof;
mod qemu;
mod requests;
mod several;
mod snapshot;
mod stats;

use anyhow::Result;

use crate::paths::{Driver, Guest};
use crate::session::{Session, Setup};

/// A test, or several that share one boot.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name, without the guest's.
    pub name: &'static str,
    /// What it shows, in one line.
    pub about: &'static str,
    /// The guests it runs in.
    pub guests: &'static [Guest],
    /// What it needs.
    pub setup: Setup,
    /// Its steps, each a test of its own if there are several.
    pub parts: &'static [Part],
    /// What is to hold in the end.
    pub after: After,
    /// Whether it makes sense with the C driver as well.
    pub any_driver: bool,
    /// What its failure must say, if it is a test of the checks that is to fail.
    pub fails_with: Option<&'static str>,
    /// About how long it takes, if that is long: such tests are begun first.
    pub seconds: u64,
}

/// A step of a scenario. Once one has failed, those after it fail too.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its name; empty if it is the only one.
    pub name: &'static str,
    /// What it does.
    pub run: fn(&Session) -> Result<()>,
}

/// What is to hold when the last part has passed. In any case the kernel must not have complained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The balloon can be emptied, all memory can be used, nothing is lost, the driver unloads, the
    /// guest powers off.
    Clean,
    /// The guest powers off.
    PowerOff,
    /// Nothing more: the test leaves the guest in a state that it need not come out of.
    Nothing,
}

impl Scenario {
    /// The usual test of our driver in User Mode Linux, to be changed where one differs.
    pub const USUAL: Self = Self {
        name: "",
        about: "",
        guests: &[Guest::Uml],
        setup: Setup::USUAL,
        parts: &[],
        after: After::Clean,
        any_driver: false,
        fails_with: None,
        seconds: 0,
    };

    /// Whether `driver` can be tested by it.
    pub fn suits(&self, driver: Driver) -> bool {
        driver == Driver::Rust || self.any_driver
    }
}

/// A step without a name, for a scenario of one step.
const fn only(run: fn(&Session) -> Result<()>) -> Part {
    Part { name: "", run }
}

/// All tests, in the order in which they are listed.
pub fn all() -> impl Iterator<Item = &'static Scenario> {
    [
        machine::SCENARIOS,
        proof::SCENARIOS,
        inflate::SCENARIOS,
        dialect::SCENARIOS,
        accounting::SCENARIOS,
        knobs::SCENARIOS,
        lifecycle::SCENARIOS,
        pressure::SCENARIOS,
        hint::SCENARIOS,
        snapshot::SCENARIOS,
        hostile::SCENARIOS,
        requests::SCENARIOS,
        kunit::SCENARIOS,
        debug::SCENARIOS,
        offline::SCENARIOS,
        pm_test::SCENARIOS,
        qemu::SCENARIOS,
        migration::SCENARIOS,
        hotplug::SCENARIOS,
        stats::SCENARIOS,
        several::SCENARIOS,
        power::SCENARIOS,
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_parts_are_named() {
        let mut names = BTreeSet::new();
        for scenario in all() {
            assert!(!scenario.name.is_empty() && !scenario.about.is_empty());
            assert!(!scenario.parts.is_empty(), "{}", scenario.name);
            assert!(scenario.fails_with.is_none() || scenario.parts.len() == 1);
            let single = scenario.parts.len() == 1;
            for part in scenario.parts {
                assert!(single || !part.name.is_empty(), "{}", scenario.name);
                for guest in scenario.guests {
                    let name = format!("{guest}/{}/{}", scenario.name, part.name);
                    assert!(names.insert(name.clone()), "{name} is there twice");
                }
            }
        }
        assert!(names.len() >= 30, "{} tests", names.len());
    }
}
