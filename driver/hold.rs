// SPDX-License-Identifier: GPL-2.0

//! Free pages that are kept out of use for the host.
//!
//! Until the host releases them, or the time is over, or the guest needs them. Whoever ends it before the
//! host does tells the host first, and gives up pages then: a host that stops the guest and finds no such
//! message knows that all pages were held when the guest stopped.

use super::{
    balloon::Balloon,
    request::{
        fill,
        AnswerQueue,
        Message, //
    },
};
use crate::{
    logic::{
        hold::Hold,
        request::{
            Answer,
            Reason, //
        },
    },
    mm::{
        Block,
        MarkedPages,
        OomHandler,
        Shrink, //
    },
    page_list::PageList,
    work::{
        Job,
        Task, //
    },
};
use core::ops::Range;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
    time::{
        msecs_to_jiffies,
        Jiffies, //
    },
};

/// What is kept, and for whom.
struct Kept {
    hold: Hold,
    /// Pages, if there are any: also after the end of a hold, until all are given up.
    pages: MarkedPages,
    /// When the time is over, in milliseconds.
    deadline: u64,
    /// The message that tells the end; none while the device has it.
    farewell: Option<KBox<Message>>,
}

/// Keeps pages.
///
/// Locks: `kept` is taken with nothing of ours held, also by reclaim and when the guest is out of memory;
/// under it only that of the queue. Pages are allocated and freed without it, nothing else is allocated under
/// it, and nobody waits for the host with it.
#[pin_data]
pub(super) struct Keeper {
    balloon: Arc<Balloon>,
    answers: Arc<AnswerQueue>,
    #[pin]
    kept: Mutex<Kept>,
    /// The number of guest pages in `kept`.
    pages: Atomic<u64>,
    /// Whether the host relies on them.
    told: Atomic<bool>,
}

impl Keeper {
    /// Keeps nothing yet. May sleep.
    pub(super) fn new(balloon: Arc<Balloon>, answers: Arc<AnswerQueue>) -> impl PinInit<Self> {
        pin_init!(Self {
            balloon,
            answers,
            kept <- new_mutex!(
                Kept {
                    hold: Hold::Nothing,
                    pages: MarkedPages::new(),
                    deadline: 0,
                    farewell: None,
                },
                "Keeper::kept"
            ),
            pages: Atomic::new(0),
            told: Atomic::new(false),
        })
    }

    /// Takes in the message that tells the end, at first and whenever the device has used it. May sleep.
    pub(super) fn provide(&self, farewell: KBox<Message>) {
        self.kept.lock().farewell = Some(farewell);
    }

    /// Whether the host relies on pages that are kept.
    pub(super) fn is_told(&self) -> bool {
        self.told.load(Relaxed)
    }

    /// Begins to keep pages, for `ms` milliseconds at most; ends what was kept before. Returns false if the
    /// device has not yet used the message about the end of an earlier one. May sleep.
    pub(super) fn begin(&self, ms: u32) -> bool {
        self.end(Reason::Newer);

        let mut kept = self.kept.lock();
        if kept.farewell.is_none() {
            return false;
        }
        kept.hold.begin();
        kept.deadline = self.balloon.now_ms().saturating_add(u64::from(ms));
        true
    }

    /// Keeps a block. Returns false if no more are to be kept, in which case this one is not, either. May
    /// sleep.
    pub(super) fn keep(&self, block: Block) -> bool {
        let mut kept = self.kept.lock();

        if !kept.hold.is_taking() {
            drop(kept);
            drop(block);
            return false;
        }
        kept.pages.push(block);
        self.pages.store(kept.pages.pages(), Relaxed);
        true
    }

    /// Whether pages are kept that the host was not told of yet. May sleep.
    pub(super) fn is_taking(&self) -> bool {
        self.kept.lock().hold.is_taking()
    }

    /// Calls `each` with the runs of guest pages within `frames` that are kept. May sleep.
    pub(super) fn for_each(&self, frames: Range<u64>, each: &mut dyn FnMut(Range<u64>)) {
        self.kept.lock().pages.for_each(frames, each);
    }

