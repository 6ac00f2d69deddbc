// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The device: takes requests from its queues and completes them.
//!
//! Lock order: `worker`, then a vring, then [`State`].
//!
//! A request is taken, carried out and completed under its vring's lock. The frontend's thread needs
//! that lock to disable a vring, and `worker` to stop one or to replace memory. So once a frontend
//! has its answer to such a message, nothing more is discarded: after it the guest uses the pages
//! of requests that were in flight.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use balloon_control::message::GuestStats;
use tracing::{debug, error, info, warn};
use vhost::vhost_user::Backend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user_backend::{VhostUserBackend, VringState, VringT};
use virtio_queue::{DescriptorChain, QueueT as _};
use vm_memory::{
    Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemoryAtomic, GuestMemoryMmap,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

use crate::chain::{Chain, Direction};
use crate::channel::{Channel, Known};
use crate::fault::{DIE_STATUS, HONEST, Plan};
use crate::features::{EVENT_IDX, PROTOCOL_FEATURES, Protocol, Role, VERSION_1, roles};
use crate::hint::Told;
use crate::ram::{Outcome, Ram};
use crate::ranges::Ranges;
use crate::refusal::Refusal;
use crate::request::Format;
use crate::state::{Session, State, lock};
use crate::stats;
use crate::vring::Vring;

/// Queues announced: more than any driver asks for, as some frontends count even those that the
/// driver does not use.
pub const QUEUES: usize = 8;
/// The largest queue that is taken.
const QUEUE_SIZE_MAX: usize = 1024;
/// The event by which other threads wake the device's thread; the numbers up to [`QUEUES`] are the
/// backend crate's.
pub const WAKE_EVENT: u64 = QUEUES as u64 + 1;

/// After a request that took longer than this, the frontend's thread gets a chance at the locks,
/// which are not fair.
const LONG: Duration = Duration::from_millis(10);
/// How long that chance lasts.
const BREATH: Duration = Duration::from_micros(200);
/// How long a ring may contradict itself: a driver that goes takes back what it has made available, and then
/// tells so.
const DOUBT: Duration = Duration::from_millis(100);

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;
type Popped<'a> = DescriptorChain<&'a GuestMemoryMmap>;

/// A balloon device for one frontend.
pub struct Device {
    state: Arc<State>,
    /// Sockets that are not the back channel.
    known: Known,
    channel: Mutex<Option<Channel>>,
    acked: AtomicU64,
    worker: Mutex<Worker>,
    /// Whether the frontend asked for anything.
    spoken: AtomicBool,
    stopping: AtomicBool,
    stats_wanted: AtomicBool,
    wake: (EventConsumer, EventNotifier),
    /// The queues, as soon as there was an event.
    vrings: OnceLock<Vec<Vring>>,
}

/// What the device's thread works with.
#[derive(Default)]
struct Worker {
    ram: Arc<Ram>,
    buffer: Vec<u8>,
    ranges: Ranges,
    /// The statistics buffer that the device keeps until it wants new ones: queue and head.
    stats: Option<(usize, u16)>,
    /// Buffers kept by a fault.
    withheld: Vec<(usize, u16)>,
}

impl Device {
    /// A device that no frontend has touched. `known` are the sockets that are open before one can.
    ///
    /// # Errors
    ///
    /// If no event can be made.
    pub fn new(state: Arc<State>, known: Known) -> io::Result<Self> {
        let wake = new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC)?;
        Ok(Self {
            state,
            known,
            channel: Mutex::default(),
            acked: AtomicU64::new(0),
            worker: Mutex::default(),
            spoken: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            stats_wanted: AtomicBool::new(false),
            wake,
            vrings: OnceLock::new(),
        })
    }

    /// What wakes the device's thread, to be registered as [`WAKE_EVENT`].
    pub const fn wake_event(&self) -> &EventConsumer {
        &self.wake.0
    }

    /// Makes the device's thread stop taking requests, however many the guest has, and end.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Whether the frontend asked for anything; else it was none, but somebody who looked in.
    pub fn spoken(&self) -> bool {
        self.spoken.load(Ordering::Relaxed)
    }

    fn wake(&self) {
        if let Err(error) = self.wake.1.notify() {
            error!("the device's thread cannot be woken: {error}");
        }
    }

    fn role(&self, queue: usize) -> Option<Role> {
        let acked = self.acked.load(Ordering::Acquire);
        roles(acked, self.state.settings.dialect).nth(queue)
    }

    fn format(&self) -> Format {
        let acked = self.acked.load(Ordering::Acquire);
        Format {
            protocol: Protocol::negotiated(acked, self.state.settings.dialect),
            limits: self.state.settings.limits,
        }
    }

    fn refuse(&self, role: Option<Role>, refusal: &Refusal) {
        let place = role.map_or("unused queue", Role::name);
        self.state.refuse(place, refusal);
    }

    /// Serves a queue until it is empty.
    fn serve(&self, queue: usize, vring: &Vring) {
        let role = self.role(queue);
        if role == Some(Role::Request) {
            return self.send(queue, vring);
        }
        let failed = |e| self.refuse(role, &Refusal::Ring(e));
        let mut doubted = false;
        loop {
            match set_notified(vring, false) {
                Some(Err(e)) => return failed(e),
                Some(Ok(_)) => {}
                None => return,
            }
            let mut served = 0u64;
            while !self.stopping() {
                let begun = Instant::now();
                if !self.serve_one(queue, role, vring) {
                    break;
                }
                served += 1;
                if begun.elapsed() > LONG {
                    thread::sleep(BREATH);
                }
            }
            if self.stopping() {
                return;
            }
            match set_notified(vring, true) {
                None | Some(Ok(false)) => return,
                Some(Ok(true)) if served != 0 || self.serve_one(queue, role, vring) => {}
                Some(Ok(true)) if self.look_again(role, vring, &mut doubted) => {}
                Some(Ok(true)) => return,
                Some(Err(e)) => return failed(e),
            }
        }
    }

    /// A ring says that there is more, but there is not. Whether to look once more: not if it was stopped
    /// meanwhile, nor if it was doubted before.
    fn look_again(&self, role: Option<Role>, vring: &Vring, doubted: &mut bool) -> bool {
        if !usable(&vring.get_ref()) {
            return false;
        }
        if std::mem::replace(doubted, true) {
            self.refuse(role, &Refusal::AvailIndex);
            return false;
        }
        thread::sleep(DOUBT);
        true
    }

    /// Sends what the guest is to be asked, as long as there are buffers for it. Those that are not
    /// needed stay in the ring.
    fn send(&self, queue: usize, vring: &Vring) {
        let role = Some(Role::Request);
        let (mut again, mut doubted) = (true, false);
        loop {
            while !self.stopping() && self.send_one(queue, vring) {
                again = true;
            }
            if self.stopping() {
                return;
            }
            match set_notified(vring, true) {
                None | Some(Ok(false)) => return,
                Some(Ok(true)) if self.state.asks.next().is_none() => return,
                Some(Ok(true)) if std::mem::take(&mut again) => {}
                Some(Ok(true)) if self.look_again(role, vring, &mut doubted) => {}
                Some(Ok(true)) => return,
                Some(Err(e)) => return self.refuse(role, &Refusal::Ring(e)),
            }
        }
    }

    /// Sends a request of the host. Returns whether there was one, and a buffer.
    fn send_one(&self, queue: usize, vring: &Vring) -> bool {
        let worker = lock(&self.worker);
        let ram = Arc::clone(&worker.ram);
        let mut ring = vring.get_mut();
        let Some(bytes) = self.state.asks.next().filter(|_| usable(&ring)) else {
            return false;
        };
        let Some(chain) = ring.get_queue_mut().pop_descriptor_chain(ram.memory()) else {
            return false;
        };
        let head = chain.head_index();
        let role = self.role(queue);
        let written = Chain::walk(chain, Direction::Writable)
            .and_then(|chain| chain.write(ram.memory(), &bytes));
        match written {
            Ok(()) => {
                self.state.asks.sent();
                let plan = self.state.faults.plan(Role::Request);
                self.complete_with(&ram, &mut ring, role, (head, bytes.len() as u32), &plan);
                self.state.asked();
            }
            Err(refusal) => {
                self.refuse(role, &refusal);
                self.complete(&ram, &mut ring, role, head, &HONEST);
            }
        }
        true
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Takes a request and completes it. Returns whether there was one.
    fn serve_one(&self, queue: usize, role: Option<Role>, vring: &Vring) -> bool {
        let mut worker = lock(&self.worker);
        let ram = Arc::clone(&worker.ram);
        let mut ring = vring.get_mut();
        if !usable(&ring) {
            return false;
        }
        let Some(chain) = ring.get_queue_mut().pop_descriptor_chain(ram.memory()) else {
            return false;
        };
        let head = chain.head_index();
        let mut plan = HONEST;
        let done = match role {
            Some(role @ (Role::Inflate | Role::Deflate)) => {
                plan = self.state.faults.plan(role);
                self.balloon(&mut worker, role, chain)
            }
            Some(role @ Role::Report) => {
                plan = self.state.faults.plan(role);
                self.report(&mut worker, chain)
            }
            Some(role @ Role::Hint) => {
                plan = self.state.faults.plan(role);
                self.hint(&mut worker, chain)
            }
            Some(role @ Role::Answer) => {
                plan = self.state.faults.plan(role);
                self.answer(&mut worker, chain)
            }
            // Served by `send`.
            Some(Role::Request) => Ok(()),
            Some(Role::Stats) => match self.take_stats(&mut worker, chain) {
                Ok(()) => {
                    // Kept until statistics are wanted again. A driver has one such buffer; of two,
                    // the first goes back.
                    if let Some((_, before)) = worker.stats.replace((queue, head)) {
                        self.complete(&ram, &mut ring, role, before, &plan);
                    }
                    return true;
                }
                Err(refusal) => Err(refusal),
            },
            None => Err(Refusal::QueueUnused(queue)),
        };
        if let Err(refusal) = done {
            self.refuse(role, &refusal);
        }
        if plan.die {
            error!("exiting because of fault 'die'");
            std::process::exit(DIE_STATUS);
        }
        if plan.withhold {
            worker.withheld.push((queue, head));
            return true;
        }
        if let Some(count) = plan.reverse {
            worker.withheld.push((queue, head));
            let (kept, others): (Vec<_>, _) = std::mem::take(&mut worker.withheld)
                .into_iter()
                .partition(|(q, _)| *q == queue);
            worker.withheld = others;
            if (kept.len() as u64) < count {
                worker.withheld.extend(kept);
            } else {
                for (_, head) in kept.into_iter().rev() {
                    self.complete(&ram, &mut ring, role, head, &plan);
                }
            }
            return true;
        }
        if !plan.delay.is_zero() {
            drop((ring, worker));
            if !self.pause(vring, plan.delay) {
                return false;
            }
            ring = vring.get_mut();
            if !usable(&ring) {
                return false;
            }
        }
        self.complete(&ram, &mut ring, role, head, &plan);
        true
    }

    /// Waits, without holding up anybody else. Returns whether the vring was in use all the time.
    fn pause(&self, vring: &Vring, delay: Duration) -> bool {
        const STEP: Duration = Duration::from_millis(5);
        let end = Instant::now() + delay;
        loop {
            if self.stopping() || !usable(&vring.get_ref()) {
                return false;
            }
            match end.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return true,
                left => thread::sleep(left.min(STEP)),
            }
        }
    }

    /// An inflate or deflate request.
    fn balloon(&self, worker: &mut Worker, role: Role, chain: Popped<'_>) -> Result<(), Refusal> {
        let Worker {
            ram,
            buffer,
            ranges,
            ..
        } = worker;
        let tally = &self.state.tally;
        tally.requests.add(1);
        match role {
            Role::Inflate => tally.inflate_requests.add(1),
            _ => tally.deflate_requests.add(1),
        }
        Chain::walk(chain, Direction::Readable)?.read(ram.memory(), buffer)?;
        tally.wire_bytes.add(buffer.len() as u64);

        ranges.clear();
        let records = self.format().read(buffer, |range| {
            if !ranges.push(range) {
                self.apply(role, ram, ranges);
            }
        })?;
        tally.records.add(records as u64);
        self.apply(role, ram, ranges);
        Ok(())
    }

    /// Deals with the ranges collected so far, and forgets them.
    fn apply(&self, role: Role, ram: &Ram, ranges: &mut Ranges) {
        let tally = &self.state.tally;
        let merged = ranges.merge();
        if merged.is_empty() {
            return;
        }
        let outcome = match role {
            Role::Deflate => ram.prefetch(merged, self.state.settings.prefetch),
            _ => ram.discard(merged),
        };
        let pages = outcome.inside / balloon_control::BALLOON_PAGE_BYTES;
        match role {
            Role::Inflate => {
                tally.runs.add(merged.len() as u64);
                tally.inflated_pages.add(pages);
            }
            Role::Deflate => {
                tally.runs.add(merged.len() as u64);
                tally.deflated_pages.add(pages);
                tally.prefetched_bytes.add(outcome.done);
            }
            _ => tally.reported_bytes.add(outcome.inside),
        }
        self.count(role, outcome);
        ranges.clear();
    }

    fn count(&self, role: Role, outcome: Outcome) {
        let tally = &self.state.tally;
        if role != Role::Deflate {
            tally.discarded_bytes.add(outcome.done);
            tally.discard_calls.add(outcome.calls);
            tally
                .discard_ns
                .add(u64::try_from(outcome.time.as_nanos()).unwrap_or(u64::MAX));
            tally.partial_bytes.add(outcome.partial);
        }
        for refusal in outcome.refusals() {
            self.refuse(Some(role), &refusal);
        }
    }

    /// Free pages that the guest reports.
    fn report(&self, worker: &mut Worker, chain: Popped<'_>) -> Result<(), Refusal> {
        let Worker { ram, ranges, .. } = worker;
        self.state.tally.report_requests.add(1);
        let reported = Chain::walk(chain, Direction::Writable)?.ranges()?;
        // The guest expects its pages to come back filled with this, but discarded pages come back
        // zeroed.
        if self.state.poison_val() != 0 {
            return Ok(());
        }
        ranges.clear();
        for range in reported {
            if !ranges.push(range) {
                self.apply(Role::Report, ram, ranges);
            }
        }
        self.apply(Role::Report, ram, ranges);
        Ok(())
    }

    /// A word of free page hinting, or free pages.
    fn hint(&self, worker: &mut Worker, chain: Popped<'_>) -> Result<(), Refusal> {
        let Worker {
            ram,
            buffer,
            ranges,
            ..
        } = worker;
        let tally = &self.state.tally;
        tally.hint_requests.add(1);
        if Direction::of(&chain) == Direction::Readable {
            Chain::walk(chain, Direction::Readable)?.read(ram.memory(), buffer)?;
            let id = <[u8; 4]>::try_from(buffer.as_slice());
            let id = u32::from_le_bytes(id.map_err(|_| Refusal::HintId(buffer.len()))?);
            match self.state.hint_told(id) {
                Told::Stale => tally.stale_hints.add(1),
                told => debug!("free page hinting, round {id:#x}: {told:?}"),
            }
            return Ok(());
        }
        let hinted = Chain::walk(chain, Direction::Writable)?.ranges()?;
        if !self.state.hints_wanted() {
            tally.stale_hints.add(1);
            return Ok(());
        }
        // Of a chain that has more ranges than are collected at a time, the rest is left out; no
        // ring has so many descriptors.
        ranges.clear();
        let _ = hinted.into_iter().all(|range| ranges.push(range));
        let outcome = ram.look(ranges.merge());
        ranges.clear();
        tally.hinted_bytes.add(outcome.inside);
        self.state.hinted(outcome.inside);
        for refusal in outcome.refusals() {
            self.refuse(Some(Role::Hint), &refusal);
        }
        Ok(())
    }

    /// An answer of the guest to what it was asked.
    fn answer(&self, worker: &mut Worker, chain: Popped<'_>) -> Result<(), Refusal> {
        let Worker { ram, buffer, .. } = worker;
        self.state.tally.answers.add(1);
        Chain::walk(chain, Direction::Readable)?.read(ram.memory(), buffer)?;
        let taken = self.state.asks.answer(buffer, &self.format(), ram);
        self.state.asked();
        taken
    }

    fn take_stats(&self, worker: &mut Worker, chain: Popped<'_>) -> Result<(), Refusal> {
        self.state.tally.stats_requests.add(1);
        let chain = Chain::walk(chain, Direction::Readable)?;
        chain.read(worker.ram.memory(), &mut worker.buffer)?;
        let values = stats::read(&worker.buffer)?;
        debug!("statistics received, {} values", values.len());
        self.stats_wanted.store(false, Ordering::Relaxed);
        self.state.stats(GuestStats { age_ms: 0, values });
        Ok(())
    }

    /// Puts a buffer into the used ring and tells the guest if it wants to know.
    fn complete(
        &self,
        ram: &Ram,
        ring: &mut VringState,
        role: Option<Role>,
        head: u16,
        plan: &Plan,
    ) {
        self.complete_with(ram, ring, role, (head, 0), plan);
    }

    /// The same, with the number of bytes that were written into the buffer.
    fn complete_with(
        &self,
        ram: &Ram,
        ring: &mut VringState,
        role: Option<Role>,
        (head, len): (u16, u32),
        plan: &Plan,
    ) {
        let used = if plan.used_id.is_some() || plan.used_len.is_some() {
            let id = plan.used_id.unwrap_or(head.into());
            put_used(ram, ring, id, plan.used_len.unwrap_or(len)).map(|()| true)
        } else {
            ring.add_used(head, len)
                .and_then(|()| ring.needs_notification())
        };
        match used {
            Ok(true) if plan.interrupt => {
                match ring.signal_used_queue() {
                    // So many interrupts are pending that another makes no difference.
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Err(e) => self.refuse(role, &Refusal::Interrupt(e)),
                    Ok(()) => {}
                }
                self.state.tally.interrupts.add(1);
            }
            Ok(_) => {}
            Err(e) => self.refuse(role, &Refusal::Ring(e)),
        }
    }

    /// Does what other threads woke this one for.
    fn woken(&self, vrings: &[Vring]) {
        let mut worker = lock(&self.worker);
        let ram = Arc::clone(&worker.ram);
        let mut go = Vec::new();
        if self.stats_wanted.swap(false, Ordering::Relaxed) {
            // Given back, it is filled again by the guest.
            go.extend(worker.stats.take());
        }
        if self.state.faults.released() {
            go.append(&mut worker.withheld);
        }
        for (queue, head) in go {
            let Some(vring) = vrings.get(queue) else {
                continue;
            };
            let mut ring = vring.get_mut();
            if usable(&ring) {
                self.complete(&ram, &mut ring, self.role(queue), head, &HONEST);
            }
        }
        drop(worker);
        let acked = self.acked.load(Ordering::Acquire);
        let queue = roles(acked, self.state.settings.dialect).position(|r| r == Role::Request);
        if let Some((queue, vring)) = queue.and_then(|q| Some((q, vrings.get(q)?))) {
            self.send(queue, vring);
        }
        // Its kick may not have come yet.
        let drains = self.state.asks.drains();
        let queue = roles(acked, self.state.settings.dialect).position(|r| r == Role::Answer);
        if let Some((queue, vring)) = queue.and_then(|q| Some((q, vrings.get(q)?))) {
            self.serve(queue, vring);
        }
        self.state.asks.drained(drains);
    }

    /// Leaves a queue so that it can be gone on with: a guest may only have been paused. The
    /// statistics buffer is taken once more then; answers are all taken now, as whoever paused the
    /// guest wants to know them.
    fn put_back(&self, queue: usize) {
        let Some(vring) = self.vrings.get().and_then(|vrings| vrings.get(queue)) else {
            return;
        };
        let mut worker = lock(&self.worker);
        let ram = Arc::clone(&worker.ram);
        let mut ring = vring.get_mut();
        if worker.stats.is_some_and(|(q, _)| q == queue) {
            let next = ring.get_queue().next_avail();
            ring.get_queue_mut().set_next_avail(next.wrapping_sub(1));
        }
        let role = self.role(queue);
        if role != Some(Role::Answer) {
            return;
        }
        // Nobody else looks at it now.
        ring.get_queue_mut().set_ready(true);
        for _ in 0..ring.get_queue().size() {
            let Some(chain) = ring.get_queue_mut().pop_descriptor_chain(ram.memory()) else {
                break;
            };
            let head = chain.head_index();
            if let Err(refusal) = self.answer(&mut worker, chain) {
                self.refuse(role, &refusal);
            }
            self.complete(&ram, &mut ring, role, head, &HONEST);
        }
        ring.get_queue_mut().set_ready(false);
        self.state.asks.suspend(ring.get_queue().next_avail());
    }

    /// Whether the driver is still the one that was asked before its queues were stopped: then it goes
    /// on where it was.
    fn resume(&self, vrings: &[Vring]) {
        let acked = self.acked.load(Ordering::Acquire);
        let queue = roles(acked, self.state.settings.dialect).position(|r| r == Role::Answer);
        match queue.and_then(|queue| vrings.get(queue)) {
            None => self.state.asks.resume(None),
            // Before it is started again nobody knows where it begins.
            Some(vring) if !usable(&vring.get_ref()) => {}
            Some(vring) => self.state.asks.resume(Some(vring.queue_next_avail())),
        }
    }

    /// Forgets the buffers it keeps, of one queue or of all.
    fn forget(&self, queue: Option<usize>) {
        let mut worker = lock(&self.worker);
        let concerned = |q: usize| queue.is_none_or(|queue| queue == q);
        worker.stats.take_if(|(q, _)| concerned(*q));
        worker.withheld.retain(|(q, _)| !concerned(*q));
    }
}

