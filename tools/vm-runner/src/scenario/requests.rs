// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the host asks the guest for: dropping caches, compacting, naming and holding free pages.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use balloon_control::message::{Reply, Request, SizeField};

use super::{Scenario, only};
use crate::host::Dialect;
use crate::paths::Guest;
use crate::process::poll;
use crate::session::{Device, Session, Setup};
use crate::size::{MIB, PAGE, show};

pub(super) const ASKING: Setup = Setup {
    device: Device::Daemon {
        dialect: Dialect::Bitmap,
        options: &[
            "--features",
            "must-tell-host,stats,host-request",
            "--fault",
            "none",
        ],
    },
    ..Setup::USUAL
};

/// Bits of `/proc/kpageflags`.
const BUDDY: u64 = 1 << 10;
pub(super) const OFFLINE: u64 = 1 << 23;

/// Pages that may be used, and freed, between what the guest names and what it is compared with: the program
/// that looks needs about a hundred itself.
const USED: usize = 256;
const FREED: usize = 1024;
/// How often to look anew, should more have moved.
const TRIES: usize = 20;

/// How long an answer may take that takes no time normally.
const PATIENCE: Duration = Duration::from_secs(60);

const ALL: Request = Request::FreePages {
    balloon: false,
    hold: false,
    hold_ms: None,
    bound: false,
    timeout_ms: Some(60_000),
};

const BALLOON_TOO: Request = Request::FreePages {
    balloon: true,
    hold: false,
    hold_ms: None,
    bound: false,
    timeout_ms: Some(60_000),
};

fn hold(ms: u64) -> Request {
    Request::FreePages {
        balloon: false,
        hold: true,
        hold_ms: Some(ms),
        bound: false,
        timeout_ms: Some(60_000),
    }
}

fn ask(s: &Session, request: &Request) -> Result<Reply> {
    s.host().daemon()?.ask(request)
}

/// Has the guest name free pages; gives their frames.
fn named(s: &Session, request: &Request) -> Result<BTreeSet<u64>> {
    let Reply::FreePages { id, bytes, .. } = ask(s, request)? else {
        bail!("another answer to {request:?}");
    };
    let runs = s.host().daemon()?.free_page_runs(id)?;
    let pages: BTreeSet<u64> = runs
        .iter()
        .flat_map(|(first, count)| *first..first + count)
        .collect();
    ensure!(
        pages.len() as u64 * PAGE == bytes,
        "{} pages are named in {}",
        pages.len(),
        show(bytes)
    );
    Ok(pages)
}

/// The frames of which the guest's kernel says one of these.
pub(super) fn frames(s: &Session, flags: u64) -> Result<BTreeSet<u64>> {
    let mut frames = BTreeSet::new();
    for line in s.sh(&format!("vbrs-guest pages {flags}"))?.lines() {
        let (first, count) = line.split_once(' ').context("a run of pages")?;
        let (first, count): (u64, u64) = (first.parse()?, count.parse()?);
        frames.extend(first..first + count);
    }
    Ok(frames)
}

/// Checks that the guest names the pages of which its kernel says one of `flags`, but for what moves
/// meanwhile.
fn alike(s: &Session, request: &Request, flags: u64) -> Result<()> {
    let mut last = (0, 0, 0);
    for _ in 0..TRIES {
        let named = named(s, request)?;
        let found = frames(s, flags)?;
        let (wrong, missing) = (
            named.difference(&found).count(),
            found.difference(&named).count(),
        );
        if !named.is_empty() && wrong <= USED && missing <= FREED {
            return Ok(());
        }
        last = (named.len(), wrong, missing);
    }
    let (named, wrong, missing) = last;
    bail!("of {named} pages named {wrong} are none, and {missing} are missing")
}

/// Leaves holes all over the guest's memory.
fn fragment(s: &Session) -> Result<()> {
    s.sh(
        "mkdir /mem/small && for i in $(seq 1000); do echo $i >/mem/small/$i; done; \
          for i in $(seq 1 2 1000); do rm /mem/small/$i; done",
    )
    .map(drop)
}

/// What is named is what the guest's own kernel says is free.
fn free_pages(s: &Session) -> Result<()> {
    alike(s, &ALL, BUDDY).context("in order")?;
    fragment(s)?;
    alike(s, &ALL, BUDDY).context("fragmented")?;
    s.sh("rm -r /mem/small").map(drop)
}

