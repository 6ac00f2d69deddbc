// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The control protocol of `vhost-device-balloon`.
//!
//! One JSON object a line, in both directions, over a Unix socket that belongs to the daemon's
//! user. `Documentation/control.rst` describes it for other languages; here are its [`message`]s,
//! the [`size`]s people write, and a blocking [`client`]; and the [`draft`]s of files that both sides
//! make.

#![forbid(unsafe_code)]

pub mod client;
pub mod draft;
pub mod message;
pub mod size;

pub use client::Client;
pub use message::{Request, Response, Status};
pub use size::Size;

/// The version of the protocol, `v` in each message.
pub const VERSION: u32 = 1;

/// Bytes in a balloon page, whatever the page size of guest and host.
pub const BALLOON_PAGE_BYTES: u64 = 4096;

/// The longest line either side sends, in bytes, without the line feed.
pub const LINE_MAX: usize = 64 * 1024;
