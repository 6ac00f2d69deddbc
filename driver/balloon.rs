// SPDX-License-Identifier: GPL-2.0

//! The driver of a balloon device: its data, and its life.

use super::{
    channel::{
        Channel,
        Direction,
        Flight,
        Link,
        Patience,
        Queue, //
    },
    knobs,
    oom::OomDeflate,
    params::Params,
    report::ReportPart,
    stats::Stats, //
};
use crate::{
    logic::{
        features::{
            self,
            Circumstances,
            Features,
            Negotiated,
            Protocol,
            Refusal,
            BLOCK_SHIFT, //
        },
        oom::OomPace,
        target::{
            self,
            Backoff,
            LogLimit, //
        },
        units::PageSize,
        window::WindowSize,
        wire::{
            self,
            Announcement, //
        },
    },
    mm::{
        self,
        BalloonPages,
        Block,
        Migrate,
        MigratingPage,
        OnFree,
        OomNotifier, //
    },
    sysfs,
    virtio::{
        self,
        Interrupts, //
    },
    work::{
        Job,
        Task,
        WorkQueue, //
    },
    VIRTIO_TABLE, //
};
use kernel::{
    device::Bound,
    new_mutex,
    num::casts::u32_as_usize,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex,
        MutexGuard, //
    },
    time::{
        msecs_to_jiffies,
        Instant,
        Jiffies,
        Monotonic, //
    },
};

/// The type that stands for the driver.
pub(crate) struct BalloonDriver;

/// A channel while the device is alive, shared by the worker and by compaction.
///
/// Held while the host is waited for, hence only tried where that must not be.
#[pin_data]
pub(super) struct SharedChannel {
    #[pin]
    inner: Mutex<Option<Channel>>,
}

impl SharedChannel {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            inner <- new_mutex!(None, "SharedChannel::inner"),
        })
    }

    /// Waits for the channel. May sleep for as long as the host takes.
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Channel>> {
        self.inner.lock()
    }

    /// Gets the channel if nobody has it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Option<Channel>>> {
        self.inner.try_lock()
    }
}

impl Migrate for SharedChannel {
    fn migrate(&self, new: MigratingPage<'_>, old: MigratingPage<'_>) -> Result {
        let mut guard = self.inner.try_lock().ok_or(EAGAIN)?;
        let channel = (*guard).as_mut().ok_or(EAGAIN)?;
        let flight = Flight::MOVE;

        if !channel.can_keep() || channel.is_busy().map_err(|_| EAGAIN)? {
            return Err(EAGAIN);
        }
        let tell = |channel: &mut Channel, direction, pfn| {
            channel.in_passing(|channel| {
                channel.tell(direction, flight, pfn, 0)?;
                channel.flush(direction)?;
                channel.drain(direction, flight)
            })
        };

        match tell(channel, Direction::Inflate, new.pfn()) {
            Ok(()) => (),
            Err(ERANGE) => return Err(EAGAIN),
            Err(_) => {
                // Nobody knows what the host thinks of the new page.
                channel.keep(new.hold());
                return Err(EAGAIN);
            }
        }
        if tell(channel, Direction::Deflate, old.pfn()).is_err() {
            channel.keep(old.hold());
        }
        Ok(())
    }
}

/// How the attempts to reach the target go.
pub(super) struct Pace {
    backoff: Backoff,
    log: LogLimit,
    /// The number of config changes that were seen at the last attempt.
    seen: u32,
}

impl Pace {
    /// The target is met.
    pub(super) fn met(&mut self) {
        self.backoff.reset();
    }

    /// There was progress.
    pub(super) fn moved(&mut self) {
        self.backoff.reset();
    }
}

/// What the user can tune while the device is in use.
pub(super) struct Knobs {
    /// The largest order of blocks to ask for.
    pub(super) max_order: u32,
    /// Size of a bitmap window, as the user wants it.
    pub(super) window: WindowSize,
}

