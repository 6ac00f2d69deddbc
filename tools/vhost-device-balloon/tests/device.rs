// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The daemon as a guest and its frontend see it: what it discards, what it keeps, what it refuses.

mod common;

use std::thread::sleep;
use std::time::{Duration, Instant};

use balloon_control::Status;
use balloon_control::client::ClientError;
use balloon_control::message::{FailureCode, HintAction, HintState};
use balloon_wire::wire::{Announcement, CONFIG_ANNOUNCEMENT};
use common::{
    BITMAP, BUFFER, Daemon, EVENT_IDX, FREE, Guest, HIGH, INDIRECT, PAGE, Piece, Queue, exists,
    pages, pfns, record, until,
};
use vhost::VhostBackend as _;
use vhost::vhost_user::VhostUserFrontend as _;
use vm_memory::{Bytes as _, GuestAddress};

const FIRST: u64 = FREE / PAGE;

#[test]
fn bitmaps_discard_exactly_their_pages() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    let before = guest.blocks();
    // A block of 2 MiB, then single pages at both ends of words, in both regions.
    let mut request = record(21, FREE >> 21, &[1]);
    request.extend(record(12, FIRST + 1024, &[1 << 63 | 1, 1 | 1 << 5]));
    request.extend(record(12, HIGH >> 12, &[0b110]));
    guest.send(0, &request);
    // Before anybody reads it, which would bring it back.
    assert_eq!(before - guest.blocks(), (512 + 1 + 2 + 1 + 2) * PAGE);
    guest.check_gone(&[
        FREE..FREE + (2 << 20),
        pages(FIRST + 1024, 1),
        pages(FIRST + 1024 + 63, 2),
        pages(FIRST + 1024 + 69, 1),
        pages((HIGH >> 12) + 1, 2),
    ]);

    let counters = guest.daemon.status().counters;
    assert_eq!(counters.requests, 1);
    assert_eq!(counters.records, 3);
    assert_eq!(counters.runs, 5);
    assert_eq!(counters.discard_calls, 5);
    assert_eq!(counters.discarded_bytes, 518 * PAGE);
    assert_eq!(counters.inflated_pages, 518);
    assert_eq!(counters.wire_bytes, request.len() as u64);
    assert!(counters.discard_ns > 0);
    assert_eq!(counters.errors, 0);
}

#[test]
fn runs_are_merged_across_windows_and_block_sizes() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    // A block, the two windows of single pages that follow it, in the wrong order, one page twice.
    let after = FIRST + 512;
    let mut request = record(12, after + 64, &[u64::MAX, 1]);
    request.extend(record(12, after, &[u64::MAX]));
    request.extend(record(21, FREE >> 21, &[1]));
    request.extend(record(12, after, &[1]));
    guest.send(0, &request);
    guest.check_gone(&[pages(FIRST, 512 + 129)]);
    let counters = guest.daemon.status().counters;
    assert_eq!((counters.runs, counters.discard_calls), (1, 1));
    assert_eq!(counters.inflated_pages, 641);
}

#[test]
fn pfn_arrays_discard_exactly_their_pages() {
    // The same daemon serves a driver that does not know bitmaps.
    let mut guest = Guest::start(&[], EVENT_IDX);
    guest.fill();
    let high = HIGH >> 12;
    let list = [
        FIRST + 7,
        FIRST + 6,
        FIRST + 5,
        high,
        FIRST + 9,
        high + 1,
        FIRST + 9,
    ];
    guest.send(0, &pfns(list));
    guest.check_gone(&[pages(FIRST + 5, 3), pages(FIRST + 9, 1), pages(high, 2)]);
    let status = guest.daemon.status();
    assert_eq!(status.frontend.protocol, "pfn-array");
    assert_eq!(status.counters.runs, 3);
    assert_eq!(status.counters.inflated_pages, 6);
    for bad in [&[][..], &[0, 0, 0], &[0; 7]] {
        guest.send(0, bad);
    }
    assert_eq!(guest.daemon.status().errors["pfn-array-length"], 3);
}

#[test]
fn deflating_changes_nothing() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    guest.send(1, &record(12, FIRST, &[u64::MAX]));
    guest.check_gone(&[]);
    let counters = guest.daemon.status().counters;
    assert_eq!(
        (counters.deflate_requests, counters.deflated_pages),
        (1, 64)
    );
    assert_eq!((counters.discard_calls, counters.prefetched_bytes), (0, 0));
}

#[test]
fn deflating_populates_if_asked() {
    let mut guest = Guest::start(&["--prefetch-deflate"], BITMAP);
    let before = guest.blocks();
    guest.send(1, &record(21, FREE >> 21, &[1]));
    assert_eq!(guest.blocks() - before, 2 << 20);
    assert_eq!(guest.daemon.status().counters.prefetched_bytes, 2 << 20);
}

