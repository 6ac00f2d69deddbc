// SPDX-License-Identifier: GPL-2.0

//! Pages of the balloon that compaction moves.

use super::channel::{
    Channel,
    Direction,
    Flight, //
};
use crate::mm::{
    Migrate,
    MigratingPage, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Mutex,
        MutexGuard, //
    },
};

/// A channel while the device is alive, shared by the worker and by compaction.
///
/// Held while the host is waited for, hence only tried where that must not be.
#[pin_data]
pub(super) struct SharedChannel {
    #[pin]
    inner: Mutex<Option<Channel>>,
}

impl SharedChannel {
    /// No channel yet.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            inner <- new_mutex!(None, "SharedChannel::inner"),
        })
    }

    /// Waits for the channel. May sleep for as long as the host takes.
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Channel>> {
        self.inner.lock()
    }

    /// Gets the channel if nobody has it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Option<Channel>>> {
        self.inner.try_lock()
    }
}

impl Migrate for SharedChannel {
    fn migrate(&self, new: MigratingPage<'_>, old: MigratingPage<'_>) -> Result {
        let mut guard = self.inner.try_lock().ok_or(EAGAIN)?;
        let channel = (*guard).as_mut().ok_or(EAGAIN)?;
        let flight = Flight::MOVE;

        if !channel.can_keep() || channel.is_busy().map_err(|_| EAGAIN)? {
            return Err(EAGAIN);
        }
        let tell = |channel: &mut Channel, direction, pfn| {
            channel.in_passing(|channel| {
                channel.tell(direction, flight, pfn, 0)?;
                channel.flush(direction)?;
                channel.drain(direction, flight)
            })
        };

        match tell(channel, Direction::Inflate, new.pfn()) {
            Ok(()) => (),
            Err(ERANGE) => return Err(EAGAIN),
            Err(_) => {
                // Nobody knows what the host thinks of the new page.
                channel.keep(new.hold());
                return Err(EAGAIN);
            }
        }
        if tell(channel, Direction::Deflate, old.pfn()).is_err() {
            channel.keep(old.hold());
        }
        Ok(())
    }
}
