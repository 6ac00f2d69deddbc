// SPDX-License-Identifier: GPL-2.0

//! Device attributes in sysfs.
//!
//! C headers: [`include/linux/sysfs.h`](srctree/include/linux/sysfs.h),
//! [`include/linux/device.h`](srctree/include/linux/device.h)

use crate::virtio;
use core::{
    cell::UnsafeCell,
    fmt::{
        self,
        Write as _, //
    },
    ptr::null, //
};
use kernel::{
    bindings,
    error::from_result,
    page::PAGE_SIZE,
    prelude::*, //
};

/// What an attribute shows and stores, for the devices of a driver.
pub(crate) trait Show<D: virtio::Driver> {
    /// Writes the value, without a newline. May sleep.
    ///
    /// # Errors
    ///
    /// Those that reading the file shall fail with.
    fn show(data: Pin<&D::Data>, out: &mut dyn fmt::Write) -> Result;
}

/// An attribute that can be written, too.
pub(crate) trait Store<D: virtio::Driver>: Show<D> {
    /// Takes a new value, with blanks trimmed off. May sleep. Changes nothing if it fails.
    ///
    /// # Errors
    ///
    /// Those that writing the file shall fail with; [`EINVAL`] for a value that is not allowed.
    fn store(data: Pin<&D::Data>, value: &str) -> Result;
}

/// A device attribute; to be put into a `static` and into one [`Group`].
#[repr(transparent)]
pub(crate) struct Attribute(UnsafeCell<bindings::device_attribute>);

// SAFETY: Rust never looks into an attribute; the C side serialises what it does with it.
unsafe impl Sync for Attribute {}

impl Attribute {
    /// A file that everybody can read.
    #[expect(clippy::disallowed_methods, reason = "`as_char_ptr` is not const")]
    pub(crate) const fn read_only<D: virtio::Driver, A: Show<D>>(name: &'static CStr) -> Self {
        let mut attribute: bindings::device_attribute = pin_init::zeroed();

        attribute.attr.name = name.as_ptr().cast();
        attribute.attr.mode = 0o444;
        attribute.__bindgen_anon_1.show = Some(show::<D, A>);
        Self(UnsafeCell::new(attribute))
    }

    /// A file that everybody can read and root can write.
    pub(crate) const fn read_write<D: virtio::Driver, A: Store<D>>(name: &'static CStr) -> Self {
        let mut this = Self::read_only::<D, A>(name);
        let attribute = this.0.get_mut();

        attribute.attr.mode = 0o644;
        attribute.__bindgen_anon_2.store = Some(store::<D, A>);
        this
    }
}

/// A folder of attributes, and the list of folders that consists of it; to be put into a `static`.
///
/// `N` is the number of attributes and one.
#[repr(C)]
pub(crate) struct Group<const N: usize> {
    attributes: [*const bindings::attribute; N],
    group: UnsafeCell<bindings::attribute_group>,
    groups: UnsafeCell<[*const bindings::attribute_group; 2]>,
}

// SAFETY: Rust never looks into a group; the C side only reads it.
unsafe impl<const N: usize> Sync for Group<N> {}

impl<const N: usize> Group<N> {
    /// A folder of this name with these attributes in it.
    #[expect(clippy::disallowed_methods, reason = "`as_char_ptr` is not const")]
    pub(crate) const fn new(name: &'static CStr, members: &[&'static Attribute]) -> Self {
        assert!(members.len() + 1 == N);

        let mut attributes = [null(); N];
        let mut i = 0;
        while i < members.len() {
            // CAST: `Attribute` is transparent, and `attr` is the first field of what it wraps.
            attributes[i] = core::ptr::from_ref(members[i]).cast();
            i += 1;
        }
        let mut group: bindings::attribute_group = pin_init::zeroed();
        group.name = name.as_ptr().cast();
        Self {
            attributes,
            group: UnsafeCell::new(group),
            groups: UnsafeCell::new([null(); 2]),
        }
    }
}

/// A list of groups that a driver gives each of its devices.
pub(crate) trait Groups: Sync {
    /// The list as the C side wants it.
    ///
    /// # Safety
    ///
    /// To be called once, when the driver is registered.
    unsafe fn as_raw(&'static self) -> *mut *const bindings::attribute_group;
}

impl<const N: usize> Groups for Group<N> {
    unsafe fn as_raw(&'static self) -> *mut *const bindings::attribute_group {
        // SAFETY: By the safety requirements this is called once, before the C side knows of the group, so nobody looks at it.
        unsafe {
            (*self.group.get()).__bindgen_anon_2.attrs_const = self.attributes.as_ptr();
            (*self.groups.get())[0] = self.group.get();
        }
        self.groups.get().cast()
    }
}

/// Text in a page.
struct Text<'a> {
    page: &'a mut [u8],
    len: usize,
}

impl fmt::Write for Text<'_> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let end = self.len.checked_add(s.len()).ok_or(fmt::Error)?;
        let room = self.page.get_mut(self.len..end).ok_or(fmt::Error)?;

        room.copy_from_slice(s.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// # Safety
///
/// Only for sysfs to call, for an attribute of a driver's `dev_groups`, with a page as `buf`.
unsafe extern "C" fn show<D: virtio::Driver, A: Show<D>>(
    dev: *mut bindings::device,
    _attribute: *mut bindings::device_attribute,
    buf: *mut c_char,
) -> isize {
    // SAFETY: sysfs gives a page to write to, which it has zeroed.
    let page = unsafe { core::slice::from_raw_parts_mut(buf.cast::<u8>(), PAGE_SIZE) };
    let mut out = Text { page, len: 0 };

    let ret: Result<usize> = (|| {
        // SAFETY: The attribute is one of a driver's `dev_groups`, which the driver core adds after
        // a successful probe and removes, waiting for calls under way, before the device is removed.
        unsafe { virtio::with_data::<D, _>(dev, |data| A::show(data, &mut out)) }?;
        out.write_str("\n").map_err(|_| ENOSPC)?;
        Ok(out.len)
    })();
    match ret {
        // CAST: a page is smaller than `isize::MAX`.
        Ok(len) => len as isize,
        Err(e) => e.to_errno() as isize,
    }
}

/// # Safety
///
/// Only for sysfs to call, for an attribute of a driver's `dev_groups`, with `count` bytes in `buf`.
unsafe extern "C" fn store<D: virtio::Driver, A: Store<D>>(
    dev: *mut bindings::device,
    _attribute: *mut bindings::device_attribute,
    buf: *const c_char,
    count: usize,
) -> isize {
    // SAFETY: sysfs gives `count` bytes.
    let bytes = unsafe { core::slice::from_raw_parts(buf.cast::<u8>(), count) };

    from_result(|| {
        let value = core::str::from_utf8(bytes).map_err(|_| EINVAL)?.trim();
        // SAFETY: As in `show`.
        unsafe { virtio::with_data::<D, _>(dev, |data| A::store(data, value)) }?;
        // CAST: sysfs writes at most a page.
        Ok(count as isize)
    })
}
