// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The few calls that Rust cannot check, behind functions that are safe to call.

#![allow(unsafe_code, reason = "the only module of the workspace that needs it")]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rustix::mm::{Advice, madvise};
use vm_memory::{GuestMemoryRegion as _, GuestRegionMmap};

/// What to do with a part of a mapping of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advise {
    /// Give the pages of private memory back; they read as zero afterwards.
    DontNeed,
    /// Read the pages in ahead, without waiting.
    WillNeed,
    /// Have the pages there and writable on return; their content stays.
    Populate,
}

/// Advises the system about `len` bytes of guest memory, `offset` bytes into a region.
///
/// # Errors
///
/// If the part is not within the region, or as madvise(2).
pub(crate) fn advise(
    region: &GuestRegionMmap<()>,
    offset: u64,
    len: u64,
    what: Advise,
) -> io::Result<()> {
    let out = || io::Error::from(io::ErrorKind::InvalidInput);
    match offset.checked_add(len) {
        Some(end) if end <= region.len() => {}
        _ => return Err(out()),
    }
    let offset = usize::try_from(offset).map_err(|_| out())?;
    let len = usize::try_from(len).map_err(|_| out())?;
    let advice = match what {
        Advise::DontNeed => Advice::LinuxDontNeed,
        Advise::WillNeed => Advice::WillNeed,
        Advise::Populate => Advice::LinuxPopulateWrite,
    };
    let start = region.as_ptr().wrapping_add(offset).cast();
    // SAFETY: The part lies within a mapping that lives as long as `region`, as was just checked.
    // It is guest memory: nothing in this program has references into it, all access is volatile,
    // and the guest may change it at any time. So it may become zero, which is the most that these
    // advices do to it.
    unsafe { madvise(start, len, advice) }?;
    Ok(())
}

/// Duplicates a file descriptor known by number, such as one listed in `/proc/self/fd`.
///
/// # Errors
///
/// `EBADF` if it is not open, or as fcntl(2).
pub(crate) fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: The borrow lasts for one system call, which checks whether the number is an open
    // file. If another thread closes or reuses it just before, the call fails or duplicates another
    // file; the caller owns the duplicate either way, and nobody else's descriptor is touched.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}
