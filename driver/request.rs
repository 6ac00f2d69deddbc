// SPDX-License-Identifier: GPL-2.0

//! Doing what the host asks for: dropping caches, compacting memory, naming free pages.
//!
//! The host writes requests into buffers of the driver's; the driver sends answers. A work item does all of
//! it, in steps, and never waits for the host: when no message is at hand it rests until the device has used
//! one. So a slow host holds up its own requests and nothing else. `logic/request.rs` says whose turn it is.

use super::{
    balloon::Balloon,
    hold::{
        Keeper,
        Relief, //
    },
};
use crate::{
    bitmap::PfnBitmap,
    logic::{
        features::Protocol,
        request::{
            self,
            Answer,
            Desk,
            Done,
            Guest,
            No,
            Reason,
            Request,
            Status, //
        },
        window::{
            Window,
            WindowSize, //
        },
        wire::{
            Header,
            BALLOON_PAGE_SHIFT, //
        },
    },
    mm::{
        self,
        Block,
        Cache,
        OnFree,
        Pressure, //
    },
    virtio,
    work::{
        Job,
        Task,
        WorkQueue, //
    },
};
use core::ops::Range;
use kernel::{
    new_mutex,
    num::casts::{
        u32_as_usize,
        usize_as_u64, //
    },
    prelude::*,
    sync::{
        atomic::Relaxed,
        Arc,
        Mutex, //
    },
    time::{
        msecs_to_jiffies,
        Jiffies, //
    },
};

/// What an answer's message is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// An answer without records.
    Plain,
    /// An answer with a record.
    Window,
    /// The end of a hold.
    Farewell,
}

/// A message with an answer.
pub(super) type Message = virtio::Message<Kind>;
/// The queue of the answers.
pub(super) type AnswerQueue = virtio::Queue<Kind>;
/// The queue of the requests.
type RequestQueue = virtio::Queue<()>;

/// The number of buffers for requests.
const BUFFERS: usize = 4;
/// The number of messages without records.
const PLAIN: usize = 5;
/// The largest number of messages with a record.
const WINDOWS: usize = 4;
/// The descriptors that a message with a record takes.
const WINDOW_DESCRIPTORS: usize = 2;
/// The largest bitmap in a record, in bytes: one piece of a message.
const BITMAP_BYTES: u32 = 32 << 10;
/// How much of the page cache is dropped at a time if there is a bound, in bytes.
const LITTLE_BYTES: u64 = 64 << 20;
/// How long to rest when the host has to do something first, in milliseconds; its interrupt ends that.
const REST_MS: u32 = 500;
/// The most blocks to take at a time.
const BLOCKS: usize = 256;

/// Writes an answer into a message.
pub(super) fn fill(message: &mut Message, answer: &Answer) {
    put(message, 0, &answer.encode());
}

/// Writes bytes into the first piece of a message, from a word on.
fn put(message: &mut Message, word: usize, bytes: &[u8]) {
    let words = message.piece_mut(0).iter_mut().skip(word);

    for (word, bytes) in words.zip(bytes.chunks_exact(size_of::<u64>())) {
        word.as_mut_bytes().copy_from_slice(bytes);
    }
}

/// Which pages to name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Those that are free.
    Free,
    /// Those that are free or in the balloon.
    FreeOrBallooned,
    /// Those that are kept for the host.
    Kept,
}

/// What is worked on.
enum Work {
    /// Nothing.
    Nothing,
    /// Dropping caches.
    Drop {
        /// How often to take a little of the page cache before it goes as a whole.
        little: u64,
        /// What is left to do.
        caches: [Option<Cache>; 2],
        /// Stop when so many guest pages are free.
        until: Option<u64>,
        /// The guest pages that were free before.
        before: u64,
    },
    /// Compacting memory.
    Compact,
    /// Beginning to keep pages, for so many milliseconds.
    Hold(u32),
    /// Taking pages that are to be kept, of this order and smaller ones.
    Take(u32),
    /// Naming pages, those of the guest pages that are left to look at.
    Name(Source, Range<u64>),
    /// Giving back the pages that are kept.
    Release,
}

