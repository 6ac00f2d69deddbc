// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A QEMU guest all of whose memory the host has allocated and mapped: what is the least that it takes
//! to give 3 GiB of it back?

use anyhow::Result;
use vm_runner::size::GIB;

use super::{ABOUT_INIT, Bench, Context, Group, NO_INIT, Sample, When};
use crate::case::{OURS, REFERENCE, Run};
use crate::host;
use crate::repopulate;
use crate::spec::{Bound, Ratio, Spec};
use crate::subject::{Plan, Subject};

const ASKED: u64 = 3 * GIB;

const SPEC: Spec = Spec {
    name: "qemu-prealloc-noinit",
    what: "QEMU with all memory allocated, stock kernel with init_on_alloc=0: inflate 3 of 4 GiB",
    against: "one hole punch of 3 GiB in shared memory, all allocated and mapped, by a plain program",
    unit: "ms",
    ratio: Ratio::Share,
    bound: Bound::AtMost(1.25),
};

/// With a kernel that does not zero what is allocated.
pub(super) const GROUP: Group = Group {
    specs: &[SPEC],
    when: When::Always,
    open: |context| Prealloc::open(context, SPEC.name, NO_INIT),
};

struct Prealloc {
    case: &'static str,
    subject: Subject,
    fresh: bool,
}

impl Prealloc {
    fn open(
        context: &Context,
        case: &'static str,
        command_line: &'static str,
    ) -> Result<Box<dyn Bench>> {
        let subject = Subject::boot(Plan {
            populated: true,
            command_line,
            accelerator: context.accelerator,
            ..Plan::QEMU
        })?;
        Ok(Box::new(Self {
            case,
            subject,
            fresh: true,
        }))
    }
}

impl Bench for Prealloc {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        if !self.fresh {
            repopulate::by_qemu(self.subject.session())?;
        }
        self.fresh = false;
        let there = self.subject.resize(ASKED)?;
        self.subject.resize(0)?;
        let punched = host::hole_punch(ASKED)?.as_secs_f64() * 1000.0;
        Ok(vec![
            Sample {
                case: self.case,
                run: there.run(OURS, round),
            },
            Sample {
                case: self.case,
                run: Run::new(REFERENCE, round, punched),
            },
        ])
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        self.subject.close()?;
        Ok(vec![ABOUT_INIT.to_owned()])
    }
}
