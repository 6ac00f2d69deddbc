// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A guest of User Mode Linux that stands still.

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};

/// Stopped processes; they go on when this is dropped.
#[derive(Debug)]
pub struct Paused(Vec<Pid>);

impl Paused {
    /// Stops a guest: its first process, which has its memory, and those that its programs run in.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub fn new(first: i32) -> Result<Self> {
        let paused = Self(family(first)?);
        for pid in &paused.0 {
            kill_process(*pid, Signal::STOP)?;
        }
        Ok(paused)
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        for pid in &self.0 {
            // One that has been killed meanwhile does not go on.
            let _ = kill_process(*pid, Signal::CONT);
        }
    }
}

fn family(first: i32) -> Result<Vec<Pid>> {
    let mut all = vec![first];
    let mut next = 0;
    while let Some(pid) = all.get(next) {
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let children = std::fs::read_to_string(thread?.path().join("children"))?;
            let children = children.split_whitespace().map(str::parse);
            all.extend(children.collect::<Result<Vec<i32>, _>>()?);
        }
        next += 1;
    }
    let pids = all.into_iter().map(Pid::from_raw);
    pids.collect::<Option<_>>()
        .context("a process without an id")
}
