// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Processes of the host that end with the runner, whatever happens.
//!
//! Each gets a process group of its own, which is killed when its [`Process`] is dropped; should the
//! runner itself be killed, the kernel kills them (`setpriv --pdeathsig`).

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// How often the end of something without an event is looked for.
pub const POLL: Duration = Duration::from_millis(5);

/// A command that dies with the runner's thread that starts it.
pub fn bound(program: &str) -> Command {
    static SETPRIV: OnceLock<bool> = OnceLock::new();
    let have = *SETPRIV.get_or_init(|| {
        Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "true"])
            .output()
            .is_ok_and(|out| out.status.success())
    });
    if !have {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", program]);
    command
}

/// A running program with its process group.
#[derive(Debug)]
pub struct Process {
    name: String,
    pid: Pid,
    child: Mutex<Child>,
}

impl Process {
    /// Starts `command` as the leader of a new process group. Pipes it asked for are left in the
    /// child, for [`Process::take`].
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn start(name: &str, mut command: Command) -> Result<Self> {
        let child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {name}: {command:?}"))?;
        Ok(Self {
            name: name.to_owned(),
            pid: Pid::from_child(&child),
            child: Mutex::new(child),
        })
    }

    /// The program's process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Takes something out of the child, its pipes for example.
    pub fn take<T>(&self, f: impl FnOnce(&mut Child) -> T) -> T {
        f(&mut self.child.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.take(|child| child.try_wait().ok().flatten())
    }

    /// Waits for its end.
    pub fn wait(&self, timeout: Duration) -> Option<ExitStatus> {
        poll(timeout, || self.ended())
    }

    /// Asks it to end, waits, and kills it if it does not. Answers with the status of an end that
    /// came by itself.
    pub fn terminate(&self, timeout: Duration) -> Option<ExitStatus> {
        if self.ended().is_none() {
            let _gone = kill_process(self.pid, Signal::TERM);
        }
        let status = self.wait(timeout);
        self.kill();
        status
    }

    /// Kills it and its children at once.
    pub fn kill(&self) {
        // Its group may outlive it, so this is done also when it has ended.
        let _gone = kill_process_group(self.pid, Signal::KILL);
        if self.wait(Duration::from_secs(10)).is_none() {
            tracing::warn!("{} ({}) does not die", self.name, self.pid());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Calls `f` until it gives something or `timeout` has passed.
pub fn poll<T>(timeout: Duration, mut f: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + timeout;
    loop {
        if let Some(found) = f() {
            return Some(found);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_kills_the_whole_group() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let mut command = bound("sh");
        command.args([
            "-c",
            &format!("sleep 100 & echo $! > {}; wait", file.display()),
        ]);
        let process = Process::start("sh", command).unwrap();
        let pid: i32 = poll(Duration::from_secs(10), || {
            std::fs::read_to_string(&file).ok()?.trim().parse().ok()
        })
        .unwrap();
        let pid = Pid::from_raw(pid).unwrap();
        drop(process);
        let gone = poll(Duration::from_secs(10), || {
            // A zombie that nobody reaps here is dead all the same.
            let state = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
            state.map_or(Some(()), |s| s.contains(") Z").then_some(()))
        });
        assert!(gone.is_some());
    }

    #[test]
    fn polling_ends() {
        assert_eq!(poll(Duration::from_millis(20), || None::<()>), None);
        let mut n = 0;
        let third = || {
            n += 1;
            (n == 3).then_some(n)
        };
        assert_eq!(poll(Duration::from_secs(10), third), Some(3));
    }
}
