// SPDX-License-Identifier: GPL-2.0

//! The driver of balloon devices: what it negotiates, and the life of a device.

use super::{
    balloon::Balloon,
    channel::Channel,
    hibernate::EmptyForImage,
    hint::{
        HintPart,
        Hints, //
    },
    hold::Relief,
    knobs,
    offline::OfflineDeflate,
    oom::OomDeflate,
    params::Params,
    report::ReportPart,
    request::RequestPart,
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
            Refusal, //
        },
        wire::{
            self,
            Announcement, //
        },
    },
    mm::{
        self,
        HibernateNotifier,
        OfflineNotifier,
        OnFree,
        OomNotifier,
        Pressure, //
    },
    sysfs,
    virtio,
    work::{
        Task,
        WorkQueue, //
    },
    VIRTIO_TABLE, //
};
use kernel::{
    device::Bound,
    num::casts::u32_as_usize,
    prelude::*,
    sync::{
        atomic::Relaxed,
        Arc, //
    },
};

/// The type that stands for the driver.
pub(crate) struct BalloonDriver;

/// What the driver keeps for a device.
#[pin_data]
pub(crate) struct BalloonData {
    _hibernate: Pin<KBox<HibernateNotifier<EmptyForImage>>>,
    // Dropped before the rest: it waits for the worker.
    task: Arc<Task<Balloon>>,
    pub(super) balloon: Arc<Balloon>,
    stats: Option<StatsPart>,
    hint: Option<HintPart>,
    report: Option<Pin<KBox<ReportPart>>>,
    request: Option<RequestPart>,
}

impl BalloonData {
    /// Ends all work, and waits for what is under way. May sleep.
    fn disable_tasks(&self) {
        self.balloon.link.patience.stopping.store(true, Relaxed);
        self.task.disable();
        if let Some(part) = &self.stats {
            part.task.disable();
        }
        if let Some(part) = &self.hint {
            part.stop();
        }
        if let Some(part) = &self.request {
            part.stop();
        }
        self.balloon.link.vdev.relax();
    }

    /// The number of the queue for requests of the host, before that for answers: the last two.
    fn request_queue(&self) -> usize {
        self.hint_queue() + usize::from(self.hint.is_some()) + usize::from(self.report.is_some())
    }

    /// The number of the queue for hints: it comes after that for statistics.
    fn hint_queue(&self) -> usize {
        StatsPart::QUEUE + usize::from(self.stats.is_some())
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
    _offline: Pin<KBox<OfflineNotifier<OfflineDeflate>>>,
    _hints: Option<Pressure<Hints>>,
    _relief: Option<Pressure<Relief>>,
}

/// How far the negotiation is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The device's features are those that it offers.
    Offered,
    /// They are those that were acknowledged.
    Acknowledged,
}

/// Negotiates, from the device's features and its announcement. May sleep.
pub(super) fn negotiate(
    vdev: &virtio::Device<Bound>,
    config: &virtio::Config,
    params: &Params,
    stage: Stage,
) -> Result<Negotiated> {
    let offered = Features(vdev.features());
    let config_len = vdev.config_len().map(u32_as_usize);
    let has_room = config_len.is_none_or(|len| len >= wire::CONFIG_LEN);
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
            // What was acknowledged was certain then.
            hint_field: stage == Stage::Acknowledged
                || config_len.is_some_and(|len| len >= wire::CONFIG_POISON_VAL),
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
        wire::F_HOST_REQUEST,
        wire::F_PAGE_BITMAP,
    ];

    fn attributes() -> &'static dyn sysfs::Groups {
        &knobs::GROUP
    }

    fn validate(vdev: &virtio::Device<Bound>, config: &virtio::Config) -> Result<u64> {
        let negotiated = negotiate(vdev, config, &Params::read()?, Stage::Offered)?;

        if Features(vdev.features()).has(wire::F_ACCESS_PLATFORM) {
            dev_warn!(
                vdev,
                "the device offers ACCESS_PLATFORM (33), which no balloon can use, since it speaks of \
                 physical pages; if it insists on that, it refuses the features next\n"
            );
        }
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
                Some(StatsPart::new(queue.clone(), balloon.clone())?)
            } else {
                None
            };
            let hint = if balloon.negotiated.wants_hints() {
                Some(HintPart::new(queue.clone(), balloon.clone())?)
            } else {
                None
            };
            let report = if balloon.negotiated.features.has(wire::F_REPORTING) {
                Some(ReportPart::new()?)
            } else {
                None
            };
            let request = if balloon.negotiated.features.has(wire::F_HOST_REQUEST) {
                Some(RequestPart::new(queue, balloon.clone())?)
            } else {
                None
            };

            let empty = EmptyForImage {
                balloon: balloon.clone(),
                task: task.clone(),
            };
            let hibernate = HibernateNotifier::new(Arc::new(empty, GFP_KERNEL)?);

            Ok(try_pin_init!(BalloonData {
                _hibernate: KBox::pin_init(hibernate, GFP_KERNEL)?,
                task,
                balloon,
                stats,
                hint,
                report,
                request,
            }))
        })
    }

    fn queues<'a>(data: &'a BalloonData, set: &mut virtio::QueueSet<'a>) -> Result {
        set.push(&*data.balloon.link.inflate)?;
        set.push(&*data.balloon.link.deflate)?;
        if let Some(part) = &data.stats {
            set.push(part.stats.queue())?;
        }
        if let Some(part) = &data.hint {
            set.push(part.queue())?;
        }
        if let Some(part) = &data.report {
            set.push(part.queue())?;
        }
        if let Some(part) = &data.request {
            let (requests, answers) = part.queues();
            set.push(requests)?;
            set.push(answers)?;
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
        let window = balloon.window();
        let channel = Channel::new(balloon.link.clone(), protocol, window)?;
        balloon.started();

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
        let offline = Arc::new(
            OfflineDeflate {
                balloon: balloon.clone(),
                keeper: data.request.as_ref().map(RequestPart::keeper),
                task: data.task.clone(),
            },
            GFP_KERNEL,
        )?;
        let offline = KBox::pin_init(OfflineNotifier::new(offline), GFP_KERNEL)?;
        let hints = match &data.hint {
            Some(part) => Some(part.start()?),
            None => None,
        };
        let relief = data.request.as_ref().and_then(|part| {
            let started = part.start();

            if let Err(e) = &started {
                dev_warn!(
                    &*balloon.link.vdev,
                    "requests of the host are not served ({e:?})\n"
                );
            }
            started.ok()
        });
        // From here on nothing fails: what is enabled is disabled by `stop` alone.
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
        Ok(Running {
            _oom: oom,
            _offline: offline,
            _hints: hints,
            _relief: relief,
        })
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
        if let Some(part) = data.hint.as_ref().filter(|_| number == data.hint_queue()) {
            part.wake();
        }
        if let Some(part) = &data.request {
            let first = data.request_queue();

            if number == first || number == first + 1 {
                part.wake();
            }
        }
    }

    fn config_changed(data: Pin<&BalloonData>) {
        data.balloon.config_changed();
        data.task.schedule(0);
        if let Some(part) = &data.hint {
            part.wake();
        }
    }
}
