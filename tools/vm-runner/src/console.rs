// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The kernel's console: written to a file, kept for reports, and watched for the guest's death.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// The most lines that are kept in memory; a guest that says more has a problem of its own.
const LINES_MAX: usize = 200_000;

/// What shows that a kernel will not come back.
const LAST_WORDS: [&str; 2] = ["Kernel panic - not syncing", "Kernel is dead"];

/// What is known of a guest's life, shared by its console and its command channel.
#[derive(Debug, Default)]
pub struct Life {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: Vec<String>,
    death: Option<String>,
    /// A panic is no death: another kernel takes over.
    panics: bool,
    /// The console has ended: nothing more will be said.
    closed: bool,
}

impl Life {
    /// Why the guest is dead, if it is.
    pub fn death(&self) -> Option<String> {
        self.state().death.clone()
    }

    /// Says that the guest is dead; the first reason stands.
    pub fn died(&self, why: impl FnOnce() -> String) {
        let mut state = self.state();
        if state.death.is_none() {
            state.death = Some(why());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// From now on a panic is no death, since another kernel takes over then.
    pub fn expect_panic(&self) {
        self.state().panics = true;
    }

    /// All lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.state().lines.clone()
    }

    /// The newest `n` lines.
    pub fn tail(&self, n: usize) -> Vec<String> {
        let state = self.state();
        state.lines[state.lines.len().saturating_sub(n)..].to_vec()
    }

    /// Waits until the console says something that contains `text`.
    pub fn wait_for(&self, text: &str, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut state = self.state();
        let mut seen = 0;
        loop {
            if state.lines[seen..].iter().any(|line| line.contains(text)) {
                return true;
            }
            seen = state.lines.len();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.closed {
                return false;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn line(&self, line: String) {
        let mut state = self.state();
        if state.death.is_none()
            && !state.panics
            && LAST_WORDS.iter().any(|words| line.contains(words))
        {
            state.death = Some(line.clone());
        }
        if state.lines.len() < LINES_MAX {
            state.lines.push(line);
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// A thread that follows a guest's console.
#[derive(Debug)]
pub struct Console {
    thread: Option<JoinHandle<()>>,
}

impl Console {
    /// Follows `source` until its end, into the file at `path` and into `life`.
    ///
    /// # Errors
    ///
    /// If the file cannot be created or the thread not started.
    pub fn follow(
        mut source: impl Read + Send + 'static,
        path: &Path,
        life: Arc<Life>,
    ) -> Result<Self> {
        let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
        let thread = std::thread::Builder::new()
            .name("console".into())
            .spawn(move || {
                let mut rest = Vec::new();
                let mut chunk = [0; 8 << 10];
                while let Ok(n @ 1..) = source.read(&mut chunk) {
                    if let Err(e) = file.write_all(&chunk[..n]) {
                        tracing::warn!("console log: {e}");
                    }
                    rest.extend_from_slice(&chunk[..n]);
                    while let Some(end) = rest.iter().position(|&b| b == b'\n') {
                        let line: Vec<u8> = rest.drain(..=end).collect();
                        life.line(String::from_utf8_lossy(&line).trim_end().to_owned());
                    }
                }
                if !rest.is_empty() {
                    life.line(String::from_utf8_lossy(&rest).into_owned());
                }
                life.state().closed = true;
                life.changed.notify_all();
            })?;
        Ok(Self {
            thread: Some(thread),
        })
    }

    /// Waits until all that was said has been read. The guest's process must be dead, or this waits
    /// for it.
    pub fn drain(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_kept_and_a_panic_is_a_death() {
        let dir = tempfile::tempdir().unwrap();
        let life = Arc::new(Life::default());
        let text = b"one\r\nKernel panic - not syncing: x\nlast";
        let log = dir.path().join("log");
        let mut console = Console::follow(&text[..], &log, life.clone()).unwrap();
        console.drain();
        assert_eq!(
            life.lines(),
            ["one", "Kernel panic - not syncing: x", "last"]
        );
        assert_eq!(life.tail(1), ["last"]);
        assert_eq!(
            life.death().as_deref(),
            Some("Kernel panic - not syncing: x")
        );
        assert_eq!(std::fs::read(log).unwrap(), text);
        assert!(life.wait_for("one", Duration::ZERO));
        assert!(!life.wait_for("two", Duration::from_secs(100)));
    }
}
