// SPDX-License-Identifier: GPL-2.0

//! The config space of a virtio device.

use super::device::Device;
use crate::bindings;
use kernel::{
    device::Bound,
    new_mutex,
    prelude::*,
    sync::{
        aref::ARef,
        Mutex, //
    }, //
};

/// Access to a device's config space as long as its driver is bound and the device not reset.
///
/// Config space of every balloon is little-endian, so there are only little-endian accessors.
///
/// Locks: `live` is the innermost lock; nothing is taken under it. The device is asked under it, so
/// that revoking waits for an access under way.
#[pin_data]
pub(crate) struct Config {
    vdev: ARef<Device>,
    #[pin]
    live: Mutex<bool>,
}

impl Config {
    /// Config space of a device that is being probed.
    pub(super) fn new(vdev: &Device<Bound>) -> impl PinInit<Self> {
        let vdev: ARef<Device> = vdev.into();

        pin_init!(Self {
            vdev,
            live <- new_mutex!(true, "Config::live"),
        })
    }

    /// Ends all access. Returns when none is under way any more.
    pub(super) fn revoke(&self) {
        *self.live.lock() = false;
    }

    /// Allows access again, after [`Config::revoke`].
    pub(super) fn restore(&self) {
        *self.live.lock() = true;
    }

    /// Reads `N` bytes at `offset`, which consist of 32-bit fields or of such as are longer or
    /// shorter but do not change while the device is in use.
    ///
    /// Must be called from a context that may sleep. The caller knows that the device has a config
    /// space that large; some transports do not forgive a read beyond it.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if the device is gone.
    pub(crate) fn read<const N: usize>(&self, offset: usize) -> Result<[u8; N]> {
        const { assert!(N % 4 == 0) };

        let mut out = [0; N];
        for (i, piece) in out.chunks_exact_mut(4).enumerate() {
            piece.copy_from_slice(&self.read_le32(offset + 4 * i)?.to_le_bytes());
        }
        Ok(out)
    }

    /// Reads a 32-bit field. See [`Config::read`].
    pub(crate) fn read_le32(&self, offset: usize) -> Result<u32> {
        let mut bytes = [0; 4];
        let live = self.live.lock();

        if !*live {
            return Err(ENODEV);
        }
        // SAFETY: The device is bound and not reset while `live` is held and true, and `bytes` is
        // valid for writes of its length, which is one that all transports take: others than 1, 2,
        // 4 and 8 are a BUG for some.
        unsafe {
            bindings::virtio_config_get(
                self.vdev.as_raw(),
                c_uint::try_from(offset)?,
                bytes.as_mut_ptr().cast(),
                c_uint::try_from(bytes.len())?,
            )
        };
        Ok(u32::from_le_bytes(bytes))
    }

    /// Writes a 32-bit field.
    ///
    /// Must be called from a context that may sleep.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if the device is gone.
    pub(crate) fn write_le32(&self, offset: usize, value: u32) -> Result {
        let bytes = value.to_le_bytes();
        let live = self.live.lock();

        if !*live {
            return Err(ENODEV);
        }
        // SAFETY: The device is bound and not reset while `live` is held and true, and `bytes` is
        // valid for reads of its length.
        unsafe {
            bindings::virtio_config_set(
                self.vdev.as_raw(),
                c_uint::try_from(offset)?,
                bytes.as_ptr().cast(),
                c_uint::try_from(bytes.len())?,
            )
        };
        Ok(())
    }
}
