// SPDX-License-Identifier: GPL-2.0

//! Drivers for virtio devices, and the one order of their life.
//!
//! `probe` → gate opened → queues found → `prepare` → DRIVER_OK → `start` → … → `stop` → queues
//! revoked → reset → unused messages detached → queues deleted → gate closed → `released`. Probe,
//! remove, freeze and restore all go this way. What needs a live device is held in the by-value
//! [`Driver::Running`], which only `stop` and `shutdown` consume; nothing that touches the device is
//! left to a `Drop`, since the data is dropped when the device has been acknowledged again.

use super::{
    config::Config,
    device::{
        Device,
        IdTable, //
    },
    queue::{
        AnyQueue,
        QueueSet,
        MAX_QUEUES, //
    },
};
use crate::{
    bindings,
    sysfs, //
};
use core::{
    cell::UnsafeCell,
    mem::offset_of,
    ptr::{
        null,
        null_mut,
        NonNull, //
    },
};
use kernel::{
    device,
    driver,
    error::{
        from_result,
        to_result, //
    },
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
    types::Opaque,
    ThisModule, //
};

/// A driver for virtio devices.
pub(crate) trait Driver: 'static {
    /// What the driver keeps for a device. Shared by callbacks, hence `Sync`.
    type Data: Send + Sync + 'static;

    /// What lives only while the device does.
    type Running: Send + Unpin + 'static;

    /// The devices the driver takes.
    const ID_TABLE: IdTable;

    /// All feature bits the driver may negotiate.
    const FEATURES: &'static [c_uint];

    /// The sysfs group of each device.
    fn attributes() -> &'static dyn sysfs::Groups;

    /// Says which of the device's features to keep. May read config space. May sleep.
    fn validate(vdev: &Device<device::Bound>, config: &Config) -> Result<u64>;

    /// Makes the data for a device. May read config space. May sleep.
    fn probe(vdev: &Device<device::Bound>, config: Arc<Config>) -> impl PinInit<Self::Data, Error>;

    /// Names the queues, in the order of their numbers.
    fn queues<'a>(data: &'a Self::Data, set: &mut QueueSet<'a>) -> Result;

    /// Writes to config space what the device has to know before it is used. May sleep.
    fn prepare(data: Pin<&Self::Data>) -> Result;

    /// Begins to use the device, which is alive from now on. `canary` tells whether the queue of
    /// [`QueueSet::expect_none_behind`] exists. May sleep.
    fn start(data: Pin<&Self::Data>, canary: bool) -> Result<Self::Running>;

    /// Ends the use of the device, which is still alive. May sleep, must return.
    fn stop(data: Pin<&Self::Data>, running: Self::Running);

    /// The system goes down: stops what uses the device, and leaves the rest as it is. May sleep.
    fn shutdown(data: Pin<&Self::Data>, running: Self::Running);

    /// The device has been reset and has nothing of ours any more. May sleep.
    fn released(data: Pin<&Self::Data>);

    /// The device has used messages of the queue with this number. Called in interrupt context.
    fn queue_used(data: Pin<&Self::Data>, number: usize);

    /// The device has changed its config space. Called with interrupts off.
    fn config_changed(data: Pin<&Self::Data>);
}

/// How far a device is in its life.
enum Life<R> {
    /// It has no queues.
    Down,
    /// It is in use.
    Up(R),
    /// It has queues that nobody uses any more, since the system goes down.
    Halted,
}

/// Where the queues of a device are, for interrupts.
type Dispatch = [Option<NonNull<dyn AnyQueue>>; MAX_QUEUES];

/// What is kept for a device.
///
/// # Invariants
///
/// The queues in `dispatch` are parts of `data`. `dispatch` changes only while the device has no
/// virtqueues, hence no interrupts that could look at it.
#[pin_data]
pub(crate) struct PrivateData<T: Driver> {
    config: Arc<Config>,
    #[pin]
    data: T::Data,
    #[pin]
    life: Mutex<Life<T::Running>>,
    dispatch: UnsafeCell<Dispatch>,
}

