// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Guests of very different size: the time per GiB must not depend on it.

use anyhow::Result;
use vm_runner::size::{GIB, MIB};

use super::{Bench, Group, Sample, When};
use crate::case::{JUDGED, Run};
use crate::host;
use crate::spec::{Bound, Ratio, Spec};
use crate::subject::{Plan, Subject};

/// Sizes in GiB; from the second on they are compared. Idle memory is sparse: the largest guest needs
/// one GiB of the host, to describe its pages.
const SIZES: [(u64, &str); 4] = [(1, "1 GiB"), (4, "4 GiB"), (16, "16 GiB"), (64, "64 GiB")];

const SPEC: Spec = Spec {
    name: "scaling",
    what: "User Mode Linux, idle, guests of 1, 4, 16 and 64 GiB: inflate three quarters by page bitmap",
    against: "each other, from 4 to 64 GiB: slowest and fastest per GiB",
    unit: "ms per GiB",
    ratio: Ratio::Deviation,
    bound: Bound::AtMost(0.25),
};

/// The group of this one case.
pub(super) const GROUP: Group = Group {
    specs: &[SPEC],
    when: When::Always,
    open: |_| {
        let mut subjects = Vec::new();
        for (size, side) in SIZES {
            let subject = Subject::boot(Plan {
                memory: size * GIB,
                ..Plan::UML
            })?;
            subjects.push((size, side, subject));
        }
        Ok(Box::new(Scaling(subjects)))
    },
};

struct Scaling(Vec<(u64, &'static str, Subject)>);

impl Bench for Scaling {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (size, side, subject) in &self.0 {
            let bytes = *size * GIB / 4 * 3;
            let per_gib = |ms: f64| ms / (bytes as f64 / GIB as f64);
            let there = subject.resize(bytes)?;
            let host_memory = subject.session().host_memory()? as f64 / MIB as f64;
            let daemon = subject.session().host().daemon()?.pid();
            let daemon_memory = host::anonymous_mib(daemon)?;
            let back = subject.resize(0)?;
            let mut run = Run::new(side, round, per_gib(there.ms)).with(there.figures);
            for (name, value) in [
                ("guest_gib", *size as f64),
                ("deflate_ms_per_gib", per_gib(back.ms)),
                ("guest_memory_on_host_mib", host_memory),
                ("daemon_memory_mib", daemon_memory),
            ] {
                run.figures
                    .insert(name.to_owned(), crate::stats::tidy(value));
            }
            if *size > 1 {
                run.figures.insert(JUDGED.to_owned(), 1.0);
            }
            samples.push(Sample {
                case: SPEC.name,
                run,
            });
        }
        Ok(samples)
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        for (_, _, subject) in self.0 {
            subject.close()?;
        }
        Ok(Vec::new())
    }
}