/// How a step went.
enum Progress {
    /// There is more to do.
    More,
    /// The host has to use a message first.
    Blocked,
    /// All is done.
    Done,
    /// It cannot be done.
    No(No),
}

/// What the work item has while the device is in use.
struct Office {
    desk: Desk,
    work: Work,
    /// Messages without records that are at hand.
    plain: KVec<KBox<Message>>,
    /// Messages with records that are at hand.
    windows: KVec<KBox<Message>>,
    window: WindowSize,
    garbage_logged: bool,
}

/// Requests of the host of a balloon.
///
/// Locks: `office` is the work item's, and the outermost; it is held while caches are dropped and memory is
/// compacted, hence for long. Under it those of [`Keeper`], of [`Balloon`] but the channel, and of the queues.
#[pin_data]
pub(super) struct Requests {
    balloon: Arc<Balloon>,
    announced: u32,
    requests: Arc<RequestQueue>,
    answers: Arc<AnswerQueue>,
    keeper: Arc<Keeper>,
    /// Ends a hold when its time is over.
    expiry: Arc<Task<Keeper>>,
    #[pin]
    office: Mutex<Option<Office>>,
}

impl Requests {
    /// Puts a buffer into the hands of the device.
    fn provide(&self, buffer: KBox<virtio::Message<()>>) -> Result {
        self.requests.send(buffer).map_err(|(_, e)| e)?;
        self.requests.kick()
    }

    /// How the guest is now.
    fn guest(&self) -> Guest {
        Guest {
            announced: self.announced,
            drops_caches: self.balloon.drops_caches(),
            poisons: !matches!(mm::on_free(), OnFree::Nothing),
        }
    }

    /// Makes the messages. May sleep.
    ///
    /// # Errors
    ///
    /// [`ENOSPC`] if the rings are too small.
    fn open(&self) -> Result<Office> {
        let ring = self.answers.ring_size()?;
        // The rings are never full, and with them no answer has to wait for another one.
        let windows = ring.saturating_sub(PLAIN + 1) / WINDOW_DESCRIPTORS;
        let windows = windows.min(WINDOWS);
        if windows == 0 || self.requests.ring_size()? < BUFFERS {
            return Err(ENOSPC);
        }
        let device = self.balloon.protocol().max_bitmap_bytes();
        let limit = BITMAP_BYTES.min(device.unwrap_or(0));
        let window = self.balloon.window().at_most(limit).ok_or(EINVAL)?;
        let answer = Answer::LEN.div_ceil(size_of::<u64>());
        let header = Header::LEN.div_ceil(size_of::<u64>());
        let bitmap = u32_as_usize(window.bytes()) / size_of::<u64>();

        let mut office = Office {
            desk: Desk::new(),
            work: Work::Nothing,
            plain: KVec::with_capacity(PLAIN, GFP_KERNEL)?,
            windows: KVec::with_capacity(windows, GFP_KERNEL)?,
            window,
            garbage_logged: false,
        };
        let plain = |kind| Message::new(core::iter::once(answer), kind, GFP_KERNEL);
        for _ in 0..PLAIN {
            let message = plain(Kind::Plain)?;
            office
                .plain
                .push_within_capacity(message)
                .map_err(|_| ENOMEM)?;
        }
        for _ in 0..windows {
            let message = Message::new(
                [answer + header, bitmap].into_iter(),
                Kind::Window,
                GFP_KERNEL,
            )?;
            office
                .windows
                .push_within_capacity(message)
                .map_err(|_| ENOMEM)?;
        }
        self.keeper.provide(plain(Kind::Farewell)?);
        Ok(office)
    }

    /// Works until there is nothing to do, or the host has to do something first. Returns whether it has.
    ///
    /// # Errors
    ///
    /// The device is broken or gone.
    fn serve(&self, office: &mut Office) -> Result<bool> {
        while !self.balloon.stopping() {
            self.collect(office)?;
            if self.take_request(office)? {
                continue;
            }
            if !office.desk.is_busy() {
                return Ok(false);
            }
            match self.step(office)? {
                Progress::More => (),
                Progress::Blocked => return Ok(true),
                Progress::Done => self.finish(office)?,
                Progress::No(no) => {
                    let answer = office.desk.fail(no, self.balloon.now_us());

                    self.answer(office, answer)?;
                    self.abandon(office);
                }
            }
            mm::relax();
        }
        Ok(false)
    }

