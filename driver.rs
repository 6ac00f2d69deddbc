// SPDX-License-Identifier: GPL-2.0

//! What a balloon does, step by step. Everything here is safe code, and knows no bindings.

mod balloon;
mod channel;
mod device;
mod hibernate;
mod hint;
mod hold;
mod knobs;
mod migrate;
mod offline;
mod oom;
mod pace;
mod params;
mod report;
mod request;
mod resize;
mod stats;

pub(crate) use self::{
    device::BalloonDriver,
    params::Params, //
};
