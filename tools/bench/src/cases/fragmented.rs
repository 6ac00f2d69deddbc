// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Guests without a free block above 64 KiB: pages have to be taken one by one.

use anyhow::{Result, ensure};
use vm_runner::size::{GIB, MIB};

use super::{Bench, Group, Sample, When};
use crate::case::{OURS, REFERENCE};
use crate::guest::{Buddies, FRAGMENT_ORDER};
use crate::helper::HELPER;
use crate::spec::{Bound, Ratio, Spec};
use crate::subject::{Plan, Subject};

const ASKED: u64 = 2 * GIB;

/// What may remain in larger blocks: the last free memory, which a guest cannot do without while its
/// memory is being fragmented.
const REST: u64 = 16 * MIB;

const SPEC: Spec = Spec {
    name: "fragmented",
    what: "User Mode Linux, no free block above 64 KiB: inflate 2 of 4 GiB (page_shift 12)",
    against: "the kernel's C driver in a guest as fragmented",
    unit: "ms",
    ratio: Ratio::TimesAsFast,
    bound: Bound::AtLeast(4.0),
};

/// The group of this one case.
pub(super) const GROUP: Group = Group {
    specs: &[SPEC],
    when: When::Always,
    open: |_| {
        let mut subjects = Vec::new();
        for (side, plan) in [(OURS, Plan::UML), (REFERENCE, Plan::UML.c())] {
            let subject = Subject::boot(plan)?;
            subject.bring_helper()?;
            // Else the kernel mends it in the background, more from round to round.
            subject
                .session()
                .sh("echo 0 >/proc/sys/vm/compaction_proactiveness")?;
            subject
                .session()
                .sh(&format!("{HELPER} fragment /mem/fragments {REST}"))?;
            subjects.push((side, subject));
        }
        Ok(Box::new(Fragmented {
            subjects,
            notes: Vec::new(),
        }))
    },
};

struct Fragmented {
    subjects: Vec<(&'static str, Subject)>,
    notes: Vec<String>,
}

impl Bench for Fragmented {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (side, subject) in &self.subjects {
            let buddies = Buddies::parse(&subject.session().sh("cat /proc/buddyinfo")?)?;
            let above = buddies.above(FRAGMENT_ORDER);
            ensure!(
                above <= 2 * REST,
                "{side}: {} MiB are free in blocks above 64 KiB; by block size: {}",
                above / MIB,
                by_size(&buddies)
            );
            if round == 0 {
                self.notes
                    .push(format!("{side}, free by block size: {}", by_size(&buddies)));
            }
            let before = subject.free()?;
            let mut there = subject.resize(ASKED)?;
            if round == 0 {
                self.notes.push(subject.memory_note(before, ASKED)?);
            }
            let back = subject.resize(0)?;
            there.figures.insert("deflate_ms".to_owned(), back.ms);
            there
                .figures
                .insert("free_above_64_kib_mib".to_owned(), (above / MIB) as f64);
            samples.push(Sample {
                case: SPEC.name,
                run: there.run(side, round),
            });
        }
        Ok(samples)
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        for (_, subject) in self.subjects {
            subject.close()?;
        }
        Ok(self.notes)
    }
}

fn by_size(buddies: &Buddies) -> String {
    let sizes = (0..).zip(&buddies.bytes);
    let sizes = sizes.map(|(order, bytes)| format!("{} KiB: {} MiB", 4_u64 << order, bytes / MIB));
    sizes.collect::<Vec<_>>().join(", ")
}