/// Says whether kicks are wanted, and whether there is more in the ring, if they are. `None` if the ring may not
/// be used, which is looked up under the same lock: from then on it may be other memory of the guest.
fn set_notified(vring: &Vring, wanted: bool) -> Option<Result<bool, virtio_queue::Error>> {
    let mut ring = vring.get_mut();
    usable(&ring).then(|| match wanted {
        true => ring.enable_notification(),
        false => ring.disable_notification().map(|()| false),
    })
}

/// Whether the frontend lets a vring be used.
fn usable(ring: &VringState) -> bool {
    ring.is_enabled() && ring.get_queue().ready()
}

/// Puts something into the used ring that need not have been made available; a fault.
fn put_used(
    ram: &Ram,
    ring: &mut VringState,
    id: u32,
    len: u32,
) -> Result<(), virtio_queue::Error> {
    const HEADER: u64 = 4;
    const ELEMENT: u64 = 8;
    let queue = ring.get_queue_mut();
    let next = queue.next_used();
    let slot = u64::from(next % queue.size().max(1));
    let at = GuestAddress(queue.used_ring() + HEADER + slot * ELEMENT);
    let element = u64::from(id) | u64::from(len) << 32;
    ram.memory()
        .write_obj(element.to_le(), at)
        .and_then(|()| {
            let index = GuestAddress(queue.used_ring() + 2);
            let next = next.wrapping_add(1).to_le();
            ram.memory().store(next, index, Ordering::Release)
        })
        .map_err(virtio_queue::Error::GuestMemory)?;
    queue.set_next_used(next.wrapping_add(1));
    Ok(())
}

