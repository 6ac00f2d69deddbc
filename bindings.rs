// SPDX-License-Identifier: GPL-2.0

//! Bindings this module needs and `kernel::bindings` does not have.
//!
//! Only the wrapper modules may use this. What the C side is made of is in `bindings_helper.h`,
//! `bindgen_parameters` and `helpers.c`.

#![allow(
    clippy::all,
    clippy::ptr_as_ptr,
    clippy::ref_as_ptr,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    improper_ctypes,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    clippy::undocumented_unsafe_blocks,
    reason = "generated code"
)]

mod raw {
    use kernel::{
        bindings::*,
        ffi, //
    };
    include!(concat!(env!("VBRS_OBJ"), "/bindings_generated.rs"));
}

mod helpers {
    use super::raw::*;
    use kernel::{
        bindings::*,
        ffi, //
    };
    include!(concat!(env!("VBRS_OBJ"), "/bindings_helpers_generated.rs"));
}

pub(crate) use helpers::*;
pub(crate) use raw::*;

// bindgen runs without layout tests, as in the kernel; these stand in for them.
const _: () = {
    use core::mem::offset_of;

    assert!(size_of::<virtio_device>() == VBRS_SIZEOF_VIRTIO_DEVICE);
    assert!(offset_of!(virtio_device, dev) == VBRS_OFFSETOF_VIRTIO_DEVICE_DEV);
    assert!(offset_of!(virtio_device, priv_) == VBRS_OFFSETOF_VIRTIO_DEVICE_PRIV);
    assert!(size_of::<virtio_driver>() == VBRS_SIZEOF_VIRTIO_DRIVER);
    assert!(size_of::<virtqueue_info>() == VBRS_SIZEOF_VIRTQUEUE_INFO);
    assert!(offset_of!(virtqueue, index) == VBRS_OFFSETOF_VIRTQUEUE_INDEX);
    assert!(size_of::<balloon_dev_info>() == VBRS_SIZEOF_BALLOON_DEV_INFO);
};
