// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A guest without a machine: guest memory, virtqueues laid out by hand, and the frontend that
//! connects them to a daemon of its own.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test program uses a part of it"
)]

use std::fs::File;
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use balloon_control::{Client, Status};
use balloon_wire::wire::Header;
use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{
    Address as _, Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap,
    GuestMemoryRegion as _, GuestRegionMmap, MmapRegion,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub const PAGE: u64 = 4096;
/// Address of the second region.
pub const HIGH: u64 = 1 << 32;
/// Where tests put requests; the queues are below.
pub const BUFFER: u64 = 0x10_0000;
/// From here on memory is free for tests to give away.
pub const FREE: u64 = 0x40_0000;
pub const PATTERN: u8 = 0xa5;

pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
const NEXT: u16 = 1;

pub const BITMAP: u64 = 1 << 23;
pub const EVENT_IDX: u64 = 1 << 29;
const BASE: u64 = 1 << 32 | 1 << 30;

const QUEUE_SIZE: u16 = 128;
const SOON: Duration = Duration::from_secs(10);

/// A daemon that a test started.
pub struct Daemon {
    pub child: Child,
    pub dir: tempfile::TempDir,
}

impl Daemon {
    pub fn start(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let child = Command::new(env!("CARGO_BIN_EXE_vhost-device-balloon"))
            .args(["--log-level", "debug", "--socket-path"])
            .arg(dir.path().join("socket"))
            .arg("--control-path")
            .arg(dir.path().join("control"))
            .args(options)
            .stdin(Stdio::null())
            .stderr(File::create(dir.path().join("log")).expect("a log"))
            .spawn()
            .expect("the daemon starts");
        let mut daemon = Self { child, dir };
        let path = daemon.control_path();
        until("the daemon listens", || {
            assert_eq!(daemon.child.try_wait().expect("a child"), None, "it ended");
            UnixStream::connect(&path).is_ok()
        });
        daemon
    }

    pub fn socket_path(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub fn control_path(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    pub fn client(&self) -> Client {
        let client = Client::connect(self.control_path()).expect("the daemon lives");
        client.set_answer_timeout(Some(SOON)).expect("a socket");
        client
    }

    pub fn status(&self) -> Status {
        self.client().status(false).expect("an answer")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).expect("a log")
    }

    /// How many files it has open.
    pub fn open_files(&self) -> usize {
        let path = format!("/proc/{}/fd", self.child.id());
        std::fs::read_dir(path).expect("a process").count()
    }

    pub fn signal(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a process");
    }

    /// Waits for the end. Returns the exit status.
    pub fn end(&mut self) -> Option<i32> {
        let mut code = None;
        until("the daemon ends", || {
            code = self.child.try_wait().expect("a child");
            code.is_some()
        });
        code.and_then(|c| c.code())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the daemon's log\n{}---", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < end, "{what}: not within {SOON:?}");
        sleep(Duration::from_millis(2));
    }
}

/// A descriptor to be.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    /// Instead of the one after it.
    pub next: Option<u16>,
}

impl Piece {
    pub fn of(addr: u64, len: u32) -> Self {
        Self {
            addr,
            len,
            flags: 0,
            next: None,
        }
    }

    pub fn writable(addr: u64, len: u32) -> Self {
        Self {
            flags: WRITE,
            ..Self::of(addr, len)
        }
    }

    pub fn next(self, next: u16) -> Self {
        Self {
            next: Some(next),
            ..self
        }
    }
}

/// A virtqueue, seen from the driver.
pub struct Queue {
    index: usize,
    size: u16,
    table: u64,
    avail: u64,
    used: u64,
    next_avail: u16,
    next_used: u16,
    kick: EventFd,
    call: EventFd,
}

/// A guest, its frontend and its daemon.
pub struct Guest {
    pub daemon: Daemon,
    pub memory: GuestMemoryMmap,
    pub file: Arc<File>,
    pub frontend: Frontend,
    pub queues: Vec<Queue>,
    /// The frontend's end of the back channel.
    pub back: UnixStream,
    buffers: u64,
}

impl Guest {
    /// Starts a daemon with `options` and a guest that takes `features`.
    pub fn start(options: &[&str], features: u64) -> Self {
        Self::with_daemon(Daemon::start(options), features, 32 << 20)
    }

    /// A guest whose low region has `low` bytes; the high one has 8 MiB.
    pub fn with_daemon(daemon: Daemon, features: u64, low: usize) -> Self {
        let high = 8 << 20;
        // The regions lie in the file the wrong way round, and not at its beginning.
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd"));
        let first = 0x3000;
        file.set_len(first + (low + high) as u64).expect("sized");
        let file = Arc::new(file);
        let region = |offset, addr, len| {
            let offset = FileOffset::from_arc(Arc::clone(&file), offset);
            let mapping = MmapRegion::from_file(offset, len).expect("mapped");
            GuestRegionMmap::new(mapping, GuestAddress(addr)).expect("a region")
        };
        let memory = GuestMemoryMmap::from_regions(vec![
            region(first + high as u64, 0, low),
            region(first, HIGH, high),
        ])
        .expect("guest memory");
        let frontend = Frontend::connect(daemon.socket_path(), 8).expect("connected");
        let (back, _) = UnixStream::pair().expect("a pair");
        let mut guest = Self {
            daemon,
            memory,
            file,
            frontend,
            queues: Vec::new(),
            back,
            buffers: BUFFER,
        };
        // The first page for requests is there, so that blocks can be counted around a small one.
        guest.place(&[0]);
        guest.negotiate(features);
        guest
    }

    fn negotiate(&mut self, features: u64) {
        let frontend = &mut self.frontend;
        greet(frontend, BASE | features);
        assert_eq!(frontend.get_queue_num().expect("queues"), 8);
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        frontend
            .set_backend_request_fd(&theirs)
            .expect("back channel");
        self.back = ours;
        self.start_driver(features);
    }

    /// What a driver does when it is loaded.
    pub fn start_driver(&mut self, features: u64) {
        let frontend = &mut self.frontend;
        frontend.set_features(BASE | features).expect("features");
        let regions: Vec<_> = self
            .memory
            .iter()
            .map(|r| VhostUserMemoryRegionInfo::from_guest_region(r).expect("a region"))
            .collect();
        frontend.set_mem_table(&regions).expect("memory");
        self.queues.clear();
        for index in 0..8 {
            let queue = Queue::new(&self.memory, index);
            self.start_queue(&queue);
            self.queues.push(queue);
        }
    }

    /// What a frontend does when the driver sets up a queue.
    pub fn start_queue(&mut self, queue: &Queue) {
        self.start_queue_at(queue, 0);
    }

    /// What a frontend does when the guest is paused. Returns where the queues are.
    pub fn pause(&mut self) -> Vec<u32> {
        let stop = |queue: &Queue| self.frontend.get_vring_base(queue.index).expect("stopped");
        self.queues.iter().map(stop).collect()
    }

    /// What it does when the guest goes on.
    pub fn go_on(&mut self, features: u64, bases: &[u32]) {
        let frontend = &mut self.frontend;
        frontend.set_features(BASE | features).expect("features");
        let queues = std::mem::take(&mut self.queues);
        for (queue, base) in queues.iter().zip(bases) {
            self.start_queue_at(queue, u16::try_from(*base).expect("an index"));
        }
        self.queues = queues;
    }

    fn start_queue_at(&mut self, queue: &Queue, base: u16) {
        let frontend = &mut self.frontend;
        let index = queue.index;
        let host = |addr| {
            self.memory
                .get_host_address(GuestAddress(addr))
                .expect("ram") as u64
        };
        let config = VringConfigData {
            queue_max_size: 1024,
            queue_size: queue.size,
            flags: 0,
            desc_table_addr: host(queue.table),
            used_ring_addr: host(queue.used),
            avail_ring_addr: host(queue.avail),
            log_addr: None,
        };
        frontend.set_vring_num(index, queue.size).expect("size");
        frontend.set_vring_base(index, base).expect("base");
        frontend.set_vring_addr(index, &config).expect("addresses");
        frontend.set_vring_call(index, &queue.call).expect("call");
        frontend.set_vring_kick(index, &queue.kick).expect("kick");
        frontend.set_vring_enable(index, true).expect("enabled");
    }

    /// Sets up a queue anew, with events of the test's.
    pub fn restart_queue(&mut self, index: usize, kick: &EventFd, call: &EventFd) {
        self.frontend.get_vring_base(index).expect("stopped");
        let mut queue = Queue::new(&self.memory, index);
        queue.kick = kick.try_clone().expect("an event");
        queue.call = call.try_clone().expect("an event");
        self.start_queue(&queue);
        self.queues[index] = queue;
    }

    /// Fills all memory that is not used by queues and requests.
    pub fn fill(&self) {
        for range in self.free() {
            let bytes = vec![PATTERN; (range.end - range.start) as usize];
            self.memory
                .write_slice(&bytes, GuestAddress(range.start))
                .expect("written");
        }
    }

    fn free(&self) -> Vec<std::ops::Range<u64>> {
        self.memory
            .iter()
            .map(|r| {
                let start = r.start_addr().raw_value();
                start.max(FREE)..start + r.len()
            })
            .collect()
    }

    /// Checks that of all free memory exactly `gone` is gone: it reads as zero and has no blocks in
    /// the file, everything else is as it was filled.
    pub fn check_gone(&self, gone: &[std::ops::Range<u64>]) {
        let mut buffer = vec![0; PAGE as usize];
        let mut kept = 0;
        for range in self.free() {
            for page in (range.start..range.end).step_by(PAGE as usize) {
                self.memory
                    .read_slice(&mut buffer, GuestAddress(page))
                    .expect("read");
                let is_gone = gone.iter().any(|g| g.contains(&page));
                let expected = if is_gone { 0 } else { PATTERN };
                assert!(
                    buffer.iter().all(|b| *b == expected),
                    "the page at {page:#x} is wrong, expected {expected:#x}"
                );
                kept += u64::from(!is_gone);
            }
        }
        let low = self.blocks() / PAGE;
        assert!(low >= kept, "{low} pages in the file, {kept} are kept");
    }

    /// Bytes of guest memory that the host has.
    pub fn blocks(&self) -> u64 {
        rustix::fs::fstat(&*self.file).expect("a file").st_blocks as u64 * 512
    }

    /// Writes bytes into the area for requests. Returns where.
    pub fn place(&mut self, bytes: &[u8]) -> u64 {
        if self.buffers + bytes.len() as u64 > FREE {
            self.buffers = BUFFER;
        }
        let at = self.buffers;
        self.memory
            .write_slice(bytes, GuestAddress(at))
            .expect("room");
        self.buffers = (at + bytes.len() as u64).next_multiple_of(64);
        at
    }

    /// Sends bytes in one descriptor, and waits until it is used.
    pub fn send(&mut self, queue: usize, bytes: &[u8]) {
        let at = self.place(bytes);
        self.send_pieces(queue, &[Piece::of(at, bytes.len() as u32)]);
    }

    /// Sends a chain, and waits until it is used.
    pub fn send_pieces(&mut self, queue: usize, pieces: &[Piece]) {
        let memory = &self.memory;
        let queue = &mut self.queues[queue];
        queue.push(memory, pieces);
        queue.kick();
        assert_eq!(queue.wait_used(memory), (0, 0));
    }

    /// Makes a chain available and tells the daemon.
    pub fn post(&mut self, queue: usize, pieces: &[Piece]) {
        self.queues[queue].push(&self.memory, pieces);
        self.queues[queue].kick();
    }

    /// Makes a piece available in the descriptor `head`, so that there can be several.
    pub fn post_at(&mut self, queue: usize, head: u16, piece: Piece) {
        let queue = &mut self.queues[queue];
        Queue::lay(&self.memory, queue.table + 16 * u64::from(head), &[piece]);
        queue.make_available(&self.memory, head);
        queue.kick();
    }

    /// The next used element, as soon as there is one: id and length.
    pub fn used(&mut self, queue: usize) -> (u32, u32) {
        self.queues[queue].wait_used(&self.memory)
    }

    /// Whether nothing is used that was not seen yet.
    pub fn none_used_now(&self, queue: usize) -> bool {
        self.queues[queue].used_index(&self.memory) == self.queues[queue].next_used
    }

    /// Whether nothing is used for a while.
    pub fn nothing_used(&self, queue: usize) -> bool {
        sleep(Duration::from_millis(100));
        self.none_used_now(queue)
    }

    /// Interrupts since the last look.
    pub fn interrupts(&self, queue: usize) -> u64 {
        self.queues[queue].call.read().unwrap_or(0)
    }

    pub fn config(&mut self, offset: u32, size: u32) -> Vec<u8> {
        let empty = vec![0; size as usize];
        let flags = VhostUserConfigFlags::WRITABLE;
        self.frontend
            .get_config(offset, size, flags, &empty)
            .expect("config space")
            .1
    }

    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) {
        self.frontend
            .set_config(offset, VhostUserConfigFlags::WRITABLE, bytes)
            .expect("config space");
    }

    /// What a driver does after a change: it says how large the balloon is.
    pub fn set_actual(&mut self, pages: u32) {
        self.set_config(4, &pages.to_le_bytes());
    }

    /// Reads a message from the back channel.
    pub fn back_message(&mut self) -> [u8; 12] {
        self.back.set_read_timeout(Some(SOON)).expect("a socket");
        let mut message = [0; 12];
        self.back.read_exact(&mut message).expect("a message");
        message
    }
}

