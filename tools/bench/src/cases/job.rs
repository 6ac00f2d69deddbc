// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A memory-bound job in the guest while the balloon is resized again and again.
//!
//! User Mode Linux without debug options, at native speed and with one processor: whatever the driver
//! does, it does at the job's expense. In emulation nothing is bound by memory.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vm_runner::size::{GIB, MIB};

use super::{Bench, Group, Sample, When};
use crate::case::{Figures, OURS, REFERENCE, Run};
use crate::helper::HELPER;
use crate::spec::{Bound, Ratio, Spec};
use crate::stats::{mean, quantile, tidy};
use crate::subject::{Plan, Subject};

/// What one step of the job copies.
const STEP: u64 = 64 * MIB;
/// How long the job runs each time.
const PHASE: Duration = Duration::from_secs(3);
/// What the balloon takes and gives.
const RESIZE: u64 = 2 * GIB;
/// How often its target changes.
const EVERY: Duration = Duration::from_millis(500);
/// The side that is shown besides.
const C_DRIVER: &str = "C driver";

const MEAN: Spec = Spec {
    name: "guest-job-mean",
    what: "User Mode Linux with one processor: a job that copies 64 MiB a step, while every half second 2 GiB go \
           into the balloon or come back; its mean speed",
    against: "the same job undisturbed",
    unit: "MiB/s",
    ratio: Ratio::Share,
    bound: Bound::AtLeast(0.97),
};
const SLOWEST: Spec = Spec {
    name: "guest-job-slowest",
    what: "the same job: the speed that only the slowest 1 % of its steps fall below",
    bound: Bound::AtLeast(0.80),
    ..MEAN
};

/// The group of these two cases.
pub(super) const GROUP: Group = Group {
    specs: &[MEAN, SLOWEST],
    when: When::Always,
    open: |_| {
        let ours = Subject::boot(Plan::UML)?;
        let c = Subject::boot(Plan::UML.c())?;
        ours.bring_helper()?;
        c.bring_helper()?;
        Ok(Box::new(Job { ours, c }))
    },
};

struct Job {
    ours: Subject,
    c: Subject,
}

impl Bench for Job {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        let mut phase = |side: &str, subject: &Subject, resizing: bool| -> Result<()> {
            let Phase { steps, resizes } = run(subject, resizing)?;
            let speed = |ms: f64| (STEP / MIB) as f64 / (ms / 1000.0);
            for (case, ms) in [
                (MEAN.name, mean(&steps)),
                (SLOWEST.name, quantile(&steps, 0.99)),
            ] {
                let ms = ms.context("the job has not made a single step")?;
                let figures = Figures::from([
                    ("steps".to_owned(), steps.len() as f64),
                    ("resizes".to_owned(), resizes.len() as f64),
                    (
                        "resize_ms".to_owned(),
                        tidy(mean(&resizes).unwrap_or_default()),
                    ),
                    (
                        "step_median_ms".to_owned(),
                        tidy(quantile(&steps, 0.5).unwrap_or_default()),
                    ),
                    (
                        "step_longest_ms".to_owned(),
                        tidy(quantile(&steps, 1.0).unwrap_or_default()),
                    ),
                ]);
                let run = Run::new(side, round, speed(ms)).with(figures);
                samples.push(Sample { case, run });
            }
            Ok(())
        };
        phase(REFERENCE, &self.ours, false)?;
        phase(OURS, &self.ours, true)?;
        phase(C_DRIVER, &self.c, true)?;
        Ok(samples)
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        self.ours.close()?;
        self.c.close()?;
        Ok(vec![
            "The guest has one processor: every microsecond of the driver is taken from the job."
                .to_owned(),
        ])
    }
}

/// What the job did in one phase.
struct Phase {
    /// Time of each step, in milliseconds.
    steps: Vec<f64>,
    /// Time of each resize meanwhile.
    resizes: Vec<f64>,
}

/// Runs the job, and resizes meanwhile if asked to.
fn run(subject: &Subject, resizing: bool) -> Result<Phase> {
    /// The job first maps its memory.
    const BEGIN: Duration = Duration::from_millis(300);
    const PATIENCE: Duration = Duration::from_secs(60);

    let ms = PHASE.as_millis();
    let command = format!("{HELPER} copies {STEP} {ms}");
    let job = subject.session().machine().background(&command, PATIENCE)?;
    let mut resizes = Vec::new();
    if resizing {
        std::thread::sleep(BEGIN);
        let end = Instant::now() + PHASE - BEGIN;
        let mut full = false;
        while Instant::now() < end {
            full = !full;
            let due = Instant::now() + EVERY;
            resizes.push(subject.travel(if full { RESIZE } else { 0 })?.0);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    let outcome = job.wait()?;
    ensure!(outcome.ok(), "the job: {}: {}", outcome.end, outcome.output);
    subject.travel(0)?;
    let steps = serde_json::from_str(&outcome.output)?;
    Ok(Phase { steps, resizes })
}