/// Pages of the balloon are named when they are asked for, whatever it consists of, and only then.
fn balloon_pages(s: &Session) -> Result<()> {
    const BALLOON: u64 = 65 * MIB + 7 * PAGE;

    for order in ["9", "0"] {
        ensure!(s.set_attribute("max_order", order)?);
        s.inflate(BALLOON)?;
        let offline = frames(s, OFFLINE)?;
        ensure!(offline.len() as u64 * PAGE == BALLOON);
        let with = named(s, &BALLOON_TOO)?;
        ensure!(
            offline.is_subset(&with),
            "{} pages of the balloon are missing",
            offline.difference(&with).count()
        );
        alike(s, &BALLOON_TOO, BUDDY | OFFLINE)?;
        let without = named(s, &ALL)?;
        ensure!(
            offline.is_disjoint(&without),
            "the balloon is named unasked"
        );
        s.deflate()?;
    }
    Ok(())
}

fn holds(s: &Session) -> Result<Option<bool>> {
    Ok(s.host().daemon()?.status()?.hold.map(|hold| hold.held))
}

/// Waits until the host knows that nothing is held any more.
fn await_end(s: &Session) -> Result<()> {
    poll(PATIENCE, || match holds(s) {
        Ok(Some(false)) => Some(Ok(())),
        Ok(_) => None,
        Err(e) => Some(Err(e)),
    })
    .context("the hold does not end")?
}

/// Waits until the guest has given back what was held, which it does after it has told the host.
fn given_back(s: &Session) -> Result<()> {
    poll(PATIENCE, || match frames(s, OFFLINE) {
        Ok(pages) => pages.is_empty().then_some(Ok(())),
        Err(e) => Some(Err(e)),
    })
    .context("pages are kept though the hold has ended")?
}

/// What is held is what is named, to the page, until it is released, or the time is over.
fn held_pages(s: &Session) -> Result<()> {
    let before = s.account()?.free()?;
    let pages = named(s, &hold(60_000))?;
    ensure!(holds(s)? == Some(true));
    ensure!(pages == frames(s, OFFLINE)?, "other pages are held");
    let held = pages.len() as u64 * PAGE;
    ensure!(held > before / 2, "only {} are held", show(held));
    // What is left is enough to go on.
    s.alive_and_well()?;
    let Reply::Release { bytes, .. } = ask(s, &Request::Release { timeout_ms: None })? else {
        bail!("another answer");
    };
    ensure!(bytes == held, "{} of {} came back", show(bytes), show(held));
    ensure!(frames(s, OFFLINE)?.is_empty());
    s.note(format!("{} of {}", show(held), show(before)));

    named(s, &hold(3_000))?;
    await_end(s)?;
    given_back(s)?;
    s.balanced(0)
}

/// A guest that needs memory gets it, and the host is told.
fn hold_gives_way(s: &Session) -> Result<()> {
    named(s, &hold(600_000))?;
    s.use_all()?;
    await_end(s)?;
    s.alive_and_well()
}

/// Unloading gives back what is held.
fn hold_and_unload(s: &Session) -> Result<()> {
    named(s, &hold(600_000))?;
    s.unload()?;
    await_end(s)?;
    ensure!(frames(s, OFFLINE)?.is_empty());
    s.left_nothing()
}

/// A guest that relies on what is in free pages names none, but can hold them.
fn poisoned(s: &Session) -> Result<()> {
    match ask(s, &ALL) {
        Ok(answer) => bail!("a guest that poisons free pages names them: {answer:?}"),
        Err(e) => ensure!(
            format!("{e:#}").contains("free pages"),
            "refused for another reason: {e:#}"
        ),
    }
    // The kernel checks the poison when the pages are used again.
    named(s, &hold(60_000))?;
    ask(s, &Request::Release { timeout_ms: None })?;
    s.use_all()
}

/// The disk, as the guest's kernel calls it.
fn disk(s: &Session) -> &'static str {
    match s.machine().guest() {
        Guest::Uml | Guest::UmlLean => "/dev/ubda",
        Guest::Stock => "/dev/nvme0n1",
        Guest::Debug => "/dev/vda",
    }
}

/// Reads a disk, so that the guest's memory is full of cache.
fn fill_cache(s: &Session, megabytes: u64) -> Result<u64> {
    s.sh(&format!(
        "dd if={} of=/dev/null bs=1M count={megabytes}",
        disk(s)
    ))?;
    let cached = s.account_as_is()?.meminfo("Buffers")?;
    ensure!(cached > megabytes * MIB / 10 * 9);
    Ok(cached)
}

