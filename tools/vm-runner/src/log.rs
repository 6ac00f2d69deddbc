// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the programs here say of what they do.

use tracing::Level;

/// Writes it to standard error: warnings, and more for each `-v` on the command line.
pub fn to_stderr(verbose: u8) {
    let level = match verbose {
        0 => Level::WARN,
        1 => Level::INFO,
        _ => Level::DEBUG,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_target(false)
        .init();
}
