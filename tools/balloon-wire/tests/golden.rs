// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Both sides against bytes that were written by hand; `golden/README.md` has the format.

#[path = "../golden/reader.rs"]
mod reader;

use std::collections::BTreeMap;

use balloon_wire::bitmap::{PfnBitmap, Runs};
use balloon_wire::logic::request::{
    Answer, Command, Guest, No, Reason, Request as Asked, Status, Task,
};
use balloon_wire::logic::window::{Place, WindowSize, WindowTable};
use balloon_wire::wire::{Announcement, AnnouncementError, Header, RecordError, VERSION};
use reader::{load, unhex};
use serde::Deserialize;

type Span = (u64, u64);

#[derive(Deserialize)]
struct Record {
    name: String,
    page_shift: u32,
    bitmap_bytes: u32,
    frames: Vec<Span>,
    requests: Vec<String>,
    runs: Vec<Span>,
}

#[derive(Deserialize)]
struct Request {
    name: String,
    request: String,
    runs: Vec<Span>,
}

#[derive(Deserialize)]
struct Refused {
    name: String,
    request: String,
    field: String,
}

#[derive(Deserialize)]
struct Announced {
    name: String,
    bytes: String,
    page_shifts: Option<Vec<u32>>,
    max_bitmap_bytes: Option<u32>,
    block_shift: Option<u32>,
    #[serde(default)]
    commands: Vec<u16>,
    refused: Option<String>,
}

#[derive(Deserialize)]
struct HostRequest {
    name: String,
    bytes: String,
    id: u32,
    command: Option<String>,
    announced: Option<u32>,
    task: Option<String>,
    refused: Option<(String, String)>,
}

#[derive(Deserialize)]
struct GoldenAnswer {
    name: String,
    bytes: String,
    id: u32,
    command: Option<String>,
    command_number: Option<u16>,
    status: String,
    value: u64,
    detail: u64,
    microseconds: u32,
    reason: String,
    state: u16,
    #[serde(default)]
    runs: Vec<Span>,
}

fn limits(page_shifts: u64, max_bitmap_bytes: u32) -> Announcement {
    Announcement {
        version: VERSION,
        page_shifts,
        max_bitmap_bytes,
        block_shift: 0,
        requests: 0,
    }
}

/// The records of a request as spans of memory, or the first error.
fn decode(limits: &Announcement, request: &[u8]) -> Result<Vec<Span>, RecordError> {
    decode_of(0, limits, request)
}

/// The same for records that carry an id.
fn decode_of(id: u32, limits: &Announcement, request: &[u8]) -> Result<Vec<Span>, RecordError> {
    let mut spans = Vec::new();
    let mut rest = request;
    loop {
        let header = Header::decode(rest)?;
        let body = &rest[Header::LEN..];
        header.check_of(id, limits, body.len() as u64)?;
        let (bitmap, after) = body.split_at(header.bmap_len as usize);
        let words: Vec<u64> = bitmap
            .chunks_exact(8)
            .map(|w| u64::from_ne_bytes(w.try_into().expect("8 bytes")))
            .collect();
        spans.extend(Runs::new(&words).map(|run| {
            let first = header.base_pfn + run.start as u64;
            (
                first << header.page_shift,
                (run.len as u64) << header.page_shift,
            )
        }));
        rest = after;
        if rest.is_empty() {
            return Ok(spans);
        }
    }
}

fn merge(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut merged: Vec<Span> = Vec::new();
    for (start, len) in spans {
        match merged.last_mut() {
            Some((s, l)) if *s + *l == start => *l += len,
            _ => merged.push((start, len)),
        }
    }
    merged
}

