// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A vhost-user virtio memory balloon that takes page bitmaps and PFN arrays.
//!
//! ```text
//!  control ──► state ◄── device ◄── vhost-user frontend
//!                          │
//!          chain ─► request ─► ranges ─► ram (hole punch, DONTNEED)
//! ```
//!
//! A kick makes [`device`] take a [`chain`] from a queue and copy its bytes; [`request`] turns them
//! into page ranges; [`ranges`] merges these; [`ram`] gives each back to the host in one call. What
//! the guest got wrong becomes a [`refusal`], never more. [`state`] is what people see and set
//! through [`control`], and what the guest is asked for by [`ask`]. The only unsafe code is in `sys`.
//!
//! A program that embeds the device has the same by [`state::State`]: `set_target`, `view_after`,
//! `status`, `hint`, `ask` and `save_memory`; `samples/embed` is such a program.

pub mod args;
pub mod ask;
pub mod chain;
pub mod channel;
pub mod config;
pub mod control;
pub mod counters;
pub mod daemon;
pub mod device;
pub mod fault;
pub mod features;
pub mod hint;
pub mod image;
pub mod page_set;
pub mod ram;
pub mod ranges;
pub mod refusal;
pub mod request;
pub mod socket;
pub mod state;
pub mod stats;
mod sys;
pub mod vring;
