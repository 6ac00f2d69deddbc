// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A program with the balloon device in it: it serves one guest, takes a quarter of its memory as soon
//! as its driver is there, and asks it which pages are free.
//!
//! ```text
//! tools/setup/in-root cargo run --manifest-path tools/Cargo.toml --example embed -- \
//!     --socket-path vhost.sock --features host-request
//! ```

use std::error::Error;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser as _;
use vhost_device_balloon::args::Args;
use vhost_device_balloon::ask::{Patience, Question};
use vhost_device_balloon::daemon;
use vhost_device_balloon::state::State;

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let state = daemon::state(&args)?;
    let steers = Arc::clone(&state);
    thread::spawn(move || steer(&steers));
    // The device works in this thread, until the guest goes.
    Ok(daemon::serve(&args, &state)?)
}

fn steer(state: &State) {
    const LOOK: Duration = Duration::from_secs(1);
    // A driver first and memory, then a target.
    let mut view = state.view();
    while !view.frontend.driver || state.memory_bytes() == 0 {
        view = state.view_after(view.version, LOOK);
    }
    let pages = state.memory_bytes() / balloon_control::BALLOON_PAGE_BYTES / 4;
    state.set_target(u32::try_from(pages).unwrap_or(u32::MAX));
    view = state.view();
    while !view.balloon.reached {
        view = state.view_after(view.version, LOOK);
    }
    println!("{} bytes taken", view.balloon.actual_bytes);

    let mut patience = Patience {
        until: Instant::now().checked_add(Duration::from_secs(10)),
        unwanted: &mut || false,
    };
    match state.ask(Question::FreePages { balloon: false }, &mut patience) {
        Ok(answered) => {
            let pages = answered.named.map_or(0, |named| named.set.pages());
            println!("{pages} pages are free, or were a moment ago");
        }
        Err(error) => println!("not known what is free: {error}"),
    }
}
