// SPDX-License-Identifier: GPL-2.0

//! Inflating and deflating, in steps towards the target.

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
        target::{
            self,
            Step, //
        },
    },
    mm::{
        self,
        Block,
        MemoryNow, //
    },
    page_list::PageList,
};
use kernel::{
    prelude::*,
    time::{
        msecs_to_jiffies,
        Jiffies, //
    },
};

/// The most bytes in a batch of blocks: 1 GiB.
const BLOCK_BATCH: u64 = 1 << 30;
/// The most bytes in a batch of single pages: 128 MiB.
const PAGE_BATCH: u64 = 128 << 20;
/// The most bytes in a step; after each step the target and what the guest can spare are looked up
/// anew.
const STEP: u64 = 4 << 30;
/// The most bytes that are held back in large pieces: 8 MiB.
const ASIDE: u64 = 8 << 20;
/// The smallest order of pieces to hold back.
const ASIDE_ORDER: u32 = 3;
/// How long to leave the channel to somebody who is out of memory, in milliseconds.
const GIVE_WAY_MS: u32 = 50;
/// How long to wait for compaction to put pages back, in milliseconds.
const ISOLATED_MS: u32 = 20;

impl Balloon {
    /// Moves towards the target until it is met, or cannot be now. Returns when to try again.
    pub(super) fn resize(&self) -> Option<Jiffies> {
        while !self.stopping() {
            let Ok(step) = self.next_step() else {
                return None;
            };
            let mut guard = self.channel.lock();
            let channel = (*guard).as_mut()?;

            if self.finish_relief(channel).is_err() || self.update_actual().is_err() {
                return None;
            }
            self.adopt_messages(channel);
            let moved = match step {
                Step::Rest => {
                    self.pace.lock().moved();
                    return None;
                }
                Step::Starved => Ok(0),
                Step::Inflate(pages) => match self.leave() {
                    Leave::Free => self.inflate(channel, pages),
                    Leave::Pause(ms) => return Some(msecs_to_jiffies(ms)),
                    Leave::Slow => {
                        let taken = self.inflate(channel, pages.min(self.slow_pages()));
                        if matches!(taken, Ok(1..)) {
                            return Some(msecs_to_jiffies(OomPace::SLOW_MS));
                        }
                        taken
                    }
                },
                Step::Deflate(pages) => self.deflate(channel, pages),
            };
            match (moved, step) {
                (Ok(0), _) if self.is_wanted() => {
                    return Some(msecs_to_jiffies(GIVE_WAY_MS));
                }
                (Ok(0), Step::Inflate(_)) if self.must_give_way() => (),
                (Ok(0), Step::Deflate(_)) => return Some(msecs_to_jiffies(ISOLATED_MS)),
                // What is hinted can be had as well.
                (Ok(0), _) if self.held.give_up() > 0 => (),
                (Ok(0), _) => return Some(self.starved()),
                (Ok(_), _) => self.pace.lock().moved(),
                (Err(_), _) => return None,
            }
            mm::relax();
        }
        None
    }

    /// The pages that can be taken from the guest now.
    pub(super) fn spare(&self) -> u64 {
        mm::available_pages().saturating_sub(self.reserve())
    }

    /// The pages of these that nobody uses. May sleep.
    pub(super) fn spare_unused(&self) -> u64 {
        let now = MemoryNow::read();

        now.free.min(now.available).saturating_sub(self.reserve())
    }

    /// Reads the target, and decides.
    fn next_step(&self) -> Result<Step> {
        // In this order, so that a change in between interrupts the step.
        self.attempts_since_change();
        let target = self.read_target()?;

        Ok(target::step(
            target,
            self.pages.pages(),
            mm::available_pages(),
            self.reserve(),
            self.page_size().pages_in(STEP),
        ))
    }

    /// Takes up to `want` pages from the guest: blocks as long as there are any, then single pages.
    /// Returns how many more there are.
    ///
    /// A batch is collected while the host works on the one before.
    ///
    /// # Errors
    ///
    /// The device is unusable. Pages that were on their way stay there.
    fn inflate(&self, channel: &mut Channel, want: u64) -> Result<u64> {
        let before = self.pages.pages();
        let mut flight = Flight::FIRST;
        let mut left = want;
        let mut next = Some(self.max_order());

        while let Some(order) = next.filter(|_| left > 0 && !self.must_give_way()) {
            let size = 1 << order;
            let limit = self.page_size().pages_in(if order >= self.block_order {
                BLOCK_BATCH
            } else {
                PAGE_BATCH
            });
            let batch = left.min(limit).min(self.spare());
            let mut got = 0;

            if batch >= size {
                let aside = self.set_aside(order);
                got = self.collect(channel, flight, order, batch)?;
                drop(aside);
                channel.flush(Direction::Inflate)?;
                left -= got;
                flight = flight.other();
                self.land(channel, flight)?;
            }
            if got + size <= batch || batch < size {
                // There are no more of this size, or no more of them are wanted.
                next = target::next_order(order, self.block_order);
            }
        }
        channel.forget_batch();
        self.land(channel, flight.other())?;
        self.land(channel, flight)?;
        Ok(self.pages.pages() - before)
    }

