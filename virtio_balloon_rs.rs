// SPDX-License-Identifier: GPL-2.0

//! A virtio memory balloon: gives guest memory to the host in bulk, and takes it back.
//!
//! See `Documentation/design.rst` for the layers, the life of a device, and the order of locks.

#![deny(unsafe_code)]

use kernel::{
    prelude::*,
    InPlaceModule, //
};

#[allow(unsafe_code)]
mod bindings;
mod bitmap;
mod driver;
mod logic;
#[allow(unsafe_code)]
mod mm;
#[allow(unsafe_code)]
mod page_list;
#[allow(unsafe_code)]
mod sysfs;
#[allow(unsafe_code)]
#[macro_use]
mod virtio;
#[allow(unsafe_code)]
mod work;

virtio_device_table!(VIRTIO_TABLE, [virtio::DeviceId::BALLOON]);

/// The module: the registration of the driver, once the parameters are found good.
#[pin_data]
struct BalloonModule {
    #[pin]
    _driver: kernel::driver::Registration<virtio::Adapter<driver::BalloonDriver>>,
}

impl InPlaceModule for BalloonModule {
    fn init(module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            _: { driver::Params::read()?; },
            _driver <- kernel::driver::Registration::new(
                <Self as kernel::ModuleMetadata>::NAME,
                module,
            ),
        })
    }
}

module! {
    type: BalloonModule,
    name: "virtio_balloon_rs",
    authors: ["The virtio_balloon_rs developers"],
    description: "Virtio balloon driver with page bitmaps",
    license: "GPL",
    params: {
        bitmap_bytes: u32 {
            default: 32768,
            description: "Size of a bitmap window in bytes: a power of two from 64 to 1048576",
        },
        reserve_mb: u32 {
            default: 0xffff_ffff,
            description: "Memory to leave to the guest in MiB (default: by the size of the guest)",
        },
        allow_drop_caches: bool {
            default: true,
            description: "Drop caches when the host asks for it",
        },
        dialect_2016: bool {
            default: false,
            description: "The host means page bitmaps by feature bit 3, as proposed in 2016",
        },
    },
}