    /// Takes the messages that the device has used.
    fn collect(&self, office: &mut Office) -> Result {
        while let Some(mut message) = self.answers.take_used()? {
            message.clear_sent();
            // There is room for all.
            let _ = match message.cargo {
                Kind::Plain => office.plain.push_within_capacity(message),
                Kind::Window => office.windows.push_within_capacity(message),
                Kind::Farewell => {
                    self.keeper.provide(message);
                    Ok(())
                }
            };
        }
        Ok(())
    }

    /// Takes a request, if there is one and its answers are at hand. Returns whether there was.
    fn take_request(&self, office: &mut Office) -> Result<bool> {
        if office.plain.len() < office.desk.answers_needed() {
            return Ok(false);
        }
        let Some(buffer) = self.requests.take_used()? else {
            return Ok(false);
        };
        let bytes = buffer.received::<{ Request::LEN }>();

        self.provide(buffer)?;
        let Some(request) = bytes.as_ref().and_then(|bytes| Request::decode(bytes)) else {
            if !core::mem::replace(&mut office.garbage_logged, true) {
                dev_warn!(
                    &*self.balloon.link.vdev,
                    "the host sent less than a request, which has no answer\n"
                );
            }
            return Ok(true);
        };
        let turn = office
            .desk
            .take(request, &self.guest(), self.balloon.now_us());

        self.answer(office, turn.older)?;
        self.abandon(office);
        match turn.task {
            Ok(task) => office.work = self.begin(task),
            Err(answer) => self.answer(office, Some(answer))?,
        }
        Ok(true)
    }

    /// Ends what is worked on. The host does not rely on pages that it was not told of by the last answer.
    fn abandon(&self, office: &mut Office) {
        let work = core::mem::replace(&mut office.work, Work::Nothing);

        if matches!(work, Work::Take(_) | Work::Name(Source::Kept, _)) {
            self.keeper.release();
        }
    }

    /// Where to begin with a task.
    fn begin(&self, task: request::Task) -> Work {
        match task {
            request::Task::Cancel => Work::Nothing,
            request::Task::DropCaches {
                page_cache,
                slab,
                until,
            } => Work::Drop {
                // No more than there is memory, or a guest that reads on and on would keep us for ever.
                little: if page_cache && until.is_some() {
                    self.balloon.page_size().bytes(mm::total_pages()) / LITTLE_BYTES + 1
                } else {
                    0
                },
                caches: [
                    page_cache.then_some(Cache::Pages),
                    slab.then_some(Cache::Slab),
                ],
                until: until.map(|pages| self.balloon.page_size().guest_count(pages)),
                before: mm::free_pages(),
            },
            request::Task::Compact => Work::Compact,
            request::Task::NameFreePages { balloon } => {
                let source = if balloon {
                    Source::FreeOrBallooned
                } else {
                    Source::Free
                };
                Work::Name(source, mm::all_frames())
            }
            request::Task::HoldFreePages { ms } => Work::Hold(ms),
            request::Task::Release => Work::Release,
        }
    }

    /// Does a part of the work. May sleep, but not for the host.
    fn step(&self, office: &mut Office) -> Result<Progress> {
        match &mut office.work {
            Work::Nothing => Ok(Progress::Done),
            Work::Drop {
                little,
                caches,
                until,
                before,
            } => {
                let (progress, done) = self.drop_some(little, caches, *until, *before);

                office.desk.note(done);
                Ok(progress)
            }
            Work::Compact => {
                let (progress, done) = self.compact();

                office.desk.note(done);
                Ok(progress)
            }
            Work::Hold(ms) => {
                if !self.keeper.begin(*ms) {
                    return Ok(Progress::Blocked);
                }
                self.expiry.schedule(msecs_to_jiffies(*ms));
                office.work = Work::Take(Block::MAX_ORDER);
                Ok(Progress::More)
            }
            Work::Take(order) => {
                if let Some(next) = self.take_blocks(*order) {
                    *order = next;
                } else {
                    office.work = Work::Name(Source::Kept, mm::all_frames());
                }
                Ok(Progress::More)
            }
            Work::Name(..) => self.name(office),
            Work::Release => {
                let value = self.keeper.release();

                office.desk.note(Done { value, detail: 0 });
                Ok(Progress::Done)
            }
        }
    }

