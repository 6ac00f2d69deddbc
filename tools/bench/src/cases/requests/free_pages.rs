// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Naming all free pages, in guests of different size, idle and as fragmented as can be.

use anyhow::{Result, bail, ensure};
use balloon_control::message::{Reply, Request};
use vm_runner::size::{GIB, MIB};

use super::{AFTER, PATIENCE_MS, PLAN, ask, connect};
use crate::case::{Figures, OURS, REFERENCE, Run};
use crate::cases::{Bench, Group, Sample, When};
use crate::helper::HELPER;
use crate::host;
use crate::spec::{Bound, Ratio, Spec};
use crate::stats::tidy;
use crate::subject::{Plan, Subject};

/// Processor time that the largest guest may take.
const BUDGET_MS: f64 = 100.0;
/// What remains in large blocks when a guest is being fragmented.
const REST: u64 = 64 * MIB;

const SPEC: Spec = Spec {
    name: "requests-free-pages",
    what: "User Mode Linux, idle guests of 4, 16 and 64 GiB name all their free pages: the guest's processor time, of \
           the largest one",
    against: "what it may take",
    unit: "ms",
    ratio: Ratio::Share,
    bound: Bound::AtMost(1.0),
};

/// The group of this one case.
pub(in crate::cases) const GROUP: Group = Group {
    specs: &[SPEC],
    when: When::Named,
    open: |_| {
        let mut subjects = Vec::new();
        for (size, fragmented, side) in [
            (4, false, "4 GiB"),
            (16, false, "16 GiB"),
            (64, false, OURS),
            (4, true, "4 GiB, fragmented"),
            (64, true, "64 GiB, fragmented"),
        ] {
            let subject = Subject::boot(Plan {
                memory: size * GIB,
                ..PLAN
            })?;
            if fragmented {
                subject.bring_helper()?;
                let session = subject.session();
                // Else the kernel mends it in the background.
                session.sh("echo 0 >/proc/sys/vm/compaction_proactiveness")?;
                session.sh("mount -o remount,size=100% /mem")?;
                session.sh(&format!("{HELPER} fragment /mem/fragments {REST}"))?;
            }
            subjects.push((side, subject));
        }
        Ok(Box::new(FreePages(subjects)))
    },
};

struct FreePages(Vec<(&'static str, Subject)>);

impl Bench for FreePages {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        let mut samples = vec![Sample {
            case: SPEC.name,
            run: Run::new(REFERENCE, round, BUDGET_MS),
        }];
        for (side, subject) in &self.0 {
            let mut client = connect(subject)?;
            let pid = subject.session().machine().pid();
            let before = host::cpu_ms(pid)?;
            let reply = ask(
                &mut client,
                &Request::FreePages {
                    balloon: false,
                    hold: false,
                    hold_ms: None,
                    bound: false,
                    timeout_ms: Some(PATIENCE_MS),
                },
            )?;
            std::thread::sleep(AFTER);
            let cpu = host::cpu_ms(pid)? - before;
            let Reply::FreePages {
                bytes,
                runs,
                answers,
                wire_bytes,
                took,
                ..
            } = reply
            else {
                bail!("another answer: {reply:?}");
            };
            ensure!(bytes > 0, "{side}: nothing is free");
            let figures = [
                ("total_ms", took.elapsed_ms),
                ("guest_clock_ms", took.guest_ms),
                ("free_mib", (bytes / MIB) as f64),
                ("runs", runs as f64),
                ("records", answers as f64),
                ("wire_bytes", wire_bytes as f64),
            ];
            let figures: Figures = figures
                .into_iter()
                .map(|(name, value)| (name.to_owned(), tidy(value)))
                .collect();
            samples.push(Sample {
                case: SPEC.name,
                run: Run::new(side, round, cpu).with(figures),
            });
        }
        Ok(samples)
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        for (_, subject) in self.0 {
            subject.close()?;
        }
        Ok(vec![format!(
            "'{OURS}' is the guest of 64 GiB. A fragmented one has no free block above 64 KiB."
        )])
    }
}
