// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What runs inside a guest: the binary `vbrs-guest`, packed into the initramfs.
//!
//! One program, so that a guest needs no more than it and busybox: the [`agent`] that takes commands
//! from the runner, and the tools the commands use to fill, verify, hold and fragment [`memory`].

pub mod agent;
pub mod memory;
