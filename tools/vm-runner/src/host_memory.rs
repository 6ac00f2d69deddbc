// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! How much memory of the host a guest takes: the allocated blocks of the file its memory lies in.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FallocateFlags, fallocate};

/// Bytes of a block as `st_blocks` counts them.
const BLOCK: u64 = 512;

/// The file that holds a machine's memory, seen through the machine's process: it has no name any
/// more, or never had one.
#[derive(Clone, Debug)]
pub struct MemoryFile(PathBuf);

impl MemoryFile {
    /// Finds it among the open files of process `pid`: the largest nameless file of at least
    /// `bytes` bytes.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn of(pid: i32, bytes: u64) -> Result<Self> {
        let folder = format!("/proc/{pid}/fd");
        let mut found = None;
        for entry in fs::read_dir(&folder).with_context(|| format!("read {folder}"))? {
            let path = entry?.path();
            // It may have been closed meanwhile.
            let Ok(file) = fs::metadata(&path) else {
                continue;
            };
            if file.is_file() && file.nlink() == 0 && file.len() >= bytes {
                found = found.max(Some((file.len(), path)));
            }
        }
        let (_, path) =
            found.with_context(|| format!("process {pid} has no file of {bytes} bytes"))?;
        Ok(Self(path))
    }

    /// Where it can be opened as long as the machine is there.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Has the host allocate all of it; what is in it stays.
    ///
    /// # Errors
    ///
    /// If the machine is gone or the host has no memory for it.
    pub fn populate(&self) -> Result<()> {
        let file = fs::File::options().write(true).open(&self.0)?;
        let bytes = file.metadata()?.len();
        fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes).context("allocate the guest's memory")
    }

    /// Bytes that are allocated now.
    ///
    /// # Errors
    ///
    /// If the machine is gone.
    pub fn allocated(&self) -> Result<u64> {
        let file = fs::metadata(&self.0).context("the guest's memory file")?;
        Ok(file.blocks() * BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom, Write};

    #[test]
    fn allocated_blocks_of_a_nameless_file() {
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 30).unwrap();
        file.seek(SeekFrom::Start(1 << 20)).unwrap();
        file.write_all(&[1; 8192]).unwrap();
        let pid = std::process::id().try_into().unwrap();
        let memory = MemoryFile::of(pid, 1 << 30).unwrap();
        assert_eq!(memory.allocated().unwrap(), 8192);
        assert!(MemoryFile::of(pid, 1 << 50).is_err());

        file.set_len(1 << 21).unwrap();
        memory.populate().unwrap();
        assert_eq!(memory.allocated().unwrap(), 1 << 21);
        file.seek(SeekFrom::Start(1 << 20)).unwrap();
        let mut byte = [0];
        file.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [1]);
    }
}
