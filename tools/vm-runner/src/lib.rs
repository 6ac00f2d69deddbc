// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Boots guests — User Mode Linux, or a kernel in QEMU — with the balloon module and the host daemon,
//! runs commands in them, and tests what they do. See `Documentation/testing.rst`.
//!
//! From the bottom up: [`process`] and [`cpio`] know nothing of guests; [`machine`] boots one and keeps
//! its [`console`] and its [`channel`] for commands apart; [`session`] adds the [`host`] side of the
//! balloon and the verbs that a test is written in; [`scenario`] holds the tests; [`check`], [`shell`]
//! and [`demo`] are what people call.

pub mod account;
pub mod channel;
pub mod check;
pub mod console;
pub mod cpio;
pub mod demo;
pub mod folder;
pub mod guest;
pub mod host;
pub mod host_memory;
pub mod initramfs;
pub mod klog;
pub mod ktap;
pub mod libvirt;
pub mod log;
pub mod machine;
pub mod parity;
pub mod paths;
pub mod pause;
pub mod process;
pub mod qmp;
pub mod random;
pub mod results;
pub mod scenario;
pub mod session;
pub mod shell;
pub mod size;
pub mod wire;