    /// Drops a little of the page cache, or the next cache, unless enough is free.
    fn drop_some(
        &self,
        little: &mut u64,
        caches: &mut [Option<Cache>; 2],
        until: Option<u64>,
        before: u64,
    ) -> (Progress, Done) {
        let size = self.balloon.page_size();
        let free = mm::free_pages();
        let missing = until.map_or(u64::MAX, |pages| pages.saturating_sub(free));
        let progress = if missing == 0 {
            Progress::Done
        } else if *little > 0 {
            let bytes = size.bytes(missing).min(LITTLE_BYTES);

            // Whether more is free now is no measure: others may use it up meanwhile. If it does not go on this
            // way, the cache goes as a whole.
            *little = match mm::reclaim_cache(bytes) {
                Ok(()) => *little - 1,
                Err(_) => 0,
            };
            Progress::More
        } else {
            match caches.iter_mut().find_map(Option::take) {
                Some(cache) => {
                    self.balloon.drops_now.store(true, Relaxed);
                    let dropped = mm::drop_cache(cache);
                    self.balloon.drops_now.store(false, Relaxed);

                    match dropped {
                        Ok(()) => Progress::More,
                        Err(e) => Progress::No(no(e)),
                    }
                }
                None => Progress::Done,
            }
        };

        (
            progress,
            Done {
                value: size.balloon_count(mm::free_pages().saturating_sub(before)),
                detail: size.balloon_count(self.balloon.spare()),
            },
        )
    }

    /// Has the kernel compact its memory.
    fn compact(&self) -> (Progress, Done) {
        let order = self.balloon.block_order;
        let before = mm::pages_in_free_blocks(order);
        let progress = match mm::compact() {
            Ok(()) => Progress::Done,
            Err(e) => Progress::No(no(e)),
        };
        let (size, after) = (self.balloon.page_size(), mm::pages_in_free_blocks(order));

        (
            progress,
            Done {
                value: size.balloon_count(after.saturating_sub(before)),
                detail: size.balloon_count(after),
            },
        )
    }

    /// Takes some free blocks of an order, and keeps them. Returns which order comes next; `None` if there are
    /// no more, or no more are to be kept.
    fn take_blocks(&self, order: u32) -> Option<u32> {
        let mut spare = self.balloon.spare_unused();

        for _ in 0..BLOCKS {
            if spare < 1 << order {
                return order.checked_sub(1);
            }
            let Some(block) = Block::alloc(order) else {
                return order.checked_sub(1);
            };
            spare -= block.pages();
            if !self.keeper.keep(block) {
                return None;
            }
        }
        Some(order)
    }

    /// Names the pages of the next window that has any.
    fn name(&self, office: &mut Office) -> Result<Progress> {
        let Work::Name(source, frames) = &mut office.work else {
            return Ok(Progress::Done);
        };
        let source = *source;

        if source == Source::Kept && !self.keeper.is_taking() {
            return Ok(Progress::Done);
        }
        if frames.is_empty() {
            return Ok(Progress::Done);
        }
        let Some(mut message) = office.windows.pop() else {
            return Ok(Progress::Blocked);
        };
        let size = self.balloon.page_size();
        let first = size.balloon_count(frames.start);
        let (number, _) = office.window.locate(first);
        let end = number
            .saturating_add(1)
            .saturating_mul(office.window.frames());
        let piece = frames.start..size.guest_count(end).min(frames.end);
        let mut found = Found {
            size: office.window,
            number,
            window: None,
            words: message.piece_mut(1),
        };
        let mut each = |pages: Range<u64>| {
            found.note(size.balloon_count(pages.start)..size.balloon_count(pages.end));
        };

        frames.start = piece.end;
        match source {
            Source::Free => mm::for_each_free(piece, &mut each),
            Source::FreeOrBallooned => {
                mm::for_each_free(piece.clone(), &mut each);
                self.balloon.pages.for_each(piece, &mut each);
            }
            Source::Kept => self.keeper.for_each(piece, &mut each),
        }
        let (window, pages) = (found.window, found.pages());
        match window {
            Some(window) => self.send_window(office, message, window, pages)?,
            // There is room for all.
            None => drop(office.windows.push_within_capacity(message)),
        }
        Ok(Progress::More)
    }

