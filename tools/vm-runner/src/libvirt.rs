// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The balloon as libvirt drives it: the sample of a guest, started and steered with `virsh`.
//!
//! Needs a mount namespace of its own, as `tools/setup/in-root` makes one: the daemon keeps its state in
//! fixed places.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::channel::Channel;
use crate::console::Life;
use crate::folder;
use crate::initramfs::{self, DRIVER_FOLDER};
use crate::klog;
use crate::paths::{self, Driver, Guest};
use crate::process::{Process, bound, poll};
use crate::size::{KIB, MIB};

/// The sample that is tested.
const SAMPLE: &str = include_str!("../../../samples/libvirt/guest.xml");
/// What the sample calls its guest.
const NAME: &str = "guest";
/// What the sample gives it.
const MEMORY: u64 = 512 * MIB;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Settings of a daemon that needs neither users of its own nor other daemons. QEMU 11.1 does not read a
/// saved guest from a file that libvirt 11.3 hands it, but from a pipe: hence the compression.
const QEMU_CONF: &str = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\n\
     cgroup_controllers = []\nnamespaces = []\nstdio_handler = \"file\"\nremember_owner = 0\n\
     save_image_format = \"gzip\"\n";
const DAEMON_CONF: &str = "auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n";

/// Runs it with `driver`; prints one line.
///
/// # Errors
///
/// If anything is not as it should be.
pub fn run(driver: Driver) -> Result<()> {
    let folder = folder::create("libvirt")?;
    let outcome = Test::start(&folder, driver).and_then(|test| test.steps());
    match &outcome {
        Ok(said) => {
            folder::remove(&folder);
            println!("libvirt: ok: {said}");
        }
        Err(_) => folder::keep(&folder),
    }
    outcome
        .map(drop)
        .with_context(|| format!("everything is in {}", folder.display()))
}

struct Test {
    _daemon: Process,
    folder: PathBuf,
    driver: Driver,
}

/// A line to the guest's agent.
struct Line {
    channel: Channel,
}

impl Line {
    fn sh(&self, command: &str) -> Result<String> {
        let outcome = self.channel.start(command, PATIENCE)?.wait()?;
        ensure!(
            outcome.ok(),
            "{command}: {}: {}",
            outcome.end,
            outcome.output
        );
        Ok(outcome.output.trim_end().to_owned())
    }
}

impl Test {
    fn start(folder: &Path, driver: Driver) -> Result<Self> {
        // Only here: the mount ends with the namespace.
        for place in ["/var/lib/libvirt", "/var/log", "/var/cache"] {
            std::fs::create_dir_all(place)?;
            let out = Command::new("mount")
                .args(["-t", "tmpfs", "libvirt", place])
                .output()?;
            ensure!(
                out.status.success(),
                "mount {place}: {}",
                String::from_utf8_lossy(&out.stderr)
            );
        }
        std::fs::write("/etc/libvirt/qemu.conf", QEMU_CONF)?;
        std::fs::write("/etc/libvirt/libvirtd.conf", DAEMON_CONF)?;
        let log = std::fs::File::create(folder.join("libvirtd.log"))?;
        let mut command = bound("libvirtd");
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let daemon = Process::start("libvirtd", command)?;
        let test = Self {
            _daemon: daemon,
            folder: folder.to_owned(),
            driver,
        };
        let up = poll(PATIENCE, || test.virsh(&["list"]).ok());
        up.context("libvirtd does not answer")?;

        let guest = Guest::Stock;
        let initramfs = folder.join("initramfs.cpio");
        std::fs::write(&initramfs, &*initramfs::of(guest)?)?;
        let xml = SAMPLE
            .replace("KERNEL<", &format!("{}<", guest.kernel()?.display()))
            .replace("INITRAMFS<", &format!("{}<", initramfs.display()))
            .replace(
                "CMDLINE<",
                "console=ttyS0 panic=-1 oops=panic VBRS_AGENT=/dev/ttyS1<",
            )
            .replace(
                "'CONSOLE'",
                &format!("'{}'", folder.join("console.log").display()),
            )
            .replace("'AGENT'", &format!("'{}'", folder.join("agent").display()));
        let path = folder.join("guest.xml");
        std::fs::write(&path, xml)?;
        test.virsh(&["define", &path.to_string_lossy()])?;
        Ok(test)
    }

