// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A file that has its name only when it is complete.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// What the name ends in until then.
const ENDING: &str = ".partial";

/// A new file, for its owner alone. Half of it has another name, and goes with whoever writes it, unless the
/// program dies.
pub struct Draft {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    done: bool,
}

impl Draft {
    /// # Errors
    ///
    /// If there is a file `path`, or one cannot be made there.
    pub fn new(path: &Path) -> io::Result<Self> {
        if fs::symlink_metadata(path).is_ok() {
            return Err(Errno::EXIST.into());
        }
        let mut name = OsString::from(path);
        name.push(ENDING);
        let partial = PathBuf::from(name);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&partial)
            .map_err(|e| match e.kind() {
                io::ErrorKind::AlreadyExists => {
                    let text = format!(
                        "{} is being written, or is left from somebody who was killed; remove it then",
                        partial.display()
                    );
                    io::Error::new(e.kind(), text)
                }
                _ => e,
            })?;
        Ok(Self {
            path: path.to_owned(),
            partial,
            file,
            done: false,
        })
    }

    /// Where to write.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives it its name.
    ///
    /// # Errors
    ///
    /// If somebody else has made such a file meanwhile.
    pub fn finish(mut self) -> io::Result<()> {
        match renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::NOREPLACE) {
            // Not all file systems know how not to replace.
            Err(Errno::INVAL) => fs::rename(&self.partial, &self.path)?,
            other => other?,
        }
        self.done = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.done {
            // Nobody is left to be told.
            let _gone = fs::remove_file(&self.partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn only_what_is_complete_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let count = || fs::read_dir(folder.path()).unwrap().count();

        drop(Draft::new(&path).unwrap());
        assert_eq!(count(), 0);

        let draft = Draft::new(&path).unwrap();
        draft.file().write_all(b"all of it").unwrap();
        assert!(!path.exists());
        let second = Draft::new(&path).err().unwrap().to_string();
        assert!(second.contains("is being written"), "{second}");
        draft.finish().unwrap();
        assert_eq!(
            (fs::read(&path).unwrap().as_slice(), count()),
            (&b"all of it"[..], 1)
        );
        assert_eq!(
            Draft::new(&path).err().unwrap().kind(),
            io::ErrorKind::AlreadyExists
        );
    }

    #[test]
    fn nothing_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let draft = Draft::new(&path).unwrap();
        fs::write(&path, "somebody else's").unwrap();
        assert!(draft.finish().is_err());
        assert_eq!(fs::read(&path).unwrap(), b"somebody else's");
    }
}
