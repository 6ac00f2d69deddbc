// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! How long a thread of the guest stands still while the host discards 3 GiB of populated memory.
//!
//! The guest has one virtual processor, so that on a machine with two the one who discards has the other
//! and nobody stands still for lack of processors.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use vm_runner::process::poll;
use vm_runner::session::Device;
use vm_runner::size::GIB;

use super::{Bench, Context, Group, Sample, When};
use crate::case::{Figures, OURS, REFERENCE, Run};
use crate::guest::{STALLS_TAIL, Stalls};
use crate::helper::HELPER;
use crate::repopulate;
use crate::spec::{Bound, Ratio, Spec};
use crate::stats::tidy;
use crate::subject::{Plan, Subject};

const ASKED: u64 = 3 * GIB;

/// The clock is read without leaving the guest, and pages are not zeroed: else the guest's memory would be
/// touched before it is given back, which takes most of the time and stalls nobody.
const COMMAND_LINE: &str = "init_on_alloc=0 clocksource=tsc tsc=reliable";

/// The side that is shown besides.
const IOEVENTFD_OFF: &str = "ioeventfd=off";

const SPEC: Spec = Spec {
    name: "stall",
    what: "QEMU, 3 of 4 GiB, all allocated and mapped, are discarded: the longest time that a guest thread, which only \
           looks at the clock, stands still",
    against: "the kernel's C driver on stock virtio-balloon-pci with ioeventfd=on",
    unit: "ms",
    ratio: Ratio::Share,
    bound: Bound::AtMost(1.0),
};

/// The group of this one case.
pub(super) const GROUP: Group = Group {
    specs: &[SPEC],
    when: When::Always,
    open: |context| Stall::open(context),
};

struct Stall(Vec<(&'static str, Subject)>);

impl Stall {
    fn open(context: &Context) -> Result<Box<dyn Bench>> {
        let plan = Plan {
            command_line: COMMAND_LINE,
            accelerator: context.accelerator,
            ..Plan::QEMU
        };
        let stock = |properties| plan.device(Device::Qemu(properties)).c();
        let mut subjects = Vec::new();
        for (side, plan) in [
            (OURS, plan),
            (REFERENCE, stock(&["ioeventfd=on"])),
            (IOEVENTFD_OFF, stock(&["ioeventfd=off"])),
        ] {
            let subject = Subject::boot(plan)?;
            subject.bring_helper()?;
            subjects.push((side, subject));
        }
        Ok(Box::new(Self(subjects)))
    }
}

impl Bench for Stall {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (side, subject) in &self.0 {
            // Nothing is required against this one, and it is slow: once will do.
            if *side == IOEVENTFD_OFF && round > 0 {
                continue;
            }
            repopulate::by_qemu(subject.session())?;
            // Nothing but that, since whoever asks the guest for figures needs its processor.
            let mut figures = Figures::new();
            let seen = watch(subject, || {
                let (ms, _) = subject.travel(ASKED)?;
                figures.insert("total_ms".to_owned(), tidy(ms));
                Ok(())
            })?;
            subject.resize(0)?;
            let longest = seen.longest_ms.first().copied().context("no gap at all")?;
            figures.insert("stalled_ms_together".to_owned(), tidy(seen.lost_ms));
            figures.insert(
                "stall_fifth_longest_ms".to_owned(),
                tidy(seen.longest_ms[4]),
            );
            let run = Run::new(side, round, longest).with(figures);
            samples.push(Sample {
                case: SPEC.name,
                run,
            });
        }
        // What this machine does to the guest anyway.
        let (_, first) = &self.0[0];
        let quiet = watch(first, || {
            std::thread::sleep(Duration::from_millis(500));
            Ok(())
        })?;
        samples.push(Sample {
            case: SPEC.name,
            run: Run::new("nothing happens", round, quiet.longest_ms[0]),
        });
        Ok(samples)
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        for (_, subject) in self.0 {
            let clock = subject
                .session()
                .sh("cat /sys/devices/system/clocksource/clocksource0/current_clocksource")?;
            let note = format!("guest clock: {clock}");
            if !notes.contains(&note) {
                notes.push(note);
            }
            subject.close()?;
        }
        Ok(notes)
    }
}

/// Has a thread in the guest look at the clock while `f` runs.
fn watch(subject: &Subject, f: impl FnOnce() -> Result<()>) -> Result<Stalls> {
    const FLAG: &str = "/tmp/stall";
    const PATIENCE: Duration = Duration::from_secs(150);
    const UP: Duration = Duration::from_secs(10);
    const LEAD: Duration = Duration::from_millis(100);

    let command = format!("{HELPER} stalls {FLAG}");
    let job = subject.session().machine().background(&command, PATIENCE)?;
    let up = poll(UP, || {
        match subject
            .session()
            .machine()
            .run(&format!("test -e {FLAG}"), UP)
        {
            Ok(outcome) => outcome.ok().then_some(Ok(())),
            Err(e) => Some(Err(e)),
        }
    });
    up.context("the helper does not start")??;
    std::thread::sleep(LEAD);
    let done = f();
    std::thread::sleep(STALLS_TAIL);
    subject.session().sh(&format!("rm {FLAG}"))?;
    let outcome = job.wait()?;
    done?;
    ensure!(
        outcome.ok(),
        "the helper: {}: {}",
        outcome.end,
        outcome.output
    );
    Ok(serde_json::from_str(&outcome.output)?)
}
