// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The guest is asked for something, and answers: well, badly, or not at all.

mod common;

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use balloon_control::Client;
use balloon_control::client::ClientError;
use balloon_control::message::{AskedState, Failure, FailureCode, Reply, Request, SizeField};
use balloon_wire::logic::request::{
    Answer, Command, HOLD, INCLUDE_BALLOON, PAGE_CACHE, Reason, Request as Asked, SLAB, Status,
};
use common::{BITMAP, Daemon, FREE, Guest, HIGH, PAGE, Piece, until};
use vm_memory::{Bytes as _, GuestAddress};

const REQUESTS: u64 = 1 << 22;
/// The queues with these features.
const REQUEST: usize = 2;
const ANSWER: usize = 3;
const FIRST: u64 = FREE / PAGE;

fn start(options: &[&str]) -> Guest {
    let all = [&["--features", "host-request"], options].concat();
    Guest::start(&all, BITMAP | REQUESTS)
}

/// Asks in a thread of its own.
fn ask(guest: &Guest, request: Request) -> JoinHandle<Result<Reply, ClientError>> {
    let mut client = guest.daemon.client();
    thread::spawn(move || client.ask(&request))
}

const DROP: Request = Request::DropCaches {
    page_cache: false,
    slab: false,
    until: None,
    timeout_ms: None,
};
const FREE_PAGES: Request = Request::FreePages {
    balloon: false,
    hold: false,
    hold_ms: None,
    bound: false,
    timeout_ms: None,
};

/// Gives the device a buffer, and waits for the request in it.
fn take(guest: &mut Guest) -> Asked {
    let at = guest.place(&[0; Asked::LEN]);
    guest.post(REQUEST, &[Piece::writable(at, Asked::LEN as u32)]);
    taken(guest, at)
}

fn taken(guest: &mut Guest, at: u64) -> Asked {
    assert_eq!(guest.used(REQUEST), (0, Asked::LEN as u32));
    let mut bytes = [0; Asked::LEN];
    let at = GuestAddress(at);
    guest.memory.read_slice(&mut bytes, at).expect("ram");
    Asked::decode(&bytes).expect("a whole request")
}

fn answer(to: &Asked, status: Status, value: u64, detail: u64) -> Answer {
    Answer {
        id: to.id,
        command: to.command,
        status,
        value,
        detail,
        microseconds: 1500,
        reason: Reason::None,
        state: 0,
    }
}

fn say(guest: &mut Guest, answer: &Answer) {
    guest.send(ANSWER, &answer.encode());
}

/// A partial answer with records that are made for it.
fn say_part(guest: &mut Guest, answer: &Answer, records: &[(u32, u64, &[u64])]) {
    let mut bytes = answer.encode().to_vec();
    for (shift, base, words) in records {
        let mut record = common::record(*shift, *base, words);
        record[..4].copy_from_slice(&answer.id.to_le_bytes());
        bytes.extend(record);
    }
    guest.send(ANSWER, &bytes);
}

