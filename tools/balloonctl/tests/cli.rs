// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The program as scripts use it, on a daemon without a machine.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use balloon_control::message::{
    Event, EventKind, MemoryStatus, RegionStatus, Status as DaemonStatus,
};
use balloon_wire::logic::request::{Answer, Reason, Request as Asked, Status};
use balloon_wire::wire::Header;
use vhost_device_balloon::args::Args;
use vhost_device_balloon::control;
use vhost_device_balloon::fault::Faults;
use vhost_device_balloon::features::Protocol;
use vhost_device_balloon::ram::Ram;
use vhost_device_balloon::request::Format;
use vhost_device_balloon::socket::{Access, Socket};
use vhost_device_balloon::state::State;

/// The control side of a daemon whose guest has 4 GiB.
struct Daemon {
    state: Arc<State>,
    path: PathBuf,
    _socket: Socket,
    _dir: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        use clap::Parser as _;
        let options = [
            "daemon",
            "--socket-path",
            "unused",
            "--features",
            "host-request",
        ];
        let args = Args::try_parse_from(options).expect("options");
        let settings = args.settings().expect("good options");
        let state = Arc::new(State::new(settings, Faults::new(vec![])));
        state.memory(MemoryStatus {
            bytes: 4 << 30,
            ..MemoryStatus::default()
        });
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("control");
        let socket = Socket::listen(&path, Access::Owner).expect("listening");
        let listener = socket.listener.try_clone().expect("a socket");
        control::spawn(Arc::clone(&state), listener).expect("serving");
        Self {
            state,
            path,
            _socket: socket,
            _dir: dir,
        }
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_balloonctl"));
        command.arg("--control-path").arg(&self.path).args(options);
        command
    }

    fn run(&self, options: &[&str]) -> (Option<i32>, String, String) {
        run(&mut self.command(options))
    }

    /// The guest says how large the balloon is.
    fn actual(&self, pages: u32) {
        self.state
            .config_write(4, &pages.to_le_bytes())
            .expect("a field of the driver's");
    }
}