// SAFETY: The pointers in `dispatch` are to parts of `data`, which is `Send` and `Sync`.
unsafe impl<T: Driver> Send for PrivateData<T> {}

// SAFETY: As above; `dispatch` is never changed while others look at it, by the type invariants.
unsafe impl<T: Driver> Sync for PrivateData<T> {}

impl<T: Driver> PrivateData<T> {
    /// The driver's data.
    fn data(self: Pin<&Self>) -> Pin<&T::Data> {
        // SAFETY: `data` is structurally pinned.
        unsafe { self.map_unchecked(|this| &this.data) }
    }

    /// Finds the queues, lets interrupts in, and starts the driver.
    fn bring_up(self: Pin<&Self>, vdev: &Device<device::Bound>) -> Result {
        let mut set = QueueSet::new();
        T::queues(&self.get_ref().data, &mut set)?;

        let mut dispatch: Dispatch = [None; MAX_QUEUES];
        for (slot, queue) in dispatch.iter_mut().zip(set.iter()) {
            // CAST: Only the lifetime changes; the queue is a part of `self.data` and outlives the
            // virtqueue, by the order of `take_down`.
            let queue: NonNull<dyn AnyQueue + '_> = NonNull::from(queue);
            // SAFETY: The two types differ in the lifetime bound alone.
            *slot = Some(unsafe {
                core::mem::transmute::<NonNull<dyn AnyQueue + '_>, NonNull<dyn AnyQueue>>(queue)
            });
        }
        // SAFETY: The device has no virtqueues, so nobody looks at `dispatch`.
        unsafe { *self.dispatch.get() = dispatch };
        // SAFETY: `vdev` is valid, and `priv` is for the driver. The gate is open before there are
        // virtqueues, hence before the first interrupt.
        unsafe { (*vdev.as_raw()).priv_ = core::ptr::from_ref(self.get_ref()).cast_mut().cast() };

        let found = find_queues::<T>(vdev, &set);
        if found.is_err() {
            // SAFETY: As above; there are no virtqueues.
            unsafe { (*vdev.as_raw()).priv_ = null_mut() };
        }
        let canary = found?;

        self.config.restore();
        let started = T::prepare(self.data()).and_then(|()| {
            // SAFETY: `vdev` is valid, and its queues are set up.
            unsafe { bindings::virtio_device_ready(vdev.as_raw()) };
            T::start(self.data(), canary)
        });
        match started {
            Ok(running) => {
                *self.life.lock() = Life::Up(running);
                Ok(())
            }
            Err(e) => {
                self.take_down(vdev);
                Err(e)
            }
        }
    }

    /// Resets the device and deletes its queues; to be called once after each [`Self::bring_up`]
    /// that found them, when the driver does not run any more.
    fn take_down(self: Pin<&Self>, vdev: &Device<device::Bound>) {
        let queues = || {
            // SAFETY: `dispatch` is only changed in `bring_up`, which does not run at the same time:
            // the driver core holds the device's lock.
            let dispatch = unsafe { &*self.dispatch.get() };
            // SAFETY: The queues are parts of `self.data`.
            dispatch.iter().flatten().map(|q| unsafe { q.as_ref() })
        };

        self.config.revoke();
        queues().for_each(AnyQueue::revoke);
        // SAFETY: `vdev` is valid.
        unsafe { bindings::virtio_reset_device(vdev.as_raw()) };
        queues().for_each(AnyQueue::reclaim);
        // SAFETY: `vdev` is valid, and its queues have been found and not been deleted since. From
        // here on there are no more interrupts.
        unsafe { bindings::virtio_del_vqs(vdev.as_raw()) };
        queues().for_each(AnyQueue::release);
        // SAFETY: `vdev` is valid, and there are no more virtqueues whose interrupts would use this.
        unsafe { (*vdev.as_raw()).priv_ = null_mut() };
        T::released(self.data());
    }
}

