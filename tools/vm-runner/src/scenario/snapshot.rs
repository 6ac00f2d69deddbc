// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The guest's memory written to a file without what is free, while a program in it writes.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use balloon_control::Client;
use balloon_control::message::{Reply, Request};

use super::{Scenario, only};
use crate::host::{Daemon, Dialect};
use crate::machine::qemu;
use crate::paths::{self, Guest};
use crate::pause::Paused;
use crate::process::poll;
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

/// What an image has: written, left out because it is free, and how long it took.
fn save(client: &mut Client, path: &Path, id: Option<u32>) -> Result<(u64, u64, f64)> {
    let path = path.to_str().context("not UTF-8")?.to_owned();
    match client.ask(&Request::SaveMemory {
        path,
        id,
        check: false,
    })? {
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

/// Makes all of a stopped guest's memory useless, and puts an image back, as people do it.
fn scribble_and_restore(client: &mut Client, image: &Path, memory: &Path) -> Result<()> {
    const PIECE: usize = 1 << 20;

    let file = File::options().write(true).open(memory)?;
    let mut command = Command::new(paths::sibling("balloonctl")?);
    command.arg("restore").arg(image).arg(memory);
    for region in client.status(false)?.memory.regions {
        let offset = region.file_offset.context("memory without a file")?;
        let (address, bytes) = (region.guest_addr, region.bytes);
        let end = offset + bytes;
        for at in (offset..end).step_by(PIECE) {
            let len = (PIECE as u64).min(end - at) as usize;
            file.write_all_at(&[0xa5; PIECE][..len], at)?;
        }
        let region = format!("{address:#x}:{bytes}:{offset:#x}");
        command.args(["--region", &region]);
    }
    let output = command.output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "balloonctl: {error}");
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
        bound: false,
        timeout_ms: Some(30_000),
    };
    let Reply::FreePages { id, bytes, .. } = client.ask(&request)? else {
        bail!("an answer to another request");
    };
    let free = client.free_page_runs(id)?;
    let folder = s.folder();
    let (part, full) = (folder.join("part.image"), folder.join("full.image"));
    let restored = folder.join("restored.image");
    let paused = Paused::new(s.machine().pid())?;
    let images = save(&mut client, &part, Some(id)).and_then(|part| {
        let all = save(&mut client, &full, None)?;
        scribble_and_restore(&mut client, &folder.join("part.image"), s.memory_file())?;
        save(&mut client, &restored, None)?;
        Ok((part, all))
    });
    drop(paused);
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
    let memory = full.metadata()?.len();
    compare(&part, &full, memory, &free).context("the image")?;
    compare(&restored, &full, memory, &free).context("the memory that was put back")?;

    // The guest goes on, with all its memory, as it was put back.
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
    for image in [part, full, restored] {
        std::fs::remove_file(image)?;
    }
    s.sentinel_intact()
}

/// As people do it, with QEMU, while others set targets all the time; a guest that stands still must not be
/// told of one, QEMU dies of that.
fn by_qmp(s: &Session) -> Result<()> {
    /// How often: without care QEMU dies of that in two of three runs.
    const TIMES: usize = 5;

    let over = AtomicBool::new(false);
    s.sh(&format!("vbrs-guest fill /mem/used {USED} 7; rm /mem/used"))?;
    std::thread::scope(|scope| {
        let targets = scope.spawn(|| -> Result<()> {
            let daemon = s.host().daemon()?;
            let mut wanted = 0;
            while !over.load(Ordering::Relaxed) {
                wanted = MIB - wanted;
                daemon.target(wanted)?;
                std::thread::sleep(Duration::from_millis(2));
            }
            daemon.target(0)
        });
        let taken = (0..TIMES).try_for_each(|_| one_by_qmp(s));
        over.store(true, Ordering::Relaxed);
        targets.join().unwrap_or(Ok(())).and(taken)
    })?;
    s.await_actual(0, SOON)?;
    // It runs, and nothing is held any more.
    ensure!(s.host().daemon()?.status()?.hold.is_none());
    s.alive_and_well()?;
    s.sentinel_intact()
}

fn one_by_qmp(s: &Session) -> Result<()> {
    let image = s.folder().join("guest.image");
    let qmp = s.folder().join(qemu::QMP);
    let mut snapshot = Command::new(paths::sibling("balloonctl")?)
        .arg("--json")
        .arg("--control-path")
        .arg(s.host().daemon()?.control_path())
        .args(["snapshot", "--qmp"])
        .arg(&qmp)
        .arg(&image)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // Somebody else wants to talk to QEMU, and does not let go; he has to wait until the guest runs again.
    let under_way = poll(SOON, || match s.host().daemon().and_then(Daemon::status) {
        Ok(now) if now.hold.is_some() => Some(Ok(())),
        Ok(_) => matches!(snapshot.try_wait(), Ok(Some(_))).then_some(Ok(())),
        Err(e) => Some(Err(e)),
    });
    under_way.context("nothing is held")??;
    let rival = UnixStream::connect(&qmp)?;
    let output = snapshot.wait_with_output()?;
    drop(rival);
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
    Ok(())
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "snapshot",
        about: "memory is written down without what is free, put back over scribbles, and all that is not free is there",
        setup: SETUP,
        parts: &[only(while_it_writes)],
        seconds: 9,
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