    /// Holds back some of the largest pieces of free memory while blocks or chunks are taken, so that the
    /// guest is left with more than single pages, from which it could not even start a thread. Single
    /// pages come from the smallest pieces anyway.
    fn set_aside(&self, order: u32) -> PageList {
        let mut aside = PageList::new();
        let want = (self.reserve() / 2).min(self.page_size().pages_in(ASIDE));
        let mut size = self.block_order;

        while order > 0 && size >= ASIDE_ORDER && aside.pages() + (1 << size) <= want {
            match Block::alloc(size) {
                Some(block) => aside.push(block),
                None => size -= 1,
            }
        }
        aside
    }

    /// Allocates blocks of an order and puts them into messages of a flight. Returns how many pages
    /// there are, which is less than `want` if memory is short.
    fn collect(&self, channel: &mut Channel, flight: Flight, order: u32, want: u64) -> Result<u64> {
        let mut got = 0;

        while got + (1 << order) <= want && !(got % 1024 == 0 && self.must_give_way()) {
            let next = match order {
                0 => channel.next_page(want - got),
                order if order < self.block_order => Block::alloc_chunk(order),
                order => Block::alloc(order),
            };
            let Some(mut block) = next else {
                break;
            };
            let pfn = block.pfn();

            if !channel.can_tell(pfn, order) {
                // Too far up for this host. It goes back to the guest, who would give it to us
                // again and again: enough of this size.
                break;
            }
            block.mark_offline();
            got += block.pages();
            channel.pages_of(flight).push(block);
            channel.tell(Direction::Inflate, flight, pfn, order)?;
            if got % 1024 == 0 {
                mm::relax();
            }
        }
        Ok(got)
    }

    /// Whether taking pages should end early.
    fn must_give_way(&self) -> bool {
        self.interrupted() || self.stopping()
    }

    /// Waits until the host has taken the pages of a flight, and takes them into the balloon.
    fn land(&self, channel: &mut Channel, flight: Flight) -> Result {
        channel.drain(Direction::Inflate, flight)?;

        let list = core::mem::replace(channel.pages_of(flight), PageList::new());
        if !list.is_empty() {
            self.pages.admit(list);
            self.update_actual()?;
        }
        Ok(())
    }

    /// Gives up to `want` pages back to the guest. Returns how many.
    ///
    /// # Errors
    ///
    /// The device is unusable. Pages that were on their way stay there.
    fn deflate(&self, channel: &mut Channel, want: u64) -> Result<u64> {
        let flight = Flight::FIRST;
        let mut left = want;

        while left > 0 && (self.stopping() || !self.interrupted()) {
            let batch = left.min(self.page_size().pages_in(BLOCK_BATCH));
            let mut list = PageList::new();
            let got = self.pages.remove(batch, &mut list);
            if got == 0 {
                break;
            }
            left -= got;

            channel.pages_of(flight).append(list);
            self.tell_all(channel, Direction::Deflate, flight)?;
            channel.drain(Direction::Deflate, flight)?;
            drop(core::mem::replace(
                channel.pages_of(flight),
                PageList::new(),
            ));
            self.update_actual()?;
        }
        Ok(want - left)
    }

    /// Puts the pages of a flight into messages and sends them.
    pub(super) fn tell_all(
        &self,
        channel: &mut Channel,
        direction: Direction,
        flight: Flight,
    ) -> Result {
        let list = core::mem::replace(channel.pages_of(flight), PageList::new());
        let told = list
            .iter()
            .try_for_each(|(pfn, order)| channel.tell(direction, flight, pfn, order));

        channel.pages_of(flight).append(list);
        told?;
        channel.flush(direction)
    }

    /// Gives all pages back to the guest, telling the host as long as it answers. For the end: what
    /// the host was not told of stays on its way until the device is reset.
    pub(super) fn deflate_all(&self, channel: &mut Channel) {
        /// After how many waits the log says that compaction still has pages: 10 s.
        const TRIES_TO_LOG: u32 = 500;

        let mut tries = 0u32;

        while self.pages.pages() > 0 {
            if self.deflate(channel, self.pages.pages()).is_err() {
                let mut list = PageList::new();

                self.pages.remove(self.pages.pages(), &mut list);
                channel.limbo.append(list);
            }
            if self.pages.pages() > 0 {
                kernel::time::delay::fsleep(kernel::time::Delta::from_millis(i64::from(
                    ISOLATED_MS,
                )));
                tries = tries.saturating_add(1);
                if tries == TRIES_TO_LOG {
                    dev_warn!(
                        &*self.link.vdev,
                        "waiting for {} guest pages that are being moved\n",
                        self.pages.pages()
                    );
                }
            }
        }
    }
}
