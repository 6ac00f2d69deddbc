// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A guest full of page cache: what the balloon can take at once, with and without dropping it first.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use balloon_control::message::{Reply, Request};
use vm_runner::size::{GIB, MIB};

use super::{PATIENCE_MS, PLAN, ask, connect};
use crate::case::{Figures, OURS, REFERENCE, Run};
use crate::cases::{Bench, Group, Sample, When};
use crate::host;
use crate::spec::{Bound, Ratio, Spec};
use crate::stats::tidy;
use crate::subject::{Plan, Subject};

/// Page cache.
const CACHE: u64 = 2 * GIB;
/// The guest's memory, nearly all of which is asked for.
const MEMORY: u64 = 4 * GIB;
/// What the guest's own program takes of it.
const PROGRAM: u64 = 64 * MIB;
/// When the balloon has not grown for so long it has what it gets.
const STILL: Duration = Duration::from_secs(3);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(1);
/// How long reading a disk may take.
const READ: Duration = Duration::from_secs(120);

const SPEC: Spec = Spec {
    name: "requests-drop-caches",
    what: "User Mode Linux, 2 of 4 GiB are page cache, and all memory is asked for: what the balloon gets if the \
           cache is dropped first",
    against: "what it gets otherwise",
    unit: "MiB",
    ratio: Ratio::Share,
    bound: Bound::AtLeast(1.0),
};

/// The group of this one case.
pub(in crate::cases) const GROUP: Group = Group {
    specs: &[SPEC],
    when: When::Named,
    open: |_| {
        let subject = Subject::boot(Plan {
            memory: MEMORY,
            disk: CACHE,
            ..PLAN
        })?;
        // The cache of a disk goes with the last one who has it open.
        subject
            .session()
            .sh("sleep 100000 </dev/ubda >/dev/null 2>&1 &")?;
        Ok(Box::new(DropCaches(subject)))
    },
};

struct DropCaches(Subject);

impl Bench for DropCaches {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (side, drops) in [(REFERENCE, false), (OURS, true)] {
            let (taken, figures) = self.take(drops)?;
            samples.push(Sample {
                case: SPEC.name,
                run: Run::new(side, round, (taken / MIB) as f64).with(figures),
            });
        }
        Ok(samples)
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        self.0.close()?;
        Ok(Vec::new())
    }
}

impl DropCaches {
    /// Fills the cache, and asks for all memory. Returns what the balloon gets.
    fn take(&self, drops: bool) -> Result<(u64, Figures)> {
        let session = self.0.session();
        session.machine().sh_within(
            &format!("dd if=/dev/ubda of=/dev/null bs=1M count={}", CACHE / MIB),
            READ,
        )?;
        let cached = session.account_as_is()?.meminfo("Buffers")?;
        ensure!(
            cached > CACHE / 10 * 9,
            "only {} MiB are cached",
            cached / MIB
        );
        let mut figures = Figures::new();
        let mut note = |name: &str, value: f64| {
            figures.insert(name.to_owned(), tidy(value));
        };
        let mut client = connect(&self.0)?;
        let pid = session.machine().pid();
        let cpu = host::cpu_ms(pid)?;
        let begun = Instant::now();
        if drops {
            let reply = ask(
                &mut client,
                &Request::DropCaches {
                    page_cache: true,
                    slab: false,
                    until: None,
                    timeout_ms: Some(PATIENCE_MS),
                },
            )?;
            let Reply::DropCaches {
                freed_bytes, took, ..
            } = reply
            else {
                bail!("another answer: {reply:?}");
            };
            note("drop_ms", took.elapsed_ms);
            note("dropped_mib", (freed_bytes / MIB) as f64);
        }
        client.target_bytes(MEMORY - PROGRAM)?;
        // From the first to the last moment that it grows.
        let (mut taken, mut last) = (0, Instant::now());
        let mut half = None;
        while last.elapsed() < STILL {
            let now = client.status(false)?.balloon.actual_bytes;
            if now > taken {
                (taken, last) = (now, Instant::now());
                if now > CACHE && half.is_none() {
                    half = Some(last);
                }
            }
            std::thread::sleep(LOOK);
        }
        let ms = |end: Instant| (end - begun).as_secs_f64() * 1000.0;
        note("ms", ms(last));
        note("guest_cpu_ms", host::cpu_ms(pid)? - cpu);
        if let Some(half) = half {
            note("ms_to_more_than_2_gib", ms(half));
        }
        let left = session.account_as_is()?;
        note("cache_left_mib", (left.meminfo("Buffers")? / MIB) as f64);
        self.0.travel(0)?;
        Ok((taken, figures))
    }
}
