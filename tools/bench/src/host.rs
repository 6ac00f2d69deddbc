// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What is read from, and done on, the host.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate};
use vm_runner::machine::qemu;
use vm_runner::process::{Process, poll};
use vm_runner::size::MIB;

/// Processor time that the threads of process `pid` have used so far, in milliseconds; of threads that
/// have ended nothing is known any more.
///
/// # Errors
///
/// If it is gone.
pub fn cpu_ms(pid: i32) -> Result<f64> {
    let folder = format!("/proc/{pid}/task");
    let mut ns = 0;
    for entry in fs::read_dir(&folder).with_context(|| format!("read {folder}"))? {
        let text = fs::read_to_string(entry?.path().join("schedstat")).unwrap_or_default();
        ns += text
            .split_whitespace()
            .next()
            .and_then(|n| n.parse::<u64>().ok())
            .unwrap_or(0);
    }
    Ok(ns as f64 / 1e6)
}

/// Memory of process `pid` that no file backs, in MiB: what it needs besides the guest's memory.
///
/// # Errors
///
/// If it is gone.
pub fn anonymous_mib(pid: i32) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    let kib: f64 = number
        .with_context(|| format!("{path} has no RssAnon"))?
        .parse()?;
    Ok(kib / 1024.0)
}

/// How long it takes to punch one hole of `bytes` into a shared file in memory that a plain program has
/// allocated and mapped to the last page, as QEMU does with a guest's memory.
///
/// # Errors
///
/// If there is no memory for it.
pub fn hole_punch(bytes: u64) -> Result<Duration> {
    /// How long the program may take to have its memory.
    const ALLOCATE: Duration = Duration::from_secs(60);

    // A QEMU without a machine is a program that does nothing but this, and with the same calls.
    let mut command = qemu::bare();
    command
        .args(["-S", "-machine", "none"])
        .args(["-object", &qemu::ram(bytes / MIB, true)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let process = Process::start("qemu (plain memory)", command)?;
    let path = poll(ALLOCATE, || match process.ended() {
        Some(status) => Some(Err(anyhow::anyhow!("QEMU ended with {status}"))),
        None => populated_file(process.pid(), bytes).map(Ok),
    });
    let path = path.context("QEMU does not get its memory in time")??;
    // It has all pages; let it map the last of them, and come to rest.
    settle(process.pid())?;
    let file = File::options().write(true).open(&path)?;
    let begun = Instant::now();
    fallocate(
        &file,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        0,
        bytes,
    )
    .context("punch a hole")?;
    let took = begun.elapsed();
    tracing::info!("hole punched in {took:.1?}");
    ensure!(file.metadata()?.blocks() == 0, "the hole is not whole");
    Ok(took)
}

/// A nameless file of process `pid` of which all `bytes` are allocated.
fn populated_file(pid: i32, bytes: u64) -> Option<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.into_iter().find(|path| {
        let whole = |m: fs::Metadata| m.is_file() && m.nlink() == 0 && m.blocks() * 512 >= bytes;
        fs::metadata(path).is_ok_and(whole)
    })
}

/// Waits until process `pid` uses no processor time any more.
///
/// # Errors
///
/// If it is gone.
pub fn settle(pid: i32) -> Result<()> {
    const QUIET: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(10);

    let end = Instant::now() + LONGEST;
    let mut before = cpu_ms(pid)?;
    while Instant::now() < end {
        std::thread::sleep(QUIET);
        let now = cpu_ms(pid)?;
        if now - before < 1.0 {
            return Ok(());
        }
        before = now;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_figures() {
        let pid = std::process::id().try_into().unwrap();
        let before = cpu_ms(pid).unwrap();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(30) {
            std::hint::spin_loop();
        }
        assert!(cpu_ms(pid).unwrap() > before);
        assert!(anonymous_mib(pid).unwrap() > 0.0);
        assert!(cpu_ms(i32::MAX).is_err());
    }
}
