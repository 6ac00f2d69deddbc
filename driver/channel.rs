// SPDX-License-Identifier: GPL-2.0

//! How the host is told of pages: windows of bitmaps or arrays of frame numbers, several in flight.

use crate::{
    bitmap::{
        self,
        PfnBitmap, //
    },
    logic::{
        features::{
            Protocol,
            BLOCK_SHIFT, //
        },
        units::PageSize,
        window::{
            Place,
            Window,
            WindowSize,
            WindowTable, //
        },
        wire::{
            Header,
            BALLOON_PAGE_SHIFT,
            PFN_ARRAY_MAX,
            PFN_BYTES, //
        },
    },
    mm::{
        Block,
        HeldPage,
        PageBatch, //
    },
    page_list::PageList,
    virtio, //
};
use kernel::{
    alloc::Flags,
    num::casts::u32_as_usize,
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    },
    time::{
        msecs_to_jiffies,
        Instant,
        Monotonic, //
    },
};

/// Which batch of pages a message is about.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Flight(u8);

impl Flight {
    /// The first one of the worker's.
    pub(super) const FIRST: Self = Self(0);

    /// The one for when the guest is out of memory.
    pub(super) const RELIEF: Self = Self(2);

    /// The one for pages that are moved.
    pub(super) const MOVE: Self = Self(3);

    /// The number of batches that can be on their way at a time.
    pub(super) const COUNT: usize = 4;

    /// The other one of the worker's.
    pub(super) fn other(self) -> Self {
        Self(self.0 ^ 1)
    }

    fn index(self) -> usize {
        usize::from(self.0) % Self::COUNT
    }
}

/// What the driver remembers of a message.
pub(super) struct Cargo {
    flight: Flight,
    /// Entries of an array that are filled.
    filled: usize,
}

type Message = virtio::Message<Cargo>;

/// A queue of messages about pages.
pub(super) type Queue = virtio::Queue<Cargo>;

/// What the waits for the host look at.
pub(super) struct Patience {
    /// The device is about to be stopped: an unresponsive host is not waited for much longer.
    pub(super) stopping: Atomic<bool>,
}

impl Patience {
    /// How long a wait sleeps before it looks around, in milliseconds.
    const SLICE_MS: u32 = 500;
    /// How long to wait for an answer while the device is being stopped, and where waiting for long is
    /// out of place, in milliseconds.
    const LAST_MS: i64 = 2000;
    /// How long all answers together may take while the device is being stopped, in milliseconds.
    const STOP_MS: i64 = 30_000;
    /// When the log says that the host does not answer, in milliseconds.
    const LOG_MS: i64 = 10_000;
}

/// Who waits for the host.
#[derive(Clone, Copy)]
pub(super) enum Waiter {
    /// The worker: as long as it takes, unless the device is being stopped.
    Worker,
    /// Whoever moves a page, or is out of memory, since then: not for long.
    Passer(Instant<Monotonic>),
}

/// The number of windows that are open at a time.
const OPEN: usize = 4;
/// The number of messages: those open, and some on their way.
const MESSAGES: usize = OPEN + 4;

/// A direction: the pages of one queue, in batches.
struct Pipe {
    queue: Arc<Queue>,
    outstanding: [usize; Flight::COUNT],
}

/// Which queue.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Pages that the host may take.
    Inflate,
    /// Pages that the host gets told are used again.
    Deflate,
}

/// What stays the same for a device, however often it is started.
#[derive(Clone)]
pub(super) struct Link {
    /// The device, to log for.
    pub(super) vdev: ARef<virtio::Device>,
    /// What waits look at.
    pub(super) patience: Arc<Patience>,
    /// The size of a guest page.
    pub(super) page_size: PageSize,
    /// Whether the device takes little-endian arrays.
    pub(super) little_endian: bool,
    /// The queue for pages that the host may take.
    pub(super) inflate: Arc<Queue>,
    /// The queue for pages that are used again.
    pub(super) deflate: Arc<Queue>,
}

