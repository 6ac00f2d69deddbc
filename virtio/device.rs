// SPDX-License-Identifier: GPL-2.0

//! A virtio device.

use crate::bindings;
use core::{
    marker::PhantomData,
    mem::offset_of,
    ptr::NonNull, //
};
use kernel::{
    device,
    device_id::RawDeviceId,
    prelude::*,
    sync::aref::AlwaysRefCounted,
    types::Opaque, //
};

/// Abstraction for `struct virtio_device_id`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceId(bindings::virtio_device_id);

impl DeviceId {
    /// A device of this kind, of any vendor.
    pub(crate) const fn new(device: u32) -> Self {
        Self(bindings::virtio_device_id {
            device,
            vendor: u32::MAX,
        })
    }

    /// The memory balloon.
    pub(crate) const BALLOON: Self = Self::new(bindings::VIRTIO_ID_BALLOON);
}

// SAFETY: `DeviceId` is a `#[repr(transparent)]` wrapper of `struct virtio_device_id` and adds no
// invariant, so it is safe to transmute to `RawType`.
unsafe impl RawDeviceId for DeviceId {
    type RawType = bindings::virtio_device_id;
}

/// The table of devices a driver takes.
pub(crate) type IdTable = &'static dyn kernel::device_id::IdTable<DeviceId, ()>;

/// A virtio device.
///
/// # Invariants
///
/// A [`Device`] represents a valid `struct virtio_device` created by the C side.
#[repr(transparent)]
pub(crate) struct Device<Ctx: device::DeviceContext = device::Normal>(
    Opaque<bindings::virtio_device>,
    PhantomData<Ctx>,
);

impl<Ctx: device::DeviceContext> Device<Ctx> {
    /// The C object.
    pub(super) fn as_raw(&self) -> *mut bindings::virtio_device {
        self.0.get()
    }
}

impl Device {
    /// Keeps the system awake, if the user has enabled that for the device, until [`Device::relax`]. Can be
    /// called from any context; does not nest.
    pub(crate) fn stay_awake(&self) {
        // SAFETY: By the type invariants the device is valid.
        unsafe { bindings::pm_stay_awake(&raw mut (*self.as_raw()).dev) };
    }

    /// Lets the system sleep again. Can be called from any context.
    pub(crate) fn relax(&self) {
        // SAFETY: By the type invariants the device is valid.
        unsafe { bindings::pm_relax(&raw mut (*self.as_raw()).dev) };
    }
}

impl Device<device::Bound> {
    /// The lower 64 feature bits: in [`super::Driver::validate`] those that both sides could have,
    /// later those that were negotiated.
    pub(crate) fn features(&self) -> u64 {
        (0..u64::BITS)
            // SAFETY: By the type invariants the device is valid.
            .filter(|bit| unsafe { bindings::virtio_test_bit(self.as_raw(), *bit) })
            .fold(0, |set, bit| set | 1 << bit)
    }

    /// Removes from the features to negotiate those that are not in `keep`.
    ///
    /// To be called from [`super::Driver::validate`] only; has no effect on the device later.
    pub(super) fn keep_features(&self, keep: u64) {
        /// `VHOST_USER_F_PROTOCOL_FEATURES`.
        const PROTOCOL_FEATURES: u32 = 30;

        let drop = self.features() & !keep;

        if drop != 0 && self.is_virtio_uml() {
            // virtio-uml takes its own bit from among the driver's features, where it was cleared when
            // they were written first. When they are written again it would lose the bit, and never
            // stop a queue again.
            //
            // SAFETY: As below.
            unsafe { bindings::virtio_set_bit(self.as_raw(), PROTOCOL_FEATURES) };
        }
        for bit in (0..u64::BITS).filter(|bit| drop >> bit & 1 == 1) {
            // SAFETY: By the type invariants the device is valid; the driver core calls `validate`
            // with the device locked, so nobody else changes its features.
            unsafe { bindings::virtio_clear_bit(self.as_raw(), bit) };
        }
    }

    /// Whether integers outside config space are little-endian.
    pub(crate) fn is_little_endian(&self) -> bool {
        cfg!(target_endian = "little") || self.features() >> bindings::VIRTIO_F_VERSION_1 & 1 == 1
    }

    /// The size of the config space in bytes, where the transport knows it.
    ///
    /// virtio-pci does not forgive a read beyond it, other transports do. May sleep.
    pub(crate) fn config_len(&self) -> Option<u32> {
        #[cfg(CONFIG_PCI)]
        return self.pci_config_len();
        #[cfg(not(CONFIG_PCI))]
        None
    }

