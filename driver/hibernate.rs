// SPDX-License-Identifier: GPL-2.0

//! An empty balloon for a system that hibernates.
//!
//! A device is stopped, and its balloon emptied, when the system has found the memory for its image already,
//! which it would not find beside a full balloon.

use super::balloon::Balloon;
use crate::{
    mm::HibernateHandler,
    work::Task, //
};
use kernel::{
    sync::Arc,
    time::{
        delay::fsleep,
        Delta, //
    },
};

/// Empties the balloon before the system hibernates, and fills it again after.
pub(super) struct EmptyForImage {
    pub(super) balloon: Arc<Balloon>,
    pub(super) task: Arc<Task<Balloon>>,
}

impl EmptyForImage {
    /// How long to wait for the next page to come back: 5 s.
    const TRIES: u32 = 500;
    const TRY_MS: i64 = 10;

    /// Whether there is nothing in the balloon, nor on its way there: who has the channel moves pages.
    fn is_empty(&self) -> bool {
        self.balloon.channel.try_lock().is_some() && self.balloon.pages.pages() == 0
    }
}

impl HibernateHandler for EmptyForImage {
    fn prepare(&self) {
        self.balloon.set_emptied(true);
        self.task.schedule(0);

        // As long as it goes on. If the host does not answer the system tries with what there is.
        let (mut pages, mut tries) = (self.balloon.pages.pages(), 0);
        while !self.is_empty() && tries < Self::TRIES {
            fsleep(Delta::from_millis(Self::TRY_MS));
            let now = self.balloon.pages.pages();
            tries = if now < pages { 0 } else { tries + 1 };
            pages = now;
        }
    }

    fn finished(&self) {
        self.balloon.set_emptied(false);
        self.task.schedule(0);
    }
}
