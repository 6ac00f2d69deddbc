// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The control socket, as a program sees it that writes its own JSON.

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use balloon_control::client::ClientError;
use balloon_control::message::{EventKind, FailureCode, SizeField};
use common::{BITMAP, Daemon, FREE, Guest, PAGE, exists, record, until};
use serde_json::{Value, json};

struct Raw {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Raw {
    fn to(daemon: &Daemon) -> Self {
        let writer = UnixStream::connect(daemon.control_path()).expect("connected");
        writer
            .set_read_timeout(Some(Duration::from_secs(10)))
            .expect("a socket");
        let reader = BufReader::new(writer.try_clone().expect("a socket"));
        Self { writer, reader }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.writer.write_all(bytes).expect("sent");
    }

    /// The next line, or `None` at the end.
    fn line(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(serde_json::from_str(&line).expect("JSON")),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(e) => panic!("{e}"),
        }
    }

    fn ask(&mut self, request: &str) -> Value {
        self.send(format!("{request}\n").as_bytes());
        self.line().expect("an answer")
    }
}

#[test]
fn requests_as_documented() {
    let daemon = Daemon::start(&[]);
    let mut raw = Raw::to(&daemon);
    let answer = raw.ask(r#"{"v":1,"cmd":"target","size":"1M"}"#);
    assert_eq!(answer["v"], 1);
    assert_eq!(answer["ok"], true);
    assert_eq!(answer["result"]["reply"], "target");
    assert_eq!(answer["result"]["target_bytes"], 1 << 20);
    assert_eq!(answer["result"]["movement"]["id"], 1);
    let answer = raw.ask(r#"{"cmd":"wait","timeout_ms":0}"#);
    assert_eq!(answer["result"]["reply"], "wait");
    assert_eq!(answer["result"]["reached"], false);
    let answer = raw.ask(r#"  {"cmd":"target","size":0}  "#);
    assert_eq!(answer["result"]["movement"]["reached"], true);
    let answer = raw.ask(r#"{"cmd":"status"}"#);
    let status = &answer["result"];
    assert_eq!(status["reply"], "status");
    assert_eq!(status["daemon"]["pid"], daemon.child.id());
    assert_eq!(status["daemon"]["dialect"], "bitmap");
    assert_eq!(
        status["daemon"]["features"],
        json!(["must-tell-host", "stats"])
    );
    assert_eq!(status["frontend"]["connected"], false);
    assert_eq!(status["memory"], json!({"bytes": 0, "regions": []}));
    assert_eq!(status["counters"]["requests"], 0);
    assert_eq!(status["errors"], json!({}));
    // Several requests in one write, blank lines between them.
    raw.send(b"\n{\"cmd\":\"status\"}\n \n{\"cmd\":\"wait\"}\n");
    assert_eq!(raw.line().expect("an answer")["result"]["reply"], "status");
    assert_eq!(raw.line().expect("an answer")["result"]["reply"], "wait");
}

#[test]
fn bad_input_is_answered_and_the_connection_goes_on() {
    let daemon = Daemon::start(&[]);
    let mut raw = Raw::to(&daemon);
    for (request, code, part) in [
        ("hello", "bad-request", "not JSON"),
        ("\u{1}\u{2}", "bad-request", "not JSON"),
        ("{\"cmd\":", "bad-request", "not JSON"),
        ("42", "bad-request", "a JSON object"),
        ("{}", "bad-request", "missing field `cmd`"),
        (
            r#"{"cmd":"inflate"}"#,
            "bad-request",
            "unknown variant `inflate`",
        ),
        (
            r#"{"cmd":"status","x":1}"#,
            "bad-request",
            "unknown field `x`",
        ),
        (r#"{"v":9,"cmd":"status"}"#, "bad-version", "allowed is 1"),
        (
            r#"{"cmd":"target","size":"1GB"}"#,
            "bad-value",
            "write G or GiB",
        ),
        (
            r#"{"cmd":"target","size":"-1"}"#,
            "bad-value",
            "start with a number",
        ),
        (
            r#"{"cmd":"target","size":4097}"#,
            "bad-value",
            "next below is 4096",
        ),
        (
            r#"{"cmd":"target","size":"16T"}"#,
            "bad-value",
            "less than 16 TiB",
        ),
        (
            r#"{"cmd":"target","size":"50%"}"#,
            "bad-value",
            "no guest is connected",
        ),
        (
            r#"{"cmd":"target","size":"101%"}"#,
            "bad-value",
            "at most 100%",
        ),
        (r#"{"cmd":"fault","set":["die"]}"#, "not-allowed", "--fault"),
    ] {
        let answer = raw.ask(request);
        assert_eq!(answer["ok"], false, "{request}");
        assert_eq!(answer["error"]["code"], code, "{request}: {answer}");
        let message = answer["error"]["message"].as_str().expect("a text");
        assert!(message.contains(part), "{request}: {message}");
        assert!(answer.get("result").is_none());
    }
    raw.send(&[0xff, 0xfe, b'\n']);
    assert_eq!(raw.line().expect("an answer")["ok"], false);
    let deep = "[".repeat(10_000);
    assert_eq!(raw.ask(&deep)["ok"], false);
    assert_eq!(raw.ask(r#"{"cmd":"status"}"#)["ok"], true);
}

/// What a request says is quoted only in part.
#[test]
fn no_answer_is_longer_than_a_line() {
    let daemon = Daemon::start(&["--fault", "none"]);
    let mut raw = Raw::to(&daemon);
    for text in ["x", "\\u0001", "ä", "\\ud83d\\ude00", "\\\\"] {
        let long = text.repeat(60_000 / text.len());
        for request in [
            format!("{{\"cmd\":\"{long}\"}}"),
            format!("{{\"cmd\":\"status\",\"{long}\":1}}"),
            format!("{{\"v\":\"{long}\"}}"),
            format!("{{\"cmd\":\"target\",\"size\":\"{long}\"}}"),
            format!("{{\"cmd\":\"fault\",\"set\":[\"{long}\"]}}"),
        ] {
            let answer = raw.ask(&request);
            assert_eq!(answer["ok"], false);
            assert!(answer.to_string().len() < 8000);
        }
    }
    let many = vec!["delay=1"; 33];
    let answer = raw.ask(&json!({"cmd": "fault", "set": many}).to_string());
    assert_eq!(answer["error"]["code"], "bad-value");
    let most = vec![format!("config=0:{}", "00".repeat(256)); 32];
    let answer = raw.ask(&json!({"cmd": "fault", "set": most}).to_string());
    assert_eq!(answer["ok"], true, "{answer}");
    assert_eq!(raw.ask(r#"{"cmd":"status"}"#)["ok"], true);
}

#[test]
fn an_endless_line_ends_the_connection() {
    let daemon = Daemon::start(&[]);
    let mut raw = Raw::to(&daemon);
    raw.send(&vec![b'x'; balloon_control::LINE_MAX + 1]);
    let answer = raw.line().expect("an answer");
    let message = answer["error"]["message"].as_str().expect("a text");
    assert!(message.contains("longer than 65536 bytes"), "{message}");
    assert_eq!(raw.line(), None);
    assert_eq!(Raw::to(&daemon).ask(r#"{"cmd":"status"}"#)["ok"], true);
}

#[test]
fn too_many_connections_are_turned_away() {
    let daemon = Daemon::start(&[]);
    let mut open: Vec<_> = (0..64).map(|_| Raw::to(&daemon)).collect();
    for raw in &mut open {
        assert_eq!(raw.ask(r#"{"cmd":"status"}"#)["ok"], true);
    }
    match daemon.client().status(false) {
        Err(ClientError::Refused(failure)) => assert_eq!(failure.code, FailureCode::Busy),
        other => panic!("{other:?}"),
    }
    drop(open);
    until("there is room again", || {
        daemon.client().status(false).is_ok()
    });
}

#[test]
fn silent_and_half_clients_do_no_harm() {
    let daemon = Daemon::start(&[]);
    let _silent = Raw::to(&daemon);
    Raw::to(&daemon).send(b"{\"cmd\":\"sta");
    Raw::to(&daemon).send(b"{\"cmd\":\"wait\"}\n{\"cmd\":\"wait\"");
    assert_eq!(Raw::to(&daemon).ask(r#"{"cmd":"status"}"#)["ok"], true);
}

#[test]
fn only_the_owner_may_connect() {
    let daemon = Daemon::start(&[]);
    let mode = std::fs::metadata(daemon.control_path())
        .expect("there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn targets_are_within_the_guest_unless_forced() {
    let guest = Guest::start(&[], BITMAP);
    let mut client = guest.daemon.client();
    let all = (32 << 20) + (8 << 20);
    let text = |t: &str| SizeField::Text(t.to_owned());
    assert_eq!(
        client
            .target(text("100%"), false)
            .expect("allowed")
            .target_bytes,
        all
    );
    assert_eq!(
        client
            .target(text("12.5%"), false)
            .expect("allowed")
            .target_bytes,
        all / 8
    );
    match client.target(SizeField::Bytes(all + PAGE), false) {
        Err(ClientError::Refused(failure)) => {
            assert_eq!(failure.code, FailureCode::BadValue);
            assert!(
                failure.message.contains("more than the guest's 40 MiB"),
                "{failure:?}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(guest.daemon.status().balloon.target_bytes, all / 8);
    let far = (1 << 44) - PAGE;
    assert_eq!(
        client
            .target(SizeField::Bytes(far), true)
            .expect("forced")
            .target_bytes,
        far
    );
    let mut guest = guest;
    assert_eq!(guest.config(0, 4), [0xff; 4]);
}

#[test]
fn waiting_tells_how_the_target_was_reached() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.send(0, &record(12, FREE >> 12, &[1]));
    guest.set_actual(1);
    let mut client = guest.daemon.client();
    let movement = client.target_bytes(65 * PAGE).expect("a target");
    assert_eq!((movement.id, movement.from_bytes), (1, PAGE));
    let begun = Instant::now();
    let early = client
        .wait(Some(Duration::from_millis(50)))
        .expect("an answer");
    assert!(!early.reached && begun.elapsed() >= Duration::from_millis(50));
    assert_eq!(early.actual_bytes, PAGE);

    let waiting = thread::spawn(move || client.wait(None).expect("an answer"));
    thread::sleep(Duration::from_millis(50));
    let request = record(12, (FREE >> 12) + 64, &[u64::MAX]);
    guest.send(0, &request);
    guest.set_actual(65);
    let waited = waiting.join().expect("no panic");
    assert!(waited.reached);
    assert_eq!(waited.actual_bytes, 65 * PAGE);
    let counters = &waited.movement.counters;
    assert_eq!((counters.requests, counters.inflated_pages), (1, 64));
    assert_eq!(counters.wire_bytes, request.len() as u64);
    assert_eq!(counters.discarded_bytes, 64 * PAGE);
    assert_eq!(counters.config_changes, 1);
    let elapsed = waited.movement.elapsed_ms;
    assert!((100.0..10_000.0).contains(&elapsed), "{elapsed}");

    // What comes later is no part of it.
    guest.send(0, &request);
    let later = guest.daemon.client().wait(None).expect("an answer");
    assert_eq!(later.movement, waited.movement);
    // Asked again for what is there, it is there at once.
    let again = guest
        .daemon
        .client()
        .target_bytes(65 * PAGE)
        .expect("a target");
    assert!(again.reached && again.id == 2);
}

#[test]
fn a_waiter_is_told_when_the_daemon_goes() {
    let daemon = Daemon::start(&["--target", "1M"]);
    let mut client = daemon.client();
    let waiting = thread::spawn(move || client.wait(None));
    thread::sleep(Duration::from_millis(50));
    daemon.signal();
    assert!(matches!(
        waiting.join().expect("no panic"),
        Err(ClientError::Gone)
    ));
}

#[test]
fn watching() {
    let daemon = Daemon::start(&[]);
    let mut events = daemon.client().watch().expect("a stream");
    let mut next = || events.next().expect("an event").expect("a good one").what;
    assert!(matches!(next(), EventKind::Frontend(f) if !f.connected));
    assert!(matches!(next(), EventKind::Balloon(b) if b.target_bytes == 0));
    daemon.client().target_bytes(1 << 20).expect("a target");
    assert!(matches!(next(), EventKind::Balloon(b) if b.target_bytes == 1 << 20 && !b.reached));

    let mut guest = Guest::with_daemon(daemon, BITMAP, 32 << 20);
    let mut until_event = |wanted: &dyn Fn(&EventKind) -> bool| while !wanted(&next()) {};
    until_event(&|e| matches!(e, EventKind::Frontend(f) if f.protocol == "page-bitmap-v1"));
    guest.set_actual(256);
    until_event(&|e| matches!(e, EventKind::Balloon(b) if b.reached));
    guest.send(0, &[1]);
    until_event(&|e| matches!(e, EventKind::Errors { errors } if errors["header-short"] == 1));
    let Guest {
        mut daemon,
        frontend,
        ..
    } = guest;
    drop(frontend);
    daemon.end();
}

#[test]
fn a_watcher_that_does_not_read_holds_nobody_up() {
    let mut guest = Guest::start(&[], BITMAP);
    let mut watcher = Raw::to(&guest.daemon);
    watcher.send(b"{\"cmd\":\"watch\"}\n");
    let begun = Instant::now();
    for i in 0..5000 {
        guest.set_actual(i);
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(guest.daemon.status().balloon.actual_pages, 4999);
}

fn run(options: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_vhost-device-balloon"))
        .args(options)
        .output()
        .expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn the_command_line() {
    let (code, out, _) = run(&["--version"]);
    assert_eq!(code, Some(0));
    assert_eq!(
        out.trim(),
        format!("vhost-device-balloon {}", env!("CARGO_PKG_VERSION"))
    );
    let (code, out, _) = run(&["--help"]);
    assert_eq!(code, Some(0));
    for option in [
        "--socket-path",
        "--control-path",
        "--dialect",
        "--features",
        "--max-bitmap-bytes",
        "--page-shifts",
        "--block-shift",
        "--prefetch-deflate",
        "--target",
        "--persist",
        "--log-level",
    ] {
        assert!(out.contains(option), "{option}");
    }
    assert!(!out.contains("--fault"));
    for (options, part) in [
        (&[][..], "--socket-path"),
        (
            &["--socket-path", "s", "--dialect", "no"],
            "possible values: bitmap",
        ),
        (
            &["--socket-path", "s", "--features", "fast"],
            "feature 'fast'",
        ),
        (
            &["--socket-path", "s", "--block-shift", "22"],
            "neither 0 nor",
        ),
        (
            &["--socket-path", "s", "--target", "5%"],
            "--target: a share",
        ),
        (
            &["--socket-path", "s", "--target", "1GB"],
            "--target: unit 'GB'",
        ),
    ] {
        let (code, _, err) = run(options);
        assert_eq!(code, Some(2), "{options:?}");
        assert!(err.contains(part), "{err}");
    }
}

#[test]
fn paths_that_are_taken() {
    let daemon = Daemon::start(&[]);
    let file = daemon.dir.path().join("file");
    std::fs::write(&file, "precious").expect("written");
    let other = daemon.dir.path().join("other");
    let text = |p: &std::path::Path| p.to_str().expect("a good path").to_owned();
    let (socket, control) = (text(&daemon.socket_path()), text(&daemon.control_path()));
    for (options, part) in [
        (["-s", &text(&file), "-c", &text(&other)], "is not a socket"),
        (["-s", &text(&other), "-c", &text(&file)], "is not a socket"),
        (
            ["-s", &text(&other), "-c", &control],
            "another program listens",
        ),
        (
            ["-s", &socket, "-c", &text(&other)],
            "another program listens",
        ),
    ] {
        let (code, _, err) = run(&options);
        assert_eq!(code, Some(1), "{options:?}");
        assert!(err.contains(part), "{err}");
        assert!(!exists(&other), "nothing is left behind");
    }
    assert_eq!(std::fs::read(&file).expect("there"), b"precious");
    assert!(daemon.client().status(false).is_ok());
}

/// What programs rely on is written down: each counter, kind of error, command and code.
#[test]
fn the_document_has_it_all() {
    let text = include_str!("../../../Documentation/control.rst");
    let manual = include_str!("../vhost-device-balloon.8");
    let listed = |name: &str| text.contains(&format!("``{name}``"));
    for (name, _) in balloon_control::message::Counters::default().each() {
        assert!(listed(name), "counter {name}");
    }
    for kind in vhost_device_balloon::refusal::Kind::ALL {
        assert!(listed(kind.name()), "kind {}", kind.name());
    }
    for code in [
        "bad-request",
        "bad-version",
        "bad-value",
        "not-allowed",
        "not-supported",
        "refused",
        "failed",
        "time-out",
        "busy",
    ] {
        assert!(listed(code), "code {code}");
    }
    for command in [
        "target",
        "wait",
        "status",
        "free-page-hint",
        "drop-caches",
        "compact",
        "free-pages",
        "free-page-map",
        "release",
        "save-memory",
        "watch",
        "fault",
    ] {
        assert!(
            text.contains(&format!("\"cmd\":\"{command}\"")),
            "command {command}"
        );
    }
    let (_, help, _) = run(&["--help"]);
    let options = help
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("--"));
    for option in options.map(|o| o.trim_matches(|c: char| !c.is_ascii_lowercase() && c != '-')) {
        let option = option.split(['[', '=']).next().unwrap_or(option);
        if !["help", "version"].contains(&option) {
            assert!(
                manual.contains(&format!("Fl Fl {option}")),
                "option {option}"
            );
        }
    }
}
