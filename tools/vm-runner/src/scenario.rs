// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The tests: what each needs, what it does, and the list of them all.

mod inflate;
mod machine;
mod qemu;

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
    [machine::SCENARIOS, inflate::SCENARIOS, qemu::SCENARIOS].into_iter().flatten()
}