/// What a frontend says first.
pub fn greet(frontend: &mut Frontend, features: u64) {
    frontend.set_owner().expect("owner");
    let offered = frontend.get_features().expect("features");
    assert_eq!(offered & features, features, "{offered:#x}");
    let protocol = frontend.get_protocol_features().expect("protocol features");
    let wanted = VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::BACKEND_REQ;
    assert!(protocol.contains(wanted));
    frontend
        .set_protocol_features(wanted)
        .expect("protocol features");
    // From here on each message is answered, so that nothing is in flight when it returns.
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
}

impl Queue {
    fn new(memory: &GuestMemoryMmap, index: usize) -> Self {
        let at = 0x1_0000 + 0x1_0000 * index as u64;
        let (table, avail, used) = (at, at + 0x4000, at + 0x8000);
        memory
            .write_slice(&[0; 0xc000], GuestAddress(at))
            .expect("room for a queue");
        Self {
            index,
            size: QUEUE_SIZE,
            table,
            avail,
            used,
            next_avail: 0,
            next_used: 0,
            kick: EventFd::new(EFD_NONBLOCK).expect("an event"),
            call: EventFd::new(EFD_NONBLOCK).expect("an event"),
        }
    }

    /// Lays a chain into a table, as indirect descriptors if the table is another.
    pub fn lay(memory: &GuestMemoryMmap, table: u64, pieces: &[Piece]) {
        for (i, piece) in pieces.iter().enumerate() {
            let last = i + 1 == pieces.len();
            let (flags, next) = match piece.next {
                Some(next) => (piece.flags | NEXT, next),
                None if last => (piece.flags, 0),
                None => (piece.flags | NEXT, i as u16 + 1),
            };
            let at = table + 16 * i as u64;
            let tail = u64::from(piece.len) | u64::from(flags) << 32 | u64::from(next) << 48;
            memory
                .write_obj(piece.addr.to_le(), GuestAddress(at))
                .expect("room");
            memory
                .write_obj(tail.to_le(), GuestAddress(at + 8))
                .expect("room");
        }
    }

