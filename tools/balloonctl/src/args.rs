// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The command line.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use balloon_control::Size;
use balloon_control::message::{Failure, FailureCode};
use balloon_control::size::SizeError;
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};
use serde_json::json;

use crate::restore::Region;
use crate::timeout::timeout;

const AFTER: &str = "\
Sizes are a number of bytes, or a number with K, M, G, T (or KiB, MiB, GiB, TiB): powers of 1024; \
or a percentage of the guest's memory. They are sizes of the balloon: what is taken from the guest, \
not what is left to it.

Exit status: 0 done, 1 failed, 2 wrong command line or value, 3 no daemon (or it went away), \
4 the time was up.";

/// Steers and watches a vhost-device-balloon
#[derive(Debug, Parser)]
#[command(name = "balloonctl", version, max_term_width = 100, after_help = AFTER)]
pub(crate) struct Args {
    /// The daemon's control socket
    #[arg(short, long, global = true, value_name = "PATH")]
    control_path: Option<PathBuf>,

    /// Print JSON, one object a line
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// What to do
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Tells what is wrong with the command line, as JSON if that is wanted, and ends the program.
fn complain(error: &clap::Error) -> ! {
    let json = std::env::args_os().any(|word| word == "--json");
    if json && error.use_stderr() {
        let failure = Failure {
            code: FailureCode::BadValue,
            message: error.to_string().trim().to_owned(),
        };
        eprintln!("{}", json!({ "error": failure }));
        std::process::exit(error.exit_code());
    }
    error.exit()
}

impl Args {
    /// The command line; ends the program if it is wrong.
    pub(crate) fn read() -> Self {
        Self::try_parse().unwrap_or_else(|error| complain(&error))
    }

    /// The daemon's control socket; ends the program if none was given.
    pub(crate) fn control_path(&self) -> &Path {
        self.control_path.as_deref().unwrap_or_else(|| {
            let text =
                "the following required argument was not provided:\n  --control-path <PATH>\n";
            complain(&Self::command().error(ErrorKind::MissingRequiredArgument, text))
        })
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Set the size of the balloon: how much memory is taken from the guest
    Target {
        /// Such as 1G, 512M, 1.5GiB, 25% or 0
        size: BalloonSize,
        /// Allow more than the guest's memory
        #[arg(long)]
        force: bool,
        /// Have the guest drop its caches first, as far as it has to; a --timeout counts for each of both then
        #[arg(long)]
        drop_caches: bool,
        /// Wait until the balloon has this size
        #[arg(long)]
        wait: bool,
        /// Wait, but not longer than this, such as 500ms, 10s or 2m
        #[arg(long, value_name = "TIME", value_parser = timeout)]
        timeout: Option<Duration>,
    },
    /// Wait until the balloon has its target size
    Wait {
        /// Not longer than this, such as 500ms, 10s or 2m
        #[arg(long, value_name = "TIME", value_parser = timeout)]
        timeout: Option<Duration>,
    },
    /// Show everything the daemon knows
    Status {
        /// Have the guest send new statistics first
        #[arg(long)]
        stats: bool,
    },
    /// Have the guest tell its free memory and keep it out of use, for whoever copies its memory
    #[command(subcommand)]
    FreePageHint(Hint),
    /// Have the guest drop its caches: forget what it can read or compute again
    DropCaches {
        /// Clean pages of files
        #[arg(long)]
        page_cache: bool,
        /// Directory entries, inodes and the like; without both options, both are meant
        #[arg(long)]
        slab: bool,
        /// Enough when so much memory of the guest is free, such as 2G
        #[arg(long, value_name = "SIZE")]
        until: Option<BalloonSize>,
        /// Wait no longer than this
        #[arg(long, value_name = "TIME", value_parser = timeout, default_value = "60s")]
        timeout: Duration,
    },
    /// Have the guest move its pages together, so that there are more whole blocks to take
    Compact {
        /// Wait no longer than this
        #[arg(long, value_name = "TIME", value_parser = timeout, default_value = "60s")]
        timeout: Duration,
    },
    /// Have the guest name its free pages
    FreePages {
        /// Those in the balloon as well
        #[arg(long, conflicts_with = "hold")]
        balloon: bool,
        /// Keep them out of use until they are released, or for this long at most; 30 seconds if no
        /// time is given, and never longer than 10 minutes, unless the guest's driver is another one
        #[arg(long, value_name = "TIME", value_parser = timeout, num_args = 0..=1,
              default_missing_value = "0s", require_equals = true)]
        hold: Option<Duration>,
        /// Write them to a file: a line for each run of pages, its address and its bytes
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Draw them: the guest's memory from top to bottom, free is white
        #[arg(long, value_name = "PNG")]
        map: Option<PathBuf>,
        /// Wait no longer than this
        #[arg(long, value_name = "TIME", value_parser = timeout, default_value = "60s")]
        timeout: Duration,
    },
    /// Release the pages that the guest keeps out of use
    Release {
        /// Wait no longer than this
        #[arg(long, value_name = "TIME", value_parser = timeout, default_value = "60s")]
        timeout: Duration,
    },
    /// Write the guest's memory to a file, without what is free; the guest stands still meanwhile
    Snapshot {
        /// A new file: sparse, the byte at guest physical address A at offset A
        file: PathBuf,
        /// Stop the guest by this QMP socket of QEMU, and let it go on
        #[arg(long, value_name = "SOCKET", conflicts_with = "stop")]
        qmp: Option<PathBuf>,
        /// Stop the guest by this shell command
        #[arg(long, value_name = "COMMAND", requires = "go_on")]
        stop: Option<String>,
        /// Let it go on by this one
        #[arg(long, value_name = "COMMAND", requires = "stop")]
        go_on: Option<String>,
        /// Write free memory as well, and do not ask the guest for it
        #[arg(long)]
        full: bool,
        /// Wait no longer than this for the guest to name its free memory
        #[arg(long, value_name = "TIME", value_parser = timeout, default_value = "60s")]
        timeout: Duration,
    },
    /// Put a snapshot back into a file with a guest's memory, which no guest may use meanwhile; needs
    /// no daemon
    Restore {
        /// The snapshot
        image: PathBuf,
        /// The file; it is made if there is none. What was free is zeros in it
        file: PathBuf,
        /// A region of the guest's memory: guest physical address, bytes, and where it begins in the
        /// file, as the daemon's status tells; once for each. Without it, address and place are the same
        #[arg(long, value_name = "ADDRESS:BYTES:OFFSET")]
        region: Vec<Region>,
    },
    /// Tell each change as it happens
    Watch,
    /// Set the faults of a daemon started with --fault; none ends them
    #[command(hide = true)]
    Fault {
        /// As for the daemon's --fault
        set: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Hint {
    /// Begin a new round
    Start {
        /// Wait until the guest has told all its free memory
        #[arg(long)]
        wait: bool,
        /// Wait, but not longer than this, such as 500ms, 10s or 2m
        #[arg(long, value_name = "TIME", value_parser = timeout)]
        timeout: Option<Duration>,
    },
    /// Want no more for now; what was told stays out of use
    Stop,
    /// Let the guest use its memory again
    Done,
}

/// A size; a whole number of pages, unless it is a percentage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BalloonSize(pub(crate) Size);

impl FromStr for BalloonSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let size: Size = text.parse()?;
        if matches!(size, Size::Bytes(_)) {
            size.pages(0)?;
        }
        Ok(Self(size))
    }
}
