// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What is known and wanted, shared by the device and the control socket.
//!
//! Lock order: nothing else is locked while [`State`]'s own lock is held, but for that of [`Asks`];
//! and no system call that waits for the frontend is made under it.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use balloon_control::BALLOON_PAGE_BYTES;
use balloon_control::message::{
    AskedStatus, BalloonStatus, Counters, DaemonStatus, FrontendStatus, GuestStats, HintAction,
    HintStatus, MemoryStatus, Movement, Status,
};
use balloon_wire::wire::{self, Announcement};

use crate::ask::{Answered, AskError, Asks, Patience, Question};
use crate::config::{ConfigSpace, READ_MAX};
use crate::counters::Tally;
use crate::fault::Faults;
use crate::features::{Dialect, Features, Protocol, requests, roles};
use crate::hint::{Hinting, Told};
use crate::image::{self, Written};
use crate::ram::{Prefetch, Ram};
use crate::refusal::{Complaints, Refusal};

/// Locks; a thread that panicked cannot have left more than a wrong number behind.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the daemon was told on the command line about the device.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the device speaks.
    pub dialect: Dialect,
    /// What it offers besides.
    pub features: Features,
    /// What it takes, announced in the bitmap dialect.
    pub limits: Announcement,
    /// What becomes of deflated memory.
    pub prefetch: Prefetch,
}

/// Why there is no image of memory.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// Nobody is connected.
    #[error("no guest is connected")]
    NoGuest,
    /// The guest has given up the pages, or never held them.
    #[error("the guest does not hold the free pages of request {0} any more")]
    NotHeld(u32),
    /// It cannot be asked.
    #[error(transparent)]
    Guest(AskError),
    /// The system refuses.
    #[error("the image cannot be written: {0}")]
    Io(#[from] io::Error),
}

/// What can be done to the device of a session from outside its thread.
pub trait Session: Send + Sync {
    /// Tells the guest that config space changed.
    ///
    /// # Errors
    ///
    /// If the frontend cannot be told.
    fn notify(&self) -> Result<(), Refusal>;
    /// Has the guest refresh its statistics.
    fn poll_stats(&self);
    /// Has a look at whether withheld requests may go, and whether the guest is to be asked for
    /// something.
    fn look(&self);
    /// The guest's memory.
    fn ram(&self) -> Arc<Ram>;
}

/// What a watcher or waiter sees of the state, at one instant.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Grows with each change.
    pub version: u64,
    /// Who is connected.
    pub frontend: FrontendStatus,
    /// The balloon.
    pub balloon: BalloonStatus,
    /// The movement.
    pub movement: Movement,
    /// Free page hinting.
    pub hint: HintStatus,
    /// The last thing that the guest was asked.
    pub asked: Option<AskedStatus>,
    /// Statistics of the guest.
    pub stats: Option<GuestStats>,
    /// How many statistics were received.
    pub stats_count: u64,
}

/// Everything that is shared.
pub struct State {
    /// From the command line.
    pub settings: Settings,
    /// What was counted.
    pub tally: Tally,
    /// What was refused.
    pub complaints: Complaints,
    /// What is done wrong on purpose.
    pub faults: Faults,
    /// What the guest is asked.
    pub asks: Asks,
    /// The request whose pages are held while somebody stops the guest, or 0.
    bound: AtomicU32,
    /// Whether there is a change that the guest was not told of for that.
    untold: AtomicBool,
    started: Instant,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    version: u64,
    config: ConfigSpace,
    /// The target, when `config.num_pages` is falsified by a fault.
    target: u32,
    connected: bool,
    acked: Option<u64>,
    memory: MemoryStatus,
    way: Way,
    hinting: Hinting,
    stats: Option<(Instant, GuestStats)>,
    stats_count: u64,
    session: Option<Arc<dyn Session>>,
}

/// A movement as it is kept.
struct Way {
    id: u64,
    from: u32,
    begun: Instant,
    base: Counters,
    done: Option<(Duration, Counters)>,
}

impl State {
    /// The state of a daemon that just started.
    pub fn new(settings: Settings, faults: Faults) -> Self {
        let now = Instant::now();
        Self {
            tally: Tally::default(),
            complaints: Complaints::default(),
            faults,
            asks: Asks::default(),
            bound: AtomicU32::new(0),
            untold: AtomicBool::new(false),
            started: now,
            inner: Mutex::new(Inner {
                version: 1,
                config: ConfigSpace::new(settings.dialect, &settings.limits),
                target: 0,
                connected: false,
                acked: None,
                memory: MemoryStatus::default(),
                way: Way {
                    id: 0,
                    from: 0,
                    begun: now,
                    base: Counters::default(),
                    done: Some((Duration::ZERO, Counters::default())),
                },
                hinting: Hinting::default(),
                stats: None,
                stats_count: 0,
                session: None,
            }),
            changed: Condvar::new(),
            settings,
        }
    }

