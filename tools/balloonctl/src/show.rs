// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What people read.

use std::io::{self, Write};

use balloon_control::message::{
    AskedStatus, BalloonStatus, Counters, Event, EventKind, FrontendStatus, GuestStats, HintState,
    HintStatus, Movement, Reply, Status,
};
use balloon_control::size::human;

use crate::restore::Restored;
use crate::snapshot::Taken;

pub(crate) fn target(out: &mut impl Write, movement: &Movement) -> io::Result<()> {
    writeln!(
        out,
        "target {} (balloon is {})",
        human(movement.target_bytes),
        human(movement.from_bytes)
    )
}

pub(crate) fn waited(
    out: &mut impl Write,
    reached: bool,
    actual_bytes: u64,
    movement: &Movement,
) -> io::Result<()> {
    if reached {
        writeln!(out, "{}", way(movement))
    } else {
        writeln!(
            out,
            "not reached: balloon is {} of {} after {:.1} ms",
            human(actual_bytes),
            human(movement.target_bytes),
            movement.elapsed_ms
        )
    }
}

pub(crate) fn restored(out: &mut impl Write, restored: &Restored) -> io::Result<()> {
    writeln!(
        out,
        "{} restored, {} are zeros",
        human(restored.written_bytes),
        human(restored.zero_bytes)
    )
}

pub(crate) fn hint(out: &mut impl Write, hint: &HintStatus) -> io::Result<()> {
    writeln!(out, "{}", round(hint))
}

pub(crate) fn status(out: &mut impl Write, status: &Status) -> io::Result<()> {
    writeln!(out, "balloon   {}", balloon(&status.balloon))?;
    let memory = &status.memory;
    if memory.bytes != 0 {
        writeln!(
            out,
            "guest     {} in {}",
            human(memory.bytes),
            count(
                (memory.regions.len() + memory.regions_left_out) as u64,
                "region"
            )
        )?;
    }
    writeln!(out, "frontend  {}", frontend(&status.frontend))?;
    if status.movement.id != 0 {
        writeln!(out, "movement  {}", way(&status.movement))?;
    }
    if status.hint.state != HintState::Idle {
        writeln!(out, "hinting   {}", round(&status.hint))?;
    }
    if let Some(now) = &status.asked {
        writeln!(out, "asked     {}", asked(now))?;
    }
    if let Some(hold) = &status.hold {
        let state = if hold.held { "keeps" } else { "has given up" };
        writeln!(out, "held      the guest {state} {}", human(hold.bytes))?;
    }
    writeln!(out, "since the start")?;
    counters(out, &status.counters)?;
    if !status.errors.is_empty() {
        writeln!(out, "refused or failed")?;
        for (kind, count) in &status.errors {
            writeln!(out, "  {kind:20} {count}")?;
        }
    }
    if let Some(stats) = &status.guest_stats {
        writeln!(out, "statistics of the guest, {} ms old", stats.age_ms)?;
        for (name, value) in &stats.values {
            writeln!(out, "  {name:20} {value}")?;
        }
    }
    let daemon = &status.daemon;
    writeln!(
        out,
        "daemon    {} (pid {}), dialect {}, offers {}, up {} s",
        daemon.version,
        daemon.pid,
        daemon.dialect,
        list(&daemon.features),
        daemon.uptime_ms / 1000
    )?;
    if !daemon.faults.is_empty() {
        writeln!(out, "faults    {}", list(&daemon.faults))?;
    }
    Ok(())
}

pub(crate) fn event(out: &mut impl Write, event: &Event) -> io::Result<()> {
    let at = event.at_ms as f64 / 1000.0;
    match &event.what {
        EventKind::Frontend(now) => writeln!(out, "{at:10.3} frontend {}", frontend(now)),
        EventKind::Balloon(now) => writeln!(out, "{at:10.3} balloon {}", balloon(now)),
        EventKind::FreePageHint(now) => writeln!(out, "{at:10.3} hinting {}", round(now)),
        EventKind::Asked(now) => writeln!(out, "{at:10.3} guest {}", asked(now)),
        EventKind::Stats(GuestStats { values, .. }) => {
            let values: Vec<_> = values.iter().map(|(n, v)| format!("{n}={v}")).collect();
            writeln!(out, "{at:10.3} statistics {}", values.join(" "))
        }
        EventKind::Errors { errors } => {
            let errors: Vec<_> = errors.iter().map(|(k, n)| format!("{k}={n}")).collect();
            writeln!(out, "{at:10.3} refused {}", errors.join(" "))
        }
    }
}

fn counters(out: &mut impl Write, counters: &Counters) -> io::Result<()> {
    for (name, value) in counters.each().filter(|(_, value)| *value != 0) {
        writeln!(out, "  {name:20} {value}")?;
    }
    Ok(())
}

