// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Counters that several threads add to.

use std::sync::atomic::{AtomicU64, Ordering};

use balloon_control::message::Counters;

macro_rules! tally {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of [`Counters`], shared.
        #[derive(Debug, Default)]
        pub struct Tally {
            $($(#[$doc])* pub $name: Counter,)*
        }

        impl Tally {
            /// The values now; each is right, but they are not read at one instant.
            pub fn snapshot(&self) -> Counters {
                Counters {
                    $($name: self.$name.get(),)*
                }
            }
        }
    };
}

balloon_control::for_each_counter!(tally);

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