    fn virsh(&self, words: &[&str]) -> Result<String> {
        let out = Command::new("virsh")
            .args(["-c", "qemu:///system", "-q"])
            .args(words)
            .env("HOME", &self.folder)
            .stdin(Stdio::null())
            .output()
            .context("run virsh")?;
        ensure!(
            out.status.success(),
            "virsh {}: {}",
            words.join(" "),
            String::from_utf8_lossy(&out.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    }

    fn line(&self) -> Result<Line> {
        let stream = poll(PATIENCE, || {
            UnixStream::connect(self.folder.join("agent")).ok()
        });
        let stream = stream.context("the guest's serial line")?;
        let channel = Channel::open(stream.try_clone()?, stream, Arc::new(Life::default()))?;
        Ok(Line { channel })
    }

    /// A figure of `virsh dommemstat`, in KiB.
    fn stat(&self, name: &str) -> Result<Option<u64>> {
        let text = self.virsh(&["dommemstat", NAME])?;
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        match lines.find(|(have, _)| *have == name) {
            Some((_, value)) => Ok(Some(value.trim().parse()?)),
            None => Ok(None),
        }
    }

    fn await_stat(&self, what: &str, name: &str, good: impl Fn(u64) -> bool) -> Result<u64> {
        let mut last = None;
        let there = poll(PATIENCE, || match self.stat(name) {
            Ok(value) => {
                last = value;
                value.filter(|&v| good(v)).map(Ok)
            }
            Err(e) => Some(Err(e)),
        });
        there.with_context(|| format!("{what}: {name} is {last:?}"))?
    }

    fn steps(&self) -> Result<String> {
        /// What the guest is to have, on no boundary of blocks.
        const LESS: u64 = 300 * MIB / KIB + 4;
        const ALL: u64 = MEMORY / KIB;
        /// What a program uses once.
        const ONCE: u64 = 160 * MIB;

        self.virsh(&["start", NAME])?;
        let line = self.line()?;
        line.channel.await_hello(PATIENCE)?;
        let total = meminfo(&line, "MemTotal")?;
        line.sh(&format!(
            "insmod {DRIVER_FOLDER}/{}.ko",
            self.driver.module()
        ))?;
        let features = line.sh("cat /sys/bus/virtio/devices/virtio0/features")?;
        for (bit, name) in [(2, "autodeflate"), (5, "freePageReporting")] {
            ensure!(
                features.as_bytes().get(bit) == Some(&b'1'),
                "{name} is not negotiated"
            );
        }

        // Statistics, with the period of the sample, then with another one.
        self.await_stat("statistics", "available", |kib| kib == total)?;
        self.virsh(&["dommemstat", NAME, "--period", "1", "--live"])?;
        let first = self.await_stat("statistics", "last_update", |at| at > 0)?;
        self.await_stat("newer statistics", "last_update", |at| at > first)?;
        // What the guest frees goes back to the host by itself.
        line.sh(&format!("vbrs-guest fill /mem/once {ONCE} 2"))?;
        let full = self.await_stat("resident", "rss", |kib| kib > ONCE / KIB)?;
        line.sh("rm /mem/once")?;
        let reported = full
            - self.await_stat("freed memory is reported", "rss", |kib| {
                kib + ONCE * 3 / 4 / KIB < full
            })?;
        self.virsh(&["setmem", NAME, &LESS.to_string(), "--live"])?;
        self.await_stat("setmem", "actual", |kib| kib == LESS)?;
        ballooned(&line, ALL - LESS)?;
        // With autodeflate the pages count as the guest's own.
        ensure!(meminfo(&line, "MemTotal")? == total, "MemTotal has changed");
        let free = self.await_stat("statistics", "unused", |kib| kib < LESS)?;
        // A program that needs more than is left gets it, and the balloon comes back when it has ended.
        let needed = meminfo(&line, "MemAvailable")? / 1024 + 48;
        line.sh(&format!("vbrs-guest fill /mem/big {needed}M 3"))?;
        let more = self.await_stat("autodeflate", "actual", |kib| kib > LESS)? - LESS;
        line.sh("vbrs-guest verify /mem/big 3 && rm /mem/big")?;
        self.await_stat("after autodeflate", "actual", |kib| kib == LESS)?;

        // To a file and back. The line ends, and the guest does not notice.
        line.sh("vbrs-guest fill /mem/kept 16M 1")?;
        drop(line);
        self.virsh(&["managedsave", NAME])?;
        ensure!(self.virsh(&["domstate", NAME])? == "shut off");
        self.virsh(&["start", NAME])?;
        let line = self.line()?;
        line.sh("vbrs-guest verify /mem/kept 1")?;
        ensure!(
            self.stat("actual")? == Some(LESS),
            "another size after managedsave"
        );
        self.virsh(&["setmem", NAME, &ALL.to_string(), "--live"])?;
        self.await_stat("setmem", "actual", |kib| kib == ALL)?;
        ballooned(&line, 0)?;
        line.sh(&format!("rmmod {}", self.driver.module()))?;
        ensure!(meminfo(&line, "MemTotal")? == total, "MemTotal has changed");
        let log: Vec<String> = line.sh("dmesg")?.lines().map(str::to_owned).collect();
        if let Some(complaint) = klog::complaint(&log, &[]) {
            bail!("{complaint}");
        }
        self.virsh(&["destroy", NAME])?;
        Ok(format!(
            "{reported} KiB reported, setmem to {LESS} KiB and back, {free} KiB free meanwhile, autodeflate by {more} KiB, \
             dommemstat, managedsave and start"
        ))
    }
}

/// Checks what the guest counts as balloon, in KiB.
fn ballooned(line: &Line, want: u64) -> Result<()> {
    // What a processor has counted alone is added up now and then only, unless it is asked for.
    line.sh("cat /proc/sys/vm/stat_refresh")?;
    let have = meminfo(line, "Balloon")?;
    ensure!(
        have == want,
        "Balloon in meminfo is {have} KiB, not {want} KiB"
    );
    Ok(())
}

/// A line of the guest's `/proc/meminfo`, in KiB.
fn meminfo(line: &Line, name: &str) -> Result<u64> {
    let text = line.sh(&format!("grep ^{name}: /proc/meminfo"))?;
    let value = text.split_whitespace().nth(1).context("no value")?;
    Ok(value.parse()?)
}

/// Whether the machine has libvirt.
///
/// # Errors
///
/// If it has not; the message says what is missing.
pub fn available() -> Result<()> {
    for program in ["virsh", "libvirtd"] {
        paths::program(program)?;
    }
    Ok(())
}