/// A balloon.
///
/// Locks: `channel` is the outermost; under it any one of `knobs`, `pace` and `oom`, and those of [`BalloonPages`], of [`virtio::Config`] and of the queues. Whoever is in the path of
/// memory allocation (page migration, out of memory) only tries `channel`.
#[pin_data]
pub(super) struct Balloon {
    pub(super) link: Link,
    config: Arc<virtio::Config>,
    pub(super) negotiated: Negotiated,
    reserve_mib: Option<u32>,
    adjusts_managed: bool,
    /// From this order on blocks stay whole in the balloon.
    pub(super) block_order: u32,
    pub(super) channel: Arc<SharedChannel>,
    #[pin]
    pub(super) pages: BalloonPages<SharedChannel>,
    /// What the device was told last of the size of the balloon; something else if it was told nothing
    /// since it was started.
    told_actual: Atomic<u64>,
    /// The number of config changes, to notice one in the middle of a step.
    changes: Atomic<u32>,
    /// The value of `changes` when the current step began.
    step_changes: Atomic<u32>,
    #[pin]
    pub(super) pace: Mutex<Pace>,
    #[pin]
    pub(super) oom: Mutex<OomPace>,
    /// Set while somebody who is out of memory waits for the channel.
    pub(super) oom_waiting: Atomic<bool>,
    #[pin]
    pub(super) knobs: Mutex<Knobs>,
    born: Instant<Monotonic>,
}

impl Balloon {
    fn new(
        vdev: &virtio::Device<Bound>,
        config: Arc<virtio::Config>,
    ) -> Result<impl PinInit<Self, Error>> {
        let params = Params::read()?;
        let negotiated = negotiate(vdev, &config, &params)?;
        let acknowledged = Features(vdev.features());
        let agrees = |bit, speaks| acknowledged.has(bit) == speaks;
        if !agrees(
            wire::F_PAGE_BITMAP,
            matches!(negotiated.protocol, Protocol::PageBitmap(_)),
        ) || !agrees(
            wire::F_PAGE_BITMAP_2016,
            negotiated.protocol == Protocol::PageBitmap2016,
        ) {
            // The host would take one thing for another.
            dev_err!(vdev, "the device has changed its mind about page bitmaps\n");
            return Err(EPROTO);
        }
        if mm::is_kdump_kernel() {
            dev_info!(
                vdev,
                "this is a kdump kernel, which needs its memory: not inflating\n"
            );
        }
        let accounts = !negotiated.features.has(wire::F_DEFLATE_ON_OOM);
        let channel = Arc::pin_init(SharedChannel::new(), GFP_KERNEL)?;
        let patience = Patience {
            stopping: Atomic::new(false),
        };
        let link = Link {
            vdev: vdev.into(),
            patience: Arc::new(patience, GFP_KERNEL)?,
            page_size: PageSize::from_shift(mm::PAGE_SHIFT).ok_or(EINVAL)?,
            little_endian: vdev.is_little_endian(),
            inflate: Arc::pin_init(Queue::new(c"inflate", Interrupts::WhileWaiting), GFP_KERNEL)?,
            deflate: Arc::pin_init(Queue::new(c"deflate", Interrupts::WhileWaiting), GFP_KERNEL)?,
        };

        let block_order = [negotiated.protocol.block_shift(), BLOCK_SHIFT]
            .into_iter()
            .filter_map(|shift| link.page_size.order(shift))
            .find(|order| *order <= Block::MAX_ORDER)
            .unwrap_or(0);
        let (whole_from, largest) = (block_order.max(1), block_order);

        Ok(try_pin_init!(Self {
            link,
            config,
            negotiated,
            reserve_mib: params.reserve_mib,
            adjusts_managed: accounts,
            block_order,
            pages <- BalloonPages::new(accounts, whole_from, channel.clone()),
            channel,
            told_actual: Atomic::new(u64::MAX),
            changes: Atomic::new(0),
            step_changes: Atomic::new(0),
            pace <- new_mutex!(
                Pace {
                    backoff: Backoff::new(),
                    log: LogLimit::new(),
                    seen: 0,
                },
                "Balloon::pace"
            ),
            oom <- new_mutex!(OomPace::new(), "Balloon::oom"),
            oom_waiting: Atomic::new(false),
            knobs <- new_mutex!(Knobs {
                    max_order: largest,
                    window: params.window,
                }, "Balloon::knobs"),
            born: Instant::now(),
        }))
    }

    /// The size of a guest page.
    pub(super) fn page_size(&self) -> PageSize {
        self.link.page_size
    }

    /// The largest order of blocks to ask for.
    pub(super) fn max_order(&self) -> u32 {
        self.knobs.lock().max_order
    }

