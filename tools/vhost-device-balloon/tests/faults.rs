// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The device misbehaves exactly as it is told.

mod common;

use std::time::{Duration, Instant};

use balloon_control::client::ClientError;
use common::{BITMAP, EVENT_IDX, FREE, Guest, PAGE, Piece, record, until};

const FIRST: u64 = FREE / PAGE;

fn post(guest: &mut Guest) {
    let bytes = record(12, FIRST, &[1]);
    let at = guest.place(&bytes);
    guest.post(0, &[Piece::of(at, bytes.len() as u32)]);
}

#[test]
fn withheld_and_released() {
    let mut guest = Guest::start(&["--fault", "withhold=1"], BITMAP | EVENT_IDX);
    post(&mut guest);
    assert_eq!(guest.used(0), (0, 0));
    post(&mut guest);
    assert!(guest.nothing_used(0));
    assert_eq!(guest.daemon.status().daemon.faults, ["withhold=1"]);
    guest.daemon.client().fault(&[]).expect("allowed");
    assert_eq!(guest.used(0), (0, 0));
    post(&mut guest);
    assert_eq!(guest.used(0), (0, 0));
}

#[test]
fn one_queue_only() {
    let options = [
        "--features",
        "free-page-hint",
        "--fault",
        "withhold",
        "--fault",
        "queue=hint",
    ];
    let mut guest = Guest::start(&options, BITMAP | 1 << 3);
    guest.post(2, &[Piece::writable(FREE, 4096)]);
    post(&mut guest);
    assert_eq!(guest.used(0), (0, 0));
    assert!(guest.nothing_used(2));
    guest.daemon.client().fault(&[]).expect("allowed");
    assert_eq!(guest.used(2), (0, 0));
}

#[test]
fn the_last_one_first() {
    let options = [
        "--features",
        "free-page-hint",
        "--fault",
        "reverse=3",
        "--fault",
        "queue=hint",
    ];
    let mut guest = Guest::start(&options, BITMAP | 1 << 3);
    for head in 0..5 {
        assert!(guest.none_used_now(2) || head > 2);
        guest.post_at(
            2,
            head,
            Piece::writable(FREE + u64::from(head) * 4096, 4096),
        );
    }
    for head in [2, 1, 0] {
        assert_eq!(guest.used(2), (head, 0));
    }
    assert!(guest.nothing_used(2));
    // What is kept goes in order when the fault ends.
    guest.daemon.client().fault(&[]).expect("allowed");
    for head in [3, 4] {
        assert_eq!(guest.used(2), (head, 0));
    }
}

#[test]
fn false_used_elements() {
    let mut guest = Guest::start(&["--fault", "used-id=65535"], BITMAP | EVENT_IDX);
    post(&mut guest);
    assert_eq!(guest.used(0), (65535, 0));
    until("an interrupt", || guest.interrupts(0) == 1);
    guest
        .daemon
        .client()
        .fault(&["used-len=4096"])
        .expect("allowed");
    post(&mut guest);
    assert_eq!(guest.used(0), (0, 4096));
}

#[test]
fn delayed_and_silent() {
    let mut guest = Guest::start(&["--fault", "delay=100", "--fault", "no-interrupt"], BITMAP);
    let begun = Instant::now();
    post(&mut guest);
    assert_eq!(guest.used(0), (0, 0));
    assert!(begun.elapsed() >= Duration::from_millis(100));
    assert_eq!(guest.interrupts(0), 0);
}

#[test]
fn dead() {
    let mut guest = Guest::start(&["--fault", "die=1"], BITMAP);
    post(&mut guest);
    assert_eq!(guest.used(0), (0, 0));
    post(&mut guest);
    assert_eq!(guest.daemon.end(), Some(70));
}

#[test]
fn storms_and_flips() {
    let mut guest = Guest::start(&["--fault", "none"], BITMAP);
    guest
        .daemon
        .client()
        .target_bytes(1 << 20)
        .expect("a target");
    guest.back_message();
    guest
        .daemon
        .client()
        .fault(&["storm=1000"])
        .expect("allowed");
    for _ in 0..20 {
        guest.back_message();
        assert_eq!(guest.config(0, 2), [0, 1]);
    }
    guest.daemon.client().fault(&["flip=200"]).expect("allowed");
    for wanted in [[0, 0], [0, 1], [0, 0]] {
        until("it flips", || guest.config(0, 2) == wanted);
    }
    guest.daemon.client().fault(&[]).expect("allowed");
    until("it settles", || guest.config(0, 2) == [0, 1]);
}

#[test]
fn a_false_announcement() {
    let mut guest = Guest::start(&["--fault", "config=32:5842"], BITMAP);
    assert_eq!(guest.config(32, 4), *b"XBMP");
}

#[test]
fn not_without_the_option() {
    let guest = Guest::start(&[], BITMAP);
    match guest.daemon.client().fault(&["die"]) {
        Err(ClientError::Refused(failure)) => assert!(failure.message.contains("--fault")),
        other => panic!("{other:?}"),
    }
    let guest = Guest::start(&["--fault", "none"], BITMAP);
    match guest.daemon.client().fault(&["sleepy"]) {
        Err(ClientError::Refused(failure)) => assert!(failure.message.contains("allowed are none")),
        other => panic!("{other:?}"),
    }
}
