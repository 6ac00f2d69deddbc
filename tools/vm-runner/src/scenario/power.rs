// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Sleeping and waking up with a full balloon, and other kernels that follow.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{After, Part, Scenario, only};
use crate::paths::{Driver, Guest};
use crate::process::poll;
use crate::session::{Device, Session, Setup};
use crate::size::{GIB, MIB, PAGE};

const FULL: u64 = 200 * MIB + 3 * PAGE;
/// What the guest's driver may take to fill the balloon again.
const SOON: Duration = Duration::from_secs(60);
/// How long the guest sleeps.
const NAP: Duration = Duration::from_secs(2);

/// Sleeps as `mode` says, with a full balloon; the balloon is full again when it is awake.
fn nap(s: &Session, mode: &str, wake: fn(&Session) -> Result<()>) -> Result<()> {
    s.resize(FULL)?;
    s.balanced(FULL)?;
    let job = s.machine().background(
        &format!("echo {mode} >/sys/power/mem_sleep && echo mem >/sys/power/state"),
        SOON,
    )?;
    s.await_log("suspend entry", SOON)?;
    wake(s)?;
    let outcome = job.wait()?;
    ensure!(outcome.ok(), "{}: {}", outcome.end, outcome.output);
    awake(s)
}

/// An idle processor is woken by what comes over the serial line, which is allowed to.
fn wake_by_a_byte(s: &Session) -> Result<()> {
    std::thread::sleep(NAP);
    s.machine().run("true", SOON).map(drop)
}

/// A machine that sleeps is woken by its host.
fn wake_by_host(s: &Session) -> Result<()> {
    let asleep = poll(SOON, || {
        let status = s
            .host()
            .qmp()
            .and_then(|mut qmp| qmp.execute("query-status", &json!({})));
        match status {
            Ok(status) => (status["status"] == "suspended").then_some(Ok(())),
            Err(e) => Some(Err(e)),
        }
    });
    asleep.context("the machine does not go to sleep")??;
    s.host().qmp()?.execute("system_wakeup", &json!({}))?;
    Ok(())
}

/// What holds after the guest has woken up.
fn awake(s: &Session) -> Result<()> {
    s.await_actual(FULL, SOON)?;
    s.balanced(FULL)?;
    s.sentinel_intact()?;
    s.resize(FULL / 2 / PAGE * PAGE)?;
    s.resize(FULL)?;
    s.alive_and_well()
}

fn hibernate(s: &Session) -> Result<()> {
    const DISK: &str = "/dev/nvme0n1";
    /// So much that the kernel finds no memory for its image unless the balloon is emptied before.
    const FULL: u64 = 376 * MIB;

    s.resize(FULL)?;
    s.sh(&format!(
        "mkswap {DISK} && swapon {DISK} && cat /sys/class/block/nvme0n1/dev >/sys/power/resume"
    ))?;
    s.hibernate()?;
    // A QEMU that was just started has no target.
    exact(s, 0)?;
    s.sentinel_intact()?;
    s.resize(FULL)?;
    exact(s, FULL)?;
    s.alive_and_well()?;
    s.sh(&format!("swapoff {DISK}"))?;
    s.resize(0)?;
    s.unload()?;
    let total = s.account()?.total()?;
    ensure!(total == s.before().total()?, "MemTotal is {total}");
    s.sentinel_intact()
}

/// What is counted to the page. What is free is not: to hibernate, the kernel gives up caches that it
/// does not give up otherwise.
fn exact(s: &Session, bytes: u64) -> Result<()> {
    let now = s.account()?;
    let (total, balloon) = (now.total()?, now.balloon()?);
    ensure!(
        s.actual()? == bytes && balloon == bytes && total + bytes == s.before().total()?,
        "Balloon is {balloon} and MemTotal {total} with {bytes} bytes in the balloon"
    );
    Ok(())
}

/// Suspending all devices and waking them up while the balloon is on its way and memory is freed, which
/// the kernel reports meanwhile.
fn storm(s: &Session) -> Result<()> {
    s.sh("echo devices >/sys/power/pm_test")?;
    for round in 0..3 {
        s.target(FULL * (round % 2))?;
        s.machine().sh_within(
            "vbrs-guest stamp /mem/used 64M 1 1 && rm /mem/used && echo freeze >/sys/power/state",
            s.patience(),
        )?;
    }
    s.sh("echo none >/sys/power/pm_test")?;
    s.target(FULL)?;
    awake(s)
}