/// The messages for telling the host of pages, and where they are.
pub(super) struct Channel {
    link: Link,
    protocol: Protocol,
    /// Size of the windows that the user wants.
    wanted: WindowSize,
    /// Size of the windows that the messages are made for.
    window: WindowSize,
    inflate: Pipe,
    deflate: Pipe,
    idle: KVec<KBox<Message>>,
    open: [Option<KBox<Message>>; OPEN],
    table: WindowTable<OPEN>,
    /// The `page_shift` of the windows that are open.
    page_shift: u32,
    /// Single pages that are not on their way yet.
    batch: PageBatch,
    /// Who has the channel now.
    waiter: Waiter,
    /// Whether the host may not have been told of all pages of [`Flight::RELIEF`].
    relief_untold: bool,
    /// Set when the device turned out unusable; nothing is told any more.
    failed: Option<Error>,
    /// The first wait that saw the device being stopped.
    stopping_since: Option<Instant<Monotonic>>,
    /// Whether the log says that the host is slow.
    slow_logged: bool,
    /// Pages on their way to the host or back, a list for each flight.
    pub(super) in_flight: [PageList; Flight::COUNT],
    /// Pages of which the host may think what it wants until the device is reset.
    pub(super) limbo: PageList,
    /// The same of migrations.
    held: [Option<HeldPage>; 8],
}

impl Channel {
    /// A channel over two queues of a live device.
    ///
    /// `window` is what the user wants; it is cut down to what the device and its rings take.
    pub(super) fn new(link: Link, protocol: Protocol, window: WindowSize) -> Result<Self> {
        let pipe = |queue: &Arc<Queue>| Pipe {
            queue: queue.clone(),
            outstanding: [0; Flight::COUNT],
        };
        let mut this = Self {
            protocol,
            wanted: window,
            window,
            inflate: pipe(&link.inflate),
            deflate: pipe(&link.deflate),
            link,
            idle: KVec::new(),
            open: [const { None }; OPEN],
            table: WindowTable::new(),
            page_shift: BALLOON_PAGE_SHIFT,
            batch: PageBatch::new()?,
            waiter: Waiter::Worker,
            relief_untold: false,
            failed: None,
            stopping_since: None,
            slow_logged: false,
            in_flight: [const { PageList::new() }; Flight::COUNT],
            limbo: PageList::new(),
            held: [const { None }; 8],
        };
        let (window, messages) = this.make_messages(window, GFP_KERNEL)?;
        this.window = window;
        this.idle = messages;
        Ok(this)
    }

    /// The window size that the device and its rings take, at most `wanted`, and the messages for
    /// it. May sleep.
    fn make_messages(
        &self,
        wanted: WindowSize,
        flags: Flags,
    ) -> Result<(WindowSize, KVec<KBox<Message>>)> {
        let ring = self.inflate.queue.ring_size()?;
        let ring = ring.min(self.deflate.queue.ring_size()?);
        let mut messages = KVec::with_capacity(MESSAGES, flags)?;
        let window = match self.protocol.max_bitmap_bytes() {
            Some(limit) => {
                let ring_limit = ring.saturating_sub(1) * Message::PIECE_WORDS * size_of::<u64>();
                let limit = limit.min(u32::try_from(ring_limit).unwrap_or(u32::MAX));
                wanted.at_most(limit).ok_or_else(|| {
                    dev_err!(
                        &*self.link.vdev,
                        "a ring of {ring} has no room for a page bitmap\n"
                    );
                    EINVAL
                })?
            }
            None => wanted,
        };
        let words = u32_as_usize(window.bytes()) / size_of::<u64>();

        for _ in 0..MESSAGES {
            let cargo = Cargo {
                flight: Flight::FIRST,
                filled: 0,
            };
            let message = if self.protocol == Protocol::PfnArray {
                Message::new(
                    core::iter::once((PFN_ARRAY_MAX * PFN_BYTES).div_ceil(size_of::<u64>())),
                    cargo,
                    flags,
                )?
            } else {
                let pieces = words.div_ceil(Message::PIECE_WORDS);
                let header = core::iter::once(Header::LEN.div_ceil(size_of::<u64>()));
                let bitmap = (0..pieces).map(|_| words.min(Message::PIECE_WORDS));
                Message::new(Iterator::chain(header, bitmap), cargo, flags)?
            };
            messages.push_within_capacity(message).map_err(|_| ENOMEM)?;
        }
        Ok((window, messages))
    }

