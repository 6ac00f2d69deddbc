// SPDX-License-Identifier: GPL-2.0

//! Telling the host which memory is free, so that a migration need not copy it.
//!
//! A block that was hinted stays out of use until the host is done, or until the guest is short of memory.
//! It goes back to the guest only after the device has used it: a hint that the host looked at later would
//! be about memory that lives again.

use super::{
    balloon::Balloon,
    oom::in_time, //
};
use crate::{
    logic::{
        hint::{
            self,
            Hinting,
            Todo, //
        },
        wire, //
    },
    mm::{
        self,
        Block,
        OomHandler,
        Pressure,
        Shrink, //
    },
    page_list::PageList,
    virtio::{
        BlockQueue,
        Used, //
    },
    work::{
        Job,
        Task,
        WorkQueue, //
    },
};
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex,
        SpinLock, //
    },
    time::{
        msecs_to_jiffies,
        Instant,
        Jiffies,
        Monotonic, //
    },
};

/// How long a wait for the host sleeps before it looks around, in milliseconds.
const SLICE_MS: u32 = 500;
/// How long to wait for room for the last word of a round, in milliseconds.
const LAST_MS: i64 = 2000;
/// After how many blocks the host is told that there are some.
const KICK_EVERY: u32 = 16;
/// The most bytes that the device has at a time: 256 MiB, and this part of the guest's memory. Until it has used
/// them nobody can have them back, however short of memory the guest is.
const MOST_LENT: u64 = 256 << 20;
const LENT_PART: u64 = 8;

/// What only the work item knows.
struct Rounds {
    hinting: Hinting,
    /// Whether blocks that come back from the device are kept.
    keeps: bool,
}

/// Blocks that were hinted and that the device has used, kept from the guest until the host is done, or until
/// somebody needs them.
///
/// Locks: `blocks` is innermost, and held for as long as it takes to link a block. It is a spinlock, so that reclaim
/// never finds it with somebody who was preempted.
#[pin_data]
pub(super) struct Held {
    #[pin]
    blocks: SpinLock<PageList>,
    /// The number of guest pages in `blocks`.
    pages: Atomic<u64>,
    /// Somebody has needed them since the round began.
    needed: Atomic<bool>,
}

impl Held {
    /// None yet.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            blocks <- new_spinlock!(PageList::new(), "Held::blocks"),
            pages: Atomic::new(0),
            needed: Atomic::new(false),
        })
    }

    /// Keeps a block, unless somebody needs them.
    fn keep(&self, block: Block) {
        if self.needed.load(Relaxed) {
            return;
        }
        let mut blocks = self.blocks.lock();

        blocks.push(block);
        self.pages.store(blocks.pages(), Relaxed);
    }

    /// Gives all of them back to the guest. Returns how many guest pages. May sleep.
    pub(super) fn release(&self) -> u64 {
        let mut blocks = self.blocks.lock();
        let list = core::mem::replace(&mut *blocks, PageList::new());

        self.pages.store(0, Relaxed);
        drop(blocks);
        list.pages()
    }

    /// The same because the guest needs them: there will be no more of this round.
    pub(super) fn give_up(&self) -> u64 {
        self.needed.store(true, Relaxed);
        self.release()
    }

    /// The same for about so many guest pages.
    fn give_some(&self, pages: u64) -> u64 {
        let mut list = PageList::new();
        let mut blocks = self.blocks.lock();

        self.needed.store(true, Relaxed);
        while list.pages() < pages {
            let Some(block) = blocks.pop() else {
                break;
            };
            list.push(block);
        }
        self.pages.store(blocks.pages(), Relaxed);
        drop(blocks);
        list.pages()
    }
}

/// Hints for the device of a balloon.
///
/// Locks: `rounds` is the work item's; under it that of [`Held`], and those of [`crate::virtio::Config`] and of
/// the queue. It is not held together with `channel` of [`Balloon`].
#[pin_data]
pub(super) struct Hints {
    balloon: Arc<Balloon>,
    #[pin]
    queue: BlockQueue,
    #[pin]
    rounds: Mutex<Rounds>,
}

