// SPDX-License-Identifier: GPL-2.0

//! Abstractions for the virtio bus, in the form of `rust/kernel/pci.rs`.
//!
//! C headers: [`include/linux/virtio.h`](srctree/include/linux/virtio.h),
//! [`include/linux/virtio_config.h`](srctree/include/linux/virtio_config.h)

mod attachment;
mod blocks;
mod config;
mod device;
mod driver;
mod event;
mod loan;
mod message;
mod queue;

pub(crate) use self::{
    blocks::{
        BlockQueue,
        Used, //
    },
    config::Config,
    device::{
        Device,
        DeviceId,
        IdTable, //
    },
    driver::{
        with_data,
        Adapter,
        Driver, //
    },
    loan::{
        LoanQueue,
        Segments, //
    },
    message::Message,
    queue::{
        Interrupts,
        Queue,
        QueueSet, //
    },
};

/// Declares the table of devices that a virtio driver takes.
macro_rules! virtio_device_table {
    ($name:ident, [$($id:expr),* $(,)?]) => {
        kernel::module_device_table!("virtio", $crate::virtio::DeviceId, $name, @none, [$($id),*]);
    };
}
