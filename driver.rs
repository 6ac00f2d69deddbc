// SPDX-License-Identifier: GPL-2.0

//! What a balloon does, step by step. No `unsafe`, no bindings.

mod balloon;
mod channel;
mod knobs;
mod oom;
mod params;
mod report;
mod resize;
mod stats;

pub(crate) use self::{
    balloon::BalloonDriver,
    params::Params, //
};