/// Finds the queues of `set`; tells whether the device has the one it should not have, too.
fn find_queues<T: Driver>(vdev: &Device<device::Bound>, set: &QueueSet<'_>) -> Result<bool> {
    const NO_QUEUE: bindings::virtqueue_info = bindings::virtqueue_info {
        name: null(),
        callback: None,
        ctx: false,
    };
    let find = |canary: Option<&'static CStr>| -> Result {
        let mut infos = [const { NO_QUEUE }; MAX_QUEUES + 1];
        let mut vqs = [null_mut::<bindings::virtqueue>(); MAX_QUEUES + 1];
        let mut n = 0;

        for (info, queue) in infos.iter_mut().zip(set.iter()) {
            info.name = queue.name().as_char_ptr();
            info.callback = Some(used_callback::<T>);
            n += 1;
        }
        if let (Some(name), Some(info)) = (canary, infos.get_mut(n)) {
            info.name = name.as_char_ptr();
            n += 1;
        }
        // SAFETY: `vdev` is valid and has no virtqueues; both arrays have at least `n` entries, and
        // the names are static.
        to_result(unsafe {
            bindings::virtio_find_vqs(
                vdev.as_raw(),
                c_uint::try_from(n)?,
                vqs.as_mut_ptr(),
                infos.as_mut_ptr(),
            )
        })?;
        for (queue, vq) in set.iter().zip(vqs) {
            if let Some(vq) = NonNull::new(vq) {
                // SAFETY: The virtqueue was just made, and is deleted only after `reclaim`, by the
                // order of `PrivateData::take_down`.
                unsafe { queue.attach(vq) };
            }
        }
        Ok(())
    };

    let canary = set.canary().filter(|_| vdev.tells_missing_queues());
    if canary.is_some() && find(canary).is_ok() {
        return Ok(true);
    }
    find(None).map(|()| false)
}

/// The device has used messages. Called in interrupt context.
extern "C" fn used_callback<T: Driver>(vq: *mut bindings::virtqueue) {
    // SAFETY: The C side calls this with a valid virtqueue, whose device is valid, too.
    let (index, gate) = unsafe { ((*vq).index, (*(*vq).vdev).priv_) };
    // SAFETY: The gate is either closed or the device's data, which is pinned and lives as long as
    // there are virtqueues.
    let Some(private) = (unsafe { gate.cast::<PrivateData<T>>().as_ref() }) else {
        return;
    };
    // SAFETY: It is pinned, see above.
    let private = unsafe { Pin::new_unchecked(private) };
    // SAFETY: `dispatch` does not change while there are virtqueues.
    let dispatch = unsafe { &*private.dispatch.get() };
    // CAST: the index fits into what it came from, an `unsigned int`.
    let number = index as usize;

    if let Some(Some(queue)) = dispatch.get(number) {
        // SAFETY: Queues outlive the virtqueues they are attached to.
        unsafe { queue.as_ref() }.on_used();
        T::queue_used(private.data(), number);
    }
}

/// Calls `f` with the driver's data of a device, for callbacks that the driver core ends before the
/// driver is unbound, such as sysfs attributes.
///
/// # Safety
///
/// `dev` must be the `struct device` of a virtio device that is bound to `T`, from after a successful
/// probe until before its removal.
pub(crate) unsafe fn with_data<T: Driver, R>(
    dev: *mut kernel::bindings::device,
    f: impl FnOnce(Pin<&T::Data>) -> R,
) -> R {
    // SAFETY: By the safety requirements `dev` is valid and bound.
    let dev = unsafe { &*dev.cast::<device::Device<device::BoundInternal>>() };
    // SAFETY: By the safety requirements probe has stored a `PrivateData<T>`.
    let private = unsafe { dev.drvdata_borrow::<PrivateData<T>>() };

    f(private.data())
}