impl Hints {
    fn new(balloon: Arc<Balloon>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            balloon,
            queue <- BlockQueue::new(c"free_page_hint"),
            rounds <- new_mutex!(
                Rounds {
                    hinting: Hinting::new(),
                    keeps: false,
                },
                "Hints::rounds"
            ),
        })
    }

    /// Does what the device wants, until it wants nothing new.
    fn serve(&self) -> Result {
        let mut rounds = self.rounds.lock();

        self.queue.set_quiet();
        while !self.balloon.stopping() {
            let changes = self.balloon.changes();

            self.collect(rounds.keeps)?;
            let word = self.command()?;
            match rounds.hinting.next(word) {
                Todo::Nothing => (),
                Todo::Release => {
                    rounds.keeps = false;
                    self.balloon.held.release();
                }
                Todo::Begin(id) => {
                    rounds.keeps = true;
                    self.round(&rounds.hinting, id)?;
                }
            }
            if self.balloon.changes() == changes && !self.queue.watch()? {
                break;
            }
        }
        Ok(())
    }

    /// Tells the host of free memory, block by block, until there is no more or it wants no more.
    fn round(&self, hinting: &Hinting, id: u32) -> Result {
        let mut changes = self.balloon.changes();
        let mut wanted = || -> Result<bool> {
            // Config space is read only after it has changed: some hosts show the id no longer than until
            // the round begins.
            let now = self.balloon.changes();
            let same = now == changes || hinting.goes_on(self.command()?);

            changes = now;
            Ok(same && !self.balloon.stopping() && !self.balloon.held.needed.load(Relaxed))
        };
        let mut order = Block::MAX_ORDER;
        let mut untold = 0;

        self.balloon.held.needed.store(false, Relaxed);
        if !self.say(id, &mut wanted)? {
            return Ok(());
        }
        while wanted()? {
            let Some(block) = self.next_block(&mut order) else {
                break;
            };
            if !self.lend(block, &mut wanted)? {
                break;
            }
            untold += 1;
            if untold == KICK_EVERY {
                untold = 0;
                self.queue.kick()?;
                self.collect(true)?;
                mm::relax();
            }
        }
        let since = Instant::<Monotonic>::now();
        // The host has the right to know, also if it wants no more; but not to keep us.
        let mut patient = || -> Result<bool> {
            Ok(!self.balloon.stopping() && since.elapsed().as_millis() < LAST_MS)
        };
        self.say(hint::STOP, &mut patient)?;
        Ok(())
    }

    /// What config space says.
    fn command(&self) -> Result<u32> {
        self.balloon.config.read_le32(wire::CONFIG_HINT_CMD_ID)
    }

    /// Sends a word, when there is room. Returns false if it was not `wanted` any more before that.
    fn say(&self, word: u32, wanted: &mut dyn FnMut() -> Result<bool>) -> Result<bool> {
        let bytes = if self.balloon.link.little_endian {
            word.to_le_bytes()
        } else {
            word.to_be_bytes()
        };

        loop {
            match self.queue.tell(bytes) {
                Ok(()) => return self.queue.kick().map(|()| true),
                Err(ENOSPC) => (),
                Err(e) => return Err(e),
            }
            if !self.make_room(wanted)? {
                return Ok(false);
            }
        }
    }

    /// Lends a block, when there is room. Returns false if it was not `wanted` any more before that.
    fn lend(&self, mut block: Block, wanted: &mut dyn FnMut() -> Result<bool>) -> Result<bool> {
        let most = self.balloon.page_size().pages_in(MOST_LENT);
        let most = most.min(mm::total_pages() / LENT_PART);

        loop {
            block = match self.queue.lend(block, most) {
                Ok(()) => return Ok(true),
                Err((block, ENOSPC)) => block,
                Err((_, e)) => return Err(e),
            };
            if !self.make_room(wanted)? {
                return Ok(false);
            }
        }
    }

    /// Waits until the device has used something, and takes it. Returns false if there is still nothing
    /// when the hints are not `wanted` any more.
    fn make_room(&self, wanted: &mut dyn FnMut() -> Result<bool>) -> Result<bool> {
        self.queue.kick()?;
        while !self.collect(true)? {
            if !wanted()? {
                return Ok(false);
            }
            self.queue.wait(msecs_to_jiffies(SLICE_MS));
        }
        Ok(true)
    }

    /// Takes what the device has used. Blocks are kept, or go back to the guest. Returns whether there was
    /// anything.
    fn collect(&self, keep: bool) -> Result<bool> {
        let mut any = false;

        while let Some(used) = self.queue.take_used()? {
            any = true;
            if let (Used::Block(block), true) = (used, keep) {
                self.balloon.held.keep(block);
            }
        }
        Ok(any)
    }

    /// A block of free memory: as large as there are any, and not from what the guest needs to go on.
    fn next_block(&self, order: &mut u32) -> Option<Block> {
        let smallest = self.balloon.block_order.min(Block::MAX_ORDER);
        let spare = self.balloon.spare_unused();

        loop {
            if spare >= 1 << *order {
                if let Some(block) = Block::alloc(*order) {
                    return Some(block);
                }
            }
            if *order <= smallest {
                return None;
            }
            *order -= 1;
        }
    }
}