fn drop_caches(s: &Session, until: Option<u64>) -> Result<(u64, u64)> {
    let request = Request::DropCaches {
        page_cache: true,
        slab: true,
        until: until.map(SizeField::Bytes),
        timeout_ms: Some(60_000),
    };
    match ask(s, &request)? {
        Reply::DropCaches {
            freed_bytes,
            spare_bytes,
            ..
        } => Ok((freed_bytes, spare_bytes)),
        other => bail!("another answer: {other:?}"),
    }
}

/// Caches are dropped when the host asks, not when enough is free, and not when the guest forbids it.
fn caches(s: &Session) -> Result<()> {
    // The cache of a disk goes with the last one who has it open.
    let command = format!("sleep 1000 <{}", disk(s));
    let open = s
        .machine()
        .background(&command, Duration::from_secs(1000))?;
    let cached = fill_cache(s, 96)?;
    let free = s.account_as_is()?.free()?;
    let (freed, _) = drop_caches(s, Some(free / 2 / PAGE * PAGE))?;
    ensure!(
        freed == 0,
        "{} were dropped though enough was free",
        show(freed)
    );

    ensure!(s.set_attribute("allow_drop_caches", "0")?);
    ensure!(s.attribute("allow_drop_caches")? == "0");
    ensure!(drop_caches(s, None).is_err(), "the guest forbids it");
    ensure!(s.account_as_is()?.meminfo("Buffers")? >= cached / 2);
    for bad in ["2", "01", "yes", "-1"] {
        ensure!(!s.set_attribute("allow_drop_caches", bad)?, "takes {bad:?}");
    }
    ensure!(s.set_attribute("allow_drop_caches", "1")?);

    let (freed, spare) = drop_caches(s, None)?;
    // The guest's programs go on meanwhile, and use some.
    ensure!(
        freed > cached / 10 * 9,
        "{} of {} became free",
        show(freed),
        show(cached)
    );
    ensure!(s.account_as_is()?.meminfo("Buffers")? < MIB);
    s.note(format!("{} of {}", show(freed), show(cached)));
    // What the guest says it can spare it can.
    s.inflate(spare / 10 * 9 / PAGE * PAGE)?;
    s.deflate()?;
    open.kill()
}

/// Memory is compacted, and the figures are right.
fn compact(s: &Session) -> Result<()> {
    const SCANNED: &str = "compact_migrate_scanned";

    fragment(s)?;
    let before = s.account_as_is()?.vmstat(SCANNED)?;
    let Reply::Compact { block_bytes, .. } = ask(
        s,
        &Request::Compact {
            timeout_ms: Some(60_000),
        },
    )?
    else {
        bail!("another answer");
    };
    let after = s.account_as_is()?;
    ensure!(after.vmstat(SCANNED)? > before, "nothing was compacted");
    let free = after.free()?;
    ensure!(
        block_bytes > free / 2 && block_bytes <= free + 16 * MIB,
        "{} of {} are in blocks",
        show(block_bytes),
        show(free)
    );
    s.sh("rm -r /mem/small").map(drop)
}

/// A host that sends anything at all gets answers to what makes sense afterwards.
fn garbage(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    for set in [
        &[
            "request=",
            "request=00",
            "request=010000000100030000000000000000",
        ][..],
        &["request=ffffffffffffffffffffffffffffffff"],
        &["request=00000000000000000000000000000000"],
        // Requests that end each other.
        &[
            "request=01000000030001000000000000000000",
            "request=02000000030001000000000000000000",
            "request=03000000010003000000000000000000",
            "request=04000000030002000000000000000000",
            "request=05000000020000000000000000000000",
            "request=06000000030000000000000000000000",
            "request=07000000040000000000000000000000",
        ],
        &[
            "used-len=4294967295",
            "queue=request",
            "request=08000000030000000000000000000000",
        ],
        &[
            "used-len=0",
            "queue=request",
            "request=09000000030000000000000000000000",
        ],
    ] {
        daemon.faults(set)?;
        std::thread::sleep(Duration::from_millis(100));
        daemon.faults(&["none"])?;
        s.alive_and_well()?;
    }
    alike(s, &ALL, BUDDY)?;
    let log = s.log()?.join("\n");
    ensure!(
        log.matches("less than a request").count() == 1,
        "not said once: {log}"
    );
    Ok(())
}