    /// The target in guest pages, as the device wants it now; none in a kdump kernel. May sleep.
    pub(super) fn read_target(&self) -> Result<u64> {
        let num_pages = self.config.read_le32(wire::CONFIG_NUM_PAGES)?;

        if mm::is_kdump_kernel() {
            return Ok(0);
        }

        Ok(self.page_size().guest_pages(num_pages))
    }

    /// The target in balloon pages. May sleep.
    pub(super) fn target(&self) -> Result<u32> {
        self.config.read_le32(wire::CONFIG_NUM_PAGES)
    }

    /// The size of the balloon, in balloon pages.
    pub(super) fn actual(&self) -> u32 {
        self.page_size().actual(self.pages.pages())
    }

    /// Tells the device the size of the balloon, if it is another than it was told last. For whoever
    /// has the channel. May sleep.
    pub(super) fn update_actual(&self) -> Result {
        let actual = self.actual();

        if self.told_actual.load(Relaxed) != u64::from(actual) {
            self.config.write_le32(wire::CONFIG_ACTUAL, actual)?;
            self.told_actual.store(u64::from(actual), Relaxed);
        }
        Ok(())
    }

    /// What is spoken with the device.
    pub(super) fn protocol(&self) -> Protocol {
        self.negotiated.protocol
    }

    /// The guest pages to leave to the guest.
    pub(super) fn reserve(&self) -> u64 {
        let ballooned = if self.adjusts_managed {
            self.pages.pages()
        } else {
            0
        };
        let ram = self.page_size().bytes(mm::total_pages() + ballooned);
        let bytes = match self.reserve_mib {
            Some(mib) => u64::from(mib) << 20,
            None => target::default_reserve(ram),
        };

        self.page_size().pages_in(bytes)
    }

    /// Takes note that a step begins; a new target starts the back-off anew.
    pub(super) fn attempts_since_change(&self) {
        let changes = self.changes.load(Relaxed);
        let mut pace = self.pace.lock();

        self.step_changes.store(changes, Relaxed);
        if pace.seen != changes {
            pace.seen = changes;
            pace.backoff.reset();
        }
    }

    /// Whether the target may be another than when the step began, or the channel is wanted by
    /// somebody who is out of memory.
    pub(super) fn interrupted(&self) -> bool {
        self.changes.load(Relaxed) != self.step_changes.load(Relaxed)
            || self.oom_waiting.load(Relaxed)
    }

    /// Milliseconds since the device was probed.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_millis()).unwrap_or(0)
    }

    /// Whether the device is being stopped.
    pub(super) fn stopping(&self) -> bool {
        self.link.patience.stopping.load(Relaxed)
    }

    /// The guest cannot spare more now. Returns when to try again.
    pub(super) fn starved(&self) -> Jiffies {
        let now = self.now_ms();
        let (delay, log) = {
            let mut pace = self.pace.lock();
            (pace.backoff.delay_ms(), pace.log.admit(now))
        };

        if log {
            dev_info!(
                &*self.link.vdev,
                "the guest cannot spare more memory now: {} of {} balloon pages; trying again\n",
                self.actual(),
                self.target().unwrap_or(0)
            );
        }
        msecs_to_jiffies(delay)
    }

    /// Makes the messages fit to the size of window that the user wants.
    pub(super) fn adopt_messages(&self, channel: &mut Channel) {
        let wanted = self.knobs.lock().window;

        channel.resize_messages(wanted);
    }
}

impl Job for Balloon {
    fn run(&self) -> Option<Jiffies> {
        self.resize()
    }
}

/// What the driver keeps for a device.
#[pin_data]
pub(crate) struct BalloonData {
    // Dropped first: it waits for the worker.
    task: Arc<Task<Balloon>>,
    pub(super) balloon: Arc<Balloon>,
    stats: Option<StatsPart>,
    report: Option<Pin<KBox<ReportPart>>>,
}

impl BalloonData {
    /// Ends all work, and waits for what is under way. May sleep.
    fn disable_tasks(&self) {
        self.balloon.link.patience.stopping.store(true, Relaxed);
        self.task.disable();
        if let Some(part) = &self.stats {
            part.task.disable();
        }
    }
}

/// What there is if the device wants statistics.
struct StatsPart {
    task: Arc<Task<Stats>>,
    stats: Arc<Stats>,
}

