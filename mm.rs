// SPDX-License-Identifier: GPL-2.0

//! Abstractions for the parts of memory management that a balloon deals with.

mod balloon;
mod batch;
mod block;
mod memory;
mod offline;
mod oom;
mod poison;
mod reporting;
mod shrinker;
mod stats;

#[cfg(CONFIG_VM_EVENT_COUNTERS)]
pub(crate) use self::stats::MemoryEvents;
pub(crate) use self::{
    balloon::{
        BalloonPages,
        HeldPage,
        Migrate,
        MigratingPage, //
    },
    batch::PageBatch,
    block::Block,
    memory::{
        available_pages,
        is_kdump_kernel,
        relax,
        total_pages,
        PAGE_SHIFT, //
    },
    offline::{
        OfflineHandler,
        OfflineNotifier, //
    },
    oom::{
        OomHandler,
        OomNotifier, //
    },
    poison::{
        on_free,
        OnFree, //
    },
    reporting::{
        PageReporting,
        Report, //
    },
    shrinker::{
        Shrink,
        Shrinker, //
    },
    stats::MemoryNow, //
};