impl Session for Device {
    fn notify(&self) -> Result<(), Refusal> {
        match &*lock(&self.channel) {
            Some(channel) => channel.config_changed().map_err(Refusal::ConfigChange),
            // The driver looks at config space when it starts.
            None => Ok(()),
        }
    }

    fn poll_stats(&self) {
        self.stats_wanted.store(true, Ordering::Relaxed);
        self.wake();
    }

    fn ram(&self) -> Arc<Ram> {
        Arc::clone(&lock(&self.worker).ram)
    }

    fn look(&self) {
        self.wake();
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE_MAX
    }

    fn features(&self) -> u64 {
        self.spoken.store(true, Ordering::Relaxed);
        let settings = &self.state.settings;
        VERSION_1
            | PROTOCOL_FEATURES
            | EVENT_IDX
            | settings.features.bits()
            | settings.dialect.feature()
    }

    fn acked_features(&self, features: u64) {
        // A driver starts anew; not every frontend says when the one before let go.
        self.forget(None);
        self.acked.store(features, Ordering::Release);
        self.state.negotiated(features);
        let protocol = Protocol::negotiated(features, self.state.settings.dialect);
        info!(
            "the driver takes features {features:#x}: {}",
            protocol.name()
        );
        if lock(&self.channel).is_none() {
            warn!("the frontend gave no back channel: the guest will not hear of new targets");
        }
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn reset_device(&self) {
        self.forget(None);
        self.state.asks.reset(false);
        self.state.released();
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let tally = &self.state.tally;
        tally.config_reads.add(1);
        let (start, size) = (offset as usize, size as usize);
        let end = start.saturating_add(size);
        if end > self.state.config_len() {
            tally.config_reads_beyond.add(1);
        }
        let bytes = self.state.config_bytes();
        bytes
            .get(start..end)
            .map(<[u8]>::to_vec)
            .unwrap_or_default()
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> io::Result<()> {
        self.state.tally.config_writes.add(1);
        if let Err(refusal) = self.state.config_write(offset, data) {
            self.state.refuse("config space", &refusal);
        }
        Ok(())
    }

    fn update_memory(&self, memory: Memory) -> io::Result<()> {
        let ram = match Ram::new(&memory.memory()) {
            Ok(ram) => ram,
            Err(error) => {
                // It is mapped already. Nothing may touch it from here on.
                memory
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .replace(GuestMemoryMmap::new());
                lock(&self.worker).ram = Arc::default();
                return Err(error);
            }
        };
        self.state.memory(ram.status());
        // Waits until the request in work is done with the old mappings.
        lock(&self.worker).ram = Arc::new(ram);
        Ok(())
    }

    fn set_backend_req_fd(&self, _backend: Backend) {
        match Channel::find(&self.known) {
            // The crate's handle is closed when it is dropped here; this is the only one left.
            Ok(channel) => *lock(&self.channel) = Some(channel),
            Err(error) => self.state.refuse("frontend", &Refusal::ConfigChange(error)),
        }
    }

    fn stop_vring(&self, queue: u32) -> io::Result<()> {
        self.put_back(queue as usize);
        // Waits until the request in work is done: the guest may use its pages again after this.
        self.forget(Some(queue as usize));
        if queue == 0 {
            self.state.released();
        }
        Ok(())
    }

    fn handle_event(
        &self,
        event: u16,
        _set: EventSet,
        vrings: &[Vring],
        _thread: usize,
    ) -> io::Result<()> {
        self.vrings.get_or_init(|| vrings.to_vec());
        self.resume(vrings);
        if u64::from(event) == WAKE_EVENT {
            // That there was nothing to consume is no reason to stop the thread.
            let _ = self.wake.0.consume();
            self.woken(vrings);
        } else if let Some(vring) = vrings.get(usize::from(event)) {
            self.state.tally.kicks.add(1);
            self.serve(usize::from(event), vring);
        }
        // An error ends the thread. (The backend crate has an event for that as well, but does not
        // close it.)
        match self.stopping() {
            true => Err(io::ErrorKind::Interrupted.into()),
            false => Ok(()),
        }
    }
}