    /// Sends a window with its answer.
    fn send_window(
        &self,
        office: &mut Office,
        mut message: KBox<Message>,
        window: Window,
        pages: u64,
    ) -> Result {
        let id = office.desk.id().unwrap_or(0);
        let Some(answer) = office.desk.part(pages, self.balloon.now_us()) else {
            return Err(EIO);
        };
        let words = window.words();
        let header = window.header(office.window, id, BALLOON_PAGE_SHIFT);

        self.fill(&mut message, answer);
        put(
            &mut message,
            Answer::LEN / size_of::<u64>(),
            &header.encode(),
        );
        message.select(0, 0..Answer::LEN + Header::LEN);
        message.select(
            1,
            words.start * size_of::<u64>()..words.end * size_of::<u64>(),
        );
        self.answers.send(message).map_err(|(_, e)| e)?;
        self.answers.kick()
    }

    /// Writes an answer into a message, with how things are now.
    fn fill(&self, message: &mut Message, answer: Answer) {
        let state = self.balloon.answer_state(self.keeper.is_told());

        fill(message, &Answer { state, ..answer });
    }

    /// Sends an answer without records.
    fn answer(&self, office: &mut Office, answer: Option<Answer>) -> Result {
        let Some(answer) = answer else {
            return Ok(());
        };
        // By the count of `Desk::answers_needed` there is one.
        let mut message = office.plain.pop().ok_or(EIO)?;

        self.fill(&mut message, answer);
        message.select(0, 0..Answer::LEN);
        self.answers.send(message).map_err(|(_, e)| e)?;
        self.answers.kick()
    }

    /// All is done: tells the host.
    fn finish(&self, office: &mut Office) -> Result {
        let work = core::mem::replace(&mut office.work, Work::Nothing);
        let now = self.balloon.now_us();

        if !matches!(work, Work::Name(Source::Kept, _)) {
            let answer = office.desk.finish(now);
            return self.answer(office, answer);
        }
        let (id, since) = (
            office.desk.id().unwrap_or(0),
            office.desk.since().unwrap_or(now),
        );
        let pages = office.desk.done().value;
        let mut sent = Ok(());
        let told = self.keeper.tell(id, pages, since, || {
            let answer = office.desk.finish(now);

            sent = self.answer(office, answer);
        });
        if let Err(reason) = told {
            let answer = office.desk.fail(No(Status::Failed, reason), now);

            sent = self.answer(office, answer);
        }
        sent
    }
}

/// What was found in a window.
struct Found<'a> {
    size: WindowSize,
    number: u64,
    window: Option<Window>,
    words: &'a mut [u64],
}

impl Found<'_> {
    /// Takes note of frames of the window. Called with the allocator locked.
    fn note(&mut self, frames: Range<u64>) {
        let (number, bit) = self.size.locate(frames.start);
        // CAST: a window has at most 2^23 frames.
        let n = frames
            .end
            .saturating_sub(frames.start)
            .min(self.size.frames()) as usize;

        if number != self.number || n == 0 {
            return;
        }
        PfnBitmap::new(self.words).set_run(bit, n);
        let window = self.window.get_or_insert(Window::new(number, bit));
        window.note(bit);
        window.note(bit.saturating_add(n - 1));
    }

    /// The number of frames.
    fn pages(&mut self) -> u64 {
        usize_as_u64(PfnBitmap::new(self.words).weight())
    }
}

/// How an error of the kernel is told to the host.
fn no(e: Error) -> No {
    match e {
        ENOENT | ENODEV => No(Status::Unsupported, Reason::NoInterface),
        ENOMEM => No(Status::Refused, Reason::NoMemory),
        _ => No(Status::Failed, Reason::Error),
    }
}

