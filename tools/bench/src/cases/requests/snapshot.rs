// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Writing down the memory of a guest that is mostly free.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use balloon_control::Client;
use balloon_control::message::{Reply, Request};
use vm_runner::paths;
use vm_runner::pause::Paused;
use vm_runner::size::{GIB, MIB};

use super::{PATIENCE_MS, PLAN, ask, connect};
use crate::case::{Figures, OURS, REFERENCE, Run};
use crate::cases::{Bench, Group, Sample, When};
use crate::helper::HELPER;
use crate::spec::{Bound, Ratio, Spec};
use crate::stats::tidy;
use crate::subject::{Plan, Subject};

const MEMORY: u64 = 4 * GIB;
/// What of it is to be free.
const FREE: u64 = MEMORY / 100 * 85;
/// What is not touched before, since the guest needs it to go on.
const REST: u64 = 128 * MIB;

const SPEC: Spec = Spec {
    name: "requests-snapshot",
    what: "User Mode Linux, 4 GiB that were all used, 85 % of them free: write the guest's memory to a file in memory \
           without what is free, from asking for it to having it released",
    against: "writing all of its memory",
    unit: "ms",
    ratio: Ratio::PairedShare,
    bound: Bound::AtMost(0.25),
};

/// The group of this one case.
pub(in crate::cases) const GROUP: Group = Group {
    specs: &[SPEC],
    when: When::Named,
    open: |_| {
        let subject = Subject::boot(Plan {
            memory: MEMORY,
            ..PLAN
        })?;
        subject.bring_helper()?;
        let session = subject.session();
        session.sh("mount -o remount,size=100% /mem")?;
        // What was never used is zeros, and in no image anyway.
        let touch = subject.free()?.saturating_sub(REST);
        session.sh(&format!("{HELPER} touch /mem/all {touch}"))?;
        let keep = subject.free()?.saturating_sub(FREE);
        session.sh(&format!("vbrs-guest fill /mem/kept {keep} 5"))?;
        Ok(Box::new(Snapshot(subject)))
    },
};

struct Snapshot(Subject);

impl Bench for Snapshot {
    fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (side, skips) in [(OURS, true), (REFERENCE, false)] {
            let (ms, figures) = self.take(skips)?;
            samples.push(Sample {
                case: SPEC.name,
                run: Run::new(side, round, ms).with(figures),
            });
        }
        Ok(samples)
    }

    fn close(self: Box<Self>) -> Result<Vec<String>> {
        self.0.close()?;
        Ok(vec![
            "The image is in memory, where writing costs the least, and so leaves the least to gain."
                .to_owned(),
        ])
    }
}

impl Snapshot {
    fn take(&self, skips: bool) -> Result<(f64, Figures)> {
        let mut client = connect(&self.0)?;
        let folder = tempfile::tempdir_in(paths::memory_folder()?)?;
        let image = folder.path().join("image");
        let mut figures = Figures::new();
        let mut note = |name: &str, value: f64| {
            figures.insert(name.to_owned(), tidy(value));
        };
        let begun = Instant::now();
        let ms = |since: Instant| since.elapsed().as_secs_f64() * 1000.0;
        let id = match skips {
            true => {
                let (id, runs) = hold(&mut client)?;
                note("hold_ms", ms(begun));
                note("runs", runs as f64);
                Some(id)
            }
            false => None,
        };
        let stopped = Instant::now();
        let paused = Paused::new(self.0.session().machine().pid())?;
        let saved = save(&mut client, &image, id);
        drop(paused);
        note("stopped_ms", ms(stopped));
        if skips {
            let released = Instant::now();
            let timeout_ms = Some(PATIENCE_MS);
            ask(&mut client, &Request::Release { timeout_ms })?;
            note("release_ms", ms(released));
        }
        let took = ms(begun);
        let memory = client.status(false)?.memory.bytes;
        let Saved {
            written,
            skipped,
            zeros,
        } = saved?;
        ensure!(
            written + skipped + zeros == memory,
            "{written} + {skipped} + {zeros} bytes are not the guest's memory"
        );
        note("written_mib", (written / MIB) as f64);
        note("free_mib", (skipped / MIB) as f64);
        note("zero_mib", (zeros / MIB) as f64);
        Ok((took, figures))
    }
}

fn hold(client: &mut Client) -> Result<(u32, u64)> {
    let request = Request::FreePages {
        balloon: false,
        hold: true,
        hold_ms: Some(PATIENCE_MS),
        bound: false,
        timeout_ms: Some(PATIENCE_MS),
    };
    match ask(client, &request)? {
        Reply::FreePages { id, runs, .. } => Ok((id, runs)),
        other => bail!("another answer: {other:?}"),
    }
}

struct Saved {
    written: u64,
    skipped: u64,
    zeros: u64,
}

fn save(client: &mut Client, path: &Path, id: Option<u32>) -> Result<Saved> {
    let path = path.to_str().context("not UTF-8")?.to_owned();
    match ask(
        client,
        &Request::SaveMemory {
            path,
            id,
            check: false,
        },
    )? {
        Reply::SaveMemory {
            written_bytes,
            skipped_bytes,
            zero_bytes,
            ..
        } => Ok(Saved {
            written: written_bytes,
            skipped: skipped_bytes,
            zeros: zero_bytes,
        }),
        other => bail!("another answer: {other:?}"),
    }
}
