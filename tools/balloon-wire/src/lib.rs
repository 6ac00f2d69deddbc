// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The page-bitmap protocol, for programs on the host.
//!
//! Nothing is defined here: these are the sources of the kernel module, compiled a second time, so
//! that the guest and the host cannot disagree about the wire.

#![forbid(unsafe_code)]

#[path = "../../../bitmap.rs"]
pub mod bitmap;

/// The pure logic of the module.
#[path = "../../../logic"]
pub mod logic {
    pub mod wire;
}

pub use logic::wire;
