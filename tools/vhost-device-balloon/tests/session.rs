// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Frontends that come and go, want too much, or give the daemon something bad to hold on to.

mod common;

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::Duration;

use common::{BITMAP, Daemon, FREE, Guest, PAGE, Piece, exists, greet, record, until};
use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, memfd_create};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, getpid, getrlimit, pidfd_getfd, pidfd_open,
    prlimit,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::EventFd;

const FIRST: u64 = FREE / PAGE;

/// Lets the guest go, keeps the daemon.
fn leave(guest: Guest) -> Daemon {
    let Guest {
        daemon, frontend, ..
    } = guest;
    drop(frontend);
    until("it noticed", || !daemon.status().frontend.connected);
    daemon
}

/// Sets how many files the daemon may have open.
fn limit_files(daemon: &Daemon, limit: Option<u64>) {
    // It inherited ours.
    let limits = Rlimit {
        current: limit,
        ..getrlimit(Resource::Nofile)
    };
    let pid = Pid::from_child(&daemon.child);
    prlimit(Some(pid), Resource::Nofile, limits).expect("limited");
}

#[test]
fn sessions_leave_nothing_open() {
    let mut daemon = Daemon::start(&["--persist"]);
    let mut before = None;
    for _ in 0..10 {
        let mut guest = Guest::with_daemon(daemon, BITMAP, 32 << 20);
        guest.send(0, &record(12, FIRST, &[1]));
        daemon = leave(guest);
        let mut open = daemon.open_files();
        // The threads of the session and of the control connection may take a moment.
        if let Some(before) = before {
            until("all is closed", || {
                open = daemon.open_files();
                open <= before
            });
        } else {
            sleep(Duration::from_millis(200));
            open = daemon.open_files();
        }
        before.get_or_insert(open);
    }
}

/// Whatever it is that there are no file descriptors left for, the daemon waits for them.
#[test]
fn a_lack_of_file_descriptors_passes() {
    let daemon = Daemon::start(&["--persist"]);
    // Those of the first session come and go; what is open now stays.
    sleep(Duration::from_millis(100));
    let open = daemon.open_files() as u64;
    let plenty = getrlimit(Resource::Nofile).current;
    let mut short = 0;
    for (before, more) in (0..60).step_by(4).enumerate() {
        limit_files(&daemon, Some(open + more));
        let waiting = UnixStream::connect(daemon.socket_path()).expect("it listens");
        sleep(Duration::from_millis(250));
        let lines = daemon.log().matches("trying again until it can be").count();
        assert!(lines <= short + 1, "{lines} lines, {short} before");
        short = lines;
        limit_files(&daemon, plenty);
        // Whoever connected meanwhile is served now.
        until("it is served", || {
            daemon.log().matches("a frontend connected").count() == before + 1
        });
        drop(waiting);
        until("it goes on", || {
            daemon.log().matches("ended without a word").count() == before + 1
        });
    }
    assert!((5..15).contains(&short), "there was a lack {short} times");
    until("nothing is left open", || {
        daemon.open_files() as u64 <= open
    });
    let mut guest = Guest::with_daemon(daemon, BITMAP, 32 << 20);
    guest.send(0, &record(12, FIRST, &[1]));
}

/// Two queues with one kick that blocks: what one of them has read is not there for the other.
#[test]
fn a_kick_of_two_queues_blocks_nobody() {
    let mut guest = Guest::start(&[], BITMAP);
    guest.fill();
    let shared = EventFd::new(0).expect("an event");
    let call = EventFd::new(0).expect("an event");
    guest.restart_queue(0, &shared, &call);
    guest.restart_queue(1, &shared, &call);
    let bytes = record(12, FIRST, &[1]);
    for _ in 0..20 {
        let at = guest.place(&bytes);
        for queue in [0, 1] {
            guest.post(queue, &[Piece::of(at, bytes.len() as u32)]);
        }
        shared.write(1).expect("kicked");
        // This one would unblock nobody.
        guest.send(4, &[1]);
        for queue in [0, 1] {
            until("it is used", || {
                shared.write(1).expect("kicked");
                !guest.none_used_now(queue)
            });
            assert_eq!(guest.used(queue), (0, 0));
        }
    }
    guest.daemon.signal();
    assert_eq!(guest.daemon.end(), Some(0));
}