fn refused(reply: Result<Reply, ClientError>) -> Failure {
    match reply {
        Err(ClientError::Refused(failure)) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_asked_and_what_is_answered() {
    let mut guest = start(&[]);
    assert_eq!(guest.config(56, 4), 0x1fu32.to_le_bytes());
    let mut ids = Vec::new();
    let until = Some(SizeField::Text("1M".to_owned()));
    for (page_cache, slab, until, flags, argument) in [
        (false, false, None, PAGE_CACHE | SLAB, 0),
        (true, false, None, PAGE_CACHE, 0),
        (false, true, until, SLAB, 256),
    ] {
        let waiting = ask(
            &guest,
            Request::DropCaches {
                page_cache,
                slab,
                until,
                timeout_ms: None,
            },
        );
        let asked = take(&mut guest);
        assert_eq!(asked.command, Command::DropCaches.number());
        assert_eq!((asked.flags, asked.argument), (flags, argument));
        say(&mut guest, &answer(&asked, Status::Ok, 3, 2));
        match waiting.join().expect("no panic").expect("an answer") {
            Reply::DropCaches {
                freed_bytes,
                spare_bytes,
                took,
            } => {
                assert_eq!((freed_bytes, spare_bytes), (3 * PAGE, 2 * PAGE));
                assert_eq!(took.guest_ms, 1.5);
                assert!(took.elapsed_ms > 0.0);
            }
            other => panic!("{other:?}"),
        }
        assert!(asked.id != 0 && !ids.contains(&asked.id));
        ids.push(asked.id);
    }
    let waiting = ask(&guest, Request::Compact { timeout_ms: None });
    let asked = take(&mut guest);
    assert_eq!((asked.command, asked.flags, asked.argument), (2, 0, 0));
    say(&mut guest, &answer(&asked, Status::Ok, 512, 1024));
    match waiting.join().expect("no panic").expect("an answer") {
        Reply::Compact {
            gained_bytes,
            block_bytes,
            ..
        } => assert_eq!((gained_bytes, block_bytes), (2 << 20, 4 << 20)),
        other => panic!("{other:?}"),
    }
    let status = guest.daemon.status();
    assert_eq!((status.counters.answers, status.counters.errors), (4, 0));
    let asked = status.asked.expect("something was");
    assert_eq!(
        (asked.command.as_str(), asked.state),
        ("compact", AskedState::Done)
    );
}

#[test]
fn refusals_are_told_with_their_reason() {
    let mut guest = start(&[]);
    for (status, reason, code, part) in [
        (
            Status::Refused,
            Reason::NotAllowed,
            FailureCode::Refused,
            "administrator",
        ),
        (
            Status::Unsupported,
            Reason::NoInterface,
            FailureCode::NotSupported,
            "kernel",
        ),
        (
            Status::Unsupported,
            Reason::Command,
            FailureCode::NotSupported,
            "not know",
        ),
        (
            Status::Invalid,
            Reason::Flags,
            FailureCode::Failed,
            "not like",
        ),
        (
            Status::Failed,
            Reason::Error,
            FailureCode::Failed,
            "its log",
        ),
        (
            Status::Cancelled,
            Reason::Stopping,
            FailureCode::Failed,
            "being stopped",
        ),
    ] {
        let waiting = ask(&guest, DROP);
        let asked = take(&mut guest);
        let no = answer(&asked, status, 0, 0);
        say(&mut guest, &Answer { reason, ..no });
        let failure = refused(waiting.join().expect("no panic"));
        assert_eq!(failure.code, code, "{failure:?}");
        assert!(failure.message.contains(part), "{failure:?}");
    }
    assert_eq!(guest.daemon.status().counters.errors, 0);
}

#[test]
fn free_pages_become_a_map() {
    let mut guest = start(&[]);
    guest.fill();
    let waiting = ask(&guest, FREE_PAGES);
    let asked = take(&mut guest);
    assert_eq!((asked.command, asked.flags, asked.argument), (3, 0, 0));
    // A block, and the page behind it.
    let part = answer(&asked, Status::Partial, 513, 0);
    let records: [(u32, u64, &[u64]); 2] = [(21, FREE >> 21, &[1]), (12, FIRST + 512, &[1])];
    say_part(&mut guest, &part, &records);
    let now = guest.daemon.status().asked.expect("it was asked");
    assert_eq!(
        (now.state, now.answers, now.bytes),
        (AskedState::Sent, 1, 513 * PAGE)
    );
    // Two pages at the end of the low region, of which one is none any more, and one high up.
    let part = answer(&asked, Status::Partial, 3, 1);
    let end = (32 << 20) / PAGE;
    let records: [(u32, u64, &[u64]); 2] = [(12, end - 1, &[3]), (12, HIGH / PAGE, &[2])];
    say_part(&mut guest, &part, &records);
    say(&mut guest, &answer(&asked, Status::Ok, 516, 2));
    let wire = 3 * Answer::LEN + 4 * common::record(12, 0, &[1]).len();
    let (id, bytes) = match waiting.join().expect("no panic").expect("an answer") {
        Reply::FreePages {
            id,
            bytes,
            wire_bytes,
            runs: 3,
            answers: 2,
            held: false,
            ..
        } if wire_bytes == wire as u64 => (id, bytes),
        other => panic!("{other:?}"),
    };
    assert_eq!((id, bytes), (asked.id, 515 * PAGE));
    let mut client = guest.daemon.client();
    assert_eq!(
        client.free_page_runs(id).expect("a map"),
        [
            (FREE, 513 * PAGE),
            ((end - 1) * PAGE, PAGE),
            (HIGH + PAGE, PAGE)
        ]
    );
    match client.free_page_runs(id + 1) {
        Err(ClientError::Refused(failure)) => assert!(failure.message.contains("not known")),
        other => panic!("{other:?}"),
    }
    guest.check_gone(&[]);
}

#[test]
fn a_long_map_comes_in_pieces() {
    let mut guest = start(&[]);
    let waiting = ask(
        &guest,
        Request::FreePages {
            balloon: true,
            hold: false,
            hold_ms: None,
            bound: false,
            timeout_ms: None,
        },
    );
    let asked = take(&mut guest);
    assert_eq!(asked.flags, INCLUDE_BALLOON);
    // Every second page.
    let words = [0x5555_5555_5555_5555; 80];
    let pages = 32 * words.len() as u64;
    let part = answer(&asked, Status::Partial, pages, 0);
    say_part(&mut guest, &part, &[(12, FIRST, &words)]);
    say(&mut guest, &answer(&asked, Status::Ok, pages, 1));
    waiting.join().expect("no panic").expect("an answer");
    let runs = guest
        .daemon
        .client()
        .free_page_runs(asked.id)
        .expect("a map");
    let expected: Vec<_> = (0..pages).map(|i| (FREE + 2 * i * PAGE, PAGE)).collect();
    assert_eq!(runs, expected);
}

/// Each bad answer has its own counter, and spoils what is told for its request; the next is good.
#[test]
fn bad_answers_are_refused_one_by_one() {
    let mut guest = start(&[]);
    let mut expected = std::collections::BTreeMap::new();
    type Records<'a> = &'a [(u32, u64, &'a [u64])];
    let good: Records<'_> = &[(12, FIRST, &[1])];
    let cases: [(&str, Status, u64, u64, Records<'_>); 8] = [
        ("answer-sum", Status::Partial, 2, 0, good),
        ("answer-sum", Status::Partial, 1, 1, good),
        ("header-short", Status::Partial, 0, 0, &[]),
        ("answer-order", Status::Partial, 0, 0, &[(12, FIRST, &[0])]),
        (
            "answer-order",
            Status::Partial,
            1,
            0,
            &[(12, FIRST, &[1]), (12, FIRST + 64, &[0])],
        ),
        (
            "answer-order",
            Status::Partial,
            2,
            0,
            &[(12, FIRST, &[1]), (12, FIRST, &[1])],
        ),
        (
            "answer-order",
            Status::Partial,
            2,
            0,
            &[(12, FIRST + 64, &[1]), (12, FIRST, &[1])],
        ),
        ("page-shift", Status::Partial, 2, 0, &[(13, FIRST, &[1])]),
    ];
    for (kind, status, value, detail, records) in cases {
        let waiting = ask(&guest, FREE_PAGES);
        let asked = take(&mut guest);
        say_part(&mut guest, &answer(&asked, status, value, detail), records);
        *expected.entry(kind.to_owned()).or_insert(0) += 1;
        assert_eq!(guest.daemon.status().errors, expected, "{records:?}");
        say(&mut guest, &answer(&asked, Status::Ok, value, 1));
        let failure = refused(waiting.join().expect("no panic"));
        assert_eq!(failure.code, FailureCode::Failed);
        assert!(failure.message.contains("not good"), "{failure:?}");
        assert_eq!(guest.daemon.status().errors, expected, "one is enough");
    }
    // Pages that were named before, named again in the next part.
    let waiting = ask(&guest, FREE_PAGES);
    let asked = take(&mut guest);
    say_part(&mut guest, &answer(&asked, Status::Partial, 1, 0), good);
    say_part(&mut guest, &answer(&asked, Status::Partial, 1, 1), good);
    *expected.entry("answer-order".to_owned()).or_insert(0) += 1;
    say(&mut guest, &answer(&asked, Status::Ok, 2, 2));
    assert!(
        refused(waiting.join().expect("no panic"))
            .message
            .contains("not good")
    );
    // A sum that is not one.
    let waiting = ask(&guest, FREE_PAGES);
    let asked = take(&mut guest);
    say_part(&mut guest, &answer(&asked, Status::Partial, 1, 0), good);
    say(&mut guest, &answer(&asked, Status::Ok, 2, 1));
    *expected.entry("answer-sum".to_owned()).or_insert(0) += 1;
    assert!(
        refused(waiting.join().expect("no panic"))
            .message
            .contains("not good")
    );
    assert_eq!(guest.daemon.status().errors, expected);

    // Answers that belong to nothing.
    let waiting = ask(&guest, DROP);
    let asked = take(&mut guest);
    let done = answer(&asked, Status::Ok, 0, 0);
    let other = Answer {
        id: asked.id + 1,
        ..done
    };
    say(&mut guest, &other);
    say(&mut guest, &Answer { command: 2, ..done });
    say(&mut guest, &answer(&asked, Status::HoldEnded, 0, 0));
    expected.insert("answer-unasked".to_owned(), 3);
    guest.send(ANSWER, &done.encode()[..31]);
    guest.send(ANSWER, &[&done.encode()[..], &[0; 8]].concat());
    guest.send(ANSWER, &[]);
    expected.insert("answer-length".to_owned(), 3);
    assert_eq!(guest.daemon.status().errors, expected);
    // It waited for the right one all the time.
    say(&mut guest, &done);
    waiting.join().expect("no panic").expect("an answer");
    say(&mut guest, &done);
    *expected.entry("answer-unasked".to_owned()).or_insert(0) += 1;
    assert_eq!(guest.daemon.status().errors, expected);
    assert!(!guest.daemon.log().contains("panicked"));
}

fn within(ms: u64) -> Request {
    Request::Compact {
        timeout_ms: Some(ms),
    }
}

#[test]
fn a_guest_that_does_not_answer_is_told_to_end() {
    let mut guest = start(&[]);
    let waiting = ask(&guest, within(200));
    let asked = take(&mut guest);
    let cancel = take(&mut guest);
    assert_eq!((cancel.command, cancel.flags, cancel.argument), (0, 0, 0));
    let ended = answer(&asked, Status::Cancelled, 0, 0);
    let reason = Reason::Newer;
    say(&mut guest, &Answer { reason, ..ended });
    say(&mut guest, &answer(&cancel, Status::Ok, 0, 0));
    let failure = refused(waiting.join().expect("no panic"));
    assert_eq!(failure.code, FailureCode::TimeOut);

    // It was done when it was told to end.
    let waiting = ask(&guest, within(200));
    let asked = take(&mut guest);
    let cancel = take(&mut guest);
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    say(&mut guest, &answer(&cancel, Status::Ok, 0, 0));
    waiting
        .join()
        .expect("no panic")
        .expect("an answer after all");

    // It does not even answer to that. Later it does, and nobody is confused.
    let waiting = ask(&guest, within(100));
    let asked = take(&mut guest);
    let cancel = take(&mut guest);
    let failure = refused(waiting.join().expect("no panic"));
    assert_eq!(
        (failure.code, failure.message.as_str()),
        (FailureCode::TimeOut, "the time is up")
    );
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    say(&mut guest, &answer(&cancel, Status::Ok, 0, 0));
    assert_eq!(guest.daemon.status().counters.errors, 0);
    let waiting = ask(&guest, within(10_000));
    let asked = take(&mut guest);
    say(&mut guest, &answer(&asked, Status::Ok, 1, 1));
    waiting.join().expect("no panic").expect("an answer");
}

#[test]
fn a_request_that_nobody_took_is_taken_back() {
    let mut guest = start(&[]);
    let failure = refused(guest.daemon.client().ask(&within(100)));
    assert_eq!(failure.code, FailureCode::TimeOut);
    assert!(failure.message.contains("not even taken"), "{failure:?}");
    let at = guest.place(&[0; Asked::LEN]);
    guest.post(REQUEST, &[Piece::writable(at, 16)]);
    assert!(guest.nothing_used(REQUEST));
    // The buffer is there for the next, without another kick.
    let waiting = ask(&guest, within(10_000));
    let asked = taken(&mut guest, at);
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    waiting.join().expect("no panic").expect("an answer");
}

#[test]
fn when_nobody_waits_any_more_the_guest_is_told_to_end() {
    let mut guest = start(&[]);
    let mut client = guest.daemon.client();
    let short = Some(Duration::from_millis(50));
    client.set_answer_timeout(short).expect("a socket");
    assert!(matches!(client.ask(&DROP), Err(ClientError::Io(_))));
    drop(client);
    let asked = take(&mut guest);
    assert_eq!(asked.command, Command::DropCaches.number());
    assert_eq!(take(&mut guest).command, Command::Cancel.number());
}

#[test]
fn one_asks_at_a_time() {
    let mut guest = start(&[]);
    let first = ask(&guest, DROP);
    let asked = take(&mut guest);
    let second = ask(&guest, Request::Compact { timeout_ms: None });
    let at = guest.place(&[0; Asked::LEN]);
    guest.post(REQUEST, &[Piece::writable(at, 16)]);
    assert!(guest.nothing_used(REQUEST), "it would end the first");
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    first.join().expect("no panic").expect("an answer");
    let asked = taken(&mut guest, at);
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    second.join().expect("no panic").expect("an answer");
}

#[test]
fn pages_are_held_and_released() {
    let mut guest = start(&[]);
    let held = |guest: &Guest| guest.daemon.status().hold.map(|h| (h.bytes, h.held));
    let hold = Request::FreePages {
        balloon: false,
        hold: true,
        hold_ms: Some(60_000),
        bound: false,
        timeout_ms: None,
    };
    for given_up in [false, true] {
        assert_eq!(held(&guest), None);
        let waiting = ask(&guest, hold.clone());
        let asked = take(&mut guest);
        assert_eq!((asked.flags, asked.argument), (HOLD, 60_000));
        let part = answer(&asked, Status::Partial, 1, 0);
        say_part(&mut guest, &part, &[(12, FIRST, &[1])]);
        assert_eq!(held(&guest), None, "not before the end");
        say(&mut guest, &answer(&asked, Status::Ok, 1, 1));
        let reply = waiting.join().expect("no panic").expect("an answer");
        assert!(matches!(reply, Reply::FreePages { held: true, .. }));
        assert_eq!(held(&guest), Some((PAGE, true)));
        if given_up {
            let ended = answer(&asked, Status::HoldEnded, 1, 0);
            let reason = Reason::Pressure;
            say(&mut guest, &Answer { reason, ..ended });
            assert_eq!(held(&guest), Some((PAGE, false)));
        }
        let waiting = ask(&guest, Request::Release { timeout_ms: None });
        let asked = take(&mut guest);
        assert_eq!(asked.command, Command::Release.number());
        say(
            &mut guest,
            &answer(&asked, Status::Ok, u64::from(!given_up), 0),
        );
        match waiting.join().expect("no panic").expect("an answer") {
            Reply::Release { bytes, .. } => assert_eq!(bytes, PAGE * u64::from(!given_up)),
            other => panic!("{other:?}"),
        }
    }
    // What did not come to its end is not held.
    let waiting = ask(&guest, hold.clone());
    let asked = take(&mut guest);
    say(&mut guest, &answer(&asked, Status::Cancelled, 0, 0));
    refused(waiting.join().expect("no panic"));
    assert_eq!(held(&guest), None);
    assert_eq!(guest.daemon.status().counters.errors, 0);
    let both = Request::FreePages {
        balloon: true,
        hold: true,
        hold_ms: None,
        bound: false,
        timeout_ms: None,
    };
    let failure = refused(guest.daemon.client().ask(&both));
    assert_eq!(failure.code, FailureCode::BadValue);
}

#[test]
fn what_is_held_for_nobody_is_released() {
    let mut guest = start(&[]);
    let held = |guest: &Guest| guest.daemon.status().hold.is_some_and(|hold| hold.held);
    let hold = |bound| Request::FreePages {
        balloon: false,
        hold: true,
        hold_ms: None,
        bound,
        timeout_ms: None,
    };
    let released = |guest: &mut Guest| {
        let asked = take(guest);
        assert_eq!(asked.command, Command::Release.number());
        say(guest, &answer(&asked, Status::Ok, 0, 0));
        until("it is released", || guest.daemon.status().hold.is_none());
    };
    // Held, and the connection of whoever asked.
    let hold_by = |guest: &mut Guest, bound| {
        let mut client = guest.daemon.client();
        let waiting = thread::spawn(move || {
            client.ask(&hold(bound)).expect("an answer");
            client
        });
        let asked = take(guest);
        say(guest, &answer(&asked, Status::Ok, 0, 0));
        waiting.join().expect("no panic")
    };
    // Whoever asked goes before the answer is there.
    let mut stream = UnixStream::connect(guest.daemon.control_path()).expect("a connection");
    let mut line = serde_json::to_vec(&hold(false)).expect("JSON");
    line.push(b'\n');
    stream.write_all(&line).expect("sent");
    let asked = take(&mut guest);
    drop(stream);
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    released(&mut guest);

    // A hold that is bound to its connection ends with it, and no other.
    for bound in [true, false] {
        let client = hold_by(&mut guest, bound);
        assert!(held(&guest));
        // As long as it is there the guest may be stopped at any time, and is told of no target.
        let told = |guest: &Guest| guest.daemon.status().counters.config_changes;
        let before = told(&guest);
        let target = u64::from(bound) * PAGE;
        guest
            .daemon
            .client()
            .target_bytes(target)
            .expect("a target");
        assert_eq!(told(&guest), before + u64::from(!bound));
        drop(client);
        match bound {
            true => {
                released(&mut guest);
                until("it is told", || told(&guest) == before + 1);
            }
            false => {
                thread::sleep(Duration::from_millis(500));
                assert!(held(&guest));
            }
        }
    }
    // Nor one that is held for somebody else by then.
    let first = hold_by(&mut guest, true);
    hold_by(&mut guest, false);
    drop(first);
    thread::sleep(Duration::from_millis(500));
    let waiting = ask(&guest, DROP);
    let asked = take(&mut guest);
    assert_eq!(asked.command, Command::DropCaches.number());
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    waiting.join().expect("no panic").expect("an answer");
    assert!(held(&guest));
    assert_eq!(guest.daemon.status().counters.errors, 0);
}

/// QEMU stops the queues of a guest that it pauses, and begins where they were.
#[test]
fn a_guest_that_is_paused_goes_on_where_it_was() {
    let mut guest = start(&[]);
    let held = hold_two(&mut guest);
    let waiting = ask(&guest, DROP);
    let asked = take(&mut guest);
    // It has said something that nobody has looked at.
    let ended = answer(&held, Status::HoldEnded, 2, 0).encode();
    let at = guest.place(&ended);
    assert!(guest.daemon.status().hold.is_some_and(|hold| hold.held));
    guest.queues[ANSWER].push(&guest.memory, &[Piece::of(at, 32)]);
    let bases = guest.pause();
    assert!(guest.daemon.status().hold.is_some_and(|hold| !hold.held));
    guest.go_on(BITMAP | REQUESTS, &bases);
    assert_eq!(guest.used(ANSWER), (0, 0));
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    waiting.join().expect("no panic").expect("an answer");

    // A hold outlives it, and can be looked at meanwhile.
    let held = hold_two(&mut guest);
    let bases = guest.pause();
    let path = guest.daemon.dir.path().join("image");
    let save = Request::SaveMemory {
        path: path.to_str().expect("a path").to_owned(),
        id: Some(held.id),
        check: false,
    };
    guest.daemon.client().ask(&save).expect("an image");
    guest.go_on(BITMAP | REQUESTS, &bases);
    assert!(guest.daemon.status().hold.is_some_and(|hold| hold.held));
    // Of a new driver nothing is held.
    guest.pause();
    guest.start_driver(BITMAP | REQUESTS);
    until("it is noticed", || guest.daemon.status().hold.is_none());
    assert_eq!(guest.daemon.status().counters.errors, 0);
}

#[test]
fn a_driver_that_goes_takes_its_answers_along() {
    let mut guest = start(&[]);
    let waiting = ask(&guest, FREE_PAGES);
    let asked = take(&mut guest);
    guest.start_driver(BITMAP | REQUESTS);
    let failure = refused(waiting.join().expect("no panic"));
    assert!(failure.message.contains("went away"), "{failure:?}");
    // What the new driver says for the old one is not asked for.
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    assert_eq!(guest.daemon.status().errors["answer-unasked"], 1);
    let waiting = ask(&guest, DROP);
    let asked = take(&mut guest);
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    waiting.join().expect("no panic").expect("an answer");

    let waiting = ask(&guest, DROP);
    take(&mut guest);
    let Guest {
        daemon, frontend, ..
    } = guest;
    drop(frontend);
    match waiting.join().expect("no panic") {
        Err(ClientError::Gone) => {}
        other => assert!(refused(other).message.contains("went away")),
    }
    drop(daemon);
}

#[test]
fn not_every_guest_can_be_asked() {
    let message = |daemon: &Daemon| {
        let failure = refused(daemon.client().ask(&DROP));
        assert_eq!(failure.code, FailureCode::NotSupported);
        failure.message
    };
    let guest = Guest::start(&["--features", "host-request"], BITMAP);
    assert!(message(&guest.daemon).contains("driver did not take host-request"));
    // Bit 22 without page bitmaps is nothing.
    let guest = Guest::start(&["--features", "host-request"], REQUESTS);
    assert!(message(&guest.daemon).contains("driver did not take host-request"));
    let mut guest = Guest::start(&[], BITMAP);
    assert!(message(&guest.daemon).contains("--features host-request"));
    assert_eq!(guest.config(56, 4), [0; 4], "nothing is announced");
}

#[test]
fn a_buffer_that_is_too_small_is_no_buffer() {
    let mut guest = start(&[]);
    let waiting = ask(&guest, DROP);
    let at = guest.place(&[0; Asked::LEN]);
    for (kind, piece) in [
        ("request-room", Piece::writable(at, 15)),
        ("chain-direction", Piece::of(at, 16)),
        ("chain-memory", Piece::writable(1 << 40, 16)),
    ] {
        guest.send_pieces(REQUEST, &[piece]);
        assert_eq!(guest.daemon.status().errors[kind], 1);
    }
    // In two pieces, and with room behind it.
    guest.post(
        REQUEST,
        &[Piece::writable(at, 5), Piece::writable(at + 5, 100)],
    );
    let asked = taken(&mut guest, at);
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    waiting.join().expect("no panic").expect("an answer");
}

#[test]
fn faults() {
    let mut guest = start(&["--fault", "none"]);
    let fault = |guest: &Guest, set: &[&str]| {
        let mut client: Client = guest.daemon.client();
        client.fault(set).expect("allowed");
    };
    // Bytes that are no request.
    let at = guest.place(&[0; 64]);
    guest.post(REQUEST, &[Piece::writable(at, 64)]);
    fault(&guest, &["request=0102030405"]);
    assert_eq!(guest.used(REQUEST), (0, 5));
    let mut bytes = [0; 6];
    let found = guest.memory.read_slice(&mut bytes, GuestAddress(at));
    found.expect("ram");
    assert_eq!(bytes, [1, 2, 3, 4, 5, 0]);
    // A request that claims to be shorter.
    fault(&guest, &["used-len=15", "queue=request"]);
    let waiting = ask(&guest, within(10_000));
    guest.post(REQUEST, &[Piece::writable(at, 16)]);
    assert_eq!(guest.used(REQUEST), (0, 15));
    // Answers that do not come back.
    fault(&guest, &["withhold", "queue=answer"]);
    let id = guest.daemon.status().asked.expect("it was asked").id;
    let asked = Asked {
        id,
        command: Command::Compact.number(),
        flags: 0,
        argument: 0,
    };
    let bytes = answer(&asked, Status::Ok, 0, 0).encode();
    let at = guest.place(&bytes);
    guest.post(ANSWER, &[Piece::of(at, 32)]);
    waiting.join().expect("no panic").expect("an answer");
    assert!(guest.nothing_used(ANSWER));
    fault(&guest, &[]);
    assert_eq!(guest.used(ANSWER), (0, 0));
    until("all is quiet", || guest.none_used_now(REQUEST));
}

/// Has the guest hold two pages. Returns the request.
fn hold_two(guest: &mut Guest) -> Asked {
    let request = Request::FreePages {
        balloon: false,
        hold: true,
        hold_ms: None,
        bound: false,
        timeout_ms: None,
    };
    let waiting = ask(guest, request);
    let asked = take(guest);
    let part = answer(&asked, Status::Partial, 2, 0);
    say_part(guest, &part, &[(12, FIRST, &[0b101])]);
    say(guest, &answer(&asked, Status::Ok, 2, 1));
    waiting.join().expect("no panic").expect("an answer");
    asked
}

#[test]
fn an_image_has_all_memory_but_what_is_held() {
    let mut guest = start(&[]);
    guest.fill();
    // A hole in guest memory, and zeros that are there.
    guest.send(0, &common::record(12, FIRST + 100, &[1]));
    let zeros = vec![0; 3 * PAGE as usize];
    let at = GuestAddress(FREE + 200 * PAGE);
    guest.memory.write_slice(&zeros, at).expect("ram");
    let held = hold_two(&mut guest);
    let path = guest.daemon.dir.path().join("image");
    let save = |id| Request::SaveMemory {
        path: path.to_str().expect("a path").to_owned(),
        id,
        check: false,
    };
    // Somebody else wants to know what is free, and takes nothing away by that.
    let waiting = ask(&guest, FREE_PAGES);
    let asked = take(&mut guest);
    say(&mut guest, &answer(&asked, Status::Ok, 0, 0));
    waiting.join().expect("no panic").expect("an answer");
    let mut client = guest.daemon.client();
    let try_it = |client: &mut Client| {
        client.ask(&Request::SaveMemory {
            path: path.to_str().expect("a path").to_owned(),
            id: None,
            check: true,
        })
    };
    try_it(&mut client).expect("it can be made");
    assert!(!path.exists());
    let reply = client.ask(&save(Some(held.id))).expect("an image");
    refused(try_it(&mut client));
    let Reply::SaveMemory {
        written_bytes,
        skipped_bytes,
        zero_bytes,
        ..
    } = reply
    else {
        panic!("{reply:?}");
    };
    assert_eq!(skipped_bytes, 2 * PAGE);
    assert_eq!(
        written_bytes + skipped_bytes + zero_bytes,
        (32 << 20) + (8 << 20)
    );
    assert!(zero_bytes >= 4 * PAGE);
    let check = |skipped: &[u64]| {
        let image = std::fs::File::open(&path).expect("written");
        let stat = image.metadata().expect("a file");
        assert_eq!(stat.len(), HIGH + (8 << 20));
        let (mut saved, mut now) = ([0; PAGE as usize], [0; PAGE as usize]);
        for page in (0..32 << 20)
            .chain(HIGH..HIGH + (8 << 20))
            .step_by(PAGE as usize)
        {
            use std::os::unix::fs::FileExt as _;
            image.read_exact_at(&mut saved, page).expect("there");
            let there = guest.memory.read_slice(&mut now, GuestAddress(page));
            there.expect("ram");
            match skipped.contains(&page) {
                true => assert!(saved.iter().all(|b| *b == 0), "{page:#x} is there"),
                // The queues go on being used.
                false => assert!(saved == now || page < FREE, "{page:#x} differs"),
            }
        }
        use std::os::unix::fs::MetadataExt as _;
        stat.blocks() * 512
    };
    let size = check(&[FREE, FREE + 2 * PAGE]);
    assert_eq!(size / PAGE, written_bytes / PAGE, "the rest is holes");
    // It is not written over.
    let failure = refused(client.ask(&save(None)));
    assert!(
        failure.message.contains("cannot be made: File exists"),
        "{failure:?}"
    );
    std::fs::remove_file(&path).expect("removed");
    // Nor is it there if nobody is left who could say that the guest stood still.
    let mut stream = UnixStream::connect(guest.daemon.control_path()).expect("a connection");
    let mut line = serde_json::to_vec(&save(None)).expect("JSON");
    line.push(b'\n');
    stream.write_all(&line).expect("sent");
    drop(stream);
    thread::sleep(Duration::from_secs(1));
    assert!(!path.exists());
    let reply = client.ask(&save(None)).expect("a full one");
    assert!(matches!(
        reply,
        Reply::SaveMemory {
            skipped_bytes: 0,
            ..
        }
    ));
    check(&[]);
}

#[test]
fn an_image_is_given_up_when_the_guest_has_not_held_still() {
    let mut guest = start(&[]);
    let path = guest.daemon.dir.path().join("image");
    let save = |id| Request::SaveMemory {
        path: path.to_str().expect("a path").to_owned(),
        id: Some(id),
        check: false,
    };
    let asked = hold_two(&mut guest);
    let mut client = guest.daemon.client();
    let failure = refused(client.ask(&save(asked.id + 1)));
    assert!(failure.message.contains("does not hold"), "{failure:?}");
    assert!(!path.exists());
    // It has said so, but nobody has looked: there is no kick.
    let ended = answer(&asked, Status::HoldEnded, 2, 0);
    let at = guest.place(&ended.encode());
    guest.queues[ANSWER].push(&guest.memory, &[Piece::of(at, 32)]);
    let failure = refused(client.ask(&save(asked.id)));
    assert!(failure.message.contains("does not hold"), "{failure:?}");
    assert!(!path.exists());
    assert_eq!(guest.used(ANSWER), (0, 0));
    let relative = Request::SaveMemory {
        path: "image".to_owned(),
        id: None,
        check: false,
    };
    assert_eq!(refused(client.ask(&relative)).code, FailureCode::BadValue);
    let nowhere = Request::SaveMemory {
        path: "/nowhere/image".to_owned(),
        id: None,
        check: false,
    };
    assert_eq!(refused(client.ask(&nowhere)).code, FailureCode::Failed);
}
