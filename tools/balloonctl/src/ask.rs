// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What takes more than one question.

use std::io::Write;
use std::time::Duration;

use balloon_control::message::{Reply, SizeField};
use balloon_control::{BALLOON_PAGE_BYTES, Client, Size};

use crate::map::Map;
use crate::sink::Sink;
use crate::{Output, Trouble};

/// How long the guest may take to drop caches before it is given a target, unless it is said.
const DROP_TIMEOUT: Duration = Duration::from_secs(60);

/// Has the guest drop as much of its caches as a balloon of this size needs, if it needs any and can be
/// so large, or may be `forced` to try.
pub(crate) fn make_room(
    client: &mut Client,
    size: Size,
    forced: bool,
    timeout: Option<Duration>,
    out: &mut Output<'_, impl Write>,
) -> Result<(), Trouble> {
    let status = client.status(false)?;
    // What is wrong with the size is said when the target is set.
    let Ok(pages) = size.pages(status.memory.bytes) else {
        return Ok(());
    };
    let wanted = u64::from(pages) * BALLOON_PAGE_BYTES;
    if wanted > status.memory.bytes && !forced {
        return Ok(());
    }
    let more = wanted.saturating_sub(status.balloon.actual_bytes);
    if more == 0 {
        return Ok(());
    }
    let until = more.saturating_add(reserve(status.memory.bytes));
    let until = until.min(status.memory.bytes) / BALLOON_PAGE_BYTES * BALLOON_PAGE_BYTES;
    let timeout = timeout.unwrap_or(DROP_TIMEOUT);
    let until = Some(SizeField::Bytes(until));
    let reply = client.drop_caches((false, false), until, Some(timeout))?;
    Ok(out.reply(&reply)?)
}

/// What a guest of this size keeps for itself, unless it is set up otherwise.
fn reserve(memory: u64) -> u64 {
    (memory / 32).clamp(16 << 20, 512 << 20)
}

/// Writes the free pages that were named to files.
pub(crate) fn keep(
    client: &mut Client,
    reply: &Reply,
    out: Option<Sink<'_>>,
    map: Option<Sink<'_>>,
) -> Result<(), Trouble> {
    let Reply::FreePages { id, .. } = reply else {
        return Ok(());
    };
    if out.is_none() && map.is_none() {
        return Ok(());
    }
    let runs = client.free_page_runs(*id)?;
    if let Some(sink) = out {
        sink.write(|file| {
            let mut line = |(start, bytes): &(u64, u64)| writeln!(file, "{start:#x} {bytes}");
            runs.iter().try_for_each(&mut line)
        })?;
    }
    if let Some(sink) = map {
        let regions = client.status(false)?.memory.regions;
        let regions: Vec<_> = regions.iter().map(|r| (r.guest_addr, r.bytes)).collect();
        sink.write(|file| Map::draw(&regions, &runs).write(file))?;
    }
    Ok(())
}
