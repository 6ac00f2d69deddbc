// SPDX-License-Identifier: GPL-2.0

//! Abstractions for the parts of memory management that a balloon deals with.

mod balloon;
mod batch;
mod block;
mod caches;
mod free_list;
mod hibernation;
mod marked;
mod memory;
mod notifier;
mod offline;
mod oom;
mod poison;
mod pressure;
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
    caches::{
        compact,
        drop_cache,
        reclaim_cache,
        Cache, //
    },
    free_list::{
        all_frames,
        for_each_free,
        free_pages,
        pages_in_free_blocks, //
    },
    hibernation::{
        HibernateHandler,
        HibernateNotifier, //
    },
    marked::MarkedPages,
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
    pressure::Pressure,
    reporting::{
        PageReporting,
        Report, //
    },
    shrinker::Shrink,
    stats::MemoryNow, //
};
