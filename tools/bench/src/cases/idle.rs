// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Idle guests that have never touched the memory they are asked for: 3 of 4 GiB, there and back.

use anyhow::Result;
use vm_runner::host::Dialect;
use vm_runner::session::Device;
use vm_runner::size::GIB;

use super::{ABOUT_INIT, Bench, Context, Group, NO_INIT, Sample, When};
use crate::case::{OURS, REFERENCE};
use crate::spec::{Bound, Ratio, Spec};
use crate::subject::{Plan, Subject};

const ASKED: u64 = 3 * GIB;

const UML_INFLATE: Spec = Spec {
    name: "uml-idle-inflate",
    what: "User Mode Linux without debug options, idle: inflate 3 of 4 GiB by page bitmap",
    against: "the kernel's C driver with PFN arrays, same daemon",
    unit: "ms",
    ratio: Ratio::TimesAsFast,
    bound: Bound::AtLeast(80.0),
};
const UML_DEFLATE: Spec = Spec {
    name: "uml-idle-deflate",
    what: "the same guest: deflate these 3 GiB again",
    bound: Bound::AtLeast(60.0),
    ..UML_INFLATE
};
const UML_PFN: Spec = Spec {
    name: "pfn-array-uml",
    what: "User Mode Linux, idle, a host that knows only PFN arrays: inflate 3 of 4 GiB",
    against: "the kernel's C driver, same daemon",
    bound: Bound::AtLeast(2.0),
    ..UML_INFLATE
};
const QEMU_INFLATE: Spec = Spec {
    name: "qemu-idle-inflate",
    what: "QEMU, stock kernel with init_on_alloc=1 (its default), idle: inflate 3 of 4 GiB by page bitmap",
    against: "the kernel's C driver on stock virtio-balloon-pci",
    // Both drivers have the kernel zero 3 GiB: 100 times as fast can be seen only without that.
    bound: Bound::AtLeast(1.0),
    ..UML_INFLATE
};
const QEMU_INFLATE_NO_INIT: Spec = Spec {
    name: "qemu-idle-inflate-noinit",
    what: "QEMU, stock kernel with init_on_alloc=0, idle: inflate 3 of 4 GiB by page bitmap",
    bound: Bound::AtLeast(100.0),
    ..QEMU_INFLATE
};
const QEMU_PFN: Spec = Spec {
    name: "pfn-array-qemu",
    what: "QEMU, stock kernel with init_on_alloc=0, idle, stock virtio-balloon-pci: inflate 3 of 4 GiB",
    bound: Bound::AtLeast(1.0),
    ..QEMU_INFLATE
};

/// User Mode Linux: ours by page bitmap, ours by PFN arrays, and the C driver.
pub(super) const UML: Group = Group {
    specs: &[UML_INFLATE, UML_DEFLATE, UML_PFN],
    when: When::Smoke,
    open: |context| {
        let plan = context.uml();
        Idle::open(
            vec![
                (
                    plan,
                    &[(UML_INFLATE.name, OURS)],
                    &[(UML_DEFLATE.name, OURS)],
                ),
                (
                    plan.c(),
                    &[(UML_INFLATE.name, REFERENCE), (UML_PFN.name, REFERENCE)],
                    &[(UML_DEFLATE.name, REFERENCE)],
                ),
                (
                    plan.device(Device::speaking(Dialect::PfnArray)),
                    &[(UML_PFN.name, OURS)],
                    &[],
                ),
            ],
            "",
        )
    },
};

/// QEMU as it comes.
pub(super) const QEMU: Group = Group {
    specs: &[QEMU_INFLATE],
    when: When::Always,
    open: |context| {
        let plan = qemu(context, "");
        Idle::open(
            vec![
                (plan, &[(QEMU_INFLATE.name, OURS)], &[]),
                (
                    plan.device(Device::Qemu(&[])).c(),
                    &[(QEMU_INFLATE.name, REFERENCE)],
                    &[],
                ),
            ],
            ABOUT_INIT,
        )
    },
};

/// QEMU with a guest that does not zero what is allocated.
pub(super) const QEMU_NO_INIT: Group = Group {
    specs: &[QEMU_INFLATE_NO_INIT, QEMU_PFN],
    when: When::Always,
    open: |context| {
        let plan = qemu(context, NO_INIT);
        let stock = plan.device(Device::Qemu(&[]));
        Idle::open(
            vec![
                (plan, &[(QEMU_INFLATE_NO_INIT.name, OURS)], &[]),
                (
                    stock.c(),
                    &[
                        (QEMU_INFLATE_NO_INIT.name, REFERENCE),
                        (QEMU_PFN.name, REFERENCE),
                    ],
                    &[],
                ),
                (stock, &[(QEMU_PFN.name, OURS)], &[]),
            ],
            ABOUT_INIT,
        )
    },
};

fn qemu(context: &Context, command_line: &'static str) -> Plan {
    Plan {
        command_line,
        accelerator: context.accelerator,
        ..Plan::QEMU
    }
}

/// The cases, with the side, that a movement of a guest counts for.
type Counts = &'static [(&'static str, &'static str)];

struct Contestant {
    subject: Subject,
    inflate: Counts,
    deflate: Counts,
}

struct Idle {
    contestants: Vec<Contestant>,
    notes: Vec<String>,
}

impl Idle {
    fn open(plans: Vec<(Plan, Counts, Counts)>, about: &str) -> Result<Box<dyn Bench>> {
        let mut contestants = Vec::new();
        for (plan, inflate, deflate) in plans {
            contestants.push(Contestant {
                subject: Subject::boot(plan)?,
                inflate,
                deflate,
            });
        }
        let notes = about.lines().map(str::to_owned).collect();
        Ok(Box::new(Self { contestants, notes }))
    }
}

impl Bench for Idle {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for Contestant {
            subject,
            inflate,
            deflate,
        } in &self.contestants
        {
            let before = subject.free()?;
            let there = subject.resize(ASKED)?;
            if round == 0 {
                self.notes.push(subject.memory_note(before, ASKED)?);
            }
            let back = subject.resize(0)?;
            let mut count = |counts: Counts, resize: &crate::subject::Resize| {
                for &(case, side) in counts {
                    let run = resize.clone().run(side, round);
                    samples.push(Sample { case, run });
                }
            };
            count(inflate, &there);
            count(deflate, &back);
        }
        Ok(samples)
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        let mut notes = self.notes;
        for contestant in self.contestants {
            let release = format!("guest kernel {}", contestant.subject.release());
            if !notes.contains(&release) {
                notes.push(release);
            }
            contestant.subject.close()?;
        }
        Ok(notes)
    }
}
