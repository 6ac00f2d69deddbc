// SPDX-License-Identifier: GPL-2.0

//! Giving memory back when the guest is out of it.

use super::{
    balloon::Balloon,
    channel::{
        Channel,
        Direction,
        Flight, //
    },
};
use crate::{
    logic::{
        oom::{
            Leave,
            OomPace, //
        },
        wire, //
    },
    mm::OomHandler,
    page_list::PageList,
    work::Task, //
};
use kernel::{
    error::Result,
    sync::{
        atomic::Relaxed,
        Arc, //
    },
    time::{
        delay::fsleep,
        Delta, //
    },
};

/// Gives memory of the balloon back when the guest is out of it.
pub(super) struct OomDeflate {
    pub(super) balloon: Arc<Balloon>,
    pub(super) task: Arc<Task<Balloon>>,
}

/// Asks until there is an answer, for 500 ms in all: who is out of memory waits no longer for anybody. May
/// sleep.
pub(super) fn in_time<R>(mut ask: impl FnMut() -> Option<R>) -> Option<R> {
    const TRIES: u32 = 50;
    const TRY_MS: i64 = 10;

    for _ in 0..TRIES {
        let answer = ask();

        if answer.is_some() {
            return answer;
        }
        fsleep(Delta::from_millis(TRY_MS));
    }
    None
}

impl OomHandler for OomDeflate {
    fn out_of_memory(&self) -> u64 {
        let balloon = &*self.balloon;
        let now = balloon.now_ms();
        let bytes = balloon.oom.lock().hit(now);
        let want = balloon.page_size().pages_in(bytes);
        let freed = balloon.relieve(|balloon, freed, list| {
            balloon.pages.remove(want.saturating_sub(freed), list);
        });

        // The worker tells the device the size of the balloon, and comes back after the pause.
        self.task.schedule(0);
        freed
    }
}

impl Balloon {
    /// Gives the pages back that `take` puts into the list; it is told how many the guest has already, of
    /// those that the host was slow to answer for. Returns how many the guest has now. Allocates nothing, and
    /// waits neither for the worker nor for the host for long.
    pub(super) fn relieve(&self, take: impl Fn(&Self, u64, &mut PageList)) -> u64 {
        // The worker looks at this and stops taking memory.
        self.waiting.add(1, Relaxed);
        let freed = in_time(|| {
            let mut guard = self.channel.try_lock()?;

            Some(match &mut *guard {
                Some(channel) => self.relieve_by(channel, &take),
                None => 0,
            })
        });
        self.waiting.fetch_sub(1, Relaxed);
        freed.unwrap_or(0)
    }

    /// The same for whoever has the channel.
    fn relieve_by(&self, channel: &mut Channel, take: impl Fn(&Self, u64, &mut PageList)) -> u64 {
        let flight = Flight::RELIEF;
        let mut freed = self.settle(channel);
        let mut list = PageList::new();
        let must_tell = self.negotiated.features.has(wire::F_MUST_TELL_HOST);

        if !channel.pages_of(flight).is_empty() || (must_tell && !channel.is_usable()) {
            return freed;
        }
        take(self, freed, &mut list);
        if must_tell {
            channel.pages_of(flight).append(list);
            channel.in_passing(|channel| {
                // What the host does not learn of in time the worker tells it later.
                match self.tell_all(channel, Direction::Deflate, flight) {
                    Ok(()) => {
                        let _ = channel.drain(Direction::Deflate, flight);
                    }
                    Err(_) => *channel.relief_untold() = true,
                }
            });
            freed += self.settle(channel);
        } else {
            // The host may learn of it when the pages are in use already, or not at all.
            channel.in_passing(|channel| {
                let told = list.iter().try_for_each(|(pfn, order)| {
                    channel.tell(Direction::Deflate, flight, pfn, order)
                });
                let _ = told.and_then(|()| channel.flush(Direction::Deflate));
            });
            freed += list.pages();
        }
        freed
    }

    /// Tells the host of what it has not learnt of an earlier relief, waits for its answer, and frees
    /// the pages. May sleep for as long as the host takes.
    ///
    /// # Errors
    ///
    /// The device is unusable.
    pub(super) fn finish_relief(&self, channel: &mut Channel) -> Result {
        if *channel.relief_untold() {
            self.tell_all(channel, Direction::Deflate, Flight::RELIEF)?;
            *channel.relief_untold() = false;
        }
        channel.drain(Direction::Deflate, Flight::RELIEF)?;
        self.settle(channel);
        Ok(())
    }

    /// Frees the pages of an earlier relief if the host has answered meanwhile. Returns how many.
    fn settle(&self, channel: &mut Channel) -> u64 {
        let flight = Flight::RELIEF;

        if channel.pages_of(flight).is_empty()
            || *channel.relief_untold()
            || channel.is_busy_with(Direction::Deflate, flight) != Ok(false)
        {
            return 0;
        }
        let list = core::mem::replace(channel.pages_of(flight), PageList::new());
        list.pages()
    }

    /// What may be taken from the guest now, given when it was out of memory.
    pub(super) fn leave(&self) -> Leave {
        self.oom.lock().leave(self.now_ms())
    }

    /// What is taken at a time after the guest was out of memory, in guest pages.
    pub(super) fn slow_pages(&self) -> u64 {
        self.page_size().pages_in(OomPace::SLOW_BYTES)
    }
}