    /// Makes a chain available that begins at descriptor 0; so there is one chain at a time.
    pub fn push(&mut self, memory: &GuestMemoryMmap, pieces: &[Piece]) {
        Self::lay(memory, self.table, pieces);
        self.make_available(memory, 0);
    }

    pub fn make_available(&mut self, memory: &GuestMemoryMmap, head: u16) {
        let slot = u64::from(self.next_avail % self.size);
        let at = GuestAddress(self.avail + 4 + 2 * slot);
        memory.write_obj(head.to_le(), at).expect("a ring");
        self.set_avail_index(memory, self.next_avail.wrapping_add(1));
    }

    pub fn set_avail_index(&mut self, memory: &GuestMemoryMmap, index: u16) {
        self.next_avail = index;
        memory
            .store(
                index.to_le(),
                GuestAddress(self.avail + 2),
                Ordering::Release,
            )
            .expect("a ring");
    }

    /// The used index at which the driver wants an interrupt (EVENT_IDX).
    pub fn set_used_event(&self, memory: &GuestMemoryMmap, index: u16) {
        let at = self.avail + 4 + 2 * u64::from(self.size);
        memory
            .store(index.to_le(), GuestAddress(at), Ordering::Release)
            .expect("a ring");
    }

    pub fn kick(&self) {
        self.kick.write(1).expect("kicked");
    }