/// An interrupt that would block is one that the guest has not taken yet.
#[test]
fn a_full_interrupt_blocks_nobody() {
    let mut guest = Guest::start(&[], BITMAP);
    let kick = EventFd::new(0).expect("an event");
    let call = EventFd::new(0).expect("an event");
    guest.restart_queue(0, &kick, &call);
    call.write(u64::MAX - 1).expect("filled");
    for _ in 0..3 {
        guest.send(0, &record(12, FIRST, &[1]));
    }
    assert_eq!(guest.daemon.status().counters.errors, 0);
}

/// The device's thread is stuck where nothing can wake it: a signal ends the daemon all the same.
#[test]
fn a_signal_ends_it_in_any_case() {
    let mut guest = Guest::start(&[], BITMAP);
    let shared = EventFd::new(0).expect("an event");
    let call = EventFd::new(0).expect("an event");
    guest.restart_queue(0, &shared, &call);
    guest.restart_queue(1, &shared, &call);
    // The frontend's end is the same file: it makes the daemon's block again.
    let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("a process");
    let event = pidfd_getfd(own, shared.as_raw_fd(), PidfdGetfdFlags::empty()).expect("an event");
    let flags = fcntl_getfl(&event).expect("a file");
    assert!(flags.contains(OFlags::NONBLOCK));
    fcntl_setfl(&event, flags - OFlags::NONBLOCK).expect("a file");
    until("it is stuck", || {
        shared.write(1).expect("kicked");
        sleep(Duration::from_millis(20));
        let kicks = guest.daemon.status().counters.kicks;
        guest.queues[4].kick();
        sleep(Duration::from_millis(20));
        guest.daemon.status().counters.kicks == kicks
    });
    guest.daemon.signal();
    assert_eq!(guest.daemon.end(), Some(0));
    assert!(guest.daemon.log().contains("still in work"));
    assert!(!exists(&guest.daemon.socket_path()));
    assert!(!exists(&guest.daemon.control_path()));
}

fn region(file: &File, guest_addr: u64, bytes: u64, offset: u64) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: guest_addr,
        memory_size: bytes,
        userspace_addr: 0x7000_0000_0000 + guest_addr,
        mmap_offset: offset,
        mmap_handle: file.as_raw_fd(),
    }
}

fn memory(bytes: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd"));
    file.set_len(bytes).expect("sized");
    file
}

#[test]
fn regions_beyond_the_end_of_their_file_are_refused() {
    let daemon = Daemon::start(&["--persist"]);
    let file = memory(1 << 20);
    let refused = |what: &dyn Fn(&mut Frontend) -> bool| {
        let before = daemon.log().matches("its file only 1048576").count();
        let mut frontend = Frontend::connect(daemon.socket_path(), 8).expect("connected");
        greet(&mut frontend, BITMAP);
        assert!(!what(&mut frontend), "taken");
        until("it says why", || {
            daemon.log().matches("its file only 1048576").count() == before + 1
        });
    };
    refused(&|f| {
        f.set_mem_table(&[region(&file, 0, (1 << 20) + PAGE, 0)])
            .is_ok()
    });
    refused(&|f| f.set_mem_table(&[region(&file, 0, 1 << 20, PAGE)]).is_ok());
    // A good one before a bad one.
    refused(&|f| {
        let two = [
            region(&file, 0, PAGE, 0),
            region(&file, 1 << 30, PAGE, 1 << 20),
        ];
        f.set_mem_table(&two).is_ok()
    });
    refused(&|f| {
        f.add_mem_region(&region(&file, 0, PAGE, 0))
            .expect("a good one");
        f.add_mem_region(&region(&file, PAGE, 1 << 21, 0)).is_ok()
    });
    // One that fits to the last byte is taken, by a daemon that lives.
    let mut frontend = Frontend::connect(daemon.socket_path(), 8).expect("connected");
    greet(&mut frontend, BITMAP);
    frontend
        .set_mem_table(&[region(&file, 0, (1 << 20) - PAGE, PAGE)])
        .expect("taken");
    assert_eq!(daemon.status().memory.bytes, (1 << 20) - PAGE);
}

#[test]
fn of_many_regions_some_are_listed() {
    let daemon = Daemon::start(&[]);
    let file = memory(PAGE);
    let mut frontend = Frontend::connect(daemon.socket_path(), 8).expect("connected");
    greet(&mut frontend, BITMAP);
    let many = 500;
    for i in 0..many {
        let added = frontend.add_mem_region(&region(&file, i * 2 * PAGE, PAGE, 0));
        added.expect("added");
    }
    let memory = daemon.status().memory;
    assert_eq!(memory.bytes, many * PAGE);
    assert_eq!(
        memory.regions.len() + memory.regions_left_out,
        many as usize
    );
    assert!(memory.regions_left_out > 0);
}
