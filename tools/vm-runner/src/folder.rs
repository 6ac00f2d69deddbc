// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The folders that machines run in: sockets, logs, an initramfs. They go when they are no longer
//! needed, also when the runner is interrupted or killed, except for those that are kept.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The file that is locked as long as a folder is in use.
const LOCK: &str = "lock";
/// The file that marks a folder as kept.
const KEPT: &str = "kept";

/// The folders of this process, with their locks.
static FOLDERS: Mutex<BTreeMap<PathBuf, File>> = Mutex::new(BTreeMap::new());

/// Makes a folder: in the build folder, or where its path is short enough for sockets.
///
/// # Errors
///
/// If it cannot be created.
pub fn create(name: &str) -> Result<PathBuf> {
    /// `sockaddr_un` has room for 107 characters; the longest name of ours has less than 20.
    const PATH_MAX: usize = 85;
    static ONCE: Once = Once::new();

    let parent = crate::paths::build_folder().join("run");
    fs::create_dir_all(&parent).with_context(|| format!("create {}", parent.display()))?;
    ONCE.call_once(|| {
        sweep(&parent);
        if let Err(e) = remove_on_signal() {
            tracing::warn!(
                "interrupting this leaves folders in {}: {e}",
                parent.display()
            );
        }
    });
    let prefix = format!("{}.", name.replace('/', "-"));
    let make = |parent: &Path| tempfile::Builder::new().prefix(&prefix).tempdir_in(parent);
    let mut folder = make(&parent)?;
    if folder.path().as_os_str().len() > PATH_MAX {
        folder = make(&std::env::temp_dir())?;
    }
    let lock = File::create(folder.path().join(LOCK))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    let path = folder.keep();
    folders().insert(path.clone(), lock);
    Ok(path)
}

/// Removes a folder that [`create`] made.
pub fn remove(folder: &Path) {
    folders().remove(folder);
    if let Err(e) = fs::remove_dir_all(folder) {
        tracing::warn!("remove {}: {e}", folder.display());
    }
}

/// Keeps a folder for whoever wants to look into it.
pub fn keep(folder: &Path) {
    if let Err(e) = File::create(folder.join(KEPT)) {
        tracing::warn!("keep {}: {e}", folder.display());
    }
    folders().remove(folder);
}

/// Removes what runs that were killed have left in `parent`.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for folder in entries.filter_map(Result::ok).map(|entry| entry.path()) {
        let Ok(lock) = File::open(folder.join(LOCK)) else {
            continue;
        };
        let abandoned = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        if abandoned && !folder.join(KEPT).exists() {
            let _somebody_else_did = fs::remove_dir_all(&folder);
        }
    }
}

/// Removes the folders and ends the program when it is asked to end. The machines end with it.
fn remove_on_signal() -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            if let Some(signal) = signals.forever().next() {
                for folder in folders().keys() {
                    let _in_use = fs::remove_dir_all(folder);
                }
                eprintln!();
                std::process::exit(128 + signal);
            }
        })?;
    Ok(())
}

fn folders() -> MutexGuard<'static, BTreeMap<PathBuf, File>> {
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_uses_is_swept_and_what_is_kept_stays() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let folder = dir.path().join(name);
            fs::create_dir(&folder).unwrap();
            File::create(folder.join(LOCK)).unwrap()
        };
        make("abandoned");
        make("kept");
        File::create(dir.path().join("kept").join(KEPT)).unwrap();
        let lock = make("used");
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        fs::create_dir(dir.path().join("foreign")).unwrap();

        sweep(dir.path());
        let mut left: Vec<String> = fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["foreign", "kept", "used"]);
    }
}