    /// Time since the daemon started, in milliseconds.
    pub fn uptime_ms(&self) -> u64 {
        millis(self.started.elapsed())
    }

    /// Counts a refusal and logs it, with the place where it happened.
    pub fn refuse(&self, place: &str, refusal: &Refusal) {
        self.tally.errors.add(1);
        self.complaints.add(place, refusal);
    }

    fn change<T>(&self, f: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = lock(&self.inner);
        let result = f(&mut inner);
        inner.version += 1;
        drop(inner);
        self.changed.notify_all();
        result
    }

    /// Sets the target, in balloon pages, and tells the guest. Returns the movement that begins.
    pub fn set_target(&self, pages: u32) -> Movement {
        let counters = self.tally.snapshot();
        let movement = self.change(|inner| {
            inner.target = pages;
            inner.config.num_pages = pages;
            inner.way = Way {
                id: inner.way.id + 1,
                from: inner.config.actual,
                begun: Instant::now(),
                base: counters,
                done: None,
            };
            inner.arrive(&counters);
            inner.movement(&counters)
        });
        self.notify();
        movement
    }

    /// Shows the guest another target than the one that was set; a fault.
    pub fn falsify_target(&self, zero: bool) {
        {
            let mut inner = lock(&self.inner);
            inner.config.num_pages = if zero { 0 } else { inner.target };
        }
        self.notify();
    }

    /// Tells the guest that config space changed, if there is one.
    ///
    /// Not before a driver has taken the device, which reads config space by itself then: QEMU up to
    /// 11.1 does not survive a change that nobody is there for. It may be that it stops the guest before it
    /// has read of the change, so there is none while pages are held by whoever is to stop the guest.
    pub fn notify(&self) {
        // In this order: if the hold ends in between, one of both tells it.
        self.untold.store(true, Ordering::SeqCst);
        self.catch_up();
    }

    /// Binds a hold to a connection: until it ends, the guest is told of no change.
    pub fn bind(&self, id: u32) {
        self.bound.store(id, Ordering::SeqCst);
    }

    /// Tells the guest what it was not told, if it can be.
    fn catch_up(&self) {
        if self.asks.holds(self.bound.load(Ordering::SeqCst))
            || !self.untold.swap(false, Ordering::SeqCst)
        {
            return;
        }
        let inner = lock(&self.inner);
        let session = inner.session.clone().filter(|_| inner.acked.is_some());
        drop(inner);
        if let Some(session) = session {
            match session.notify() {
                Ok(()) => self.tally.config_changes.add(1),
                Err(refusal) => self.refuse("frontend", &refusal),
            }
        }
    }

    /// The session now, if any.
    pub fn session(&self) -> Option<Arc<dyn Session>> {
        lock(&self.inner).session.clone()
    }

    /// A frontend connected.
    pub fn connected(&self, session: Arc<dyn Session>) {
        self.change(|inner| {
            inner.connected = true;
            inner.session = Some(session);
        });
    }

    /// The frontend went away, and the guest with it. The target stays for the next.
    pub fn disconnected(&self) {
        self.asks.reset(false);
        let counters = self.tally.snapshot();
        self.change(|inner| {
            inner.connected = false;
            inner.session = None;
            inner.acked = None;
            inner.memory = MemoryStatus::default();
            inner.config.actual = 0;
            inner.config.poison_val = 0;
            inner.stats = None;
            inner.hint(Hinting::forget);
            inner.arrive(&counters);
        });
    }

    /// The driver acknowledged features.
    pub fn negotiated(&self, acked: u64) {
        self.asks.begin(requests(acked, self.settings.dialect));
        for bytes in self.faults.requests() {
            self.asks.push_raw(bytes);
        }
        self.change(|inner| {
            inner.acked = Some(acked);
            inner.hint(Hinting::forget);
        });
    }

    /// The driver let the device go.
    pub fn released(&self) {
        self.change(|inner| {
            inner.acked = None;
            inner.hint(Hinting::forget);
        });
    }

    /// Begins or ends a round of free page hinting, and tells the guest.
    ///
    /// # Errors
    ///
    /// If there is no driver that hints; says why.
    pub fn hint(&self, action: HintAction) -> Result<HintStatus, String> {
        self.can(wire::F_FREE_PAGE_HINT)?;
        let status = self.change(|inner| {
            inner.hint(match action {
                HintAction::Start => Hinting::start,
                HintAction::Stop => Hinting::stop,
                HintAction::Done => Hinting::done,
            });
            inner.hinting.status()
        });
        self.notify();
        Ok(status)
    }

