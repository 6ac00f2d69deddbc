// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The page-bitmap protocol, for programs on the host.
//!
//! Nothing is defined here: these are the sources of the kernel module, compiled a second time, so
//! that the guest and the host cannot disagree about the wire. What the guest alone needs is here
//! too, for its tests.

#![forbid(unsafe_code)]

// Formatted as the kernel has it, not as this workspace.
#[rustfmt::skip]
#[path = "../../../bitmap.rs"]
pub mod bitmap;

/// The pure logic of the module.
#[rustfmt::skip]
#[path = "../../../logic"]
pub mod logic {
    pub mod features;
    pub mod hint;
    pub mod hold;
    pub mod request;
    pub mod target;
    pub mod units;
    pub mod window;
    pub mod wire;
}

pub use logic::wire;
