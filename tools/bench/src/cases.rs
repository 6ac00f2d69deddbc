// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The cases, in groups that share guests.

mod fragmented;
mod idle;
mod job;
mod prealloc;
mod requests;
mod scaling;
mod stall;
mod touched;

use anyhow::Result;
use vm_runner::machine::qemu::Accelerator;
use vm_runner::paths::Guest;

use crate::case::Run;
use crate::spec::Spec;
use crate::subject::Plan;

/// Cases that are measured together.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Its cases.
    pub specs: &'static [Spec],
    /// In which runs.
    pub when: When,
    /// Makes the guests it needs.
    pub open: fn(&Context) -> Result<Box<dyn Bench>>,
}

/// When cases are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Also in the short run that only looks whether the benchmarks work.
    Smoke,
    /// If nothing else is said.
    Always,
    /// Only if they are named.
    Named,
}

/// What the user has chosen.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// How QEMU runs guests.
    pub accelerator: Accelerator,
    /// Which User Mode Linux runs the cases of a smoke test: one without checks for times that mean something.
    pub uml: Guest,
}

impl Context {
    /// An idle guest of User Mode Linux for a case that is in the smoke test, too.
    pub fn uml(&self) -> Plan {
        Plan {
            guest: self.uml,
            ..Plan::UML
        }
    }
}

/// Guests of a group, ready to be measured.
pub trait Bench {
    /// Measures each contestant once.
    ///
    /// # Errors
    ///
    /// If something does not work.
    fn round(&mut self, round: u32) -> Result<Vec<Sample>>;

    /// Ends the guests; tells what must be known to understand the results.
    ///
    /// # Errors
    ///
    /// If a guest has anything to complain of.
    fn close(self: Box<Self>) -> Result<Vec<String>>;
}

/// A run and the case it belongs to.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The case's name.
    pub case: &'static str,
    /// The run.
    pub run: Run,
}

/// All there are, in the order of the report.
pub const ALL: [Group; 12] = [
    idle::UML,
    touched::GROUP,
    idle::QEMU,
    idle::QEMU_NO_INIT,
    prealloc::GROUP,
    fragmented::GROUP,
    scaling::GROUP,
    job::GROUP,
    stall::GROUP,
    requests::free_pages::GROUP,
    requests::drop_caches::GROUP,
    requests::snapshot::GROUP,
];

/// A stock kernel's command line that keeps it from zeroing each page that is allocated.
const NO_INIT: &str = "init_on_alloc=0";

/// The note about [`NO_INIT`].
const ABOUT_INIT: &str = "Debian's kernels boot with init_on_alloc=1: whoever allocates a page has the kernel zero it \
     first, and the host provide memory for it. Both drivers pay for this, and no driver can avoid it; under \
     emulation it outweighs all else. The same case with init_on_alloc=0 on the guest's command line shows \
     the drivers themselves.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_easy_to_type() {
        let mut names: Vec<&str> = ALL.iter().flat_map(|g| g.specs).map(|s| s.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        let easy = |c: char| c.is_ascii_lowercase() || c == '-';
        assert!(names.iter().all(|name| name.chars().all(easy)));
        assert!(ALL.iter().any(|group| group.when == When::Smoke));
    }
}
