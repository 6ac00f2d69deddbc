// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A file that has its name only when it is complete.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, open, renameat_with};
use rustix::io::Errno;

/// What the name ends in until then, where a file needs one.
const ENDING: &str = ".partial";

/// A new file, for its owner alone.
///
/// Half of it has no name, and goes with the program, however that ends. Where the file system knows no files
/// without a name, it has another one until then, and stays if the program is killed.
#[derive(Debug)]
pub struct Draft {
    path: PathBuf,
    /// Its name until then, if it has one.
    partial: Option<PathBuf>,
    file: File,
}

impl Draft {
    /// # Errors
    ///
    /// If there is a file `path`, or one cannot be made there.
    pub fn new(path: &Path) -> io::Result<Self> {
        if fs::symlink_metadata(path).is_ok() {
            return Err(Errno::EXIST.into());
        }
        match nameless(path) {
            Some(file) => Ok(Self {
                path: path.to_owned(),
                partial: None,
                file,
            }),
            None => Self::named(path),
        }
    }

    fn named(path: &Path) -> io::Result<Self> {
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
            partial: Some(partial),
            file,
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
        match &self.partial {
            None => linkat(
                CWD,
                place(&self.file),
                CWD,
                &self.path,
                AtFlags::SYMLINK_FOLLOW,
            )?,
            Some(name) => match renameat_with(CWD, name, CWD, &self.path, RenameFlags::NOREPLACE) {
                // Not all file systems know how not to replace.
                Err(Errno::INVAL) => fs::rename(name, &self.path)?,
                other => other?,
            },
        }
        self.partial = None;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(name) = &self.partial {
            // Nobody is left to be told.
            let _gone = fs::remove_file(name);
        }
    }
}

/// A file without a name, where `path` is to be, if it can be had and given a name later.
fn nameless(path: &Path) -> Option<File> {
    let folder = match path.parent()? {
        here if here.as_os_str().is_empty() => Path::new("."),
        folder => folder,
    };
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = File::from(open(folder, flags, Mode::RUSR | Mode::WUSR).ok()?);
    fs::symlink_metadata(place(&file)).ok().map(|_| file)
}

/// Where an open file is found.
fn place(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    type Make = fn(&Path) -> io::Result<Draft>;

    #[test]
    fn only_what_is_complete_has_its_name() {
        for make in [Draft::new as Make, Draft::named] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("image");
            let count = || fs::read_dir(folder.path()).unwrap().count();

            drop(make(&path).unwrap());
            assert_eq!(count(), 0);

            let draft = make(&path).unwrap();
            draft.file().write_all(b"all of it").unwrap();
            assert!(!path.exists());
            assert_eq!(count(), usize::from(draft.partial.is_some()));
            draft.finish().unwrap();
            assert_eq!(
                (fs::read(&path).unwrap().as_slice(), count()),
                (&b"all of it"[..], 1)
            );
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            assert_eq!(
                Draft::new(&path).unwrap_err().kind(),
                io::ErrorKind::AlreadyExists
            );
        }
    }

    #[test]
    fn nothing_is_replaced() {
        for make in [Draft::new as Make, Draft::named] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("image");
            let draft = make(&path).unwrap();
            fs::write(&path, "somebody else's").unwrap();
            assert_eq!(
                draft.finish().unwrap_err().kind(),
                io::ErrorKind::AlreadyExists
            );
            assert_eq!(fs::read(&path).unwrap(), b"somebody else's");
        }
    }

    #[test]
    fn a_name_that_is_left_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let first = Draft::named(&path).unwrap();
        let second = Draft::named(&path).unwrap_err().to_string();
        assert!(second.contains("is being written"), "{second}");
        drop(first);
    }

    #[test]
    fn a_bad_place_is_told() {
        let folder = tempfile::tempdir().unwrap();
        for bad in ["none/image", "."] {
            Draft::new(&folder.path().join(bad)).unwrap_err();
        }
    }
}