/// What the driver does with frames: they fall into windows, and windows are sent.
fn encode(page_shift: u32, bitmap_bytes: u32, frames: &[Span]) -> Vec<Vec<u8>> {
    let size = WindowSize::new(bitmap_bytes).expect("a size of windows");
    let mut table = WindowTable::<4>::new();
    let mut maps = vec![vec![0u64; bitmap_bytes as usize / 8]; 4];
    let mut sent = BTreeMap::new();
    let mut send = |table: &mut WindowTable<4>, maps: &mut [Vec<u64>], slot: usize| {
        if let Some(window) = table.close(slot) {
            let mut bytes = window.header(size, 0, page_shift).encode().to_vec();
            bytes.extend(
                maps[slot][window.words()]
                    .iter()
                    .flat_map(|w| w.to_ne_bytes()),
            );
            maps[slot].fill(0);
            assert!(sent.insert(window.number(), bytes).is_none(), "sent twice");
        }
    };
    for frame in frames
        .iter()
        .flat_map(|(first, count)| *first..first + count)
    {
        let (number, bit) = size.locate(frame);
        let slot = match table.find(number) {
            Place::Open(slot) | Place::Free(slot) => slot,
            Place::Evict(slot) => {
                send(&mut table, &mut maps, slot);
                slot
            }
        };
        assert!(PfnBitmap::new(&mut maps[slot]).set(bit));
        table.note(slot, number, bit);
    }
    (0..4).for_each(|slot| send(&mut table, &mut maps, slot));
    sent.into_values().collect()
}

#[test]
fn records_are_encoded() {
    let records: Vec<Record> = load(include_str!("../golden/records.json"));
    assert!(records.len() >= 12);
    for record in records {
        let requests: Vec<_> = record.requests.iter().map(|r| unhex(r)).collect();
        let encoded = encode(record.page_shift, record.bitmap_bytes, &record.frames);
        assert_eq!(encoded, requests, "{}", record.name);
    }
}

#[test]
fn records_are_decoded() {
    for record in load::<Record>(include_str!("../golden/records.json")) {
        let limits = limits(1 << 12 | 1 << record.page_shift, record.bitmap_bytes);
        let mut spans = Vec::new();
        for request in &record.requests {
            spans.extend(decode(&limits, &unhex(request)).expect(&record.name));
        }
        assert_eq!(merge(spans), record.runs, "{}", record.name);
        // The frames of the example are the same memory.
        let frames = record.frames.iter();
        let frames = frames.map(|(f, n)| (f << record.page_shift, n << record.page_shift));
        assert_eq!(merge(frames.collect()), record.runs, "{}", record.name);
    }
}

#[test]
fn other_requests_are_decoded() {
    for request in load::<Request>(include_str!("../golden/requests.json")) {
        let limits = limits(1 << 12 | 1 << 21, 4096);
        let spans = decode(&limits, &unhex(&request.request)).expect(&request.name);
        assert_eq!(merge(spans), request.runs, "{}", request.name);
    }
}

#[test]
fn bad_requests_are_refused() {
    for refused in load::<Refused>(include_str!("../golden/refused.json")) {
        let limits = limits(1 << 12 | 1 << 21, 4096);
        let error = decode(&limits, &unhex(&refused.request)).expect_err(&refused.name);
        let field = match error {
            RecordError::Short(_) => "header",
            RecordError::Id(_) => "id",
            RecordError::PageShift(_) => "page_shift",
            RecordError::BasePfn(_) => "base_pfn",
            RecordError::BmapLen(_) => "bmap_len",
            RecordError::Truncated { .. } => "request",
        };
        assert_eq!(field, refused.field, "{}", refused.name);
    }
}

#[test]
fn announcements() {
    for golden in load::<Announced>(include_str!("../golden/announcements.json")) {
        let bytes: [u8; Announcement::LEN] = unhex(&golden.bytes).try_into().expect("32 bytes");
        let refused = match Announcement::decode(&bytes) {
            Ok(announcement) => {
                let shifts = golden.page_shifts.expect("good ones have them");
                let expected = Announcement {
                    page_shifts: shifts.iter().fold(0, |set, shift| set | 1 << shift),
                    max_bitmap_bytes: golden.max_bitmap_bytes.expect("good ones have it"),
                    block_shift: golden.block_shift.expect("good ones have it"),
                    requests: golden.commands.iter().fold(0, |set, bit| set | 1 << bit),
                    ..limits(0, 0)
                };
                assert_eq!(announcement, expected, "{}", golden.name);
                assert_eq!(announcement.encode(), bytes, "{}", golden.name);
                None
            }
            Err(AnnouncementError::Magic) => Some("magic"),
            Err(AnnouncementError::Version(_)) => Some("version"),
            Err(AnnouncementError::PageShifts(_)) => Some("page_shifts"),
            Err(AnnouncementError::MaxBitmapBytes(_)) => Some("max_bitmap_bytes"),
            Err(AnnouncementError::BlockShift(_)) => Some("block_shift"),
        };
        assert_eq!(refused, golden.refused.as_deref(), "{}", golden.name);
    }
}

