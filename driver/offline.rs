// SPDX-License-Identifier: GPL-2.0

//! Giving memory back that is to be taken out of use.
//!
//! Single pages are moved by compaction. Blocks cannot be: they are given back, and the worker takes others
//! in their place.

use super::{
    balloon::Balloon,
    hold::Keeper, //
};
use crate::{
    logic::request::Reason,
    mm::OfflineHandler,
    work::Task, //
};
use core::ops::Range;
use kernel::sync::Arc;

/// Gives blocks back when their memory is to be taken out of use.
pub(super) struct OfflineDeflate {
    pub(super) balloon: Arc<Balloon>,
    pub(super) keeper: Option<Arc<Keeper>>,
    pub(super) task: Arc<Task<Balloon>>,
}

impl OfflineHandler for OfflineDeflate {
    fn going_offline(&self, frames: Range<u64>) {
        self.balloon.held.give_up();
        if let Some(keeper) = &self.keeper {
            keeper.end(Reason::Pressure);
        }
        // If the host does not answer in time, the kernel finds the pages in use, and gives up.
        self.balloon.relieve(|balloon, _, list| {
            balloon.pages.remove_blocks(&frames, list);
        });
        self.task.schedule(0);
    }
}
