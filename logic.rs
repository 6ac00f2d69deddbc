// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the driver decides and computes, without knowing a kernel: `core` only, memory on loan, no
//! page-size constant. The host crates compile the same files.

#![forbid(unsafe_code)]

pub(crate) mod features;
pub(crate) mod hint;
pub(crate) mod hold;
pub(crate) mod oom;
pub(crate) mod request;
pub(crate) mod stats;
pub(crate) mod target;
pub(crate) mod units;
pub(crate) mod window;
pub(crate) mod wire;
