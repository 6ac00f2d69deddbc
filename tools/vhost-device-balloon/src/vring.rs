// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A virtqueue as the frontend set it up, with events that nobody can block on.
//!
//! The backend crate reads a kick as soon as epoll has shown it. If it is gone by then (another queue
//! has the same event, or the frontend took it back), a blocking read holds up all queues, and an
//! error ends the device's thread without a word. Here neither happens.

use std::fs::File;
use std::io;
use std::thread;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tracing::warn;
use vhost_user_backend::{VringRwLock, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::Error;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// How long a kick that is no event at all holds up the device's thread, which sees it again and
/// again.
const BROKEN_KICK: Duration = Duration::from_millis(10);

/// A vring; clones are the same one.
#[derive(Clone)]
pub struct Vring(VringRwLock);

/// Makes reads and writes of an event return at once. The frontend's end is affected as well; what
/// it does with it, waking and being woken, never blocks.
fn unblock(event: &File) {
    let unblocked =
        fcntl_getfl(event).and_then(|flags| fcntl_setfl(event, flags | OFlags::NONBLOCK));
    if let Err(error) = unblocked {
        warn!("frontend: an event cannot be made non-blocking: {error}");
    }
}

impl<'a> VringStateGuard<'a, Memory> for Vring {
    type G = <VringRwLock as VringStateGuard<'a, Memory>>::G;
}

impl<'a> VringStateMutGuard<'a, Memory> for Vring {
    type G = <VringRwLock as VringStateMutGuard<'a, Memory>>::G;
}

impl VringT<Memory> for Vring {
    fn new(memory: Memory, max_queue_size: u16) -> Result<Self, Error> {
        VringRwLock::new(memory, max_queue_size).map(Self)
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, Memory>>::G {
        self.0.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, Memory>>::G {
        self.0.get_mut()
    }

    fn add_used(&self, desc_index: u16, len: u32) -> Result<(), Error> {
        self.0.add_used(desc_index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.0.signal_used_queue()
    }

    fn enable_notification(&self) -> Result<bool, Error> {
        self.0.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), Error> {
        self.0.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, Error> {
        self.0.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.0.set_enabled(enabled);
    }

    fn set_queue_info(
        &self,
        desc_table: u64,
        avail_ring: u64,
        used_ring: u64,
    ) -> Result<(), Error> {
        self.0.set_queue_info(desc_table, avail_ring, used_ring)
    }

    fn queue_next_avail(&self) -> u16 {
        self.0.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.0.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, index: u16) {
        self.0.set_queue_next_used(index);
    }

    fn queue_used_idx(&self) -> Result<u16, Error> {
        self.0.queue_used_idx()
    }

    fn set_queue_size(&self, size: u16) {
        self.0.set_queue_size(size);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.0.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        self.0.set_queue_ready(ready);
    }

    fn set_kick(&self, event: Option<File>) {
        event.iter().for_each(unblock);
        self.0.set_kick(event);
    }

    /// Takes a kick. Returns whether the queue may be served; to serve it once too often does no
    /// harm.
    fn read_kick(&self) -> io::Result<bool> {
        match self.0.read_kick() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // The thread that calls would end with an error, and no queue be served any more.
            Err(_) => thread::sleep(BROKEN_KICK),
            Ok(enabled) => return Ok(enabled),
        }
        Ok(self.0.get_ref().is_enabled())
    }

    fn set_call(&self, event: Option<File>) {
        event.iter().for_each(unblock);
        self.0.set_call(event);
    }

    fn set_err(&self, event: Option<File>) {
        self.0.set_err(event);
    }
}
