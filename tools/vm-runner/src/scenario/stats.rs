// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Statistics: each figure against what the guest's own kernel says at the same moment.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{Scenario, only};
use crate::account::Account;
use crate::host::{Dialect, Host};
use crate::paths::Guest;
use crate::process::poll;
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE};

/// How QEMU calls them and how our daemon does, and what the kernel says of them.
const FIGURES: [(&str, &str, Source); 16] = [
    ("stat-swap-in", "swap-in", Source::Events(&["pswpin"], PAGE)),
    (
        "stat-swap-out",
        "swap-out",
        Source::Events(&["pswpout"], PAGE),
    ),
    (
        "stat-major-faults",
        "major-faults",
        Source::Events(&["pgmajfault"], 1),
    ),
    (
        "stat-minor-faults",
        "minor-faults",
        Source::Events(&["pgfault"], 1),
    ),
    ("stat-free-memory", "free-memory", Source::Memory("MemFree")),
    (
        "stat-total-memory",
        "total-memory",
        Source::Memory("MemTotal"),
    ),
    (
        "stat-available-memory",
        "available-memory",
        Source::Memory("MemAvailable"),
    ),
    (
        "stat-disk-caches",
        "disk-caches",
        Source::Pages("nr_file_pages"),
    ),
    (
        "stat-htlb-pgalloc",
        "hugetlb-allocations",
        Source::Events(&["htlb_buddy_alloc_success"], 1),
    ),
    (
        "stat-htlb-pgfail",
        "hugetlb-failures",
        Source::Events(&["htlb_buddy_alloc_fail"], 1),
    ),
    (
        "stat-oom-kills",
        "oom-kills",
        Source::Events(&["oom_kill"], 1),
    ),
    (
        "stat-alloc-stalls",
        "alloc-stalls",
        Source::Events(
            &[
                "allocstall_dma",
                "allocstall_dma32",
                "allocstall_normal",
                "allocstall_movable",
                "allocstall_device",
            ],
            1,
        ),
    ),
    (
        "stat-async-scans",
        "async-scans",
        Source::Events(&["pgscan_kswapd"], PAGE),
    ),
    (
        "stat-direct-scans",
        "direct-scans",
        Source::Events(&["pgscan_direct"], PAGE),
    ),
    (
        "stat-async-reclaims",
        "async-reclaims",
        Source::Events(&["pgsteal_kswapd"], PAGE),
    ),
    (
        "stat-direct-reclaims",
        "direct-reclaims",
        Source::Events(&["pgsteal_direct"], PAGE),
    ),
];

