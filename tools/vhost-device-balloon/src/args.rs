// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The command line.

use std::path::PathBuf;

use balloon_wire::wire::{self, Announcement};
use clap::Parser;

use crate::ask;
use crate::fault::{FAULTS_MAX, Fault};
use crate::features::{Dialect, Features};
use crate::ram::Prefetch;
use crate::state::Settings;

/// A vhost-user virtio memory balloon that takes page bitmaps and PFN arrays.
///
/// Serves one guest, for stock QEMU (10.2 or later: vhost-user-test-device-pci with virtio-id=5)
/// and for User Mode Linux (virtio_uml.device=SOCKET:5), and ends when the frontend disconnects.
/// The balloon is steered with balloonctl.
#[derive(Clone, Debug, Parser)]
#[command(name = "vhost-device-balloon", version, max_term_width = 100)]
pub struct Args {
    /// Where the frontend connects (vhost-user)
    #[arg(short, long, value_name = "PATH")]
    pub socket_path: PathBuf,

    /// Where balloonctl connects; only the daemon's user may
    #[arg(short, long, value_name = "PATH")]
    pub control_path: Option<PathBuf>,

    /// What the device speaks
    #[arg(long, value_name = "DIALECT", default_value = "bitmap")]
    pub dialect: Dialect,

    /// What else it offers: must-tell-host, stats, deflate-on-oom, free-page-hint, page-poison,
    /// reporting, host-request, or none
    #[arg(long, value_name = "LIST", default_value_t)]
    pub features: Features,

    /// The largest bitmap it takes, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = wire::BITMAP_BYTES_MAX, value_parser = bitmap_bytes)]
    pub max_bitmap_bytes: u32,

    /// The page_shift values it takes in bitmaps
    #[arg(long, value_name = "LIST", default_value = "12,21", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(12..=30))]
    pub page_shifts: Vec<u32>,

    /// The page_shift it likes best for blocks, one of --page-shifts; 0 if it does not care
    #[arg(long, value_name = "SHIFT", default_value_t = 21)]
    pub block_shift: u32,

    /// Whether memory is made ready when the guest deflates
    #[arg(long, value_name = "HOW", default_value = "off", num_args = 0..=1,
          default_missing_value = "populate", require_equals = true)]
    pub prefetch_deflate: Prefetch,

    /// The size the balloon is to have from the start, as for balloonctl target; no percentage
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub target: String,

    /// Wait for another frontend when one disconnects
    #[arg(long)]
    pub persist: bool,

    /// What is logged: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: tracing::Level,

    /// Misbehave, for testing drivers; see the source of fault.rs
    #[arg(long, value_name = "FAULT", hide = true)]
    pub fault: Vec<Fault>,
}

fn bitmap_bytes(text: &str) -> Result<u32, String> {
    let range = wire::BITMAP_BYTES_MIN..=wire::BITMAP_BYTES_MAX;
    match text.parse() {
        Ok(n) if range.contains(&n) && u64::from(n) % wire::BITMAP_ALIGN == 0 => Ok(n),
        _ => Err(format!(
            "a number of bytes from {} to {}, a multiple of {}, is allowed",
            range.start(),
            range.end(),
            wire::BITMAP_ALIGN
        )),
    }
}

impl Args {
    /// What the device is to be.
    ///
    /// # Errors
    ///
    /// If options contradict each other.
    pub fn settings(&self) -> Result<Settings, String> {
        self.features
            .check(self.dialect)
            .map_err(|e| e.to_string())?;
        let page_shifts = self
            .page_shifts
            .iter()
            .fold(0, |set, shift| set | 1 << shift);
        if page_shifts & 1 << wire::BALLOON_PAGE_SHIFT == 0 {
            return Err("--page-shifts must have 12 (4 KiB) among them".to_owned());
        }
        let limits = Announcement {
            version: wire::VERSION,
            page_shifts,
            max_bitmap_bytes: self.max_bitmap_bytes,
            block_shift: self.block_shift,
            requests: match self.features.has(wire::F_HOST_REQUEST) {
                true => ask::COMMANDS,
                false => 0,
            },
        };
        if self.block_shift != 0 && !limits.takes(self.block_shift) {
            return Err(format!(
                "--block-shift {} is neither 0 nor one of --page-shifts",
                self.block_shift
            ));
        }
        if self.fault.len() > FAULTS_MAX {
            return Err(format!("--fault may be repeated {FAULTS_MAX} times"));
        }
        Ok(Settings {
            dialect: self.dialect,
            features: self.features,
            limits,
            prefetch: self.prefetch_deflate,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(more: &[&str]) -> Result<Args, String> {
        let all = ["vhost-device-balloon", "--socket-path", "s"];
        Args::try_parse_from(all.iter().chain(more)).map_err(|e| e.to_string())
    }

    fn settings(more: &[&str]) -> Result<Settings, String> {
        args(more)?.settings()
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Args::command().debug_assert();
    }

    #[test]
    fn defaults_can_be_announced() {
        let settings = settings(&[]).expect("good");
        assert_eq!(
            Announcement::decode(&settings.limits.encode()),
            Ok(settings.limits)
        );
        assert_eq!(settings.features.to_string(), "must-tell-host,stats");
        assert_eq!(settings.prefetch, Prefetch::Off);
    }

    #[test]
    fn options() {
        assert_eq!(
            settings(&["--prefetch-deflate"]).map(|s| s.prefetch),
            Ok(Prefetch::Populate)
        );
        assert_eq!(
            settings(&["--prefetch-deflate=willneed"]).map(|s| s.prefetch),
            Ok(Prefetch::Willneed)
        );
        let limits = settings(&["--page-shifts", "12,16,21", "--block-shift=16"])
            .expect("good")
            .limits;
        assert_eq!(limits.page_shifts, 1 << 12 | 1 << 16 | 1 << 21);
        for (more, part) in [
            (&["--page-shifts", "21"][..], "must have 12"),
            (&["--page-shifts", "12,31"], "12..=30"),
            (&["--page-shifts", "12"], "--block-shift 21 is neither"),
            (&["--block-shift", "64"], "--block-shift 64 is neither"),
            (&["--max-bitmap-bytes", "60"], "from 64 to"),
            (&["--max-bitmap-bytes", "68"], "a multiple of 8"),
            (
                &["--dialect", "2017"],
                "possible values: bitmap, 2016, pfn-array",
            ),
            (&["--features", "stats,fast"], "feature 'fast' is not known"),
            (
                &["--dialect", "2016", "--features", "free-page-hint"],
                "feature bit 3",
            ),
            (
                &["--dialect", "pfn-array", "--features", "host-request"],
                "needs the bitmap dialect",
            ),
            (&["--fault", "fast"], "fault 'fast' is not known"),
        ] {
            let error = settings(more).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }
}
