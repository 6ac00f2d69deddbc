// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A vhost-user virtio memory balloon that takes page bitmaps and PFN arrays.

#![forbid(unsafe_code)]

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use tracing::error;
use tracing_subscriber::filter::LevelFilter;
use vhost_device_balloon::args::Args;
use vhost_device_balloon::daemon::{self, DaemonError};

/// Exit status of a wrong command line, as clap's own.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::from_level(args.log_level))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    match daemon::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ DaemonError::Usage(_)) => {
            eprintln!("error: {error}");
            ExitCode::from(USAGE)
        }
        Err(error) => {
            error!("{error}");
            ExitCode::FAILURE
        }
    }
}