/// An adapter for the registration of virtio drivers.
pub(crate) struct Adapter<T: Driver>(T);

// SAFETY:
// - `bindings::virtio_driver` is a C type declared as `repr(C)`.
// - `PrivateData<T>` is the type of the driver's device private data.
// - `struct virtio_driver` embeds a `struct device_driver` at that offset.
unsafe impl<T: Driver> driver::DriverLayout for Adapter<T> {
    type DriverType = bindings::virtio_driver;
    type DriverData<'bound> = PrivateData<T>;
    const DEVICE_DRIVER_OFFSET: usize = offset_of!(Self::DriverType, driver);
}

// SAFETY: A call to `unregister` for a given instance of `DriverType` is guaranteed to be valid if a
// preceding call to `register` has been successful.
unsafe impl<T: Driver> driver::RegistrationOps for Adapter<T> {
    unsafe fn register(
        vdrv: &Opaque<Self::DriverType>,
        name: &'static CStr,
        module: &'static ThisModule,
    ) -> Result {
        // SAFETY: It's safe to set the fields of `struct virtio_driver` on initialization.
        unsafe {
            (*vdrv.get()).driver.name = name.as_char_ptr();
            // The driver is registered once.
            (*vdrv.get()).driver.dev_groups = T::attributes().as_raw();
            (*vdrv.get()).id_table = T::ID_TABLE.as_ptr();
            (*vdrv.get()).feature_table = T::FEATURES.as_ptr();
            (*vdrv.get()).feature_table_size = c_uint::try_from(T::FEATURES.len())?;
            (*vdrv.get()).validate = Some(Self::validate_callback);
            (*vdrv.get()).probe = Some(Self::probe_callback);
            (*vdrv.get()).remove = Some(Self::remove_callback);
            (*vdrv.get()).config_changed = Some(Self::config_changed_callback);
            (*vdrv.get()).freeze = Some(Self::freeze_callback);
            (*vdrv.get()).restore = Some(Self::restore_callback);
            (*vdrv.get()).shutdown = Some(Self::shutdown_callback);
        }

        // SAFETY: `vdrv` is guaranteed to be a valid `DriverType`.
        to_result(unsafe { bindings::__register_virtio_driver(vdrv.get(), module.as_ptr()) })
    }

    unsafe fn unregister(vdrv: &Opaque<Self::DriverType>) {
        // SAFETY: `vdrv` is guaranteed to be a valid `DriverType`.
        unsafe { bindings::unregister_virtio_driver(vdrv.get()) }
    }
}