/// The poison value that QEMU shows in config space.
fn poison_value(s: &Session) -> Result<u32> {
    /// Where it lies there.
    const POISON_VAL: u64 = 12;

    // The guest's kernel says where the device's own config space is: capability 4 of virtio.
    let place = s.sh(
        "d=/sys/bus/pci/devices/$(basename $(dirname $(readlink -f /sys/bus/virtio/devices/virtio0))); \
         hexdump -v -e '1/1 \"%u \"' $d/config; echo; cat $d/resource",
    )?;
    let (config, resources) = place.split_once('\n').context("no resources")?;
    let config: Vec<u8> = config
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let byte = |at: usize| u64::from(config.get(at).copied().unwrap_or(0));
    let word = |at: usize| (0..4).fold(0, |sum, i| sum | byte(at + i) << (8 * i));
    let mut at = usize::try_from(byte(0x34))?;
    for _ in 0..48 {
        if byte(at) == 9 && byte(at + 3) == 4 {
            break;
        }
        at = usize::try_from(byte(at + 1))?;
    }
    ensure!(byte(at + 3) == 4, "no device config capability");
    let bar = resources.lines().nth(usize::try_from(byte(at + 4))?);
    let begin = bar
        .and_then(|line| line.split_whitespace().next())
        .context("no such resource")?;
    let begin = u64::from_str_radix(begin.trim_start_matches("0x"), 16)?;
    let address = begin + word(at + 8) + POISON_VAL;
    let command = json!({ "command-line": format!("xp /1wx {address:#x}") });
    let answer = s.host().qmp()?.execute("human-monitor-command", &command)?;
    // "00000000fe00200c: 0xaaaaaaaa"
    let text = answer.as_str().unwrap_or_default().trim();
    let value = text
        .rsplit("0x")
        .next()
        .and_then(|hex| u32::from_str_radix(hex, 16).ok());
    value.with_context(|| format!("{text:?} has no value"))
}

/// A guest that writes a value to memory that it frees says which one, also when it has woken up.
fn poison(s: &Session) -> Result<()> {
    const PAGE_POISON: usize = 4;
    const VALUE: u32 = 0xaaaa_aaaa;

    ensure!(s.negotiated(PAGE_POISON)?, "page poison is not negotiated");
    let told = |s: &Session, when: &str| -> Result<()> {
        let value = poison_value(s)?;
        ensure!(value == VALUE, "{when} config space says {value:#010x}");
        Ok(())
    };
    told(s, "after loading")?;
    s.resize(FULL / 4 / PAGE * PAGE)?;
    s.bind(false)?;
    s.bind(true)?;
    told(s, "after binding")?;
    s.machine().sh_within(
        "echo devices >/sys/power/pm_test; echo freeze >/sys/power/state",
        s.patience(),
    )?;
    s.await_actual(FULL / 4 / PAGE * PAGE, SOON)?;
    told(s, "after waking up")
}

/// Another kernel takes over a machine whose balloon is full, and fills it again.
fn kexec(s: &Session) -> Result<()> {
    s.resize(FULL)?;
    s.sh(&format!(
        "{FETCH} && kexec -s -l /tmp/kernel --initrd=/tmp/initramfs --reuse-cmdline"
    ))?;
    s.machine()
        .background("sleep 0.2; kexec -e", s.patience())?;
    s.machine().await_boot().context("the second kernel")?;
    // QEMU still shows what the first kernel's driver has told it: the new kernel counts.
    ensure!(s.account()?.balloon()? == 0, "full without a driver");
    s.load("")?;
    let full = poll(SOON, || {
        let balloon = s.account().and_then(|a| a.balloon()).ok()?;
        (balloon == FULL).then_some(())
    });
    full.context("the new kernel does not fill the balloon again")?;
    s.alive_and_well()?;
    s.resize(0)?;
    ensure!(s.account()?.balloon()? == 0);
    s.resize(FULL).map(drop)
}

/// The kernel that writes a crash dump has little memory, and gives none away.
fn kdump(s: &Session) -> Result<()> {
    const WORDS: &str = "kdump kernel";

    // What the crash says is what is wanted here.
    for words in ["sysrq triggered crash", "Call Trace:", "Kernel panic"] {
        s.expect_in_log(words);
    }
    s.sh(&format!(
        "{FETCH} && kexec -s -p /tmp/kernel --initrd=/tmp/initramfs --append=\"$CRASHED\""
    ))?;
    s.machine().life().expect_panic();
    s.machine()
        .background("sleep 0.2; echo c >/proc/sysrq-trigger", s.patience())?;
    s.machine().await_boot().context("the crash kernel")?;
    s.sh("test -e /proc/vmcore")?;
    let free = s.account()?.free()?;
    s.load("")?;
    ensure!(s.bound()?);
    if s.driver() == Driver::Rust {
        s.await_log(WORDS, SOON)?;
    }
    // Long enough for a driver that does not know: the memory is small.
    let taken = poll(Duration::from_secs(5), || match s.actual() {
        Ok(0) => None,
        other => Some(other),
    });
    if let Some(actual) = taken {
        let actual = actual?;
        anyhow::bail!(
            "the crash kernel gives {} MiB of {} away",
            actual / MIB,
            free / MIB
        );
    }
    s.alive_and_well()
}