/// Each bad record is refused with its own counter, changes nothing, and is completed all the same.
#[test]
fn bad_records_are_refused_one_by_one() {
    let mut guest = Guest::start(&["--max-bitmap-bytes", "4096"], BITMAP);
    guest.fill();
    let good = record(12, FIRST, &[u64::MAX; 2]);
    let with = |at: usize, bytes: &[u8]| {
        let mut record = good.clone();
        record[at..at + bytes.len()].copy_from_slice(bytes);
        record
    };
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("header-short", good[..23].to_vec()),
        ("header-short", vec![]),
        ("record-id", with(0, &[1])),
        ("page-shift", with(4, &[11])),
        ("page-shift", with(4, &[13])),
        ("page-shift", with(4, &64u32.to_le_bytes())),
        ("page-shift", with(4, &u32::MAX.to_le_bytes())),
        ("base-pfn", with(8, &u64::MAX.to_le_bytes())),
        ("base-pfn", with(8, &(u64::MAX >> 12).to_le_bytes())),
        ("bmap-len", with(16, &0u64.to_le_bytes())),
        ("bmap-len", with(16, &15u64.to_le_bytes())),
        ("bmap-len", with(16, &4104u64.to_le_bytes())),
        ("bmap-len", with(16, &(u64::MAX - 7).to_le_bytes())),
        ("bmap-len", with(16, &(1u64 << 63).to_le_bytes())),
        ("truncated", with(16, &24u64.to_le_bytes())),
        ("truncated", good[..39].to_vec()),
        // A good record does not save the bad one after it, nor is it carried out.
        ("page-shift", [good.clone(), with(4, &[20])].concat()),
        ("header-short", [good.clone(), vec![0; 3]].concat()),
    ];
    let mut expected = std::collections::BTreeMap::new();
    for (kind, bytes) in &cases {
        guest.send(0, bytes);
        *expected.entry((*kind).to_owned()).or_insert(0) += 1;
        let status = guest.daemon.status();
        assert_eq!(status.errors, expected, "after {kind} {bytes:x?}");
        assert_eq!(status.counters.discard_calls, 0);
    }
    guest.check_gone(&[]);
    let log = guest.daemon.log();
    for field in [
        "id is 1",
        "page_shift is 11",
        "base_pfn is 0xf",
        "bmap_len is 15",
    ] {
        assert!(log.contains(field), "{field}");
    }

    // It lives on.
    guest.send(0, &good);
    guest.check_gone(&[pages(FIRST, 128)]);
    let status = guest.daemon.status();
    assert_eq!(status.counters.errors, cases.len() as u64);
    assert_eq!(status.counters.requests, cases.len() as u64 + 1);
}

#[test]
fn frames_outside_ram_are_skipped() {
    let mut guest = Guest::start(&["--page-shifts", "12,21,30"], BITMAP);
    guest.fill();
    // Around the end of the low region, before the high one, after it, and as far as it goes.
    let end = 32 << 20;
    guest.send(0, &record(12, (end >> 12) - 64, &[1 << 63, 1]));
    guest.send(0, &record(12, (HIGH >> 12) - 64, &[1 << 63, 1]));
    guest.send(0, &record(12, (HIGH >> 12) + (8 << 8), &[u64::MAX]));
    guest.send(0, &record(30, (u64::MAX >> 30) - 64, &[u64::MAX]));
    guest.check_gone(&[end - PAGE..end, HIGH..HIGH + PAGE]);
    let status = guest.daemon.status();
    assert_eq!(status.errors["outside-ram"], 4);
    assert_eq!(status.counters.inflated_pages, 2);
    assert_eq!(status.counters.discard_calls, 2);
    // A frame of 1 GiB of which some is memory takes all the memory there is in it.
    guest.send(0, &record(30, HIGH >> 30, &[1]));
    assert_eq!(guest.daemon.status().counters.inflated_pages, 2 + 2048);
}

#[test]
fn chains_of_any_shape() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    // Byte by byte, with empty descriptors in between.
    let bytes = record(12, FIRST, &[0b1011]);
    let at = guest.place(&bytes);
    let pieces: Vec<_> = (0..bytes.len() as u64)
        .flat_map(|i| [Piece::of(at + i, 1), Piece::of(0, 0)])
        .collect();
    guest.send_pieces(0, &pieces);
    let mut gone = vec![pages(FIRST, 2), pages(FIRST + 3, 1)];
    guest.check_gone(&gone);

    // Header and bitmap apart, the bitmap first in memory.
    let bytes = record(12, FIRST + 64, &[1]);
    let at = guest.place(&[&bytes[24..], &bytes[..24]].concat());
    guest.send_pieces(0, &[Piece::of(at + 8, 24), Piece::of(at, 8)]);
    gone.push(pages(FIRST + 64, 1));
    guest.check_gone(&gone);

    // Indirect, although it was never offered.
    let bytes = record(12, FIRST + 128, &[1]);
    let at = guest.place(&bytes);
    let table = guest.place(&[0; 64]);
    Queue::lay(
        &guest.memory,
        table,
        &[Piece::of(at, 5), Piece::of(at + 5, 27)],
    );
    let indirect = Piece {
        flags: INDIRECT,
        ..Piece::of(table, 32)
    };
    guest.send_pieces(0, &[indirect]);
    gone.push(pages(FIRST + 128, 1));
    guest.check_gone(&gone);
    assert_eq!(guest.daemon.status().counters.errors, 0);
}