/// Where the guest's kernel says the same.
#[derive(Clone, Copy)]
enum Source {
    /// Sum of counters of `/proc/vmstat` that only grow, times so many bytes.
    Events(&'static [&'static str], u64),
    /// Pages in `/proc/vmstat`.
    Pages(&'static str),
    /// A line of `/proc/meminfo`.
    Memory(&'static str),
}

impl Source {
    /// What it is now; nothing if this kernel does not count it.
    fn of(self, account: &Account) -> Result<Option<u64>> {
        match self {
            Self::Events(names, unit) => {
                let counted: Vec<u64> = names
                    .iter()
                    .filter_map(|n| account.vmstat(n).ok())
                    .collect();
                Ok((!counted.is_empty()).then(|| counted.iter().sum::<u64>() * unit))
            }
            Self::Pages(name) => Ok(Some(account.vmstat(name)? * PAGE)),
            Self::Memory(name) => Ok(Some(account.meminfo(name)?)),
        }
    }
}

/// What the host has been told, newer than this call.
fn told(s: &Session) -> Result<BTreeMap<String, u64>> {
    match s.host() {
        Host::Qemu { .. } => told_to_qemu(s),
        _ => Ok(s.host().daemon()?.stats()?.values.into_iter().collect()),
    }
}

fn told_to_qemu(s: &Session) -> Result<BTreeMap<String, u64>> {
    const PATH: &str = "/machine/peripheral/balloon0";

    let mut qmp = s.host().qmp()?;
    let interval = json!({ "path": PATH, "property": "guest-stats-polling-interval", "value": 1 });
    qmp.execute("qom-set", &interval)?;
    let get = json!({ "path": PATH, "property": "guest-stats" });
    let mut begun = None;
    let news = poll(s.patience(), || {
        let answer = match qmp.execute("qom-get", &get) {
            Ok(answer) => answer,
            Err(e) => return Some(Err(e)),
        };
        let at = answer["last-update"].as_u64()?;
        let first = *begun.get_or_insert(at);
        // Two updates: the first one may have been asked for before.
        (at > first + 1).then_some(Ok(answer))
    });
    let news = news.context("QEMU gets no statistics in time")??;
    let values = news["stats"].as_object().context("no stats")?;
    Ok(values
        .iter()
        .filter_map(|(name, value)| Some((name.clone(), value.as_u64()?)))
        .collect())
}

/// Every figure that the host is told is what the guest's own kernel says: counters lie between what it
/// says before and after, sizes are near to it.
pub(super) fn agree(s: &Session) -> Result<()> {
    /// While the kernel reports free pages, 128 MiB of them are not free for a moment.
    const TRIES: usize = 3;

    let mut last = Ok(());
    for _ in 0..TRIES {
        last = agree_now(s);
        if last.is_ok() {
            break;
        }
    }
    last
}

fn agree_now(s: &Session) -> Result<()> {
    let before = s.account_as_is()?;
    let told = told(s)?;
    let after = s.account_as_is()?;
    let qemu = matches!(s.host(), Host::Qemu { .. });
    let mut compared = 0;
    for (in_qemu, in_daemon, source) in FIGURES {
        let name = if qemu { in_qemu } else { in_daemon };
        let (Some(least), Some(most)) = (source.of(&before)?, source.of(&after)?) else {
            continue;
        };
        let have = told
            .get(name)
            .with_context(|| format!("no {name} among {told:?}"))?;
        let slack = match source {
            Source::Events(..) => 0,
            Source::Pages(_) | Source::Memory(_) => s.slack(),
        };
        let (least, most) = (least.min(most), least.max(most));
        ensure!(
            (least.saturating_sub(slack)..=most + slack).contains(have),
            "{name} is {have}; the guest says from {least} to {most}"
        );
        compared += 1;
    }
    ensure!(compared >= 12, "only {compared} figures are compared");
    s.note(format!("{compared} figures agree"));
    Ok(())
}

/// The same after the guest was short of memory, with swap: then no counter is zero.
fn after_pressure(s: &Session) -> Result<()> {
    // With more in reserve than so small a guest has: else kswapd itself runs out of pages now and then, and
    // the kernel complains of that.
    s.sh("mkswap /dev/nvme0n1 && swapon /dev/nvme0n1 && echo 16384 >/proc/sys/vm/min_free_kbytes")?;
    let more = s.account()?.available()? + 160 * MIB;
    s.machine().sh_within(
        &format!("vbrs-guest hog {more} /tmp/hog & until test -e /tmp/hog; do sleep 0.1; done; rm /tmp/hog; wait"),
        s.patience(),
    )?;
    s.sh("dd if=/dev/nvme0n1 of=/dev/null bs=1M count=32; swapoff /dev/nvme0n1")?;
    let now = s.account_as_is()?;
    for name in [
        "pswpout",
        "pswpin",
        "pgmajfault",
        "pgscan_kswapd",
        "pgsteal_kswapd",
    ] {
        ensure!(now.vmstat(name)? > 0, "{name} has stayed at 0");
    }
    agree(s)
}

/// Answers come while the balloon is on its way, also with a host that is slow with everything else.
fn while_inflating(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    daemon.faults(&["delay=100"])?;
    let mut answers = 0;
    for target in [12 * MIB, 24 * MIB, 0] {
        s.target(target)?;
        loop {
            std::thread::sleep(Duration::from_millis(20));
            daemon.stats()?;
            if s.actual()? == target {
                break;
            }
            answers += 1;
        }
    }
    daemon.faults(&[])?;
    ensure!(
        answers >= 3,
        "only {answers} answers came while it was on its way"
    );
    s.note(format!("{answers} answers on the way"));
    agree(s)
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "statistics-all",
        about: "all figures agree with the guest's own after memory was short and pages were swapped",
        guests: &[Guest::Stock],
        setup: Setup {
            memory: 384 * MIB,
            cpus: 1,
            disk: 640 * MIB,
            device: Device::Qemu(&[]),
            populated: false,
            ..Setup::USUAL
        },
        parts: &[only(after_pressure)],
        any_driver: true,
        seconds: 30,
        ..Scenario::USUAL
    },
    Scenario {
        name: "statistics-under-load",
        about: "statistics come, and are right, while a slow host keeps the balloon on its way",
        setup: Setup {
            device: Device::Daemon {
                dialect: Dialect::PfnArray,
                options: &["--fault", "none"],
            },
            ..Setup::USUAL
        },
        parts: &[only(while_inflating)],
        any_driver: true,
        seconds: 10,
        ..Scenario::USUAL
    },
];