    /// The size of the config space according to the PCI capability that describes it; `None` if the
    /// device is on another bus. A PCI device without the capability is a legacy one, which has the
    /// fields that all balloons have.
    #[cfg(CONFIG_PCI)]
    fn pci_config_len(&self) -> Option<u32> {
        use kernel::bindings::{
            pci_bus_type,
            pci_dev,
            pci_find_capability,
            pci_find_next_capability,
            pci_read_config_byte,
            pci_read_config_dword,
            PCI_CAP_ID_VNDR, //
        };

        // SAFETY: By the type invariants the device is valid, and so is its parent.
        let parent = unsafe { (*self.as_raw()).dev.parent };
        // SAFETY: As above; the bus type is only compared.
        if parent.is_null() || unsafe { (*parent).bus } != &raw const pci_bus_type {
            return None;
        }
        // SAFETY: A device on the PCI bus is embedded in a `struct pci_dev`.
        let pdev = unsafe { kernel::container_of!(parent, pci_dev, dev) };
        // CAST: a PCI capability id, which the C side takes as `int`.
        let vendor = PCI_CAP_ID_VNDR as c_int;
        // SAFETY: `pdev` is valid, here and below.
        let mut at = unsafe { pci_find_capability(pdev, vendor) };

        while at != 0 {
            let (mut kind, mut len) = (0, 0);
            let field = |offset: u32| c_int::from(at).wrapping_add(offset as c_int);

            // SAFETY: `pdev` is valid, and the results are written to local variables.
            let failed = unsafe {
                pci_read_config_byte(pdev, field(bindings::VIRTIO_PCI_CAP_CFG_TYPE), &mut kind)
                    | pci_read_config_dword(pdev, field(bindings::VIRTIO_PCI_CAP_LENGTH), &mut len)
            };
            if failed == 0 && u32::from(kind) == bindings::VIRTIO_PCI_CAP_DEVICE_CFG {
                return Some(len);
            }
            // SAFETY: As above.
            at = unsafe { pci_find_next_capability(pdev, at, vendor) };
        }
        Some(0)
    }

    /// Says whether the device can wake the system, if the user enables that. May sleep.
    pub(super) fn set_wakeup_capable(&self, capable: bool) {
        // SAFETY: By the type invariants the device is valid.
        unsafe { bindings::device_set_wakeup_capable(&raw mut (*self.as_raw()).dev, capable) };
    }

    /// Whether the transport can be asked for a queue that the device may not have.
    ///
    /// virtio-uml knows only how many queues the other side is ready for, and warns of a question
    /// for more.
    pub(super) fn tells_missing_queues(&self) -> bool {
        !self.is_virtio_uml()
    }

    /// Whether the transport is that of User Mode Linux.
    fn is_virtio_uml(&self) -> bool {
        // SAFETY: By the type invariants the device is valid, and so is its parent's driver while
        // the device is bound; the name is a C string that lives as long.
        let name = unsafe { CStr::from_char_ptr(bindings::virtio_transport(self.as_raw())) };

        name.to_bytes() == b"virtio-uml"
    }
}

// SAFETY: `Device` is a transparent wrapper of `struct virtio_device`, which embeds a
// `struct device` at that offset.
unsafe impl<Ctx: device::DeviceContext> device::AsBusDevice<Ctx> for Device<Ctx> {
    const OFFSET: usize = offset_of!(bindings::virtio_device, dev);
}

// SAFETY: `Device` is a transparent wrapper of a type that doesn't depend on `Device`'s generic
// argument.
kernel::impl_device_context_deref!(unsafe { Device });
kernel::impl_device_context_into_aref!(Device);

// SAFETY: Instances of `Device` are always reference-counted.
unsafe impl AlwaysRefCounted for Device {
    fn inc_ref(&self) {
        // SAFETY: The existence of a shared reference guarantees that the refcount is non-zero.
        unsafe { kernel::bindings::get_device(&raw mut (*self.as_raw()).dev) };
    }

    unsafe fn dec_ref(obj: NonNull<Self>) {
        let vdev: *mut bindings::virtio_device = obj.cast().as_ptr();

        // SAFETY: By the safety requirements of this function the refcount is non-zero.
        unsafe { kernel::bindings::put_device(&raw mut (*vdev).dev) }
    }
}

impl<Ctx: device::DeviceContext> AsRef<device::Device<Ctx>> for Device<Ctx> {
    fn as_ref(&self) -> &device::Device<Ctx> {
        // SAFETY: By the type invariants `dev` is a valid `struct device`, in the same context.
        unsafe { device::Device::from_raw(&raw mut (*self.as_raw()).dev) }
    }
}

// SAFETY: A `Device` is reference-counted by the driver core and can be released from any thread.
unsafe impl Send for Device {}

// SAFETY: All methods of a `Device` in this context only take references or read what is constant.
unsafe impl Sync for Device {}

// SAFETY: Features change only in `validate`, where the driver core holds the device's lock.
unsafe impl Sync for Device<device::Bound> {}
