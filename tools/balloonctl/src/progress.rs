// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! How far the guest is with what it was asked, for people who wait.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use balloon_control::Client;
use balloon_control::message::{AskedState, EventKind};

use crate::args::Args;
use crate::show;

/// Shows it on the terminal until it is dropped.
pub(crate) struct Progress {
    over: Arc<AtomicBool>,
}

impl Progress {
    /// Begins to show what the daemon tells on a connection of its own. If that cannot be had, or
    /// nobody looks, nothing is shown.
    pub(crate) fn start(args: &Args) -> Self {
        let over = Arc::new(AtomicBool::new(args.json || !io::stderr().is_terminal()));
        if !over.load(Ordering::Relaxed) {
            if let Ok(events) = Client::connect(args.control_path()).and_then(Client::watch) {
                let over = Arc::clone(&over);
                thread::spawn(move || {
                    for event in events.map_while(Result::ok) {
                        if over.load(Ordering::Relaxed) {
                            return;
                        }
                        match event.what {
                            EventKind::Asked(now) if under_way(now.state) => {
                                line(&show::asked(&now))
                            }
                            _ => {}
                        }
                    }
                });
            }
        }
        Self { over }
    }
}

fn under_way(state: AskedState) -> bool {
    matches!(state, AskedState::Waiting | AskedState::Sent)
}

/// Replaces the line on the terminal.
fn line(text: &str) {
    let mut err = io::stderr().lock();
    // That nobody can read it is no reason to stop.
    let _ = write!(err, "\r\x1b[K{text}").and_then(|()| err.flush());
}

impl Drop for Progress {
    fn drop(&mut self) {
        if !self.over.swap(true, Ordering::Relaxed) {
            line("");
        }
    }
}