    /// The guest sent an id on the hinting queue.
    pub fn hint_told(&self, id: u32) -> Told {
        self.change(|inner| inner.hinting.told(id))
    }

    /// Whether hints that come now are wanted.
    pub fn hints_wanted(&self) -> bool {
        lock(&self.inner).hinting.wanted()
    }

    /// Counts a hint.
    pub fn hinted(&self, bytes: u64) {
        lock(&self.inner).hinting.note(bytes);
    }

    /// Asks the guest for something, and waits for its last word.
    ///
    /// # Errors
    ///
    /// If there is no guest that can be asked, or it did not do it.
    pub fn ask(
        &self,
        question: Question,
        patience: &mut Patience<'_>,
    ) -> Result<Answered, AskError> {
        self.can(wire::F_HOST_REQUEST)
            .map_err(AskError::NotSupported)?;
        let answered = self.asks.ask(question, || self.wake(), patience);
        self.asked();
        self.catch_up();
        answered
    }

    /// Has the guest release what it holds for request `id`, if it does. May take long, if others
    /// ask the guest meanwhile.
    pub fn release(&self, id: u32) {
        self.asks.release(id, || self.wake());
        self.asked();
        self.catch_up();
    }

    /// Has the device's thread look what is to be sent.
    fn wake(&self) {
        if let Some(session) = self.session() {
            session.look();
        }
    }

    /// Writes the memory of a guest that stands still into an empty file. The pages that request `id`
    /// has the guest hold are left out.
    ///
    /// # Errors
    ///
    /// If there is no guest, it does not hold these pages all the time, or the file cannot be written.
    pub fn save_memory(&self, id: Option<u32>, file: &File) -> Result<Written, SaveError> {
        let session = self.session().ok_or(SaveError::NoGuest)?;
        let nothing = Arc::default();
        let named = match id {
            None => nothing,
            Some(id) => {
                self.holds(&session, id)?;
                self.asks.named(id).ok_or(SaveError::NotHeld(id))?
            }
        };
        let written = image::write(&session.ram(), &named.set, file)?;
        file.sync_all()?;
        if let Some(id) = id {
            // If the guest did not stand still after all, it may have given them up.
            self.holds(&session, id)?;
        }
        Ok(written)
    }

    /// Makes sure that the guest holds the pages of request `id`, and has not said otherwise.
    fn holds(&self, session: &Arc<dyn Session>, id: u32) -> Result<(), SaveError> {
        self.asks
            .drain(|| session.look())
            .map_err(SaveError::Guest)?;
        match self.asks.holds(id) {
            true => Ok(()),
            false => Err(SaveError::NotHeld(id)),
        }
    }

    /// What the guest is asked, or its answer, is news.
    pub fn asked(&self) {
        self.change(|_| ());
    }

    /// Makes sure that the driver has taken a feature.
    ///
    /// # Errors
    ///
    /// Why it has not.
    fn can(&self, bit: u32) -> Result<(), String> {
        let dialect = self.settings.dialect;
        let name = Features::from_bits(1 << bit)
            .names(Dialect::PfnArray)
            .join("");
        if !self.settings.features.has(bit) {
            return Err(format!(
                "the daemon does not offer {name}; start it with --features {name}"
            ));
        }
        let inner = lock(&self.inner);
        let taken = |acked: u64| match bit {
            wire::F_HOST_REQUEST => requests(acked, dialect),
            _ => Features::from_bits(acked & !dialect.feature()).has(bit),
        };
        match inner.acked {
            Some(acked) if taken(acked) => Ok(()),
            Some(_) => Err(format!("the guest's driver did not take {name}")),
            None if inner.connected => {
                Err("no driver has taken the device, or the guest stands still".to_owned())
            }
            None => Err("no guest is connected".to_owned()),
        }
    }

    /// The guest's memory is another.
    pub fn memory(&self, memory: MemoryStatus) {
        self.change(|inner| inner.memory = memory);
    }

    /// The guest sent statistics.
    pub fn stats(&self, stats: GuestStats) {
        self.change(|inner| {
            inner.stats = Some((Instant::now(), stats));
            inner.stats_count += 1;
        });
    }

    /// Config space as the guest reads it.
    pub fn config_bytes(&self) -> [u8; READ_MAX] {
        let mut bytes = lock(&self.inner).config.bytes();
        self.faults.falsify(&mut bytes);
        bytes
    }

    /// Size of config space, in bytes.
    pub fn config_len(&self) -> usize {
        lock(&self.inner).config.len()
    }

    /// What the driver says freed pages are filled with.
    pub fn poison_val(&self) -> u32 {
        lock(&self.inner).config.poison_val
    }

