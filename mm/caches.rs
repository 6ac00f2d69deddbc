// SPDX-License-Identifier: GPL-2.0

//! Having the kernel drop its caches, or compact its memory.
//!
//! What does that is not for modules to call, but there are files for it. They are opened below private mounts
//! of procfs and sysfs, so that it does not matter what is mounted where.
//!
//! C headers: [`include/linux/fs.h`](srctree/include/linux/fs.h),
//! [`include/linux/mount.h`](srctree/include/linux/mount.h)

use core::ptr::NonNull;
use kernel::{
    bindings,
    error::from_err_ptr,
    prelude::*,
    str::CString, //
};

/// What to drop.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cache {
    /// Clean pages that cache files.
    Pages,
    /// Directory entries, inodes, and what else can be shrunk.
    Slab,
}

/// Has the kernel drop a cache. Takes as long as it takes. Must be called from a kernel thread that holds no
/// locks.
///
/// # Errors
///
/// [`ENOENT`] or [`ENODEV`] if the kernel has no file for that.
pub(crate) fn drop_cache(cache: Cache) -> Result {
    PrivateMount::new(c"proc")?.write(
        c"sys/vm/drop_caches",
        match cache {
            Cache::Pages => b"1",
            Cache::Slab => b"2",
        },
    )
}

/// Has the kernel compact its memory. Takes as long as it takes. Must be called from a kernel thread that
/// holds no locks.
///
/// # Errors
///
/// [`ENOENT`] or [`ENODEV`] if the kernel has no file for that.
pub(crate) fn compact() -> Result {
    PrivateMount::new(c"proc")?.write(c"sys/vm/compact_memory", b"1")
}

/// Has the kernel reclaim about so many bytes of pages that cache files, those first that were not used for
/// longest. Must be called from a kernel thread that holds no locks.
///
/// # Errors
///
/// [`ENOENT`] or [`ENODEV`] if the kernel has no file for that, [`EAGAIN`] if there was less.
pub(crate) fn reclaim_cache(bytes: u64) -> Result {
    let mount = PrivateMount::new(c"sysfs")?;
    let value = CString::try_from_fmt(fmt!("{bytes} swappiness=0"))?;
    let mut result = Err(ENODEV);
    let mut node = -1;

    loop {
        // SAFETY: Takes any number.
        node = unsafe { crate::bindings::next_node(node) };
        if node < 0 {
            return result;
        }
        let file = CString::try_from_fmt(fmt!("devices/system/node/node{node}/reclaim"))?;
        result = mount.write(&file, value.to_bytes());
        if !matches!(result, Err(EAGAIN)) {
            return result;
        }
    }
}

/// A mount of a file system of the kernel's own that nobody else sees.
///
/// # Invariants
///
/// Owns a mount made by `kern_mount()`.
struct PrivateMount(NonNull<bindings::vfsmount>);

impl PrivateMount {
    /// `name` must be that of a file system which is part of no module.
    fn new(name: &'static CStr) -> Result<Self> {
        // SAFETY: The name is a C string.
        let kind = unsafe { bindings::get_fs_type(name.as_char_ptr()) };

        if kind.is_null() {
            return Err(ENODEV);
        }
        // SAFETY: `kind` is valid: it is never unregistered. A reference to its module was taken, of which
        // there is none.
        let mount = from_err_ptr(unsafe { bindings::kern_mount(kind) })?;

        // INVARIANT: It was just made.
        NonNull::new(mount).map(Self).ok_or(ENODEV)
    }

    /// Writes to a file.
    fn write(&self, file: &CStr, value: &[u8]) -> Result {
        // CAST: a small constant that the C side takes as `int`.
        let flags = bindings::O_WRONLY as c_int;
        let mut pos = 0;

        // SAFETY: By the type invariants the mount is valid, and so is its root. The file is closed before
        // this returns: that may be done at once in a kernel thread, which has no other use of it.
        unsafe {
            let root = bindings::path {
                mnt: self.0.as_ptr(),
                dentry: (*self.0.as_ptr()).mnt_root,
            };
            let file = from_err_ptr(bindings::file_open_root(
                &root,
                file.as_char_ptr(),
                flags,
                0,
            ))?;
            let written =
                bindings::kernel_write(file, value.as_ptr().cast(), value.len(), &mut pos);

            bindings::__fput_sync(file);
            match c_int::try_from(written) {
                Ok(error) if error < 0 => Err(Error::from_errno(error)),
                _ => Ok(()),
            }
        }
    }
}

impl Drop for PrivateMount {
    fn drop(&mut self) {
        // SAFETY: By the type invariants. All files on it are closed.
        unsafe { bindings::kern_unmount(self.0.as_ptr()) };
    }
}
