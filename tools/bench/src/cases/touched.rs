// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A guest that has used its memory: the host really has something to discard.

use anyhow::{Context as _, Result};
use vm_runner::size::GIB;

use super::{Bench, Group, Sample, When};
use crate::case::{OURS, REFERENCE, Run};
use crate::helper::HELPER;
use crate::spec::{Bound, Ratio, Spec};
use crate::subject::Subject;

/// Bytes that the guest has used before.
const TOUCHED: u64 = 3_200_000_000;

const SPEC: Spec = Spec {
    name: "uml-touched-inflate",
    what: "User Mode Linux, 3.2 GB of 4 GiB touched first: inflate 3 GiB by page bitmap",
    against: "the time that the daemon spends discarding in that run",
    unit: "ms",
    ratio: Ratio::PairedShare,
    bound: Bound::AtMost(1.10),
};

/// The group of this one case.
pub(super) const GROUP: Group = Group {
    specs: &[SPEC],
    when: When::Smoke,
    open: |context| {
        let subject = Subject::boot(context.uml())?;
        subject.bring_helper()?;
        Ok(Box::new(Touched(subject)))
    },
};

struct Touched(Subject);

impl Bench for Touched {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        self.0
            .session()
            .sh(&format!("{HELPER} touch /mem/all {TOUCHED}"))?;
        let there = self.0.resize(3 * GIB)?;
        self.0.resize(0)?;
        let discard = there
            .discard_ms
            .context("the daemon has discarded nothing")?;
        Ok(vec![
            Sample {
                case: SPEC.name,
                run: there.run(OURS, round),
            },
            Sample {
                case: SPEC.name,
                run: Run::new(REFERENCE, round, discard),
            },
        ])
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        self.0.close()?;
        Ok(Vec::new())
    }
}