impl Shrink for Hints {
    fn count(&self) -> u64 {
        self.balloon.held.pages.load(Relaxed)
    }

    fn shrink(&self, pages: u64) -> u64 {
        self.balloon.held.give_some(pages)
    }
}

impl OomHandler for Hints {
    /// Gives back all that is kept; if that is nothing, what the device uses within half a second.
    fn out_of_memory(&self) -> u64 {
        let mut freed = self.balloon.held.give_up();

        let _ = in_time(|| {
            loop {
                match self.queue.take_used() {
                    Ok(Some(Used::Block(block))) => freed += block.pages(),
                    Ok(Some(Used::Word)) => (),
                    Ok(None) => break,
                    // It comes back when the device is reset.
                    Err(_) => return Some(()),
                }
            }
            (freed > 0 || self.queue.lent() == 0).then_some(())
        });
        freed
    }
}

impl Job for Hints {
    fn run(&self) -> Option<Jiffies> {
        // On an error the device is broken or gone: what it has comes back when it is reset.
        let _ = self.serve();
        None
    }
}

/// What there is if the device wants hints.
pub(super) struct HintPart {
    task: Arc<Task<Hints>>,
    hints: Arc<Hints>,
}

impl HintPart {
    /// Not at work yet. May sleep.
    pub(super) fn new(queue: Arc<WorkQueue>, balloon: Arc<Balloon>) -> Result<Self> {
        let hints = Arc::pin_init(Hints::new(balloon), GFP_KERNEL)?;
        let task = Arc::pin_init(Task::new(queue, hints.clone()), GFP_KERNEL)?;

        Ok(Self { task, hints })
    }

    /// The queue of the hints.
    pub(super) fn queue(&self) -> &BlockQueue {
        &self.hints.queue
    }

    /// Begins to serve a device, which knows nothing of earlier rounds. May sleep.
    ///
    /// Returns what takes blocks back when the guest is short of memory; to be dropped before
    /// [`Self::stop`].
    pub(super) fn start(&self) -> Result<Pressure<Hints>> {
        let pressure = Pressure::new(c"virtio-balloon-rs", self.hints.clone())?;
        let mut rounds = self.hints.rounds.lock();

        rounds.hinting = Hinting::new();
        rounds.keeps = false;
        drop(rounds);
        self.task.enable();
        self.wake();
        Ok(pressure)
    }

    /// The device may want something, or has used something. Can be called from any context.
    pub(super) fn wake(&self) {
        self.task.schedule(0);
    }

    /// Ends the work and gives back what the device has used. May sleep.
    pub(super) fn stop(&self) {
        self.task.disable();
        self.hints.balloon.held.release();
    }
}
