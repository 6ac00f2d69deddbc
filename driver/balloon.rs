// SPDX-License-Identifier: GPL-2.0

//! A balloon: how large it is, how large it should be, and what that takes.

use super::{
    channel::{
        Channel,
        Link,
        Patience,
        Queue, //
    },
    device::{
        negotiate,
        Stage, //
    },
    hint::Held,
    migrate::SharedChannel,
    pace::Pace,
    params::Params, //
};
use crate::{
    logic::{
        features::{
            Features,
            Negotiated,
            Protocol,
            BLOCK_SHIFT, //
        },
        oom::OomPace,
        request,
        target,
        units::PageSize,
        window::WindowSize,
        wire, //
    },
    mm::{
        self,
        BalloonPages,
        Block, //
    },
    virtio::{
        self,
        Interrupts, //
    },
    work::Job,
};
use kernel::{
    device::Bound,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        barrier::smp_mb,
        Arc,
        Mutex, //
    },
    time::{
        msecs_to_jiffies,
        Instant,
        Jiffies,
        Monotonic, //
    },
};

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
    pub(super) config: Arc<virtio::Config>,
    pub(super) negotiated: Negotiated,
    reserve_mib: Option<u32>,
    adjusts_managed: bool,
    /// From this order on blocks stay whole in the balloon.
    pub(super) block_order: u32,
    pub(super) channel: Arc<SharedChannel>,
    #[pin]
    pub(super) pages: BalloonPages<SharedChannel>,
    /// Blocks that are hinted to the host.
    #[pin]
    pub(super) held: Held,
    /// What the device was told last of the size of the balloon; something else if it was told nothing
    /// since it was started.
    told_actual: Atomic<u64>,
    /// The system hibernates: the balloon is to be empty, whatever the device wants.
    emptied: Atomic<bool>,
    /// The number of config changes, to notice one in the middle of a step.
    changes: Atomic<u32>,
    /// The value of `changes` when the current step began.
    step_changes: Atomic<u32>,
    #[pin]
    pub(super) pace: Mutex<Pace>,
    #[pin]
    pub(super) oom: Mutex<OomPace>,
    /// How many wait for the channel because memory is wanted back at once.
    pub(super) waiting: Atomic<u32>,
    #[pin]
    pub(super) knobs: Mutex<Knobs>,
    /// Whether the host may have caches dropped.
    pub(super) allow_drop_caches: Atomic<bool>,
    /// Whether caches are being dropped for the host.
    pub(super) drops_now: Atomic<bool>,
    born: Instant<Monotonic>,
}

impl Balloon {
    /// A balloon for a device that is being probed. May sleep.
    ///
    /// # Errors
    ///
    /// [`EPROTO`] if the device says now something else of itself than when it was validated.
    pub(super) fn new(
        vdev: &virtio::Device<Bound>,
        config: Arc<virtio::Config>,
    ) -> Result<impl PinInit<Self, Error>> {
        let params = Params::read()?;
        let negotiated = negotiate(vdev, &config, &params, Stage::Acknowledged)?;
        if negotiated.features != Features(vdev.features()) {
            // The host would take one thing for another.
            dev_err!(vdev, "the device has changed its mind about its features\n");
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
            held <- Held::new(),
            told_actual: Atomic::new(u64::MAX),
            emptied: Atomic::new(false),
            changes: Atomic::new(0),
            step_changes: Atomic::new(0),
            pace <- new_mutex!(
                Pace::new(),
                "Balloon::pace"
            ),
            oom <- new_mutex!(OomPace::new(), "Balloon::oom"),
            waiting: Atomic::new(0),
            knobs <- new_mutex!(Knobs {
                    max_order: largest,
                    window: params.window,
                }, "Balloon::knobs"),
            allow_drop_caches: Atomic::new(params.allow_drop_caches),
            drops_now: Atomic::new(false),
            born: Instant::now(),
        }))
    }

    /// The device was started: it knows nothing of the balloon yet.
    pub(super) fn started(&self) {
        self.told_actual.store(u64::MAX, Relaxed);
    }

    /// The device has changed its config space. Can be called from any context.
    pub(super) fn config_changed(&self) {
        self.changes.add(1, Relaxed);
        // After the count, see `rest`.
        smp_mb(Full);
        self.link.vdev.stay_awake();
    }

    /// The work is done, or cannot go on now: the system may sleep. Not if the device has changed its config
    /// space since the last look at it.
    pub(super) fn rest(&self) {
        self.link.vdev.relax();
        // Whoever counts a change after this has not called `stay_awake` yet.
        smp_mb(Full);
        if self.has_changed() {
            self.link.vdev.stay_awake();
        }
    }

    /// Whether the target may be another than when the step began.
    fn has_changed(&self) -> bool {
        self.changes.load(Relaxed) != self.step_changes.load(Relaxed)
    }

    /// How often the device has changed its config space.
    pub(super) fn changes(&self) -> u32 {
        self.changes.load(Relaxed)
    }

    /// The size of a guest page.
    pub(super) fn page_size(&self) -> PageSize {
        self.link.page_size
    }

    /// The largest order of blocks to ask for.
    pub(super) fn max_order(&self) -> u32 {
        self.knobs.lock().max_order
    }

    /// Says whether the balloon is to be empty, whatever the device wants.
    pub(super) fn set_emptied(&self, emptied: bool) {
        self.emptied.store(emptied, Relaxed);
        self.changes.add(1, Relaxed);
    }

    /// The target in guest pages, as the device wants it now; none in a kdump kernel, and while the system
    /// hibernates. May sleep.
    pub(super) fn read_target(&self) -> Result<u64> {
        let num_pages = self.config.read_le32(wire::CONFIG_NUM_PAGES)?;

        if mm::is_kdump_kernel() || self.emptied.load(Relaxed) {
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

        self.step_changes.store(changes, Relaxed);
        self.pace.lock().attempt(changes);
    }

    /// Whether somebody who wants memory back waits for the channel.
    pub(super) fn is_wanted(&self) -> bool {
        self.waiting.load(Relaxed) > 0
    }

    /// Whether the target may be another than when the step began, or the channel is wanted by somebody else.
    pub(super) fn interrupted(&self) -> bool {
        self.has_changed() || self.is_wanted()
    }

    /// The size of a bitmap window, as the user wants it.
    pub(super) fn window(&self) -> WindowSize {
        self.knobs.lock().window
    }

    /// Whether the host may have caches dropped.
    pub(super) fn drops_caches(&self) -> bool {
        self.allow_drop_caches.load(Relaxed)
    }

    /// What an answer to the host tells of how things are now.
    pub(super) fn answer_state(&self, holding: bool) -> u16 {
        let caches = if self.drops_caches() {
            request::STATE_CACHES
        } else {
            0
        };

        if holding {
            caches | request::STATE_HOLDING
        } else {
            caches
        }
    }

    /// Microseconds since the device was probed.
    pub(super) fn now_us(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_nanos() / 1000).unwrap_or(0)
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
        let (delay, log) = self.pace.lock().starved(now);

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
        channel.resize_messages(self.window());
    }
}

impl Job for Balloon {
    fn run(&self) -> Option<Jiffies> {
        let again = self.resize();

        self.rest();
        again
    }
}