impl Job for Requests {
    fn run(&self) -> Option<Jiffies> {
        let mut guard = self.office.lock();
        let office = (*guard).as_mut()?;

        match self.serve(office) {
            Ok(true) => Some(msecs_to_jiffies(REST_MS)),
            // If the device is broken or gone, what is kept goes with it, when it is stopped.
            Ok(false) | Err(_) => None,
        }
    }
}

/// What there is if the device asks for something.
pub(super) struct RequestPart {
    task: Arc<Task<Requests>>,
    requests: Arc<Requests>,
}

impl RequestPart {
    /// Not at work yet. May sleep.
    pub(super) fn new(queue: Arc<WorkQueue>, balloon: Arc<Balloon>) -> Result<Self> {
        let answers = Arc::pin_init(
            AnswerQueue::new(c"answer", virtio::Interrupts::Always),
            GFP_KERNEL,
        )?;
        let keeper = Arc::pin_init(Keeper::new(balloon.clone(), answers.clone()), GFP_KERNEL)?;
        let announced = match balloon.protocol() {
            Protocol::PageBitmap(device) => device.requests,
            Protocol::PageBitmap2016 | Protocol::PfnArray => 0,
        };
        let expiry = Task::new(queue.clone(), keeper.clone());
        let expiry = Arc::pin_init(expiry, GFP_KERNEL)?;
        let requests = Arc::pin_init(
            RequestQueue::new(c"request", virtio::Interrupts::Always),
            GFP_KERNEL,
        )?;
        let requests = Arc::pin_init(
            pin_init!(Requests {
                balloon,
                announced,
                requests,
                answers,
                keeper,
                expiry,
                office <- new_mutex!(None, "Requests::office"),
            }),
            GFP_KERNEL,
        )?;
        let task = Arc::pin_init(Task::new(queue, requests.clone()), GFP_KERNEL)?;

        Ok(Self { task, requests })
    }

    /// The queues, in the order of their numbers.
    pub(super) fn queues(&self) -> (&RequestQueue, &AnswerQueue) {
        (&self.requests.requests, &self.requests.answers)
    }

    /// What keeps pages for the host.
    pub(super) fn keeper(&self) -> Arc<Keeper> {
        self.requests.keeper.clone()
    }

    /// Begins to serve a device. May sleep.
    ///
    /// Returns what takes pages back when the guest is short of memory; to be dropped before [`Self::stop`].
    ///
    /// # Errors
    ///
    /// [`ENOSPC`] if the rings are too small; nothing is served then.
    pub(super) fn start(&self) -> Result<Pressure<Relief>> {
        let relief = Relief {
            keeper: self.keeper(),
            task: self.requests.expiry.clone(),
        };
        let relief = Arc::new(relief, GFP_KERNEL)?;
        let office = self.requests.open()?;
        let pressure = Pressure::new(c"virtio-balloon-rs-hold", relief)?;
        let words = Request::LEN.div_ceil(size_of::<u64>());

        for _ in 0..BUFFERS {
            let buffer = virtio::Message::new_writable(words, (), GFP_KERNEL)?;
            self.requests.provide(buffer)?;
        }
        *self.requests.office.lock() = Some(office);
        self.requests.expiry.enable();
        self.task.enable();
        self.wake();
        Ok(pressure)
    }

    /// The device has used something. Can be called from any context.
    pub(super) fn wake(&self) {
        self.task.schedule(0);
    }

    /// Ends the work, tells the host if there are messages at hand, and gives all pages back. May sleep.
    pub(super) fn stop(&self) {
        if self.requests.office.lock().is_none() {
            // It was not started.
            return;
        }
        self.task.disable();
        self.requests.expiry.disable();
        self.requests.keeper.end(Reason::Stopping);
        if let Some(mut office) = self.requests.office.lock().take() {
            let now = self.requests.balloon.now_us();
            let answer = office.desk.give_up(Reason::Stopping, now);

            // The device may be gone already.
            let _ = self.requests.answer(&mut office, answer);
        }
        self.requests.keeper.forget();
    }
}