impl StatsPart {
    /// The number of the statistics queue: it comes after those for inflating and deflating.
    const QUEUE: usize = 2;

    fn new(queue: Arc<WorkQueue>, balloon: Arc<Balloon>) -> Result<Self> {
        let stats = Arc::new(Stats::new(balloon)?, GFP_KERNEL)?;
        let task = Arc::pin_init(Task::new(queue, stats.clone()), GFP_KERNEL)?;

        Ok(Self { task, stats })
    }
}

/// What exists only while the device is in use.
pub(crate) struct Running {
    _oom: Option<Pin<KBox<OomNotifier<OomDeflate>>>>,
}

/// Negotiates, from the device's features and its announcement. May sleep.
fn negotiate(
    vdev: &virtio::Device<Bound>,
    config: &virtio::Config,
    params: &Params,
) -> Result<Negotiated> {
    let offered = Features(vdev.features());
    let has_room = vdev
        .config_len()
        .is_none_or(|len| u32_as_usize(len) >= wire::CONFIG_LEN);
    let announcement = if offered.has(wire::F_PAGE_BITMAP) && has_room {
        let bytes = config.read::<{ Announcement::LEN }>(wire::CONFIG_ANNOUNCEMENT)?;
        Some(Announcement::decode(&bytes))
    } else {
        None
    };

    Ok(features::negotiate(
        offered,
        &Circumstances {
            announcement,
            dialect_2016: params.dialect_2016,
            // Not known before there are queues; see `start`.
            free_page_queue: false,
            poison: poison(),
        },
    ))
}

/// What the guest writes to each byte of memory that is freed, if anything.
fn poison() -> Option<u8> {
    match mm::on_free() {
        OnFree::Nothing => None,
        OnFree::Fill(byte) => Some(byte),
    }
}

impl virtio::Driver for BalloonDriver {
    type Data = BalloonData;
    type Running = Running;

    const ID_TABLE: virtio::IdTable = &VIRTIO_TABLE;