/// A host that uses no answers keeps nobody from anything, and gets them all when it does.
fn answers_withheld(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    let short = Request::FreePages {
        balloon: false,
        hold: true,
        hold_ms: None,
        bound: false,
        timeout_ms: Some(300),
    };
    daemon.faults(&["withhold", "queue=answer"])?;
    for _ in 0..6 {
        // The daemon may have seen the answer, though it does not give the buffer back.
        let _ = ask(s, &short);
    }
    s.inflate(32 * MIB)?;
    s.alive_and_well()?;
    daemon.faults(&["none"])?;
    ask(
        s,
        &Request::Release {
            timeout_ms: Some(60_000),
        },
    )?;
    alike(s, &ALL, BUDDY)?;
    // Once more, and away.
    daemon.faults(&["withhold", "queue=answer"])?;
    for _ in 0..6 {
        let _ = ask(s, &short);
    }
    s.unload()?;
    ensure!(frames(s, OFFLINE)?.is_empty());
    s.left_nothing()
}

/// Unloading in the middle of anything the host asks.
pub(super) fn unload_while_asked(s: &Session) -> Result<()> {
    let daemon = s.host().daemon()?;
    for i in 0..6 {
        daemon.faults(&[
            "delay=20",
            "queue=answer",
            "request=01000000030001000000000000000000",
            "request=02000000030002000000000000000000",
            "request=03000000010003000000000000000000",
            "request=04000000030000000000000000000000",
            "request=05000000030001000000000000000000",
        ])?;
        std::thread::sleep(Duration::from_millis(i * 15));
        s.unload()?;
        ensure!(frames(s, OFFLINE)?.is_empty());
        daemon.faults(&["none"])?;
        s.load("")?;
        ensure!(!named(s, &ALL)?.is_empty());
    }
    Ok(())
}

/// All queues there can be are where both sides look for them.
fn beside_others(s: &Session) -> Result<()> {
    alike(s, &ALL, BUDDY)?;
    s.inflate(64 * MIB)?;
    named(s, &hold(60_000))?;
    ask(s, &Request::Release { timeout_ms: None })?;
    s.deflate().map(drop)
}

const fn with(options: &'static [&'static str]) -> Setup {
    Setup {
        device: Device::Daemon {
            dialect: Dialect::Bitmap,
            options,
        },
        ..Setup::USUAL
    }
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "free-pages",
        about: "names the pages that its kernel says are free, in order and fragmented",
        guests: &[Guest::Uml, Guest::Stock, Guest::Debug],
        setup: ASKING,
        parts: &[only(free_pages)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "balloon-pages",
        about: "names the pages of the balloon, to the page, when they are asked for",
        setup: ASKING,
        parts: &[only(balloon_pages)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "hold",
        about: "holds what it names, to the page, until it is released or the time is over",
        guests: &[Guest::Uml, Guest::Debug],
        setup: ASKING,
        parts: &[only(held_pages)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "hold-gives-way",
        about: "gives held pages back when the guest needs them, kills nobody, and tells the host",
        setup: ASKING,
        parts: &[only(hold_gives_way)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "hold-and-unload",
        about: "unloads while pages are held",
        setup: ASKING,
        parts: &[only(hold_and_unload)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "poisoned-free-pages",
        about: "names no free pages where skipping one could change what the guest reads, but holds some",
        setup: Setup {
            command_line: "page_poison=1",
            ..ASKING
        },
        parts: &[only(poisoned)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "drop-caches",
        about: "drops caches when asked: not if enough is free, not if the guest forbids it",
        guests: &[Guest::Uml, Guest::Stock],
        setup: Setup {
            disk: 128 * MIB,
            ..ASKING
        },
        parts: &[only(caches)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "compact",
        about: "compacts memory when asked",
        guests: &[Guest::Uml, Guest::Debug],
        setup: ASKING,
        parts: &[only(compact)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "requests-garbage",
        about: "lives through requests that make no sense, and serves those after",
        setup: ASKING,
        parts: &[only(garbage)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "answers-withheld",
        about: "goes on and unloads with a host that uses no answers",
        setup: ASKING,
        parts: &[only(answers_withheld)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "unload-while-asked",
        about: "unloads at any moment of what the host asks",
        setup: ASKING,
        parts: &[only(unload_while_asked)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "requests-alone",
        about: "finds the queues for requests behind no other optional one",
        setup: with(&["--features", "host-request"]),
        parts: &[only(beside_others)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "requests-beside-all",
        about: "finds the queues for requests behind all other optional ones",
        setup: with(&[
            "--features",
            "must-tell-host,stats,deflate-on-oom,free-page-hint,reporting,host-request",
        ]),
        parts: &[only(beside_others)],
        ..Scenario::USUAL
    },
    Scenario {
        name: "requests-behind-reporting",
        about: "finds the queues for requests behind that for reports alone",
        setup: with(&["--features", "reporting,host-request"]),
        parts: &[only(beside_others)],
        ..Scenario::USUAL
    },
];