/// Copies them from there, whatever their numbers are, and says how a kernel that follows a crash starts.
const FETCH: &str = "for n in /sys/class/nvme/nvme*; do \
     dd if=/dev/${n##*/}n1 of=/tmp/$(cat $n/serial | tr -d ' ') bs=1M || exit 1; done; \
     CRASHED=\"$(sed 's/crashkernel=[^ ]*//' /proc/cmdline) nr_cpus=1 reset_devices\"";

/// Drives with this kernel and this initramfs in them.
const KERNELS: &[&str] = &[
    "-blockdev",
    "driver=file,node-name=kernel,filename=kernel,read-only=on",
    "-device",
    "nvme,drive=kernel,serial=kernel",
    "-blockdev",
    "driver=file,node-name=initramfs,filename=initramfs.cpio,read-only=on",
    "-device",
    "nvme,drive=initramfs,serial=initramfs",
];

/// A guest whose memory the host need not have allocated.
const SMALL: Setup = Setup {
    memory: 512 * MIB,
    populated: false,
    sentinel: 8 * MIB,
    ..Setup::USUAL
};

const HINTS_AND_REPORTS: Device = Device::Qemu(&[
    "iothread=balloon-io",
    "free-page-hint=on",
    "free-page-reporting=on",
]);

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "sleep",
        about: "sleeps and wakes up with a full balloon: idle, and suspended to memory",
        guests: &[Guest::Stock],
        setup: Setup {
            device: HINTS_AND_REPORTS,
            ..SMALL
        },
        parts: &[
            Part {
                name: "idle",
                run: |s| {
                    s.sh(
                        "for t in /sys/class/tty/ttyS1 /sys/class/tty/ttyS1/device; do \
                          echo enabled >$t/power/wakeup; done; true",
                    )?;
                    nap(s, "s2idle", wake_by_a_byte)
                },
            },
            Part {
                name: "to-memory",
                run: |s| nap(s, "deep", wake_by_host),
            },
            Part {
                name: "unload",
                run: Session::leave_clean,
            },
        ],
        // QEMU's machine, once it has slept, does not always power off, with whatever driver.
        after: After::Nothing,
        any_driver: true,
        seconds: 60,
        ..Scenario::USUAL
    },
    Scenario {
        name: "hibernate",
        about: "wakes up from a disk, in another machine, with a full balloon",
        guests: &[Guest::Stock],
        setup: Setup {
            disk: GIB,
            device: HINTS_AND_REPORTS,
            command_line: "VBRS_RESUME=nvme0n1",
            ..SMALL
        },
        parts: &[only(hibernate)],
        after: After::PowerOff,
        any_driver: true,
        seconds: 40,
        ..Scenario::USUAL
    },
    Scenario {
        name: "sleep-in-flight",
        about: "devices sleep and wake up while the balloon is on its way and pages are reported",
        guests: &[Guest::Debug],
        setup: Setup {
            device: Device::Qemu(&["free-page-reporting=on", "deflate-on-oom=on"]),
            ..SMALL
        },
        parts: &[only(storm)],
        any_driver: true,
        seconds: 30,
        ..Scenario::USUAL
    },
    Scenario {
        name: "poison",
        about: "tells what it writes to freed memory, at first, when bound again and after sleep",
        guests: &[Guest::Debug],
        setup: Setup {
            device: Device::Qemu(&["free-page-reporting=on", "page-poison=on"]),
            command_line: "page_poison=1",
            ..SMALL
        },
        parts: &[only(poison)],
        any_driver: true,
        seconds: 20,
        ..Scenario::USUAL
    },
    Scenario {
        name: "kexec",
        about: "another kernel takes over a guest with a full balloon, then one that writes a crash dump",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: GIB,
            cpus: 1,
            hardware: KERNELS,
            device: Device::Qemu(&["free-page-reporting=on"]),
            populated: false,
            sentinel: 0,
            command_line: "crashkernel=192M",
            ..Setup::USUAL
        },
        parts: &[
            Part {
                name: "next",
                run: kexec,
            },
            Part {
                name: "crash",
                run: kdump,
            },
        ],
        after: After::Nothing,
        any_driver: true,
        seconds: 60,
        ..Scenario::USUAL
    },
];
