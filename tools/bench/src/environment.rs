// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Where and when was measured.

use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The machine, the versions and the date.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// The day, as `2026-11-30 12:50 UTC`.
    pub date: String,
    /// The commit that was checked out.
    pub commit: String,
    /// The processor.
    pub processor: String,
    /// How many of it.
    pub processors: usize,
    /// Memory of the machine.
    pub memory: String,
    /// The host's kernel.
    pub host_kernel: String,
    /// QEMU.
    pub qemu: String,
    /// Load averages when it began.
    pub load_before: String,
    /// And when it ended.
    pub load_after: String,
}

impl Environment {
    /// Looks around.
    pub fn look() -> Self {
        Self {
            date: date(SystemTime::now()),
            commit: commit().unwrap_or_else(|| "unknown".to_owned()),
            processor: line("/proc/cpuinfo", "model name"),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory: line("/proc/meminfo", "MemTotal"),
            host_kernel: word("/proc/sys/kernel/osrelease"),
            qemu: qemu(),
            load_before: load(),
            load_after: String::new(),
        }
    }

    /// Each with its name.
    pub fn rows(&self) -> [(&'static str, String); 8] {
        [
            ("Date", self.date.clone()),
            ("Commit", self.commit.clone()),
            (
                "Processor",
                format!("{} × {}", self.processors, self.processor),
            ),
            ("Memory", self.memory.clone()),
            ("Host kernel", self.host_kernel.clone()),
            ("QEMU", self.qemu.clone()),
            ("Load before", self.load_before.clone()),
            ("Load after", self.load_after.clone()),
        ]
    }
}

/// Load averages of the last 1, 5 and 15 minutes.
pub fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace()
        .take(3)
        .collect::<Vec<_>>()
        .join(" ")
}

fn word(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

fn line(path: &str, name: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let rest = text.lines().find_map(|line| line.strip_prefix(name));
    let value = rest.and_then(|rest| rest.split_once(':'));
    value.map_or_else(
        || "unknown".to_owned(),
        |(_, value)| value.trim().to_owned(),
    )
}

fn qemu() -> String {
    let out = Command::new("qemu-system-x86_64").arg("--version").output();
    let text = out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
    let first = text
        .ok()
        .and_then(|text| text.lines().next().map(str::to_owned));
    first.map_or_else(
        || "not there".to_owned(),
        |line| line.replace("QEMU emulator version ", ""),
    )
}

/// What `.git` says: the tools may run where git itself is not installed.
fn commit() -> Option<String> {
    let head = fs::read_to_string(".git/HEAD").ok()?;
    let Some(name) = head.trim().strip_prefix("ref: ") else {
        return Some(head.trim().to_owned());
    };
    if let Ok(id) = fs::read_to_string(format!(".git/{name}")) {
        return Some(id.trim().to_owned());
    }
    let packed = fs::read_to_string(".git/packed-refs").ok()?;
    let found = packed.lines().find_map(|line| line.strip_suffix(name));
    found.map(|id| id.trim().to_owned())
}

/// Date and time of day in UTC.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's civil_from_days: years begin in March, eras have 400 of them.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute) = (rest / 3_600, rest % 3_600 / 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_796_042_999, "2026-11-30 12:49 UTC"),
            (4_107_542_399, "2100-02-28 23:59 UTC"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn something_is_known_of_this_machine() {
        let here = Environment::look();
        assert!(here.processors > 0);
        assert!(!here.host_kernel.is_empty());
        assert_eq!(here.load_before.split(' ').count(), 3);
    }
}
