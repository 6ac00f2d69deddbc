// SPDX-License-Identifier: GPL-2.0

//! The sysfs group `balloon/` of each device; see `Documentation/ABI`.

use super::device::{
    BalloonData,
    BalloonDriver, //
};
use crate::{
    logic::window::WindowSize,
    mm::Block,
    sysfs::{
        Attribute,
        Group,
        Show,
        Store, //
    },
};
use core::fmt::Write;
use kernel::{
    prelude::*,
    sync::atomic::Relaxed, //
};

struct BitmapBytes;

impl Show<BalloonDriver> for BitmapBytes {
    fn show(data: Pin<&BalloonData>, out: &mut dyn Write) -> Result {
        let bytes = data.balloon.window().bytes();

        write!(out, "{bytes}").map_err(|_| ENOSPC)
    }
}

impl Store<BalloonDriver> for BitmapBytes {
    fn store(data: Pin<&BalloonData>, value: &str) -> Result {
        let bytes = value.parse().map_err(|_| EINVAL)?;
        let window = WindowSize::new(bytes).ok_or(EINVAL)?;

        data.balloon.knobs.lock().window = window;
        Ok(())
    }
}

struct MaxOrder;

impl Show<BalloonDriver> for MaxOrder {
    fn show(data: Pin<&BalloonData>, out: &mut dyn Write) -> Result {
        write!(out, "{}", data.balloon.max_order()).map_err(|_| ENOSPC)
    }
}

impl Store<BalloonDriver> for MaxOrder {
    fn store(data: Pin<&BalloonData>, value: &str) -> Result {
        let order = value.parse().map_err(|_| EINVAL)?;

        if order > Block::MAX_ORDER {
            return Err(EINVAL);
        }
        data.balloon.knobs.lock().max_order = order;
        Ok(())
    }
}

struct AllowDropCaches;

impl Show<BalloonDriver> for AllowDropCaches {
    fn show(data: Pin<&BalloonData>, out: &mut dyn Write) -> Result {
        write!(out, "{}", u32::from(data.balloon.drops_caches())).map_err(|_| ENOSPC)
    }
}

impl Store<BalloonDriver> for AllowDropCaches {
    fn store(data: Pin<&BalloonData>, value: &str) -> Result {
        let allow = match value {
            "0" => false,
            "1" => true,
            _ => return Err(EINVAL),
        };

        data.balloon.allow_drop_caches.store(allow, Relaxed);
        Ok(())
    }
}

struct Target;

impl Show<BalloonDriver> for Target {
    fn show(data: Pin<&BalloonData>, out: &mut dyn Write) -> Result {
        write!(out, "{}", data.balloon.target()?).map_err(|_| ENOSPC)
    }
}

struct Actual;

impl Show<BalloonDriver> for Actual {
    fn show(data: Pin<&BalloonData>, out: &mut dyn Write) -> Result {
        write!(out, "{}", data.balloon.actual()).map_err(|_| ENOSPC)
    }
}

struct Protocol;

impl Show<BalloonDriver> for Protocol {
    fn show(data: Pin<&BalloonData>, out: &mut dyn Write) -> Result {
        out.write_str(data.balloon.protocol().name())
            .map_err(|_| ENOSPC)
    }
}

static BITMAP_BYTES: Attribute =
    Attribute::read_write::<BalloonDriver, BitmapBytes>(c"bitmap_bytes");
static MAX_ORDER: Attribute = Attribute::read_write::<BalloonDriver, MaxOrder>(c"max_order");
static ALLOW_DROP_CACHES: Attribute =
    Attribute::read_write::<BalloonDriver, AllowDropCaches>(c"allow_drop_caches");
static TARGET: Attribute = Attribute::read_only::<BalloonDriver, Target>(c"target");
static ACTUAL: Attribute = Attribute::read_only::<BalloonDriver, Actual>(c"actual");
static PROTOCOL: Attribute = Attribute::read_only::<BalloonDriver, Protocol>(c"protocol");

/// The group, as the driver core creates it for each device.
pub(super) static GROUP: Group<7> = Group::new(
    c"balloon",
    &[
        &BITMAP_BYTES,
        &MAX_ORDER,
        &ALLOW_DROP_CACHES,
        &TARGET,
        &ACTUAL,
        &PROTOCOL,
    ],
);