    // More than what is ever acknowledged, since the bits that `negotiate` refuses by must be seen.
    const FEATURES: &'static [c_uint] = &[
        wire::F_MUST_TELL_HOST,
        wire::F_STATS_VQ,
        wire::F_DEFLATE_ON_OOM,
        wire::F_FREE_PAGE_HINT,
        wire::F_PAGE_POISON,
        wire::F_REPORTING,
        wire::F_PAGE_BITMAP,
    ];

    fn attributes() -> &'static dyn sysfs::Groups {
        &knobs::GROUP
    }

    fn validate(vdev: &virtio::Device<Bound>, config: &virtio::Config) -> Result<u64> {
        let negotiated = negotiate(vdev, config, &Params::read()?)?;

        if let Some(e) = negotiated.mistrust {
            dev_warn!(
                vdev,
                "feature bit 23 is offered without a page-bitmap announcement to rely on ({e:?}), \
                 using arrays of frame numbers\n"
            );
        }
        if let Some(refusal) = negotiated.refusal {
            dev_err!(
                vdev,
                "the page-bitmap dialect of 2016 is refused: {}\n",
                refusal.reason()
            );
        }
        Ok(negotiated.features.0)
    }

    fn probe(
        vdev: &virtio::Device<Bound>,
        config: Arc<virtio::Config>,
    ) -> impl PinInit<BalloonData, Error> {
        let balloon = Balloon::new(vdev, config).and_then(|init| Arc::pin_init(init, GFP_KERNEL));
        let queue = WorkQueue::new(c"virtio-balloon").and_then(|q| Ok(Arc::new(q, GFP_KERNEL)?));

        pin_init::pin_init_scope(move || {
            let (balloon, queue) = (balloon?, queue?);
            let task = Arc::pin_init(Task::new(queue.clone(), balloon.clone()), GFP_KERNEL)?;
            let stats = if balloon.negotiated.features.has(wire::F_STATS_VQ) {
                Some(StatsPart::new(queue, balloon.clone())?)
            } else {
                None
            };

            let report = if balloon.negotiated.features.has(wire::F_REPORTING) {
                Some(ReportPart::new()?)
            } else {
                None
            };

            Ok(try_pin_init!(BalloonData {
                task,
                balloon,
                stats,
                report,
            }))
        })
    }

    fn queues<'a>(data: &'a BalloonData, set: &mut virtio::QueueSet<'a>) -> Result {
        set.push(&*data.balloon.link.inflate)?;
        set.push(&*data.balloon.link.deflate)?;
        if let Some(part) = &data.stats {
            set.push(part.stats.queue())?;
        }
        if let Some(part) = &data.report {
            set.push(part.queue())?;
        }
        if data.balloon.negotiated.protocol == Protocol::PageBitmap2016 {
            // Behind the statistics queue, which hosts of 2016 have, too.
            set.expect_none_behind(c"free_page_vq");
        }
        Ok(())
    }

    fn prepare(data: Pin<&BalloonData>) -> Result {
        let balloon = &data.get_ref().balloon;

        if balloon.negotiated.features.has(wire::F_PAGE_POISON) {
            let value = u32::from_ne_bytes([poison().unwrap_or(0); 4]);
            balloon.config.write_le32(wire::CONFIG_POISON_VAL, value)?;
        }
        Ok(())
    }

    fn start(data: Pin<&BalloonData>, canary: bool) -> Result<Running> {
        let balloon = &data.get_ref().balloon;
        let protocol = balloon.negotiated.protocol;

        if canary {
            // Feature bit 3 has been acknowledged, so that there is no way back to arrays: a host of
            // 2016 would take them for bitmaps.
            dev_err!(
                &*balloon.link.vdev,
                "the page-bitmap dialect of 2016 is refused: {}; load without dialect_2016\n",
                Refusal::FreePageQueue.reason()
            );
            return Err(EOPNOTSUPP);
        }
        balloon.link.patience.stopping.store(false, Relaxed);
        let window = balloon.knobs.lock().window;
        let channel = Channel::new(balloon.link.clone(), protocol, window)?;
        balloon.told_actual.store(u64::MAX, Relaxed);

        *balloon.channel.lock() = Some(channel);
        dev_info!(&*balloon.link.vdev, "using {}\n", protocol.name());
        let oom = if balloon.negotiated.features.has(wire::F_DEFLATE_ON_OOM) {
            let handler = OomDeflate {
                balloon: balloon.clone(),
                task: data.task.clone(),
            };
            let handler = Arc::new(handler, GFP_KERNEL)?;
            Some(KBox::pin_init(OomNotifier::new(handler), GFP_KERNEL)?)
        } else {
            None
        };
        if let Some(part) = &data.stats {
            part.task.enable();
            if let Err(e) = part.stats.prime() {
                dev_warn!(&*balloon.link.vdev, "the host gets no statistics ({e:?})\n");
            }
        }
        if let Some(part) = &data.report {
            match part.start() {
                Ok(()) => (),
                Err(EBUSY) => dev_info!(
                    &*balloon.link.vdev,
                    "somebody else reports free pages already, this device gets no reports\n"
                ),
                Err(e) => dev_warn!(
                    &*balloon.link.vdev,
                    "the host gets no reports of free pages ({e:?})\n"
                ),
            }
        }
        data.task.enable();
        data.task.schedule(0);
        Ok(Running { _oom: oom })
    }

    fn stop(data: Pin<&BalloonData>, running: Running) {
        let balloon = &data.get_ref().balloon;

        drop(running);
        data.disable_tasks();
        if let Some(channel) = &mut *balloon.channel.lock() {
            balloon.deflate_all(channel);
            // The device may be gone already.
            let _ = balloon.update_actual();
        }
    }

    fn shutdown(data: Pin<&BalloonData>, running: Running) {
        drop(running);
        data.disable_tasks();
    }

    fn released(data: Pin<&BalloonData>) {
        let balloon = &data.get_ref().balloon;
        if let Some(part) = &data.report {
            part.end();
        }
        let Some(mut channel) = balloon.channel.lock().take() else {
            return;
        };
        let pages = channel.take_back();

        if !pages.is_empty() {
            dev_info!(
                &*balloon.link.vdev,
                "{} guest pages that the host had not answered for are back after the reset\n",
                pages.pages()
            );
        }
    }

    fn queue_used(data: Pin<&BalloonData>, number: usize) {
        if let (StatsPart::QUEUE, Some(part)) = (number, &data.stats) {
            part.task.schedule(0);
        }
    }

    fn config_changed(data: Pin<&BalloonData>) {
        data.balloon.changes.add(1, Relaxed);
        data.task.schedule(0);
    }
}