#[test]
fn bad_chains_are_refused_one_by_one() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    let bytes = record(12, FIRST, &[u64::MAX]);
    let at = guest.place(&bytes);
    let (head, tail) = (Piece::of(at, 24), Piece::of(at + 24, 8));
    let writable = Piece::writable(at + 24, 8);
    let end = 32 << 20;
    let big = 2 << 20;
    let cases: Vec<(&str, Vec<Piece>)> = vec![
        ("chain-direction", vec![head, writable]),
        ("chain-direction", vec![Piece::writable(at, 32)]),
        ("chain-direction", vec![head, tail, Piece::writable(at, 0)]),
        ("chain-endless", vec![head.next(0)]),
        ("chain-endless", vec![head, tail.next(0)]),
        ("chain-endless", vec![head, tail.next(128)]),
        ("chain-endless", vec![head, tail.next(u16::MAX)]),
        (
            "chain-endless",
            vec![Piece::of(0, u32::MAX), Piece::of(0, u32::MAX)],
        ),
        ("chain-memory", vec![head, Piece::of(end, 8)]),
        ("chain-memory", vec![head, Piece::of(end - 4, 8)]),
        ("chain-memory", vec![Piece::of(u64::MAX - 7, 32)]),
        ("chain-bytes", vec![Piece::of(0, big + 1)]),
        ("chain-bytes", vec![Piece::of(0, u32::MAX)]),
        ("chain-bytes", vec![Piece::of(0, big), Piece::of(0, 1)]),
        (
            "chain-empty",
            vec![Piece {
                flags: INDIRECT,
                ..Piece::of(at, 15)
            }],
        ),
        (
            "chain-empty",
            vec![Piece {
                flags: INDIRECT,
                ..Piece::of(end, 32)
            }],
        ),
    ];
    let mut expected = std::collections::BTreeMap::new();
    for (kind, pieces) in &cases {
        guest.send_pieces(0, pieces);
        *expected.entry((*kind).to_owned()).or_insert(0) += 1;
        assert_eq!(
            guest.daemon.status().errors,
            expected,
            "after {kind} {pieces:?}"
        );
    }
    // A chain that loops through an indirect table.
    let table = guest.place(&[0; 64]);
    Queue::lay(&guest.memory, table, &[head, tail.next(0)]);
    guest.send_pieces(
        0,
        &[Piece {
            flags: INDIRECT,
            ..Piece::of(table, 32)
        }],
    );
    *expected.entry("chain-endless".to_owned()).or_insert(0) += 1;
    assert_eq!(guest.daemon.status().errors, expected);

    guest.check_gone(&[]);
    guest.send_pieces(0, &[head, tail]);
    guest.check_gone(&[pages(FIRST, 64)]);
}

/// Random records cut into random descriptors, some of them spoilt, against a set of pages.
#[test]
fn random_requests_against_a_model() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    // A generator that gives the same numbers each time (xorshift).
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut gone = std::collections::BTreeSet::new();
    let mut refused = 0;
    for _ in 0..300 {
        let mut request = Vec::new();
        let mut pages = Vec::new();
        for _ in 0..=random(3) {
            let base = match random(4) {
                0 => (HIGH >> 12) + random(2048 - 256),
                _ => FIRST + random(8192 - FIRST - 256),
            };
            let words: Vec<_> = (0..=random(4))
                .map(|_| random(u64::MAX) & random(u64::MAX) & random(u64::MAX))
                .collect();
            for (i, word) in (0..).zip(&words) {
                let set = (0..64).filter(|bit| word >> bit & 1 == 1);
                pages.extend(set.map(|bit| base + i * 64 + bit));
            }
            request.extend(record(12, base, &words));
        }
        if random(5) == 0 {
            // The first record's id, so that nothing of the request counts.
            request[random(4) as usize] = 1 + random(255) as u8;
            refused += 1;
        } else {
            gone.extend(pages);
        }
        let at = guest.place(&request);
        let mut pieces = Vec::new();
        let mut from = 0;
        while from < request.len() as u64 {
            let len = (1 + random(40)).min(request.len() as u64 - from);
            pieces.push(Piece::of(at + from, len as u32));
            from += len;
        }
        guest.send_pieces(0, &pieces);
    }
    let counters = guest.daemon.status().counters;
    assert_eq!((counters.requests, counters.errors), (300, refused));
    guest.check_gone(&gone.iter().map(|p| pages(*p, 1)).collect::<Vec<_>>());
}

#[test]
fn a_broken_ring_is_refused() {
    let mut guest = Guest::start(&[], BITMAP | EVENT_IDX);
    guest.fill();
    // More available than the ring has; nothing may be made of it, and nothing may spin.
    guest.queues[0].set_avail_index(&guest.memory, 129);
    guest.queues[0].kick();
    until("it is noticed", || {
        guest.daemon.status().errors.contains_key("avail-index")
    });
    sleep(Duration::from_millis(50));
    let kicks = guest.daemon.status().counters.kicks;
    assert_eq!(guest.daemon.status().counters.kicks, kicks);
    assert_eq!(guest.daemon.status().counters.requests, 0);

    // A head that is no descriptor cannot even be completed.
    guest.queues[0].set_avail_index(&guest.memory, 0);
    guest.queues[0].make_available(&guest.memory, 128);
    guest.queues[0].kick();
    until("it is noticed", || {
        guest.daemon.status().errors.contains_key("ring")
    });
    assert!(guest.daemon.status().errors.contains_key("chain-empty"));

    let bytes = record(12, FIRST, &[1]);
    guest.send(0, &bytes);
    guest.check_gone(&[pages(FIRST, 1)]);
}

