// SPDX-License-Identifier: GPL-2.0

//! Something a sleeping thread waits for and an interrupt signals.
//!
//! C header: [`include/linux/completion.h`](srctree/include/linux/completion.h)

use kernel::{
    bindings,
    prelude::*,
    time::Jiffies,
    types::Opaque, //
};

/// An event that is remembered if nobody waits for it, so that no wake-up is lost.
///
/// Each signal wakes one waiter; a waiter checks its condition after each wake-up, since signals add
/// up while nobody waits.
#[pin_data]
pub(super) struct Event {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: A `struct completion` can be used and freed from any thread.
unsafe impl Send for Event {}

// SAFETY: All operations on a `struct completion` are serialised by its own lock.
unsafe impl Sync for Event {}

impl Event {
    /// An event that has not happened yet.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot: *mut bindings::completion| {
                // SAFETY: `slot` is valid for writes and stays pinned, by `ffi_init`.
                unsafe { bindings::init_completion(slot) }
            }),
        })
    }

    /// Signals the event. Can be called from any context.
    pub(super) fn signal(&self) {
        // SAFETY: The completion was initialised in `new`.
        unsafe { bindings::complete(self.inner.get()) };
    }

    /// Waits until the event was signalled, for `timeout` at most. Not interrupted by signals.
    ///
    /// Must be called from a context that may sleep.
    pub(super) fn wait(&self, timeout: Jiffies) {
        // SAFETY: The completion was initialised in `new`.
        unsafe { bindings::wait_for_completion_timeout(self.inner.get(), timeout) };
    }
}