    /// Has `send` tell the host that `pages` balloon pages are kept for the request `id`, which was taken at
    /// `since`. May sleep.
    ///
    /// # Errors
    ///
    /// Why they are not kept any more.
    pub(super) fn tell(
        &self,
        id: u32,
        pages: u64,
        since: u64,
        send: impl FnOnce(),
    ) -> Result<(), Reason> {
        let mut kept = self.kept.lock();

        kept.hold.tell(id, pages, since)?;
        self.told.store(true, Relaxed);
        // With the lock held, so that nobody can tell the host of the end before.
        send();
        Ok(())
    }

    /// Ends the hold, tells the host if it does not know, and gives all pages back. Returns how many guest
    /// pages. Allocates nothing. May sleep.
    pub(super) fn end(&self, reason: Reason) -> u64 {
        let mut kept = self.kept.lock();

        self.say(&mut kept, reason);
        let pages = self.take_all(&mut kept);
        drop(kept);
        pages.pages()
    }

    /// Ends the hold for the host, and gives all pages back. Returns how many balloon pages the host relied
    /// on. May sleep.
    pub(super) fn release(&self) -> u64 {
        let mut kept = self.kept.lock();
        let told = kept.hold.release();

        self.told.store(false, Relaxed);
        let pages = self.take_all(&mut kept);
        drop(kept);
        drop(pages);
        told
    }

    /// Forgets the message, which is to be made anew when the device is started again. May sleep.
    pub(super) fn forget(&self) {
        let farewell = self.kept.lock().farewell.take();

        drop(farewell);
    }

    fn take_all(&self, kept: &mut Kept) -> MarkedPages {
        self.pages.store(0, Relaxed);
        // With another mark, since these are not ours any more although they bear the old one.
        core::mem::replace(&mut kept.pages, MarkedPages::new())
    }

    /// Tells the host that the hold ends, if it relies on it. Allocates nothing, and does not sleep.
    fn say(&self, kept: &mut Kept, reason: Reason) {
        let answer = kept.hold.end(reason, self.balloon.now_us());

        self.told.store(false, Relaxed);
        let Some(answer) = answer else {
            return;
        };
        if let Some(mut message) = kept.farewell.take() {
            let state = self.balloon.answer_state(false);

            fill(&mut message, &Answer { state, ..answer });
            message.select(0, 0..Answer::LEN);
            match self.answers.send(message) {
                // If the device cannot be told any more it will be reset before long.
                Ok(()) => drop(self.answers.kick()),
                Err((message, _)) => kept.farewell = Some(message),
            }
        }
    }
}

impl Job for Keeper {
    /// Ends a hold whose time is over, and gives up what is left of one that has ended.
    fn run(&self) -> Option<Jiffies> {
        let mut kept = self.kept.lock();
        let holds = kept.hold.is_taking() || kept.hold.is_told();
        let left = kept.deadline.saturating_sub(self.balloon.now_ms());

        if holds && left > 0 {
            return Some(msecs_to_jiffies(u32::try_from(left).unwrap_or(u32::MAX)));
        }
        self.say(&mut kept, Reason::TimeOut);
        let pages = self.take_all(&mut kept);
        drop(kept);
        drop(pages);
        None
    }
}

/// Gives kept pages back when the guest is short of memory.
pub(super) struct Relief {
    pub(super) keeper: Arc<Keeper>,
    pub(super) task: Arc<Task<Keeper>>,
}

impl Shrink for Relief {
    /// None while the host has caches dropped, for which the kernel asks everybody: they are no cache.
    fn count(&self) -> u64 {
        if self.keeper.balloon.drops_now.load(Relaxed) {
            return 0;
        }
        self.keeper.pages.load(Relaxed)
    }

    fn shrink(&self, pages: u64) -> u64 {
        let mut list = PageList::new();
        let mut kept = self.keeper.kept.lock();

        self.keeper.say(&mut kept, Reason::Pressure);
        while list.pages() < pages {
            let Some(block) = kept.pages.pop() else {
                break;
            };
            list.push(block);
        }
        self.keeper.pages.store(kept.pages.pages(), Relaxed);
        drop(kept);
        // The rest is given up without making anybody wait.
        self.task.schedule(0);
        list.pages()
    }
}

impl OomHandler for Relief {
    fn out_of_memory(&self) -> u64 {
        self.keeper.end(Reason::Pressure)
    }
}