    /// The driver wrote to config space.
    pub fn config_write(&self, offset: u32, data: &[u8]) -> Result<(), Refusal> {
        let mut inner = lock(&self.inner);
        let before = inner.config.actual;
        inner.config.write(offset, data)?;
        if inner.config.actual != before {
            inner.version += 1;
            if inner.config.actual == inner.target {
                let counters = self.tally.snapshot();
                inner.arrive(&counters);
            }
            drop(inner);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// The size of guest memory, in bytes; 0 without a guest.
    pub fn memory_bytes(&self) -> u64 {
        lock(&self.inner).memory.bytes
    }

    /// What watchers see now.
    pub fn view(&self) -> View {
        let counters = self.tally.snapshot();
        self.view_of(&lock(&self.inner), &counters)
    }

    /// What watchers see, once it is newer than `version` or the time is up.
    pub fn view_after(&self, version: u64, timeout: Duration) -> View {
        let inner = lock(&self.inner);
        let (inner, _) = self
            .changed
            .wait_timeout_while(inner, timeout, |inner| inner.version <= version)
            .unwrap_or_else(PoisonError::into_inner);
        self.view_of(&inner, &self.tally.snapshot())
    }

    fn view_of(&self, inner: &Inner, counters: &Counters) -> View {
        View {
            version: inner.version,
            frontend: self.frontend_status(inner),
            balloon: inner.balloon_status(),
            movement: inner.movement(counters),
            hint: inner.hinting.status(),
            asked: self.asks.status(),
            stats: inner.guest_stats(),
            stats_count: inner.stats_count,
        }
    }

    /// Everything people see.
    pub fn status(&self) -> Status {
        let counters = self.tally.snapshot();
        let inner = lock(&self.inner);
        Status {
            daemon: DaemonStatus {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                uptime_ms: self.uptime_ms(),
                dialect: self.settings.dialect.name().to_owned(),
                features: self.settings.features.names(Dialect::PfnArray),
                faults: self.faults.list(),
            },
            frontend: self.frontend_status(&inner),
            memory: inner.memory.clone(),
            balloon: inner.balloon_status(),
            movement: inner.movement(&counters),
            hint: inner.hinting.status(),
            asked: self.asks.status(),
            hold: self.asks.hold_status(),
            counters,
            errors: self.complaints.by_kind(),
            guest_stats: inner.guest_stats(),
        }
    }

    fn frontend_status(&self, inner: &Inner) -> FrontendStatus {
        let dialect = self.settings.dialect;
        let negotiated = inner.acked.map(|acked| FrontendStatus {
            connected: inner.connected,
            driver: true,
            features: Features::from_bits(acked).names(dialect),
            protocol: Protocol::negotiated(acked, dialect).name().to_owned(),
            queues: roles(acked, dialect)
                .map(|role| role.name().to_owned())
                .collect(),
        });
        negotiated.unwrap_or(FrontendStatus {
            connected: inner.connected,
            ..FrontendStatus::default()
        })
    }
}

impl Inner {
    /// Does something about free page hinting, and shows it in config space.
    fn hint(&mut self, what: impl FnOnce(&mut Hinting)) {
        what(&mut self.hinting);
        self.config.hint_cmd_id = self.hinting.command();
    }

    /// Notes that the target is reached, the first time it is.
    fn arrive(&mut self, counters: &Counters) {
        if self.config.actual == self.target && self.way.done.is_none() {
            let counted = counters.since(&self.way.base);
            self.way.done = Some((self.way.begun.elapsed(), counted));
        }
    }

    fn movement(&self, counters: &Counters) -> Movement {
        let way = &self.way;
        let (elapsed, counters) = match &way.done {
            Some((elapsed, counters)) => (*elapsed, *counters),
            None => (way.begun.elapsed(), counters.since(&way.base)),
        };
        Movement {
            id: way.id,
            from_bytes: bytes(way.from),
            target_bytes: bytes(self.target),
            reached: way.done.is_some(),
            elapsed_ms: elapsed.as_micros() as f64 / 1000.0,
            counters,
        }
    }

    fn balloon_status(&self) -> BalloonStatus {
        BalloonStatus {
            target_bytes: bytes(self.target),
            target_pages: self.target,
            actual_bytes: bytes(self.config.actual),
            actual_pages: self.config.actual,
            reached: self.config.actual == self.target,
        }
    }

    fn guest_stats(&self) -> Option<GuestStats> {
        self.stats.as_ref().map(|(when, stats)| GuestStats {
            age_ms: millis(when.elapsed()),
            values: stats.values.clone(),
        })
    }
}

fn bytes(pages: u32) -> u64 {
    u64::from(pages) * BALLOON_PAGE_BYTES
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