fn command(name: &str) -> Command {
    let found = Command::ALL.iter().find(|c| format!("{c:?}") == name);
    *found.expect("a command")
}

fn status(name: &str) -> Status {
    let found = Status::ALL.iter().find(|s| format!("{s:?}") == name);
    *found.expect("a status")
}

fn reason(name: &str) -> Reason {
    let found = Reason::ALL.iter().find(|r| format!("{r:?}") == name);
    *found.expect("a reason")
}

/// The words of `golden/README.md` for a task.
fn words(task: &Task) -> String {
    let word = |yes: bool, word| if yes { word } else { "" };
    match *task {
        Task::Cancel => "cancel".to_owned(),
        Task::DropCaches {
            page_cache,
            slab,
            until,
        } => {
            let until = until.map(|pages| format!(" until {pages}"));
            format!(
                "drop{}{}{}",
                word(page_cache, " page-cache"),
                word(slab, " slab"),
                until.unwrap_or_default()
            )
        }
        Task::Compact => "compact".to_owned(),
        Task::NameFreePages { balloon } => format!("name{}", word(balloon, " balloon")),
        Task::HoldFreePages { ms } => format!("hold {ms}"),
        Task::Release => "release".to_owned(),
    }
}

#[test]
fn host_requests() {
    for golden in load::<HostRequest>(include_str!("../golden/host-requests.json")) {
        let bytes = unhex(&golden.bytes);
        let asked = Asked::decode(&bytes).expect(&golden.name);
        assert_eq!(asked.encode()[..], bytes, "{}", golden.name);
        assert_eq!(asked.id, golden.id, "{}", golden.name);
        assert_eq!(
            Command::from_number(asked.command),
            golden.command.as_deref().map(command),
            "{}",
            golden.name
        );
        let guest = Guest {
            announced: golden.announced.unwrap_or(0x1f),
            drops_caches: true,
            poisons: false,
        };
        match asked.judge(&guest) {
            Ok(task) => assert_eq!(Some(words(&task)), golden.task, "{}", golden.name),
            Err(no) => {
                let (s, r) = golden.refused.expect(&golden.name);
                assert_eq!(no, No(status(&s), reason(&r)), "{}", golden.name);
            }
        }
    }
}

#[test]
fn answers() {
    for golden in load::<GoldenAnswer>(include_str!("../golden/answers.json")) {
        let bytes = unhex(&golden.bytes);
        let number = golden.command.as_deref().map(|c| command(c).number());
        let expected = Answer {
            id: golden.id,
            command: number.or(golden.command_number).expect("one of them"),
            status: status(&golden.status),
            value: golden.value,
            detail: golden.detail,
            microseconds: golden.microseconds,
            reason: reason(&golden.reason),
            state: golden.state,
        };
        let (answer, records) = bytes.split_at(Answer::LEN);
        assert_eq!(Answer::decode(answer), Some(expected), "{}", golden.name);
        assert_eq!(expected.encode()[..], *answer, "{}", golden.name);
        let partial = expected.status == Status::Partial;
        assert_eq!(!records.is_empty(), partial, "{}", golden.name);
        if partial {
            let limits = limits(1 << 12 | 1 << 21, 4096);
            let spans = decode_of(expected.id, &limits, records).expect(&golden.name);
            assert!(spans.is_sorted(), "{}", golden.name);
            let pages: u64 = spans.iter().map(|(_, len)| len >> 12).sum();
            assert_eq!(pages, expected.value, "{}", golden.name);
            assert_eq!(merge(spans), golden.runs, "{}", golden.name);
        }
    }
}