    fn used_index(&self, memory: &GuestMemoryMmap) -> u16 {
        let at = GuestAddress(self.used + 2);
        u16::from_le(memory.load(at, Ordering::Acquire).expect("a ring"))
    }

    fn wait_used(&mut self, memory: &GuestMemoryMmap) -> (u32, u32) {
        until("a buffer is used", || {
            self.used_index(memory) != self.next_used
        });
        let slot = u64::from(self.next_used % self.size);
        let at = GuestAddress(self.used + 4 + 8 * slot);
        let element = u64::from_le(memory.read_obj(at).expect("a ring"));
        self.next_used = self.next_used.wrapping_add(1);
        (element as u32, (element >> 32) as u32)
    }
}

/// A record for whole words of bitmap.
pub fn record(page_shift: u32, base_pfn: u64, words: &[u64]) -> Vec<u8> {
    let header = Header {
        id: 0,
        page_shift,
        base_pfn,
        bmap_len: words.len() as u64 * 8,
    };
    let mut bytes = header.encode().to_vec();
    bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
    bytes
}

/// An array of page frame numbers.
pub fn pfns(pfns: impl IntoIterator<Item = u64>) -> Vec<u8> {
    pfns.into_iter()
        .flat_map(|p| u32::try_from(p).expect("32 bits").to_le_bytes())
        .collect()
}

/// Addresses of pages.
pub fn pages(first: u64, count: u64) -> std::ops::Range<u64> {
    first * PAGE..(first + count) * PAGE
}

/// Tells whether a path exists, without following links.
pub fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