impl<T: Driver> Adapter<T> {
    extern "C" fn validate_callback(vdev: *mut bindings::virtio_device) -> c_int {
        // SAFETY: The virtio bus only ever calls this with a valid pointer to a device that is being
        // bound to this driver.
        //
        // INVARIANT: `vdev` is valid for the duration of the callback.
        let vdev: &Device<device::Bound> =
            unsafe { &*vdev.cast::<Device<device::CoreInternal<'_>>>() };

        from_result(|| {
            // SAFETY: `vdev` is valid.
            if !unsafe { bindings::virtio_has_config(vdev.as_raw()) } {
                dev_err!(vdev, "the device has no config space\n");
                return Err(EINVAL);
            }
            let config = Arc::pin_init(Config::new(vdev), GFP_KERNEL)?;
            // Without indirect descriptors adding a message allocates nothing. Mapping for devices
            // behind an IOMMU would be undone while the device keeps the pages.
            let never = 1 << bindings::VIRTIO_RING_F_INDIRECT_DESC
                | 1 << bindings::VIRTIO_F_ACCESS_PLATFORM;

            vdev.keep_features(T::validate(vdev, &config)? & !never);
            config.revoke();
            Ok(0)
        })
    }

    extern "C" fn probe_callback(vdev: *mut bindings::virtio_device) -> c_int {
        // SAFETY: As in `validate_callback`.
        //
        // INVARIANT: `vdev` is valid for the duration of the callback.
        let vdev = unsafe { &*vdev.cast::<Device<device::CoreInternal<'_>>>() };

        from_result(|| {
            let config = Arc::pin_init(Config::new(vdev), GFP_KERNEL)?;
            let data = T::probe(vdev, config.clone());

            vdev.as_ref().set_drvdata(try_pin_init!(PrivateData::<T> {
                config,
                data <- data,
                life <- new_mutex!(Life::Down, "PrivateData::life"),
                dispatch: UnsafeCell::new([None; MAX_QUEUES]),
            }))?;
            // SAFETY: It was just set. If what follows fails, the driver core drops it.
            let private = unsafe { vdev.as_ref().drvdata_borrow::<PrivateData<T>>() };

            private.bring_up(vdev)?;
            vdev.set_wakeup_capable(true);
            Ok(0)
        })
    }

    /// Calls `f` with the data of a device whose probe has succeeded.
    ///
    /// # Safety
    ///
    /// `vdev` must be valid and bound to this driver, and must stay so during the call.
    unsafe fn with_private<R>(
        vdev: *mut bindings::virtio_device,
        f: impl FnOnce(Pin<&PrivateData<T>>, &Device<device::Bound>) -> R,
    ) -> R {
        // SAFETY: By the safety requirements.
        let vdev = unsafe { &*vdev.cast::<Device<device::CoreInternal<'_>>>() };
        // SAFETY: Probe has stored a `PrivateData<T>`, which is dropped after the driver is unbound.
        let private = unsafe { vdev.as_ref().drvdata_borrow::<PrivateData<T>>() };

        f(private, vdev)
    }

    /// Stops the driver, if it runs, and takes the device down, if it is up.
    fn stop(private: Pin<&PrivateData<T>>, vdev: &Device<device::Bound>) {
        let life = core::mem::replace(&mut *private.life.lock(), Life::Down);

        match life {
            Life::Down => return,
            Life::Up(running) => T::stop(private.data(), running),
            Life::Halted => (),
        }
        private.take_down(vdev);
    }

    extern "C" fn remove_callback(vdev: *mut bindings::virtio_device) {
        // SAFETY: The virtio bus only ever calls this for a device that was probed.
        unsafe {
            Self::with_private(vdev, |private, vdev| {
                vdev.set_wakeup_capable(false);
                Self::stop(private, vdev);
                // Once more for a device that could not be restored; does no harm to others.
                bindings::virtio_reset_device(vdev.as_raw());
            })
        };
    }

    extern "C" fn freeze_callback(vdev: *mut bindings::virtio_device) -> c_int {
        // SAFETY: As in `remove_callback`.
        unsafe { Self::with_private(vdev, Self::stop) };
        0
    }

    extern "C" fn restore_callback(vdev: *mut bindings::virtio_device) -> c_int {
        // SAFETY: As in `remove_callback`.
        from_result(|| unsafe {
            Self::with_private(vdev, |private, vdev| private.bring_up(vdev)).map(|()| 0)
        })
    }

    extern "C" fn shutdown_callback(vdev: *mut bindings::virtio_device) {
        // SAFETY: As in `remove_callback`.
        unsafe {
            Self::with_private(vdev, |private, vdev| {
                let life = core::mem::replace(&mut *private.life.lock(), Life::Down);

                if let Life::Up(running) = life {
                    T::shutdown(private.data(), running);
                    *private.life.lock() = Life::Halted;
                }
                bindings::virtio_device_shutdown(vdev.as_raw());
            })
        };
    }

    extern "C" fn config_changed_callback(vdev: *mut bindings::virtio_device) {
        // SAFETY: The virtio core delivers config changes only between probe and remove.
        unsafe { Self::with_private(vdev, |private, _| T::config_changed(private.data())) };
    }
}
