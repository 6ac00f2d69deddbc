// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Archives in the "newc" form of cpio, which the kernel unpacks as its first root.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};

/// Kinds of entries, as in `st_mode`.
const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive being written, in memory.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Archive {
    /// Adds a file with these permissions. Folders above it are made.
    ///
    /// # Errors
    ///
    /// If the path is no clean relative one, is there already, or `data` exceeds 4 GiB.
    pub fn file(&mut self, path: &str, permissions: u32, data: &[u8]) -> Result<()> {
        self.parents(path)?;
        self.entry(path, FILE | permissions, data, (0, 0))
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    ///
    /// As [`Archive::file`].
    pub fn link(&mut self, path: &str, target: &str) -> Result<()> {
        self.parents(path)?;
        self.entry(path, LINK | 0o777, target.as_bytes(), (0, 0))
    }

    /// Adds a folder, unless it is there.
    ///
    /// # Errors
    ///
    /// As [`Archive::file`].
    pub fn directory(&mut self, path: &str) -> Result<()> {
        self.parents(path)?;
        if self.names.contains(path) {
            return Ok(());
        }
        self.entry(path, DIRECTORY | 0o755, &[], (0, 0))
    }

    /// Adds a character device node.
    ///
    /// # Errors
    ///
    /// As [`Archive::file`].
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) -> Result<()> {
        self.parents(path)?;
        self.entry(path, CHARACTER_DEVICE | 0o600, &[], (major, minor))
    }

    /// Ends the archive and hands it over.
    pub fn finish(mut self) -> Vec<u8> {
        self.write("TRAILER!!!", 0, &[], (0, 0));
        self.bytes
    }

    fn parents(&mut self, path: &str) -> Result<()> {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent)?;
        }
        Ok(())
    }

    fn entry(&mut self, path: &str, mode: u32, data: &[u8], device: (u32, u32)) -> Result<()> {
        let clean =
            !path.is_empty() && path.split('/').all(|part| !matches!(part, "" | "." | ".."));
        ensure!(
            clean && !path.contains('\0'),
            "{path:?} is no clean relative path"
        );
        ensure!(self.names.insert(path.to_owned()), "{path} is there twice");
        ensure!(u32::try_from(data.len()).is_ok(), "{path} is too large");
        self.write(path, mode, data, device);
        Ok(())
    }

    fn write(&mut self, name: &str, mode: u32, data: &[u8], (major, minor): (u32, u32)) {
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        let fields = [
            self.names.len(),
            mode as usize,
            0, // uid
            0, // gid
            links,
            0, // mtime: the same input gives the same archive
            data.len(),
            0, // major and minor of the device it lies on
            0,
            major as usize,
            minor as usize,
            name.len() + 1,
            0, // checksum, unused in this form
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        let padded = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(padded, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_byte_by_byte() {
        let mut archive = Archive::default();
        archive.file("a", 0o644, b"hi").unwrap();
        let want = concat!(
            "070701",
            "00000001",
            "000081a4",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000002",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000002",
            "00000000",
            "a\0",
            "hi\0\0",
            "070701",
            "00000001",
            "00000000",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "0000000b",
            "00000000",
            "TRAILER!!!\0\0\0\0",
        );
        assert_eq!(String::from_utf8(archive.finish()).unwrap(), want);
    }

    #[test]
    fn folders_come_before_what_is_in_them_and_once() {
        let mut archive = Archive::default();
        archive.file("a/b/c", 0o755, b"").unwrap();
        archive.link("a/b/d", "c").unwrap();
        archive.directory("a").unwrap();
        let names: Vec<&str> = archive.names.iter().map(String::as_str).collect();
        assert_eq!(names, ["a", "a/b", "a/b/c", "a/b/d"]);
        let bytes = archive.finish();
        assert_eq!(bytes.windows(6).filter(|w| w == b"070701").count(), 5);
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn bad_paths_are_refused() {
        let mut archive = Archive::default();
        for path in ["", "/a", "a/", "a//b", "../a", "a/./b", "a\0b"] {
            assert!(archive.file(path, 0o644, b"").is_err(), "{path:?}");
        }
        archive.file("x", 0o644, b"").unwrap();
        assert!(archive.file("x", 0o644, b"").is_err());
    }
}