fn balloon(balloon: &BalloonStatus) -> String {
    if balloon.reached {
        format!("{}, as wanted", human(balloon.actual_bytes))
    } else {
        format!(
            "{}, target {}",
            human(balloon.actual_bytes),
            human(balloon.target_bytes)
        )
    }
}

fn frontend(frontend: &FrontendStatus) -> String {
    match (frontend.connected, frontend.driver) {
        (false, _) => "not connected".to_owned(),
        (true, false) => "connected, no driver".to_owned(),
        (true, true) => format!(
            "connected, {}, features {}, queues {}",
            frontend.protocol,
            list(&frontend.features),
            list(&frontend.queues)
        ),
    }
}

fn list(names: &[String]) -> String {
    match names {
        [] => "none".to_owned(),
        names => names.join(","),
    }
}

pub(crate) fn snapshot(out: &mut impl Write, taken: &Taken) -> io::Result<()> {
    writeln!(
        out,
        "{} written, {} free and {} of zeros left out; the guest stood still for {:.1} ms",
        human(taken.written_bytes),
        human(taken.skipped_bytes),
        human(taken.zero_bytes),
        taken.stopped_ms
    )
}

/// What the guest said to what it was asked.
pub(crate) fn reply(out: &mut impl Write, reply: &Reply) -> io::Result<()> {
    match reply {
        Reply::DropCaches {
            freed_bytes,
            spare_bytes,
            took,
        } => writeln!(
            out,
            "{} freed in {:.1} ms, {} could be taken now",
            human(*freed_bytes),
            took.elapsed_ms,
            human(*spare_bytes)
        ),
        Reply::Compact {
            gained_bytes,
            block_bytes,
            took,
        } => writeln!(
            out,
            "{} more in whole blocks after {:.1} ms, {} in all",
            human(*gained_bytes),
            took.elapsed_ms,
            human(*block_bytes)
        ),
        Reply::FreePages {
            bytes,
            runs,
            answers,
            held,
            took,
            ..
        } => writeln!(
            out,
            "{} {} in {}, told in {} and {:.1} ms",
            human(*bytes),
            if *held { "held" } else { "free" },
            count(*runs, "run"),
            count(*answers, "answer"),
            took.elapsed_ms
        ),
        Reply::Release { bytes: 0, .. } => {
            writeln!(
                out,
                "nothing was held, or what was held had been given up before"
            )
        }
        Reply::Release { bytes, took } => writeln!(
            out,
            "{} released in {:.1} ms",
            human(*bytes),
            took.elapsed_ms
        ),
        // Others have their own.
        _ => Ok(()),
    }
}

/// Something that the guest was asked, in one line.
pub(crate) fn asked(asked: &AskedStatus) -> String {
    let named = match asked.answers {
        0 => String::new(),
        n => format!(", {} in {}", human(asked.bytes), count(n, "answer")),
    };
    format!(
        "{} {}{named} after {:.1} ms",
        asked.command,
        asked.state.name(),
        asked.elapsed_ms
    )
}

/// A round of free page hinting in one line.
fn round(hint: &HintStatus) -> String {
    format!(
        "round {:#x} {}, {} in {} after {:.1} ms",
        hint.id,
        hint.state.name(),
        human(hint.bytes),
        count(hint.hints, "hint"),
        hint.elapsed_ms
    )
}

/// A number of things.
fn count(number: u64, thing: &str) -> String {
    match number {
        1 => format!("1 {thing}"),
        _ => format!("{number} {thing}s"),
    }
}

/// A movement in one line.
fn way(movement: &Movement) -> String {
    let counters = &movement.counters;
    let state = if movement.reached {
        "reached in"
    } else {
        "under way for"
    };
    format!(
        "{} -> {}, {state} {:.1} ms: {}, {} on the wire, {} given back in {} and {:.1} ms",
        human(movement.from_bytes),
        human(movement.target_bytes),
        movement.elapsed_ms,
        count(counters.requests, "request"),
        count(counters.wire_bytes, "byte"),
        human(counters.discarded_bytes),
        count(counters.discard_calls, "call"),
        counters.discard_ns as f64 / 1e6
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_many() {
        let mut movement = Movement::default();
        assert!(
            way(&movement).contains(": 0 requests, 0 bytes on the wire, 0 B given back in 0 calls")
        );
        movement.counters.requests = 1;
        movement.counters.wire_bytes = 1;
        movement.counters.discard_calls = 1;
        assert!(
            way(&movement).contains(": 1 request, 1 byte on the wire, 0 B given back in 1 call")
        );
    }
}