#[test]
fn a_flood_of_errors_is_a_few_lines() {
    let mut guest = Guest::start(&[], BITMAP);
    for _ in 0..200 {
        guest.send(0, &record(13, FIRST, &[1]));
    }
    let status = guest.daemon.status();
    assert_eq!(status.errors["page-shift"], 200);
    let lines = guest.daemon.log().matches("page_shift is 13").count();
    assert!((1..=10).contains(&lines), "{lines} lines");
}

#[test]
fn a_queue_without_a_use_is_completed() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.send(3, &[1, 2, 3]);
    assert_eq!(guest.daemon.status().errors["queue-unused"], 1);
}

#[test]
fn many_runs_need_bounded_memory() {
    // Every second page of 1 GiB: twice what is collected at a time.
    let daemon = Daemon::start(&[]);
    let mut guest = Guest::with_daemon(daemon, BITMAP, 1 << 30);
    let words = vec![0x5555_5555_5555_5555; (1 << 18) / 64 - FIRST as usize / 64];
    guest.send(0, &record(12, FIRST, &words));
    let counters = guest.daemon.status().counters;
    assert_eq!(counters.inflated_pages, ((1 << 18) - FIRST) / 2);
    assert_eq!(counters.runs, counters.inflated_pages);
    assert_eq!(counters.errors, 0);
}

#[test]
fn the_2016_dialect() {
    let mut guest = Guest::start(&["--dialect", "2016"], 1 << 3);
    guest.fill();
    let one = record(12, FIRST, &[0b11]);
    guest.send(0, &one);
    guest.check_gone(&[pages(FIRST, 2)]);
    guest.send(0, &[one.clone(), record(12, FIRST + 64, &[1])].concat());
    guest.check_gone(&[pages(FIRST, 2)]);
    let status = guest.daemon.status();
    assert_eq!(status.errors["trailing"], 1);
    assert_eq!(status.frontend.protocol, "page-bitmap-2016");
    // Config space ends after 8 bytes; what is behind reads as zero, and is not written.
    assert_eq!(guest.config(0, 64), [0; 64]);
    guest.set_actual(7);
    guest.set_config(12, &[1; 4]);
    let mut expected = [0; 64];
    expected[4] = 7;
    assert_eq!(guest.config(0, 64), expected);
    let status = guest.daemon.status();
    assert_eq!(status.counters.config_reads_beyond, 2);
    assert_eq!(status.errors["config-write"], 1);
}

#[test]
fn what_each_dialect_offers() {
    for (options, bits) in [
        (&["--dialect", "2016", "--features", "none"][..], 1u64 << 3),
        (
            &["--dialect", "2016", "--features", "reporting,page-poison"],
            0b11_1000,
        ),
        (
            &["--dialect", "pfn-array", "--features", "free-page-hint"],
            1 << 3,
        ),
        (&["--features", "none"], 1 << 23),
        (&[], 1 << 23 | 0b11),
        (
            &["--features", "deflate-on-oom,reporting"],
            1 << 23 | 0b10_0100,
        ),
    ] {
        let guest = Guest::start(options, 0);
        let offered = guest.frontend.get_features().expect("features");
        assert_eq!(offered, bits | 1 << 29 | 1 << 30 | 1 << 32, "{options:?}");
    }
}

