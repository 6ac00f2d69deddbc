// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The guest's own book-keeping: `/proc/meminfo`, `/proc/vmstat` and `/proc/zoneinfo` at one moment.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use crate::size::{KIB, PAGE};

/// The command whose output [`Account::parse`] reads. The first line folds counters that processors
/// keep for themselves.
pub const COMMAND: &str = "cat /proc/sys/vm/stat_refresh >/dev/null 2>&1; \
     cat /proc/meminfo; echo ==; cat /proc/vmstat; echo ==; cat /proc/zoneinfo";

/// The guest's memory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Lines of `/proc/meminfo`, in bytes.
    meminfo: BTreeMap<String, u64>,
    /// Lines of `/proc/vmstat`, as they stand there.
    vmstat: BTreeMap<String, u64>,
    /// Pages the allocator manages, by node and zone.
    pub managed: BTreeMap<String, u64>,
    /// Free pages that processors keep for themselves; `MemFree` leaves them out.
    per_cpu: u64,
}

impl Account {
    /// Reads the output of [`COMMAND`].
    ///
    /// # Errors
    ///
    /// If it is not what the kernel prints.
    pub fn parse(text: &str) -> Result<Self> {
        let mut parts = text.split("==\n");
        let mut part = || parts.next().context("the output is too short");
        let (meminfo, vmstat, zoneinfo) = (part()?, part()?, part()?);
        let mut account = Self::default();
        for line in meminfo.lines() {
            let (name, rest) = line
                .split_once(':')
                .with_context(|| format!("meminfo: {line:?}"))?;
            let mut words = rest.split_whitespace();
            let number: u64 = words.next().unwrap_or_default().parse()?;
            let unit = if words.next() == Some("kB") { KIB } else { 1 };
            account.meminfo.insert(name.to_owned(), number * unit);
        }
        for line in vmstat.lines() {
            let (name, number) = line
                .split_once(' ')
                .with_context(|| format!("vmstat: {line:?}"))?;
            account.vmstat.insert(name.to_owned(), number.parse()?);
        }
        let mut zone = String::new();
        for line in zoneinfo.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["Node", node, "zone", name] => {
                    zone = format!("node {} zone {name}", node.trim_end_matches(','));
                }
                ["managed", pages] => {
                    account.managed.insert(zone.clone(), pages.parse()?);
                }
                ["count:", pages] => account.per_cpu += pages.parse::<u64>()?,
                _ => {}
            }
        }
        ensure!(!account.managed.is_empty(), "zoneinfo has no zone");
        Ok(account)
    }

    /// A line of `/proc/meminfo`, in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel has none of this name.
    pub fn meminfo(&self, name: &str) -> Result<u64> {
        self.meminfo
            .get(name)
            .copied()
            .with_context(|| format!("/proc/meminfo has no {name}"))
    }

    /// A line of `/proc/vmstat`.
    ///
    /// # Errors
    ///
    /// If the kernel has none of this name.
    pub fn vmstat(&self, name: &str) -> Result<u64> {
        self.vmstat
            .get(name)
            .copied()
            .with_context(|| format!("/proc/vmstat has no {name}"))
    }

    /// `MemTotal`, in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell.
    pub fn total(&self) -> Result<u64> {
        self.meminfo("MemTotal")
    }

    /// `MemAvailable`, in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell.
    pub fn available(&self) -> Result<u64> {
        self.meminfo("MemAvailable")
    }

    /// Free memory including what processors keep for themselves, in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell.
    pub fn free(&self) -> Result<u64> {
        Ok(self.meminfo("MemFree")? + self.per_cpu * PAGE)
    }

    /// What the kernel counts as ballooned, in bytes.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell.
    pub fn balloon(&self) -> Result<u64> {
        self.meminfo("Balloon")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
MemTotal:         500000 kB
MemFree:          400000 kB
MemAvailable:     390000 kB
Balloon:            2048 kB
HugePages_Total:       0
==
nr_free_pages 100000
balloon_inflate 512
==
Node 0, zone      DMA
  pages free     1
        boost    0
        managed  3840
    cpu: 0
              count:    5
              high:     8
Node 0, zone   Normal
        managed  121160
    cpu: 0
              count:    7
    cpu: 1
              count:    8
";

    #[test]
    fn reads_what_the_kernel_prints() {
        let account = Account::parse(TEXT).unwrap();
        assert_eq!(account.total().unwrap(), 500_000 << 10);
        assert_eq!(account.free().unwrap(), (400_000 << 10) + 20 * 4096);
        assert_eq!(account.balloon().unwrap(), 2 << 20);
        assert_eq!(account.meminfo("HugePages_Total").unwrap(), 0);
        assert_eq!(account.vmstat("balloon_inflate").unwrap(), 512);
        assert_eq!(account.managed["node 0 zone DMA"], 3840);
        assert_eq!(account.managed["node 0 zone Normal"], 121_160);
        assert!(account.vmstat("balloon_deflate").is_err());
        assert!(Account::parse("MemTotal: 1 kB\n").is_err());
    }
}
