// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The daemon's decoder against bytes that were written by hand; `balloon-wire/golden/README.md`
//! has the format.

#[path = "../../balloon-wire/golden/reader.rs"]
mod reader;

use balloon_wire::logic::request::Answer;
use balloon_wire::wire::{Announcement, VERSION};
use reader::{load, unhex};
use serde::Deserialize;
use vhost_device_balloon::features::Protocol;
use vhost_device_balloon::ranges::Ranges;
use vhost_device_balloon::refusal::Kind;
use vhost_device_balloon::request::Format;

#[derive(Deserialize)]
struct Example {
    name: String,
    page_shift: Option<u32>,
    #[serde(default)]
    requests: Vec<String>,
    request: Option<String>,
    #[serde(default)]
    runs: Vec<(u64, u64)>,
    field: Option<String>,
    bytes: Option<String>,
    id: Option<u32>,
    status: Option<String>,
}

fn format(protocol: Protocol, page_shift: u32, max_bitmap_bytes: u32) -> Format {
    Format {
        protocol,
        limits: Announcement {
            version: VERSION,
            page_shifts: 1 << 12 | 1 << 21 | 1 << page_shift,
            max_bitmap_bytes,
            block_shift: 0,
            requests: 0,
        },
    }
}

fn check(example: &Example, format: Format, requests: &[String]) {
    let mut ranges = Ranges::default();
    for request in requests {
        format
            .read(&unhex(request), |r| assert!(ranges.push(r)))
            .expect(&example.name);
    }
    let runs: Vec<_> = ranges.merge().iter().map(|r| (r.start, r.len())).collect();
    assert_eq!(runs, example.runs, "{}", example.name);
}

#[test]
fn records() {
    for example in load::<Example>(include_str!("../../balloon-wire/golden/records.json")) {
        let shift = example.page_shift.expect("records have one");
        for protocol in [Protocol::PageBitmap, Protocol::PageBitmap2016] {
            check(
                &example,
                format(protocol, shift, 1 << 20),
                &example.requests,
            );
        }
        // One request with all the records.
        let all = [example.requests.join(" ")];
        check(&example, format(Protocol::PageBitmap, shift, 1 << 20), &all);
    }
}

#[test]
fn other_requests() {
    for example in load::<Example>(include_str!("../../balloon-wire/golden/requests.json")) {
        let request = [example.request.clone().expect("there is one")];
        check(&example, format(Protocol::PageBitmap, 12, 4096), &request);
    }
}

#[test]
fn pfn_arrays() {
    for example in load::<Example>(include_str!("../../balloon-wire/golden/pfn-arrays.json")) {
        let request = [example.request.clone().expect("there is one")];
        check(&example, format(Protocol::PfnArray, 12, 4096), &request);
    }
}

#[test]
fn answers() {
    let mut parts = 0;
    for example in load::<Example>(include_str!("../../balloon-wire/golden/answers.json")) {
        if example.status.as_deref() != Some("Partial") {
            continue;
        }
        let bytes = unhex(&example.bytes.expect("there are some"));
        let id = example.id.expect("there is one");
        let mut ranges = Ranges::default();
        format(Protocol::PageBitmap, 12, 4096)
            .read_answer(id, &bytes[Answer::LEN..], |r| assert!(ranges.push(r)))
            .expect(&example.name);
        let runs: Vec<_> = ranges.merge().iter().map(|r| (r.start, r.len())).collect();
        assert_eq!(runs, example.runs, "{}", example.name);
        parts += 1;
    }
    assert!(parts >= 2);
}

#[test]
fn refused() {
    for example in load::<Example>(include_str!("../../balloon-wire/golden/refused.json")) {
        let request = unhex(&example.request.expect("there is one"));
        let refusal = format(Protocol::PageBitmap, 12, 4096)
            .read(&request, |_| panic!("{}: something is done", example.name))
            .expect_err(&example.name);
        let kind = match example.field.expect("there is one").as_str() {
            "header" => Kind::HeaderShort,
            "id" => Kind::RecordId,
            "page_shift" => Kind::PageShift,
            "base_pfn" => Kind::BasePfn,
            "bmap_len" => Kind::BmapLen,
            "request" => Kind::Truncated,
            other => panic!("{other}"),
        };
        assert_eq!(refusal.kind(), kind, "{}", example.name);
    }
}