#[test]
fn config_space() {
    let options = [
        "--page-shifts=12,16",
        "--block-shift=16",
        "--max-bitmap-bytes=64",
    ];
    let mut guest = Guest::start(&options, BITMAP);
    let space = guest.config(0, 64);
    let mut announced = [0; Announcement::LEN];
    announced.copy_from_slice(&space[CONFIG_ANNOUNCEMENT..]);
    let announced = Announcement::decode(&announced).expect("a good announcement");
    assert_eq!(announced.page_shifts, 1 << 12 | 1 << 16);
    assert_eq!(
        (announced.block_shift, announced.max_bitmap_bytes),
        (16, 64)
    );

    // A target becomes num_pages and a message.
    guest
        .daemon
        .client()
        .target_bytes(5 * PAGE)
        .expect("a target");
    assert_eq!(guest.back_message(), [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(guest.config(0, 4), [5, 0, 0, 0]);

    // As QEMU does it: all of config space, in which the driver changed one field.
    let mut all = guest.config(0, 64);
    all[0] = 99;
    all[4..8].copy_from_slice(&3u32.to_le_bytes());
    all[32..].fill(0xff);
    guest.set_config(0, &all);
    let status = guest.daemon.status();
    assert_eq!(
        (status.balloon.target_pages, status.balloon.actual_pages),
        (5, 3)
    );
    assert_eq!(guest.config(32, 32), space[32..]);
    // As User Mode Linux does it.
    guest.set_actual(5);
    assert!(guest.daemon.status().balloon.reached);
    // Nonsense is answered, not obeyed.
    guest.set_config(40, &[1; 8]);
    assert_eq!(guest.daemon.status().errors["config-write"], 1);
    assert_eq!(guest.daemon.status().counters.config_writes, 3);
}

#[test]
fn free_page_reporting() {
    let mut guest = Guest::start(&["--features", "reporting,page-poison"], 1 << 5 | 1 << 4);
    guest.fill();
    let at = FREE;
    let report = [
        Piece::writable(at, 2 << 20),
        Piece::writable(HIGH, PAGE as u32),
        Piece::writable(at + (2 << 20), 1 << 20),
    ];
    guest.send_pieces(2, &report);
    let gone = [at..at + (3 << 20), HIGH..HIGH + PAGE];
    guest.check_gone(&gone);
    let status = guest.daemon.status();
    assert_eq!(status.frontend.queues, ["inflate", "deflate", "report"]);
    assert_eq!(status.counters.reported_bytes, (3 << 20) + PAGE);
    assert_eq!(status.counters.discard_calls, 2);
    assert_eq!(status.counters.requests, 0);

    // Parts of pages, no memory, and the wrong direction.
    guest.send_pieces(2, &[Piece::writable(at + (4 << 20) + 1, 8190)]);
    guest.send_pieces(2, &[Piece::writable(1 << 40, 4096)]);
    guest.send_pieces(2, &[Piece::of(at + (4 << 20), 4096)]);
    guest.send_pieces(2, &[Piece::writable(u64::MAX - 1, 4096)]);
    guest.check_gone(&gone);
    let status = guest.daemon.status();
    assert_eq!(status.errors["outside-ram"], 1);
    assert_eq!(status.errors["chain-direction"], 1);
    assert_eq!(status.errors["chain-memory"], 1);
    assert_eq!(status.counters.partial_bytes, 8190);

    // A guest that poisons its free pages would find zeros.
    guest.set_config(12, &0x5555_5555u32.to_le_bytes());
    guest.send_pieces(2, &[Piece::writable(at + (4 << 20), 4096)]);
    guest.check_gone(&gone);
}

#[test]
fn statistics_are_kept_until_wanted() {
    let mut guest = Guest::start(&[], BITMAP | 1 << 1);
    let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
    let at = guest.place(&[entry(4, 1000), entry(5, 2000)].concat());
    guest.post(2, &[Piece::of(at, 20)]);
    until("they arrive", || {
        guest.daemon.status().guest_stats.is_some()
    });
    assert!(guest.nothing_used(2), "the buffer stays with the device");
    let stats = guest.daemon.status().guest_stats.expect("statistics");
    assert_eq!(stats.values["free-memory"], 1000);
    assert_eq!(stats.values["total-memory"], 2000);

    // Asked for, the buffer comes back and the guest fills it again.
    let path = guest.daemon.control_path();
    let asked = std::thread::spawn(move || {
        let mut client = balloon_control::Client::connect(path).expect("connected");
        client.status(true).expect("a status")
    });
    assert_eq!(guest.used(2), (0, 0));
    let at = guest.place(&entry(4, 1001));
    guest.post(2, &[Piece::of(at, 10)]);
    let status = asked.join().expect("an answer");
    assert_eq!(
        status.guest_stats.expect("statistics").values["free-memory"],
        1001
    );

    // A guest that does not answer costs a second, not more.
    let begun = Instant::now();
    guest.daemon.client().status(true).expect("a status");
    assert!(begun.elapsed() < Duration::from_secs(3));
    assert_eq!(guest.used(2), (0, 0));

    // Nonsense is given back at once.
    let at = guest.place(&[0; 11]);
    guest.send_pieces(2, &[Piece::of(at, 11)]);
    assert_eq!(guest.daemon.status().errors["stats-length"], 1);
}

const STATS: u64 = 1 << 1;
const HINT: u64 = 1 << 3;
const REPORTING: u64 = 1 << 5;
const REQUESTS: u64 = 1 << 22;

fn told(guest: &mut Guest, queue: usize, id: u32) {
    guest.send(queue, &id.to_le_bytes());
}

#[test]
fn statistics_of_a_guest_that_was_paused() {
    let mut guest = Guest::start(&[], BITMAP | STATS);
    let at = guest.place(&[4, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    guest.post(2, &[Piece::of(at, 10)]);
    let received = |guest: &Guest| guest.daemon.status().counters.stats_requests;
    until("they arrive", || received(&guest) == 1);
    let bases = guest.pause();
    assert_eq!(bases[2], 0, "the buffer is not used");
    guest.go_on(BITMAP | STATS, &bases);
    until("they are there again", || received(&guest) == 2);
    let path = guest.daemon.control_path();
    let asked = std::thread::spawn(move || {
        let mut client = balloon_control::Client::connect(path).expect("connected");
        client.status(true).expect("a status")
    });
    assert_eq!(guest.used(2), (0, 0));
    asked.join().expect("an answer");
}

#[test]
fn rounds_of_free_page_hinting() {
    let mut guest = Guest::start(
        &["--features", "stats,free-page-hint"],
        BITMAP | HINT | STATS,
    );
    guest.fill();
    let block = Piece::writable(FREE, 4 << 20);
    let hint = |guest: &Guest| guest.daemon.status().hint;
    assert_eq!(hint(&guest).state, HintState::Idle);
    assert_eq!(guest.config(8, 4), [0; 4]);

    // Before any round was asked for.
    guest.send_pieces(3, &[block]);
    told(&mut guest, 3, 0);
    let counters = guest.daemon.status().counters;
    assert_eq!((counters.stale_hints, counters.hinted_bytes), (2, 0));

    let mut client = guest.daemon.client();
    let mut last = 0;
    for round in 1..=3 {
        let asked = client.free_page_hint(HintAction::Start).expect("a round");
        assert_eq!(asked.state, HintState::Requested);
        assert!(asked.id > 1 && asked.id != last, "{:#x}", asked.id);
        assert_eq!(guest.back_message()[0], 2);
        assert_eq!(guest.config(8, 4), asked.id.to_le_bytes());
        // What the guest still says of the round before is not for this one.
        guest.send_pieces(3, &[block]);
        told(&mut guest, 3, 0);
        told(&mut guest, 3, last);
        assert_eq!(
            (hint(&guest).state, hint(&guest).hints),
            (HintState::Requested, 0)
        );

        told(&mut guest, 3, asked.id);
        assert_eq!(hint(&guest).state, HintState::Running);
        guest.send_pieces(3, &[block]);
        guest.send_pieces(
            3,
            &[
                Piece::writable(HIGH, 4096),
                Piece::writable(HIGH + 4096, 4096),
            ],
        );
        told(&mut guest, 3, 0);
        let now = hint(&guest);
        assert_eq!((now.state, now.id), (HintState::Finished, asked.id));
        assert_eq!((now.hints, now.bytes), (2, (4 << 20) + 8192));
        let counters = guest.daemon.status().counters;
        assert_eq!(counters.hinted_bytes, round * now.bytes);
        // At the end is the end.
        guest.send_pieces(3, &[block]);
        assert_eq!(hint(&guest).hints, 2);
        last = asked.id;
    }
    client.free_page_hint(HintAction::Stop).expect("stopped");
    assert_eq!(guest.back_message()[0], 2);
    assert_eq!(guest.config(8, 4), [0; 4]);
    client.free_page_hint(HintAction::Done).expect("done");
    assert_eq!(guest.back_message()[0], 2);
    assert_eq!(guest.config(8, 4), [1, 0, 0, 0]);

    // Hints are hints: all memory is as it was.
    guest.check_gone(&[]);
    let status = guest.daemon.status();
    assert_eq!(status.counters.hint_requests, 2 + 3 * 8);
    assert_eq!(
        (status.counters.discard_calls, status.counters.errors),
        (0, 0)
    );
    assert_eq!(status.counters.stale_hints, 2 + 3 * 4);
}

#[test]
fn bad_hints_are_refused_one_by_one() {
    let mut guest = Guest::start(&["--features", "free-page-hint"], BITMAP | HINT);
    guest.fill();
    let mut client = guest.daemon.client();
    let id = client
        .free_page_hint(HintAction::Start)
        .expect("a round")
        .id;
    told(&mut guest, 2, id);
    let at = guest.place(&id.to_le_bytes());
    let mut expected = std::collections::BTreeMap::new();
    for (kind, pieces) in [
        ("hint-id", vec![Piece::of(at, 3)]),
        ("hint-id", vec![Piece::of(at, 5)]),
        ("hint-id", vec![Piece::of(at, 0)]),
        ("chain-memory", vec![Piece::of(1 << 40, 4)]),
        (
            "chain-direction",
            vec![Piece::of(at, 4), Piece::writable(FREE, 4096)],
        ),
        (
            "chain-direction",
            vec![Piece::writable(FREE, 4096), Piece::of(at, 4)],
        ),
        ("chain-memory", vec![Piece::writable(u64::MAX - 1, 4096)]),
        ("chain-endless", vec![Piece::writable(FREE, 4096).next(0)]),
        ("outside-ram", vec![Piece::writable(1 << 40, 4096)]),
    ] {
        guest.send_pieces(2, &pieces);
        *expected.entry(kind.to_owned()).or_insert(0) += 1;
        assert_eq!(guest.daemon.status().errors, expected, "{pieces:?}");
    }
    // Of a hint that is partly memory that part counts, and of memory named twice, one.
    assert_eq!(guest.daemon.status().hint.bytes, 0);
    let end = 32 << 20;
    guest.send_pieces(
        2,
        &[
            Piece::writable(end - 4096, 8192),
            Piece::writable(end - 4096, 4096),
        ],
    );
    assert_eq!(guest.daemon.status().hint.bytes, 4096);
    // A guest that says it is in another round is believed.
    told(&mut guest, 2, id + 1);
    guest.send_pieces(2, &[Piece::writable(FREE, 4096)]);
    told(&mut guest, 2, 0);
    let hint = guest.daemon.status().hint;
    assert_eq!((hint.bytes, hint.state), (4096, HintState::Running));
    guest.check_gone(&[]);
}

#[test]
fn a_round_is_waited_for() {
    let mut guest = Guest::start(&["--features", "free-page-hint"], BITMAP | HINT);
    let mut client = guest.daemon.client();
    let soon = Some(Duration::from_millis(50));
    let early = client.free_page_hint_round(soon).expect("an answer");
    assert_eq!(early.state, HintState::Requested);
    let waiting = std::thread::spawn(move || client.free_page_hint_round(None).expect("an answer"));
    until("it asks", || guest.daemon.status().hint.id == early.id + 1);
    told(&mut guest, 2, early.id + 1);
    guest.send_pieces(2, &[Piece::writable(FREE, 4096)]);
    told(&mut guest, 2, 0);
    let round = waiting.join().expect("an answer");
    assert_eq!((round.state, round.bytes), (HintState::Finished, 4096));
    // A new driver knows nothing of it.
    guest.start_driver(BITMAP | HINT);
    assert_eq!(guest.config(8, 4), [0; 4]);
    assert_eq!(guest.daemon.status().hint.state, HintState::Idle);
    let mut client = guest.daemon.client();
    let next = client.free_page_hint(HintAction::Start).expect("a round");
    assert_eq!(next.id, early.id + 2);
}

#[test]
fn hints_need_a_driver_that_gives_them() {
    let refused = |daemon: &Daemon| match daemon.client().free_page_hint(HintAction::Start) {
        Err(ClientError::Refused(failure)) => {
            assert_eq!(failure.code, FailureCode::NotSupported);
            failure.message
        }
        other => panic!("{other:?}"),
    };
    let guest = Guest::start(&["--features", "free-page-hint"], BITMAP);
    assert!(refused(&guest.daemon).contains("driver did not take free-page-hint"));
    let guest = Guest::start(&[], BITMAP);
    assert!(refused(&guest.daemon).contains("--features free-page-hint"));
    // There bit 3 means bitmaps.
    let guest = Guest::start(&["--dialect", "2016"], 1 << 3);
    assert!(refused(&guest.daemon).contains("does not offer"));
    let daemon = Daemon::start(&["--features", "free-page-hint"]);
    assert!(refused(&daemon).contains("no guest is connected"));
}

/// Whatever is offered and whatever of that is taken: each queue is where the driver has it. Host
/// requests are there only beside page bitmaps.
#[test]
fn queues_are_where_the_driver_has_them() {
    let optional = [
        (STATS, "stats"),
        (HINT, "hint"),
        (REPORTING, "report"),
        (BITMAP, ""),
        (REQUESTS, "request"),
    ];
    // Requests cannot be offered without bitmaps.
    for offered in (0..32u64).filter(|set| set & 0b11000 != 0b10000) {
        let is = |set: u64, i: usize| set >> i & 1 == 1;
        let names = ["stats", "free-page-hint", "reporting", "", "host-request"];
        let list = [0, 1, 2, 4].into_iter().filter(|i| is(offered, *i));
        let list: Vec<_> = list.map(|i| names[i]).collect();
        let list = if list.is_empty() {
            "none".to_owned()
        } else {
            list.join(",")
        };
        let dialect = if is(offered, 3) {
            "bitmap"
        } else {
            "pfn-array"
        };
        let options = ["--features", &list, "--dialect", dialect];
        let mut guest = Guest::start(&options, 0);
        for taken in (0..32u64).filter(|taken| taken & !offered == 0) {
            let features = optional.iter().enumerate();
            let features = features
                .filter(|(i, _)| is(taken, *i))
                .map(|(_, (bit, _))| bit);
            guest.start_driver(features.sum());
            let mut expected = vec!["inflate", "deflate"];
            expected.extend((0..3).filter(|i| is(taken, *i)).map(|i| optional[i].1));
            if is(taken, 3) && is(taken, 4) {
                expected.extend(["request", "answer"]);
            }
            let before = guest.daemon.status();
            assert_eq!(before.frontend.queues, expected, "{offered:#b} {taken:#b}");
            // Not only by name: an empty buffer is what each of them counts, but for that of
            // requests, which keeps it.
            for queue in 0..expected.len() {
                guest.post(queue, &[Piece::of(BUFFER, 0)]);
            }
            let count = |status: &Status| {
                let c = &status.counters;
                [
                    c.inflate_requests,
                    c.deflate_requests,
                    c.stats_requests,
                    c.hint_requests,
                    c.report_requests,
                    c.answers,
                ]
            };
            let there = ["inflate", "deflate", "stats", "hint", "report", "answer"];
            let wanted: Vec<_> = std::iter::zip(there, count(&before))
                .map(|(name, before)| before + u64::from(expected.contains(&name)))
                .collect();
            until("each is counted", || {
                count(&guest.daemon.status()).to_vec() == wanted
            });
        }
    }
}

#[test]
fn interrupts_only_when_wanted() {
    let mut guest = Guest::start(&[], BITMAP | EVENT_IDX);
    guest.queues[0].set_used_event(&guest.memory, 2);
    for used in 1..=4 {
        guest.send(0, &record(12, FIRST, &[1]));
        sleep(Duration::from_millis(20));
        assert_eq!(guest.interrupts(0), u64::from(used == 3), "after {used}");
    }
    assert_eq!(guest.daemon.status().counters.interrupts, 1);
}

/// Once a queue is disabled or stopped, the guest may use the pages of requests in flight again.
#[test]
fn nothing_is_discarded_after_a_queue_was_disabled() {
    // Enough single pages to keep it busy for longer than all the rest takes.
    let size: u64 = 3 << 30;
    for stop in [false, true] {
        let daemon = Daemon::start(&[]);
        let mut guest = Guest::with_daemon(daemon, BITMAP, size as usize);
        let words = vec![0x5555_5555_5555_5555; (size >> 12) as usize / 64 - FIRST as usize / 64];
        let bytes = record(12, FIRST, &words);
        let at = guest.place(&bytes);
        guest.post(0, &[Piece::of(at, bytes.len() as u32)]);
        until("it is at work", || {
            guest.daemon.status().counters.requests == 1
        });
        if stop {
            guest.frontend.get_vring_base(0).expect("stopped");
        } else {
            guest.frontend.set_vring_enable(0, false).expect("disabled");
            guest.frontend.get_features().expect("features");
        }
        assert!(!guest.none_used_now(0), "the request in work is not done");
        // The last page of the request, again in use.
        let last = GuestAddress(size - 2 * PAGE);
        guest.memory.write_obj(0x1234_5678u32, last).expect("ram");
        let discarded = guest.daemon.status().counters.discarded_bytes;
        sleep(Duration::from_millis(300));
        let value: u32 = guest.memory.read_obj(last).expect("ram");
        assert_eq!(value, 0x1234_5678, "discarded after use");
        assert_eq!(guest.daemon.status().counters.discarded_bytes, discarded);
    }
}

#[test]
fn a_disabled_queue_is_left_alone_and_picked_up_again() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    guest.frontend.set_vring_enable(0, false).expect("disabled");
    let bytes = record(12, FIRST, &[1]);
    let at = guest.place(&bytes);
    guest.post(0, &[Piece::of(at, 32)]);
    assert!(guest.nothing_used(0));
    guest.check_gone(&[]);
    guest.frontend.set_vring_enable(0, true).expect("enabled");
    assert_eq!(guest.used(0), (0, 0));
    guest.check_gone(&[pages(FIRST, 1)]);
}

#[test]
fn a_driver_comes_back_with_other_features() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    guest.send(0, &record(12, FIRST, &[1]));
    for queue in 0..8 {
        guest.frontend.get_vring_base(queue).expect("stopped");
    }
    assert!(!guest.daemon.status().frontend.driver);
    guest.start_driver(EVENT_IDX);
    guest.send(0, &pfns([FIRST + 1]));
    guest.check_gone(&[pages(FIRST, 2)]);
    assert_eq!(guest.daemon.status().frontend.protocol, "pfn-array");
}

#[test]
fn it_ends_when_the_frontend_disconnects() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.send(0, &record(12, FIRST, &[1]));
    let Guest {
        mut daemon,
        frontend,
        ..
    } = guest;
    drop(frontend);
    assert_eq!(daemon.end(), Some(0));
    assert!(!exists(&daemon.socket_path()) && !exists(&daemon.control_path()));
}

#[test]
fn somebody_who_looks_in_is_no_frontend() {
    let daemon = Daemon::start(&[]);
    for _ in 0..3 {
        drop(std::os::unix::net::UnixStream::connect(daemon.socket_path()).expect("there"));
    }
    let mut guest = Guest::with_daemon(daemon, BITMAP, 32 << 20);
    guest.send(0, &record(12, FIRST, &[1]));
}

#[test]
fn it_ends_on_a_signal() {
    let mut daemon = Daemon::start(&[]);
    daemon.signal();
    assert_eq!(daemon.end(), Some(0));
    assert!(!exists(&daemon.socket_path()) && !exists(&daemon.control_path()));

    let mut guest = Guest::start(&["--fault", "delay=60000"], BITMAP);
    let bytes = record(12, FIRST, &[1]);
    let at = guest.place(&bytes);
    guest.post(0, &[Piece::of(at, 32)]);
    until("it is at work", || {
        guest.daemon.status().counters.requests == 1
    });
    guest.daemon.signal();
    assert_eq!(guest.daemon.end(), Some(0));
    assert!(!exists(&guest.daemon.socket_path()));
}

#[test]
fn a_persistent_daemon_serves_the_next_guest() {
    let guest = Guest::start(&["--persist"], BITMAP);
    let Guest {
        daemon, frontend, ..
    } = guest;
    daemon.client().target_bytes(1 << 20).expect("a target");
    drop(frontend);
    until("it noticed", || !daemon.status().frontend.connected);
    let mut guest = Guest::with_daemon(daemon, BITMAP, 32 << 20);
    guest.fill();
    guest.send(0, &record(12, FIRST, &[1]));
    guest.check_gone(&[pages(FIRST, 1)]);
    assert_eq!(guest.config(0, 4), 256u32.to_le_bytes());
    // The back channel is that of the new frontend.
    guest
        .daemon
        .client()
        .target_bytes(2 << 20)
        .expect("a target");
    assert_eq!(guest.back_message()[0], 2);
}

#[test]
fn a_frontend_that_talks_nonsense_is_an_error() {
    use std::io::Write as _;
    let mut daemon = Daemon::start(&[]);
    let mut stream = std::os::unix::net::UnixStream::connect(daemon.socket_path()).expect("there");
    stream.write_all(&[0xff; 64]).expect("written");
    assert_eq!(daemon.end(), Some(1));
    assert!(daemon.log().contains("the frontend cannot be served"));
    assert!(!exists(&daemon.socket_path()));
}
