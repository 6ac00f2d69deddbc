// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A file for a result that is yet to come.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::Trouble;

/// A file that is opened before the guest is asked, so that a bad path is no reason to ask in vain.
///
/// What was in it stays until there is a result; a file that was made for the result goes without one.
pub(crate) struct Sink<'a> {
    path: &'a Path,
    file: File,
    /// Whether the file was made here and nothing is in it.
    fresh: bool,
}

impl<'a> Sink<'a> {
    pub(crate) fn open(path: &'a Path) -> Result<Self, Trouble> {
        let made = File::create_new(path).map(|file| (file, true));
        let opened = made.or_else(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                let file = OpenOptions::new().write(true).open(path)?;
                Ok((file, false))
            }
            _ => Err(error),
        });
        let (file, fresh) = opened.map_err(|error| trouble(path, error))?;
        Ok(Self { path, file, fresh })
    }

    /// Whether both are one file. Devices take anything.
    pub(crate) fn is_same(&self, other: &Self) -> Result<bool, Trouble> {
        let about = |sink: &Self| {
            let there = sink.file.metadata();
            there.map_err(|error| trouble(sink.path, error))
        };
        let (one, two) = (about(self)?, about(other)?);
        Ok(one.is_file() && (one.dev(), one.ino()) == (two.dev(), two.ino()))
    }

    /// Has `what` write the result.
    pub(crate) fn write(
        mut self,
        what: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
    ) -> Result<(), Trouble> {
        self.fresh = false;
        self.replace(what)
            .map_err(|error| trouble(self.path, error))
    }

    fn replace(
        &self,
        what: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
    ) -> io::Result<()> {
        // A pipe or a terminal has no length.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        let mut file = BufWriter::new(&self.file);
        what(&mut file)?;
        file.flush()
    }
}

impl Drop for Sink<'_> {
    fn drop(&mut self) {
        if self.fresh {
            // Nobody is left to be told.
            let _gone = fs::remove_file(self.path);
        }
    }
}

fn trouble(path: &Path, error: io::Error) -> Trouble {
    Trouble::File {
        path: path.to_owned(),
        error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_replaces_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("map");
        fs::write(&path, "much longer than the result").unwrap();

        let sink = Sink::open(&path).ok().unwrap();
        assert_eq!(fs::read(&path).unwrap().len(), 27);
        assert!(sink.write(|file| file.write_all(b"short")).is_ok());
        assert_eq!(fs::read(&path).unwrap(), b"short");
    }

    #[test]
    fn without_a_result_nothing_changes() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        fs::write(&old, "old").unwrap();

        drop(Sink::open(&old));
        drop(Sink::open(&new));
        assert_eq!(fs::read(&old).unwrap(), b"old");
        assert!(!new.exists());
    }

    #[test]
    fn a_bad_path_is_told() {
        let folder = tempfile::tempdir().unwrap();

        for bad in [folder.path().to_owned(), folder.path().join("none/map")] {
            assert!(matches!(Sink::open(&bad), Err(Trouble::File { path, .. }) if path == bad));
        }
    }
}