/// What the guest says to what it is asked: a last word, and free pages before.
type Script<'a> = &'a [(Status, Reason, &'a [u64])];

impl Daemon {
    /// A guest that takes requests and answers each as it is told. Returns them.
    fn guest(&self, script: Script<'_>) -> Vec<Asked> {
        let asks = &self.state.asks;
        let size = 4 << 30;
        let memory = vm_memory::GuestMemoryMmap::from_ranges(&[(vm_memory::GuestAddress(0), size)]);
        let ram = Ram::new(&memory.expect("memory")).expect("ram");
        let format = Format {
            protocol: Protocol::PageBitmap,
            limits: self.state.settings.limits,
        };
        let mut seen = Vec::new();
        for (status, reason, words) in script {
            let begun = Instant::now();
            let bytes = loop {
                match asks.next() {
                    Some(bytes) => break bytes,
                    None if begun.elapsed() > Duration::from_secs(10) => panic!("nothing is asked"),
                    None => thread::sleep(Duration::from_millis(2)),
                }
            };
            asks.sent();
            let asked = Asked::decode(&bytes).expect("a request");
            let pages: u64 = words.iter().map(|w| u64::from(w.count_ones())).sum();
            let mut answer = Answer {
                id: asked.id,
                command: asked.command,
                status: Status::Partial,
                value: pages,
                detail: 0,
                microseconds: 1000,
                reason: Reason::None,
                state: 0,
            };
            if !words.is_empty() {
                let header = Header {
                    id: asked.id,
                    page_shift: 12,
                    base_pfn: 256,
                    bmap_len: words.len() as u64 * 8,
                };
                let mut bytes = [&answer.encode()[..], &header.encode()].concat();
                bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
                asks.answer(&bytes, &format, &ram).expect("a good answer");
                answer.detail = 1;
            }
            answer.status = *status;
            answer.reason = *reason;
            asks.answer(&answer.encode(), &format, &ram)
                .expect("a good answer");
            seen.push(asked);
        }
        seen
    }

    /// Runs the program against such a guest.
    fn ask(
        &self,
        options: &[&str],
        script: Script<'_>,
    ) -> (Option<i32>, String, String, Vec<Asked>) {
        self.state.negotiated(1 << 22 | 1 << 23 | 1 << 32);
        thread::scope(|scope| {
            let guest = scope.spawn(|| self.guest(script));
            let (code, out, err) = self.run(options);
            (code, out, err, guest.join().expect("no panic"))
        })
    }
}

const DONE: (Status, Reason, &[u64]) = (Status::Ok, Reason::None, &[]);

#[test]
fn the_guest_is_asked() {
    let daemon = Daemon::start();
    let (code, out, err, asked) =
        daemon.ask(&["drop-caches", "--page-cache", "--until", "2G"], &[DONE]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.starts_with("0 B freed in "), "{out}");
    assert_eq!(
        (asked[0].command, asked[0].flags, asked[0].argument),
        (1, 1, 1 << 19)
    );
    let (code, out, _, asked) = daemon.ask(&["drop-caches", "--json"], &[DONE]);
    assert_eq!((code, asked[0].flags, asked[0].argument), (Some(0), 3, 0));
    let reply: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(
        (&reply["reply"], &reply["guest_ms"]),
        (&"drop-caches".into(), &1.0.into())
    );
    let (code, out, _, asked) = daemon.ask(&["compact"], &[DONE]);
    assert_eq!((code, asked[0].command), (Some(0), 2));
    assert!(out.contains("in whole blocks"), "{out}");
    let (code, out, _, asked) = daemon.ask(&["release"], &[DONE]);
    assert_eq!((code, asked[0].command), (Some(0), 4));
    assert!(out.starts_with("nothing was held"), "{out}");
}

#[test]
fn what_the_guest_does_not_do_is_status_1_or_4() {
    let daemon = Daemon::start();
    let no = (Status::Refused, Reason::NotAllowed, &[][..]);
    let (code, out, err, _) = daemon.ask(&["drop-caches"], &[no]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(
        err.contains("the guest refuses: its administrator does not want that"),
        "{err}"
    );
    let (code, _, err, _) = daemon.ask(&["--json", "drop-caches"], &[no]);
    assert_eq!(code, Some(1));
    assert!(err.starts_with(r#"{"error":{"code":"refused","#), "{err}");
    let (code, _, err, _) = daemon.ask(&["compact", "--timeout", "50ms"], &[]);
    assert_eq!(code, Some(4));
    assert!(err.contains("the time is up"), "{err}");
    daemon.state.released();
    let (code, _, err) = daemon.run(&["compact"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("no guest is connected"), "{err}");
}

#[test]
fn free_pages_go_to_files() {
    let daemon = Daemon::start();
    daemon.state.memory(MemoryStatus {
        bytes: 4 << 30,
        regions: vec![RegionStatus {
            bytes: 4 << 30,
            ..RegionStatus::default()
        }],
        ..MemoryStatus::default()
    });
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("a path").to_owned();
    let (list, map) = (path("list"), path("map.png"));
    let pages = [(Status::Ok, Reason::None, &[0b1011, 1][..])];
    let options = ["free-pages", "--out", &list, "--map", &map];
    let (code, out, err, asked) = daemon.ask(&options, &pages);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(
        out.starts_with("16 KiB free in 3 runs, told in 1 answer and "),
        "{out}"
    );
    assert_eq!((asked[0].command, asked[0].flags), (3, 0));
    let text = std::fs::read_to_string(&list).expect("written");
    assert_eq!(text, "0x100000 8192\n0x103000 4096\n0x140000 4096\n");
    let picture = std::fs::read(&map).expect("written");
    assert!(picture.starts_with(b"\x89PNG"));
    // The guest is not asked in vain.
    let (code, _, err, asked) = daemon.ask(&["free-pages", "--out", &path("no/list")], &[]);
    assert_eq!((code, asked.len()), (Some(1), 0));
    assert!(err.contains("no/list cannot be written"), "{err}");

    for (hold, time) in [("--hold", 0), ("--hold=1.5s", 1500)] {
        let (code, out, _, asked) = daemon.ask(&["free-pages", hold], &pages);
        assert_eq!(
            (code, asked[0].flags, asked[0].argument),
            (Some(0), 1, time)
        );
        assert!(out.starts_with("16 KiB held in "), "{out}");
    }
    let (code, ..) = daemon.run(&["free-pages", "--hold", "--balloon"]);
    assert_eq!(code, Some(2));
}

/// The guest is stopped and let go on, and has its pages back, even if nothing comes of it.
#[test]
fn a_snapshot_that_fails_leaves_the_guest_running() {
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("a path").to_owned();
    let (image, log) = (path("image"), path("log"));
    let (stop, go_on) = (format!("echo stop >>{log}"), format!("echo go >>{log}"));
    let options = ["snapshot", &image, "--stop", &stop, "--go-on", &go_on];
    let held = [(Status::Ok, Reason::None, &[0b11][..]), DONE];
    let (code, out, err, asked) = daemon.ask(&options, &held);
    // The daemon of this test has no guest memory.
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.contains("no guest is connected"), "{err}");
    let commands: Vec<_> = asked.iter().map(|a| (a.command, a.flags)).collect();
    assert_eq!(commands, [(3, 1), (4, 0)]);
    assert_eq!(
        std::fs::read_to_string(&log).expect("written"),
        "stop\ngo\n"
    );
    assert!(!std::path::Path::new(&image).exists());

    // Nor does a signal end it before the guest goes on.
    std::fs::remove_file(&log).expect("removed");
    let killed = format!("{stop}; kill -TERM $PPID");
    let options_killed = ["snapshot", &image, "--stop", &killed, "--go-on", &go_on];
    let (code, _, err, asked) = daemon.ask(&options_killed, &held);
    assert_eq!(code, Some(1));
    assert!(err.contains("interrupted"), "{err}");
    assert_eq!(asked.len(), 2);
    let lines = std::fs::read_to_string(&log).expect("written");
    assert_eq!(lines, "stop\ngo\n");
    // A command that never ends is ended by it.
    std::fs::remove_file(&log).expect("removed");
    let hangs = format!("{stop}; kill -TERM $PPID; sleep 1000");
    let options_hangs = ["snapshot", &image, "--stop", &hangs, "--go-on", &go_on];
    let (code, _, err, asked) = daemon.ask(&options_hangs, &held);
    assert_eq!((code, asked.len()), (Some(1), 2));
    assert!(
        err.contains("did not end: interrupted by a signal"),
        "{err}"
    );
    let lines = std::fs::read_to_string(&log).expect("written");
    assert_eq!(lines, "stop\ngo\n");
    // That it stands still is said at once.
    let options_still = ["snapshot", &image, "--stop", "true", "--go-on", "false"];
    let (code, _, err, _) = daemon.ask(&options_still, &held);
    assert_eq!(code, Some(1));
    assert!(
        err.contains("STANDS STILL") && err.contains("'false' failed"),
        "{err}"
    );

    // Nor is one stopped whose image cannot be made.
    std::fs::remove_file(&log).expect("removed");
    let nowhere = path("none/image");
    let options_nowhere = ["snapshot", &nowhere, "--stop", &stop, "--go-on", &go_on];
    let (code, _, err, asked) = daemon.ask(&options_nowhere, &[]);
    assert_eq!((code, asked.len()), (Some(1), 0));
    assert!(err.contains("cannot be made"), "{err}");
    assert!(!std::path::Path::new(&log).exists());

    // A guest that refuses is not stopped.
    let no = (Status::Refused, Reason::NoMemory, &[][..]);
    let (code, ..) = daemon.ask(&options, &[no]);
    assert_eq!(code, Some(1));
    assert!(!std::path::Path::new(&log).exists());
    // One that cannot be stopped is not written.
    let options = ["snapshot", &image, "--stop", "false", "--go-on", "true"];
    let (code, _, err, _) = daemon.ask(&options, &held);
    assert_eq!(code, Some(1));
    assert!(err.contains("'false' failed"), "{err}");
    for (options, part) in [
        (&["snapshot", &image][..], "cannot say what is free"),
        (&["snapshot", &image, "--qmp", &path("none")], "QEMU at"),
    ] {
        let (code, _, err, _) = daemon.ask(options, &[]);
        assert_eq!(code, Some(1));
        assert!(err.contains(part), "{err}");
    }
}

#[test]
fn a_target_after_dropping_caches() {
    let daemon = Daemon::start();
    let options = ["target", "1G", "--drop-caches"];
    let (code, out, _, asked) = daemon.ask(&options, &[DONE]);
    assert_eq!(code, Some(0));
    assert_eq!(out.lines().count(), 2, "{out}");
    // What the balloon needs, and what the guest keeps of 4 GiB.
    let until = (1u64 << 30) + (128 << 20);
    assert_eq!((asked[0].flags, asked[0].argument), (3, until >> 12));
    assert_eq!(daemon.state.view().balloon.target_bytes, 1 << 30);
    // If the guest does not, nothing is set.
    let no = (Status::Refused, Reason::NotAllowed, &[][..]);
    let (code, ..) = daemon.ask(&["target", "2G", "--drop-caches"], &[no]);
    assert_eq!(code, Some(1));
    assert_eq!(daemon.state.view().balloon.target_bytes, 1 << 30);
    // Nor is anything dropped for a size that cannot be meant.
    let (code, _, err, _) = daemon.ask(&["target", "5G", "--drop-caches"], &[]);
    assert_eq!(code, Some(2));
    assert!(err.contains("more than the guest's 4 GiB"), "{err}");
    // A smaller balloon needs no room.
    daemon.actual(1 << 18);
    let (code, out, ..) = daemon.ask(&["target", "512M", "--drop-caches"], &[]);
    assert_eq!(code, Some(0), "{out}");
    assert_eq!(daemon.state.view().balloon.target_bytes, 1 << 29);
}

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn targets_in_any_notation() {
    let daemon = Daemon::start();
    for (size, bytes) in [
        ("1G", 1u64 << 30),
        ("512M", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("25%", 1 << 30),
        ("100%", 4 << 30),
        ("0", 0),
        ("8192", 8192),
    ] {
        let (code, out, err) = daemon.run(&["target", size]);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{size}");
        assert!(out.starts_with("target "), "{out}");
        assert_eq!(daemon.state.view().balloon.target_bytes, bytes, "{size}");
    }
}

#[test]
fn wrong_usage_is_status_2() {
    let daemon = Daemon::start();
    for (options, part) in [
        (&["target", "1GB"][..], "write G or GiB"),
        (&["target", "fast"], "does not start with a number"),
        (&["target", "4097"], "the next below is 4096"),
        (&["target", "101%"], "at most 100%"),
        (&["target", "5G"], "more than the guest's 4 GiB"),
        (&["target"], "required"),
        (&["wait", "--timeout", "10"], "write it like 500ms"),
        (&["inflate"], "unrecognized subcommand"),
        (&[], "Usage"),
    ] {
        let (code, _, err) = daemon.run(options);
        assert_eq!(code, Some(2), "{options:?}: {err}");
        assert!(err.contains(part), "{options:?}: {err}");
        assert_eq!(daemon.state.view().movement.id, 0, "nothing is set");
    }
    let (code, ..) = daemon.run(&["target", "5G", "--force"]);
    assert_eq!(code, Some(0));
    let (code, ..) = run(Command::new(env!("CARGO_BIN_EXE_balloonctl")).arg("status"));
    assert_eq!(code, Some(2), "the socket is not guessed");
}

/// Programs that want JSON get it also of what is wrong with their command line.
#[test]
fn a_wrong_command_line_is_told_as_it_is_wanted() {
    let daemon = Daemon::start();
    for options in [
        &["target", "1KB"][..],
        &["bogus"],
        &["drop-caches", "--until", "3"],
    ] {
        let (code, out, err) = daemon.run(&[&["--json"], options].concat());
        assert_eq!((code, out.as_str()), (Some(2), ""));
        let value: serde_json::Value = serde_json::from_str(&err).expect("JSON");
        assert_eq!(value["error"]["code"], "bad-value");
        let (code, _, err) = daemon.run(options);
        assert_eq!(code, Some(2));
        assert!(err.starts_with("error: "), "{err}");
    }
    let (code, _, err) = daemon.run(&["drop-caches", "--until", "0"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("less than a page"), "{err}");
}

/// One that would let the guest go on in the middle of another one does not begin.
#[test]
fn snapshots_are_taken_one_at_a_time() {
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("a path").to_owned();
    let (ctl, control) = (env!("CARGO_BIN_EXE_balloonctl"), daemon.path.display());
    let second = path("second");
    let stop = format!("{ctl} -c {control} snapshot {second} --full --stop true --go-on true");
    let first = path("first");
    let options = [
        "snapshot", &first, "--full", "--stop", &stop, "--go-on", "true",
    ];
    let (code, _, err) = daemon.run(&options);
    assert_eq!(code, Some(1));
    assert!(err.contains("another snapshot of this guest"), "{err}");
}

#[test]
fn no_daemon_is_status_3() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("nobody");
    let mut command = Command::new(env!("CARGO_BIN_EXE_balloonctl"));
    let (code, out, err) = run(command.arg("-c").arg(&path).arg("status"));
    assert_eq!((code, out.as_str()), (Some(3), ""));
    assert!(
        err.contains("no daemon listens on") && err.contains("nobody"),
        "{err}"
    );
    let (code, _, err) = run(command.arg("--json"));
    assert_eq!(code, Some(3));
    assert!(
        err.starts_with(r#"{"error":{"code":"other","message":"no daemon"#),
        "{err}"
    );
}

/// That a socket cannot be reached is not that nobody listens.
#[test]
fn no_way_to_the_daemon_is_status_1() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "").expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_balloonctl"));
    let (code, out, err) = run(command.arg("-c").arg(file.join("socket")).arg("status"));
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(
        err.contains("file/socket cannot be connected to: Not a directory"),
        "{err}"
    );
    assert!(!err.contains("no daemon"), "{err}");
}

#[test]
fn waiting_is_status_0_or_4() {
    let daemon = Daemon::start();
    let (code, out, _) = daemon.run(&["wait"]);
    assert_eq!(code, Some(0), "{out}");
    let begun = Instant::now();
    let (code, out, _) = daemon.run(&["target", "1M", "--timeout", "100ms"]);
    assert_eq!(code, Some(4));
    assert!(begun.elapsed() >= Duration::from_millis(100));
    assert!(
        out.starts_with("not reached: balloon is 0 B of 1 MiB after "),
        "{out}"
    );

    let waiting = daemon
        .command(&["wait", "--timeout", "10s"])
        .stdout(Stdio::piped())
        .spawn();
    let waiting = waiting.expect("it runs");
    thread::sleep(Duration::from_millis(100));
    daemon.actual(256);
    let output = waiting.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0));
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.starts_with("0 B -> 1 MiB, reached in "), "{out}");

    let (code, out, _) = daemon.run(&["--json", "target", "1M", "--wait"]);
    assert_eq!(code, Some(0));
    let answer: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(answer["reached"], true);
    assert_eq!(answer["actual_bytes"], 1 << 20);
    assert_eq!(answer["movement"]["id"], 2);
    assert!(answer["movement"]["counters"]["requests"].is_number());
}

#[test]
fn status_for_people_and_programs() {
    let daemon = Daemon::start();
    daemon.run(&["target", "1G"]);
    daemon.actual(256);
    let (code, out, _) = daemon.run(&["status"]);
    assert_eq!(code, Some(0));
    for part in [
        "balloon   1 MiB, target 1 GiB",
        "guest     4 GiB",
        "not connected",
        "dialect bitmap",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let (code, out, _) = daemon.run(&["status", "--json", "--stats"]);
    assert_eq!(code, Some(0));
    let status: DaemonStatus = serde_json::from_str(&out).expect("a status");
    assert_eq!(status.balloon.actual_pages, 256);
    assert_eq!(out.lines().count(), 1);
}

#[test]
fn hinting_without_a_guest_is_status_1() {
    let daemon = Daemon::start();
    for what in ["start", "stop", "done"] {
        let (code, out, err) = daemon.run(&["free-page-hint", what]);
        assert_eq!((code, out.as_str()), (Some(1), ""));
        assert!(err.contains("--features free-page-hint"), "{err}");
    }
    let (code, _, err) = daemon.run(&["free-page-hint", "start", "--timeout", "10"]);
    assert_eq!(code, Some(2), "{err}");
}

#[test]
fn watching() {
    use std::io::{BufRead as _, BufReader};
    let daemon = Daemon::start();
    let child = daemon
        .command(&["watch", "--json"])
        .stdout(Stdio::piped())
        .spawn();
    let mut child = child.expect("it runs");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let mut next = || -> Event {
        let line = lines.next().expect("a line").expect("text");
        serde_json::from_str(&line).expect("an event")
    };
    assert!(matches!(next().what, EventKind::Frontend(_)));
    assert!(matches!(next().what, EventKind::Balloon(_)));
    daemon.actual(1);
    assert!(matches!(next().what, EventKind::Balloon(b) if b.actual_pages == 1));
    drop(lines);
    // Who reads has enough: an event ends it, quietly. Perhaps not the next one: a process that another test
    // starts just now has our end of the pipe, too, for a moment.
    let mut end = None;
    for pages in 2..1000 {
        daemon.actual(pages);
        end = child.try_wait().expect("it can be waited for");
        if end.is_some() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    if end.is_none() {
        child.kill().expect("it is there");
    }
    assert_eq!(end.and_then(|status| status.code()), Some(0));
}

#[test]
fn faults_are_refused_with_a_reason() {
    let daemon = Daemon::start();
    let (code, _, err) = daemon.run(&["fault", "die"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("started with --fault"), "{err}");
}

#[test]
fn help_tells_all() {
    let (code, out, _) = run(Command::new(env!("CARGO_BIN_EXE_balloonctl")).arg("--help"));
    assert_eq!(code, Some(0));
    for part in [
        "target",
        "wait",
        "status",
        "watch",
        "--json",
        "Exit status",
        "what is taken from",
    ] {
        assert!(out.contains(part), "{part}");
    }
    assert!(!out.contains("fault"));
}