    /// Makes the windows as large as the user wants now. If there is no memory for that, or if the host
    /// still has some, they stay as they are. May sleep.
    pub(super) fn resize_messages(&mut self, wanted: WindowSize) {
        if wanted == self.wanted || self.protocol == Protocol::PfnArray {
            return;
        }
        // A message that came back later would be one of the old size among the new ones.
        if self.is_busy() != Ok(false) {
            return;
        }
        // Memory may be short just now; the next step tries again.
        if let Ok((window, messages)) = self.make_messages(wanted, GFP_NOWAIT | __GFP_NOWARN) {
            self.wanted = wanted;
            self.window = window;
            self.idle = messages;
        }
    }

    /// Whether the host still has messages, after those are taken that it has used.
    ///
    /// # Errors
    ///
    /// The device is unusable.
    pub(super) fn is_busy(&mut self) -> Result<bool> {
        for direction in [Direction::Inflate, Direction::Deflate] {
            while self.take_one(direction)? {}
            if self.pipe(direction).outstanding != [0; Flight::COUNT] {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the host can be told of the block of `order` at guest page `pfn`.
    pub(super) fn can_tell(&self, pfn: u64, order: u32) -> bool {
        match self.protocol {
            Protocol::PfnArray => self
                .link
                .page_size
                .balloon_pfn(pfn + (1 << order))
                .is_some_and(|end| end != 0),
            Protocol::PageBitmap(_) | Protocol::PageBitmap2016 => self
                .link
                .page_size
                .frames(pfn, order, self.shift_of(order))
                .is_some(),
        }
    }

    /// The `page_shift` to tell the host of a block of `order` with.
    fn shift_of(&self, order: u32) -> u32 {
        let size = self.link.page_size.shift() + order;

        (BLOCK_SHIFT..=size)
            .rev()
            .find(|shift| self.protocol.takes(*shift))
            .unwrap_or(BALLOON_PAGE_SHIFT)
    }

    fn pipe(&mut self, direction: Direction) -> &mut Pipe {
        match direction {
            Direction::Inflate => &mut self.inflate,
            Direction::Deflate => &mut self.deflate,
        }
    }

    /// Puts the block of `order` at guest page `pfn` into a message of a flight. May send others and
    /// wait for the host. Allocates nothing.
    ///
    /// # Errors
    ///
    /// [`ERANGE`] if the host cannot be told of this block, in which case nothing has changed; else
    /// the device is unusable.
    pub(super) fn tell(
        &mut self,
        direction: Direction,
        flight: Flight,
        pfn: u64,
        order: u32,
    ) -> Result {
        self.check()?;
        if !self.can_tell(pfn, order) {
            return Err(ERANGE);
        }
        if self.protocol == Protocol::PfnArray {
            let first = self.link.page_size.balloon_pfn(pfn).ok_or(ERANGE)?;
            for i in 0..self.link.page_size.balloon_pages(order) {
                // CAST: `can_tell` has checked the last one.
                self.tell_pfn(direction, flight, first.wrapping_add(i as u32))?;
            }
            return Ok(());
        }
        let shift = self.shift_of(order);
        let (first, count) = self
            .link
            .page_size
            .frames(pfn, order, shift)
            .ok_or(ERANGE)?;
        if shift != self.page_shift {
            self.flush(direction)?;
            self.page_shift = shift;
        }
        self.tell_frames(direction, flight, first, count)
    }

    /// Adds an entry to the array that is being filled.
    fn tell_pfn(&mut self, direction: Direction, flight: Flight, pfn: u32) -> Result {
        if self.open[0].is_none() {
            self.open[0] = Some(self.acquire(direction, flight)?);
        }
        let little_endian = self.link.little_endian;
        let Some(message) = &mut self.open[0] else {
            return Err(EIO);
        };
        let at = message.cargo.filled;
        let bytes = if little_endian {
            pfn.to_le_bytes()
        } else {
            pfn.to_ne_bytes()
        };
        if let Some(word) = message.piece_mut(0).get_mut(at / 2) {
            let half = at % 2 * PFN_BYTES;
            word.as_mut_bytes()[half..half + PFN_BYTES].copy_from_slice(&bytes);
        }
        message.cargo.filled = at + 1;
        if at + 1 == PFN_ARRAY_MAX {
            self.close(direction, 0)?;
        }
        Ok(())
    }

    /// Sets the bits of `count` frames, of the size that the open windows have.
    fn tell_frames(
        &mut self,
        direction: Direction,
        flight: Flight,
        first: u64,
        count: u64,
    ) -> Result {
        let mut at = first;
        let end = first.saturating_add(count);

        while at < end {
            let (number, bit) = self.window.locate(at);
            // CAST: a window has at most 2^23 frames.
            let n = (end - at).min(self.window.frames() - bit as u64) as usize;
            let slot = self.open_window(direction, flight, number)?;

            if let Some(Some(message)) = self.open.get_mut(slot) {
                set_run(message, bit, n);
                self.table.note(slot, number, bit);
                self.table.note(slot, number, bit + n - 1);
            }
            at += n as u64;
        }
        Ok(())
    }

    /// Opens a window if it is not open. Returns the slot it is in.
    fn open_window(&mut self, direction: Direction, flight: Flight, number: u64) -> Result<usize> {
        let mut place = self.table.find(number);

        if let Place::Evict(slot) = place {
            self.close(direction, slot)?;
            place = Place::Free(slot);
        }
        match place {
            Place::Open(slot) => Ok(slot),
            Place::Free(slot) | Place::Evict(slot) => {
                let message = self.acquire(direction, flight)?;
                if let Some(open) = self.open.get_mut(slot) {
                    *open = Some(message);
                }
                Ok(slot)
            }
        }
    }

    /// Gets a message for a flight, waiting for the host to return one if need be.
    fn acquire(&mut self, direction: Direction, flight: Flight) -> Result<KBox<Message>> {
        let mut message = loop {
            if let Some(message) = self.idle.pop() {
                break message;
            }
            if self.pipe(direction).outstanding == [0; Flight::COUNT] {
                // All messages are open, none is on its way.
                self.flush(direction)?;
            }
            self.wait_for_one(direction)?;
        };

        message.cargo = Cargo { flight, filled: 0 };
        Ok(message)
    }

    /// Sends what is in a slot.
    fn close(&mut self, direction: Direction, slot: usize) -> Result {
        let window = self.table.close(slot);
        let Some(mut message) = self.open.get_mut(slot).and_then(Option::take) else {
            return Ok(());
        };
        let flight = message.cargo.flight;

        self.select(&mut message, window);
        loop {
            match self.pipe(direction).queue.send(message) {
                Ok(()) => break,
                Err((back, ENOSPC)) if self.pipe(direction).outstanding != [0; Flight::COUNT] => {
                    message = back;
                    if let Err(e) = self.wait_for_one(direction) {
                        self.recycle(message);
                        return Err(e);
                    }
                }
                Err((back, e)) => {
                    self.recycle(back);
                    return self.fail(e);
                }
            }
        }
        let pipe = self.pipe(direction);
        pipe.outstanding[flight.index()] += 1;
        match pipe.queue.kick() {
            Ok(()) => Ok(()),
            Err(e) => self.fail(e),
        }
    }

    /// Does something as one who must not wait for long. What was not sent by then is forgotten.
    pub(super) fn in_passing<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        self.waiter = Waiter::Passer(Instant::now());
        let ret = f(self);
        self.waiter = Waiter::Worker;
        for slot in 0..OPEN {
            let window = self.table.close(slot);
            if let Some(mut message) = self.open.get_mut(slot).and_then(Option::take) {
                self.select(&mut message, window);
                self.recycle(message);
            }
        }
        ret
    }

    /// Whether the host may not have been told of all pages of [`Flight::RELIEF`].
    pub(super) fn relief_untold(&mut self) -> &mut bool {
        &mut self.relief_untold
    }

    /// Whether the device is still usable.
    pub(super) fn is_usable(&self) -> bool {
        self.failed.is_none()
    }

    /// Fails if the device is not usable any more.
    fn check(&self) -> Result {
        self.failed.map_or(Ok(()), Err)
    }

    /// Takes note that the device is unusable, and says so once. What was on its way stays there until
    /// the device is reset.
    fn fail<T>(&mut self, e: Error) -> Result<T> {
        if self.failed.is_none() && e != ETIMEDOUT {
            dev_err!(
                &*self.link.vdev,
                "the device is unusable ({e:?}), the balloon stays as it is\n"
            );
        }
        self.failed = Some(e);
        Err(e)
    }

    /// Says what of a message is sent: the words of its window behind a header, or its array.
    fn select(&self, message: &mut Message, window: Option<Window>) {
        match window {
            Some(window) => {
                let header = window.header(self.window, 0, self.page_shift).encode();
                for (word, bytes) in message.piece_mut(0).iter_mut().zip(header.chunks_exact(8)) {
                    word.as_mut_bytes().copy_from_slice(bytes);
                }
                message.select(0, 0..Header::LEN);

                let words = window.words();
                let mut at = 0;
                let mut piece = 1;
                while at < u32_as_usize(self.window.bytes()) / size_of::<u64>() {
                    let from = words.start.saturating_sub(at);
                    let to = words.end.saturating_sub(at).min(Message::PIECE_WORDS);
                    message.select(piece, from * size_of::<u64>()..to * size_of::<u64>());
                    at += Message::PIECE_WORDS;
                    piece += 1;
                }
            }
            None => {
                let bytes = message.cargo.filled * PFN_BYTES;
                message.select(0, 0..bytes);
            }
        }
    }

    /// Sends everything that is open.
    ///
    /// # Errors
    ///
    /// The device is unusable.
    pub(super) fn flush(&mut self, direction: Direction) -> Result {
        self.check()?;
        for slot in 0..OPEN {
            self.close(direction, slot)?;
        }
        Ok(())
    }

    /// Waits until the host has used all messages of a flight. May sleep.
    ///
    /// # Errors
    ///
    /// Those of [`Channel::wait_for_one`].
    pub(super) fn drain(&mut self, direction: Direction, flight: Flight) -> Result {
        while self.pipe(direction).outstanding[flight.index()] > 0 {
            self.wait_for_one(direction)?;
        }
        Ok(())
    }

    /// Waits until the host has used a message, and makes that idle again. May sleep.
    ///
    /// # Errors
    ///
    /// [`EIO`] if the device is broken, [`ENODEV`] if it is gone, [`ETIMEDOUT`] if the device is
    /// being stopped and the host does not answer, [`EAGAIN`] if it does not answer a passer.
    fn wait_for_one(&mut self, direction: Direction) -> Result {
        let begin = Instant::<Monotonic>::now();

        self.check()?;
        while !self.take_one(direction)? {
            self.pipe(direction)
                .queue
                .wait(msecs_to_jiffies(Patience::SLICE_MS));
            // By the clock, since a host may send interrupts without having used anything.
            let waited = begin.elapsed().as_millis();
            if self.link.patience.stopping.load(Relaxed) {
                let since = *self.stopping_since.get_or_insert(begin);
                if waited >= Patience::LAST_MS || since.elapsed().as_millis() >= Patience::STOP_MS {
                    return self.fail(ETIMEDOUT);
                }
            }
            if let Waiter::Passer(since) = self.waiter {
                if since.elapsed().as_millis() >= Patience::LAST_MS {
                    return Err(EAGAIN);
                }
            }
            if waited >= Patience::LOG_MS && !self.slow_logged {
                self.slow_logged = true;
                dev_warn!(
                    &*self.link.vdev,
                    "the host has not answered for 10 s, waiting on\n"
                );
            }
        }
        Ok(())
    }

    /// Makes a message idle again that the host has used, if there is one. Returns whether there was.
    fn take_one(&mut self, direction: Direction) -> Result<bool> {
        let pipe = self.pipe(direction);

        match pipe.queue.take_used() {
            Ok(Some(message)) => {
                let n = &mut pipe.outstanding[message.cargo.flight.index()];
                *n = n.saturating_sub(1);
                self.recycle(message);
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(e) => self.fail(e),
        }
    }

    /// Makes a message idle, with nothing in it.
    fn recycle(&mut self, mut message: KBox<Message>) {
        message.clear_sent();
        // There is room for all messages; were there none, one would be freed.
        let _ = self.idle.push_within_capacity(message);
    }

    /// The pages that the host may still hold something of, once the device is reset: all that were
    /// on their way. Forgets the messages.
    pub(super) fn take_back(&mut self) -> PageList {
        let mut pages = core::mem::replace(&mut self.limbo, PageList::new());

        for list in &mut self.in_flight {
            pages.append(core::mem::replace(list, PageList::new()));
        }
        pages
    }

    /// Whether the host still has messages of a flight, after those are taken that it has used.
    ///
    /// # Errors
    ///
    /// The device is unusable.
    pub(super) fn is_busy_with(&mut self, direction: Direction, flight: Flight) -> Result<bool> {
        while self.take_one(direction)? {}
        Ok(self.pipe(direction).outstanding[flight.index()] > 0)
    }

    /// Takes a single page from the guest, in the knowledge that `want` pages are wanted in all.
    ///
    /// For arrays in ascending order, so that hosts that join neighbours find them.
    pub(super) fn next_page(&mut self, want: u64) -> Option<Block> {
        self.batch.next(want, self.protocol == Protocol::PfnArray)
    }

    /// Gives pages back to the guest that are not on their way yet.
    pub(super) fn forget_batch(&mut self) {
        self.batch.clear();
    }

    /// Whether there is room for two more pages to [`Channel::keep`].
    pub(super) fn can_keep(&self) -> bool {
        self.held.iter().filter(|page| page.is_none()).count() >= 2
    }

    /// Keeps a page of an unclean migration from being used until the device is reset. Allocates
    /// nothing.
    pub(super) fn keep(&mut self, page: HeldPage) {
        match self.held.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(page),
            // Not reached by those who ask first. Better lost than used by two.
            None => core::mem::forget(page),
        }
    }

    /// The pages of a flight.
    pub(super) fn pages_of(&mut self, flight: Flight) -> &mut PageList {
        &mut self.in_flight[flight.index()]
    }
}

/// Sets `len` bits from `start` on in a message that carries a bitmap, whose pieces follow the header.
fn set_run(message: &mut Message, start: usize, len: usize) {
    const PIECE_BITS: usize = Message::PIECE_WORDS * bitmap::WORD_BITS;

    let mut at = start;
    let end = start + len;

    while at < end {
        let n = (PIECE_BITS - at % PIECE_BITS).min(end - at);

        PfnBitmap::new(message.piece_mut(1 + at / PIECE_BITS)).set_run(at % PIECE_BITS, n);
        at += n;
    }
}
