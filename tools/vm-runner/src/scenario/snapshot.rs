// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The guest's memory written to a file without what is free, while a program in it writes.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use balloon_control::Client;
use balloon_control::message::{Reply, Request};
use rustix::process::{Pid, Signal, kill_process};

use super::{Scenario, only};
use crate::host::Dialect;
use crate::machine::qemu;
use crate::paths::{self, Guest};
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE, show};

const SOON: Duration = Duration::from_secs(30);
/// How much a program in the guest writes, checks and frees, over and over.
const CHURN: u64 = 32 * MIB;
/// How much of its free memory was used before.
const USED: u64 = 128 * MIB;

const SETUP: Setup = Setup {
    device: Device::Daemon {
        dialect: Dialect::Bitmap,
        options: &["--features", "must-tell-host,stats,host-request"],
    },
    ..Setup::USUAL
};

/// The processes of the guest: the one with its memory, and those that its programs run in.
fn family(first: i32) -> Result<Vec<Pid>> {
    let mut all = vec![first];
    let mut next = 0;
    while let Some(pid) = all.get(next) {
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let children = std::fs::read_to_string(thread?.path().join("children"))?;
            let children = children.split_whitespace().map(str::parse);
            all.extend(children.collect::<Result<Vec<i32>, _>>()?);
        }
        next += 1;
    }
    let pids = all.into_iter().map(Pid::from_raw);
    pids.collect::<Option<_>>()
        .context("a process without an id")
}

fn signal(pids: &[Pid], signal: Signal) -> Result<()> {
    for pid in pids {
        kill_process(*pid, signal)?;
    }
    Ok(())
}

/// What an image has: written, left out because it is free, and how long it took.
fn save(client: &mut Client, path: &Path, id: Option<u32>) -> Result<(u64, u64, f64)> {
    let path = path.to_str().context("not UTF-8")?.to_owned();
    match client.ask(&Request::SaveMemory { path, id })? {
        Reply::SaveMemory {
            written_bytes,
            skipped_bytes,
            elapsed_ms,
            ..
        } => Ok((written_bytes, skipped_bytes, elapsed_ms)),
        other => bail!("{other:?}"),
    }
}

/// Compares the images: what is not in the list of free pages is the same.
fn compare(part: &Path, full: &Path, memory: u64, free: &[(u64, u64)]) -> Result<()> {
    let (part, full) = (File::open(part)?, File::open(full)?);
    ensure!(part.metadata()?.len() == full.metadata()?.len());
    let mut runs = free.iter().peekable();
    let (mut a, mut b) = ([0; PAGE as usize], [0; PAGE as usize]);
    for page in (0..memory).step_by(PAGE as usize) {
        while runs
            .next_if(|(start, bytes)| start + bytes <= page)
            .is_some()
        {}
        if runs.peek().is_some_and(|(start, _)| *start <= page) {
            continue;
        }
        part.read_exact_at(&mut a, page)?;
        full.read_exact_at(&mut b, page)?;
        ensure!(a == b, "the page at {page:#x} is not free, and differs");
    }
    Ok(())
}

fn while_it_writes(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    let mut client = Client::connect(daemon.control_path())?;
    // What was used once is no zeros, that a host could leave out anyway.
    s.sh(&format!("vbrs-guest fill /mem/used {USED} 7; rm /mem/used"))?;
    let job = s
        .machine()
        .background(&format!("vbrs-guest churn {CHURN} /mem/churns"), SOON * 10)?;
    s.sh_until("[ -e /mem/churns ]")?;

    let request = Request::FreePages {
        balloon: false,
        hold: true,
        hold_ms: None,
        timeout_ms: Some(30_000),
    };
    let Reply::FreePages { id, bytes, .. } = client.ask(&request)? else {
        bail!("an answer to another request");
    };
    let free = client.free_page_runs(id)?;
    let folder = s.folder();
    let (part, full) = (folder.join("part.image"), folder.join("full.image"));
    let pids = family(s.machine().pid())?;
    signal(&pids, Signal::STOP)?;
    let images = save(&mut client, &part, Some(id)).and_then(|part| {
        let full = save(&mut client, &full, None)?;
        Ok((part, full))
    });
    signal(&pids, Signal::CONT)?;
    let ((written, skipped, ms), (all, none, all_ms)) = images?;
    ensure!(
        skipped == bytes && none == 0,
        "{} are held, {} are left out",
        show(bytes),
        show(skipped)
    );
    ensure!(
        written + USED / 2 < all,
        "{} without what is free, {} with it",
        show(written),
        show(all)
    );
    compare(&part, &full, s.machine().memory(), &free)?;

    // The guest goes on, with all its memory.
    let release = Request::Release {
        timeout_ms: Some(30_000),
    };
    client.ask(&release)?;
    s.sh("rm /mem/churns")?;
    let ended = job.wait()?;
    ensure!(ended.ok(), "the writer has found other contents: {ended:?}");
    s.note(format!(
        "{} in {ms:.0} ms, {} free; all of it: {} in {all_ms:.0} ms",
        show(written),
        show(skipped),
        show(all)
    ));
    for image in [part, full] {
        std::fs::remove_file(image)?;
    }
    s.sentinel_intact()
}

/// As people do it, with QEMU.
fn by_qmp(s: &Session) -> Result<()> {
    s.sh(&format!("vbrs-guest fill /mem/used {USED} 7; rm /mem/used"))?;
    let image = s.folder().join("guest.image");
    let output = Command::new(paths::sibling("balloonctl")?)
        .arg("--json")
        .arg("--control-path")
        .arg(s.host().daemon()?.control_path())
        .args(["snapshot", "--qmp"])
        .arg(s.folder().join(qemu::QMP))
        .arg(&image)
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "balloonctl: {error}");
    let taken: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let bytes = |name: &str| taken[name].as_u64().context("no number");
    let (written, skipped) = (bytes("written_bytes")?, bytes("skipped_bytes")?);
    let sum = written + skipped + bytes("zero_bytes")?;
    ensure!(
        sum == s.host().daemon()?.status()?.memory.bytes && skipped > USED / 2,
        "{taken}"
    );
    std::fs::remove_file(image)?;
    s.note(format!("{} written, {} free", show(written), show(skipped)));
    // It runs, and nothing is held any more.
    ensure!(s.host().daemon()?.status()?.hold.is_none());
    s.alive_and_well()?;
    s.sentinel_intact()
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "snapshot",
        about: "memory is written down without what is free, and all that is not free is in it",
        setup: SETUP,
        parts: &[only(while_it_writes)],
        seconds: 6,
        ..Scenario::USUAL
    },
    Scenario {
        name: "snapshot-qemu",
        about: "balloonctl writes memory down, and has QEMU stop the guest meanwhile",
        guests: &[Guest::Stock],
        setup: SETUP,
        parts: &[only(by_qmp)],
        ..Scenario::USUAL
    },
];
