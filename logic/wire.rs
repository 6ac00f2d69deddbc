// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What goes over the wire: feature bits, config space, and the page-bitmap record.
//!
//! `Documentation/protocol.rst` is the specification; this file is its only implementation, used by
//! the guest driver and by the host daemon. All integers are little-endian: page bitmaps exist only
//! on VERSION_1 devices, and the balloon's config space is little-endian on every device.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

/// The device wants to be told before a page that was in the balloon is used again.
pub const F_MUST_TELL_HOST: u32 = 0;
/// The device has a statistics queue.
pub const F_STATS_VQ: u32 = 1;
/// The guest takes pages back from the balloon instead of killing processes.
pub const F_DEFLATE_ON_OOM: u32 = 2;
/// Free page hinting; the same bit meant page bitmaps in the proposal of 2016.
pub const F_FREE_PAGE_HINT: u32 = 3;
/// The page-bitmap bit of the proposal of 2016, see [`F_FREE_PAGE_HINT`].
pub const F_PAGE_BITMAP_2016: u32 = 3;
/// The guest poisons or initialises freed pages and says with what.
pub const F_PAGE_POISON: u32 = 4;
/// Free page reporting.
pub const F_REPORTING: u32 = 5;
/// Host requests; only valid beside [`F_PAGE_BITMAP`] and its announcement.
pub const F_HOST_REQUEST: u32 = 22;
/// Page bitmaps; only valid together with the [`Announcement`] in config space.
pub const F_PAGE_BITMAP: u32 = 23;

/// A device of version 1 of the virtio specification, of which all integers are little-endian.
pub const F_VERSION_1: u32 = 32;
/// The device reaches memory only through the platform, such as an IOMMU or the bounce buffers of a
/// confidential guest.
pub const F_ACCESS_PLATFORM: u32 = 33;

/// log2 of the size of a balloon page (4 KiB), whatever the page size of the guest.
pub const BALLOON_PAGE_SHIFT: u32 = 12;
/// The most page frame numbers in one array that every known host takes.
pub const PFN_ARRAY_MAX: usize = 256;
/// Bytes of one page frame number in an array.
pub const PFN_BYTES: usize = 4;

/// Offset of `num_pages` in config space: the target in balloon pages.
pub const CONFIG_NUM_PAGES: usize = 0;
/// Offset of `actual` in config space: the balloon's size in balloon pages, written by the driver.
pub const CONFIG_ACTUAL: usize = 4;
/// Offset of `free_page_hint_cmd_id` in config space.
pub const CONFIG_HINT_CMD_ID: usize = 8;
/// Offset of `poison_val` in config space, written by the driver.
pub const CONFIG_POISON_VAL: usize = 12;
/// Offset of the [`Announcement`] in config space.
pub const CONFIG_ANNOUNCEMENT: usize = 32;
/// Size of the config space of a device that announces page bitmaps.
pub const CONFIG_LEN: usize = CONFIG_ANNOUNCEMENT + Announcement::LEN;

/// "PBMP" as it lies in config space.
pub const MAGIC: [u8; 4] = *b"PBMP";
/// The version of the protocol that this file implements.
pub const VERSION: u16 = 1;

/// Smallest `bmap_len` limit a device may announce, in bytes.
pub const BITMAP_BYTES_MIN: u32 = 64;
/// Largest `bmap_len` a driver ever sends, in bytes.
pub const BITMAP_BYTES_MAX: u32 = 1 << 20;
/// `bmap_len` is a multiple of this many bytes.
pub const BITMAP_ALIGN: u64 = 8;
/// Largest `page_shift` that has a meaning on the wire (1 GiB).
pub const PAGE_SHIFT_MAX: u32 = 30;

pub(super) fn le16(bytes: &[u8], at: usize) -> u16 {
    let mut v = [0; 2];
    if let Some(s) = bytes.get(at..at + 2) {
        v.copy_from_slice(s);
    }
    u16::from_le_bytes(v)
}

pub(super) fn le32(bytes: &[u8], at: usize) -> u32 {
    let mut v = [0; 4];
    if let Some(s) = bytes.get(at..at + 4) {
        v.copy_from_slice(s);
    }
    u32::from_le_bytes(v)
}

pub(super) fn le64(bytes: &[u8], at: usize) -> u64 {
    let mut v = [0; 8];
    if let Some(s) = bytes.get(at..at + 8) {
        v.copy_from_slice(s);
    }
    u64::from_le_bytes(v)
}

pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(s) = bytes.get_mut(at..at + value.len()) {
        s.copy_from_slice(value);
    }
}

/// What a device that speaks page bitmaps says of itself at [`CONFIG_ANNOUNCEMENT`].
///
/// | offset | type | field |
/// |---|---|---|
/// | 0 | u8\[4\] | magic, "PBMP" |
/// | 4 | le16 | version |
/// | 6 | le16 | reserved, 0 |
/// | 8 | le64 | `page_shifts` |
/// | 16 | le32 | `max_bitmap_bytes` |
/// | 20 | le32 | `block_shift` |
/// | 24 | le32 | `requests` |
/// | 28 | le32 | reserved, 0 |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Version of the protocol; a driver takes the device only if it knows it.
    pub version: u16,
    /// Bit n: records with `page_shift` n are taken. Bit 12 is always set.
    pub page_shifts: u64,
    /// Largest `bmap_len` the device takes, in bytes, at least [`BITMAP_BYTES_MIN`].
    pub max_bitmap_bytes: u32,
    /// The `page_shift` the device likes best for whole blocks; 0 if it does not care.
    pub block_shift: u32,
    /// Bit n: the device may send request command n.
    pub requests: u32,
}

/// Why an announcement is not one to rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnnouncementError {
    /// The magic is not "PBMP": some other device uses the bit.
    Magic,
    /// A version this side does not know.
    Version(u16),
    /// `page_shifts` lacks bit 12 or has bits outside 12 to 30.
    PageShifts(u64),
    /// `max_bitmap_bytes` is below [`BITMAP_BYTES_MIN`].
    MaxBitmapBytes(u32),
    /// `block_shift` is neither 0 nor one of `page_shifts`.
    BlockShift(u32),
}

impl Announcement {
    /// Size in config space, in bytes.
    pub const LEN: usize = 32;

    /// Writes the announcement as it lies in config space.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, &MAGIC);
        put(&mut out, 4, &self.version.to_le_bytes());
        put(&mut out, 8, &self.page_shifts.to_le_bytes());
        put(&mut out, 16, &self.max_bitmap_bytes.to_le_bytes());
        put(&mut out, 20, &self.block_shift.to_le_bytes());
        put(&mut out, 24, &self.requests.to_le_bytes());
        out
    }

    /// Reads and checks an announcement.
    ///
    /// # Errors
    ///
    /// The first field that cannot be relied on.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, AnnouncementError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(AnnouncementError::Magic);
        }
        let this = Self {
            version: le16(bytes, 4),
            page_shifts: le64(bytes, 8),
            max_bitmap_bytes: le32(bytes, 16),
            block_shift: le32(bytes, 20),
            requests: le32(bytes, 24),
        };
        let allowed = (1u64 << (PAGE_SHIFT_MAX + 1)) - (1u64 << BALLOON_PAGE_SHIFT);
        if this.version != VERSION {
            return Err(AnnouncementError::Version(this.version));
        }
        if this.page_shifts & (1 << BALLOON_PAGE_SHIFT) == 0 || this.page_shifts & !allowed != 0 {
            return Err(AnnouncementError::PageShifts(this.page_shifts));
        }
        if this.max_bitmap_bytes < BITMAP_BYTES_MIN {
            return Err(AnnouncementError::MaxBitmapBytes(this.max_bitmap_bytes));
        }
        if this.block_shift != 0 && !this.takes(this.block_shift) {
            return Err(AnnouncementError::BlockShift(this.block_shift));
        }
        Ok(this)
    }

    /// Whether the device takes records with this `page_shift`.
    pub const fn takes(&self, page_shift: u32) -> bool {
        page_shift < u64::BITS && self.page_shifts >> page_shift & 1 == 1
    }
}

/// The header of a page-bitmap record, as in the proposal of 2016.
///
/// | offset | type | field |
/// |---|---|---|
/// | 0 | le32 | `id` |
/// | 4 | le32 | `page_shift` |
/// | 8 | le64 | `base_pfn` |
/// | 16 | le64 | `bmap_len` |
///
/// `bmap_len` bytes of bitmap follow; bit i, least significant first, is frame `base_pfn + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// 0 for inflate and deflate, else the id of the request that is answered.
    pub id: u32,
    /// log2 of the size of a frame, in bytes.
    pub page_shift: u32,
    /// The frame of bit 0, in units of `1 << page_shift` bytes.
    pub base_pfn: u64,
    /// Length of the bitmap that follows, in bytes.
    pub bmap_len: u64,
}

/// Which field of a record is wrong, with the value found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// The request ends before the header does; holds the bytes there were.
    Short(usize),
    /// `id` is not 0 on an inflate or deflate queue, or not that of the request in an answer.
    Id(u32),
    /// `page_shift` is none that the device takes.
    PageShift(u32),
    /// `base_pfn + 8 * bmap_len` frames do not fit into 64-bit addresses.
    BasePfn(u64),
    /// `bmap_len` is 0, no multiple of 8, or above the device's limit.
    BmapLen(u64),
    /// `bmap_len` is more than what follows the header.
    Truncated {
        /// The length the header gives.
        bmap_len: u64,
        /// The bytes there are.
        have: u64,
    },
}

impl Header {
    /// Size on the wire, in bytes.
    pub const LEN: usize = 24;

    /// Writes the header as it goes over the wire.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, &self.id.to_le_bytes());
        put(&mut out, 4, &self.page_shift.to_le_bytes());
        put(&mut out, 8, &self.base_pfn.to_le_bytes());
        put(&mut out, 16, &self.bmap_len.to_le_bytes());
        out
    }

    /// Reads a header without judging it; see [`Header::check`].
    ///
    /// # Errors
    ///
    /// [`RecordError::Short`] if `bytes` is shorter than a header.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        if bytes.len() < Self::LEN {
            return Err(RecordError::Short(bytes.len()));
        }
        Ok(Self {
            id: le32(bytes, 0),
            page_shift: le32(bytes, 4),
            base_pfn: le64(bytes, 8),
            bmap_len: le64(bytes, 16),
        })
    }

    /// Checks the header of an inflate or deflate record against what the device takes and the
    /// `have` bytes that follow it in the request.
    ///
    /// # Errors
    ///
    /// The first field that is wrong.
    pub fn check(&self, device: &Announcement, have: u64) -> Result<(), RecordError> {
        self.check_of(0, device, have)
    }

    /// The same for a record that has to carry `id`, as in the answers to a host's request.
    ///
    /// # Errors
    ///
    /// The first field that is wrong.
    pub fn check_of(&self, id: u32, device: &Announcement, have: u64) -> Result<(), RecordError> {
        if self.id != id {
            return Err(RecordError::Id(self.id));
        }
        if self.page_shift > PAGE_SHIFT_MAX || !device.takes(self.page_shift) {
            return Err(RecordError::PageShift(self.page_shift));
        }
        if self.bmap_len == 0
            || self.bmap_len % BITMAP_ALIGN != 0
            || self.bmap_len > u64::from(device.max_bitmap_bytes)
        {
            return Err(RecordError::BmapLen(self.bmap_len));
        }
        if self.bmap_len > have {
            return Err(RecordError::Truncated {
                bmap_len: self.bmap_len,
                have,
            });
        }
        // NO-OVERFLOW: `bmap_len` is at most `u32::MAX`.
        let end = self.base_pfn.checked_add(self.bmap_len * 8);
        match end {
            Some(end) if end <= u64::MAX >> self.page_shift => Ok(()),
            _ => Err(RecordError::BasePfn(self.base_pfn)),
        }
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_wire))]
mod tests {
    use super::*;

    const DEVICE: Announcement = Announcement {
        version: VERSION,
        page_shifts: 1 << 12 | 1 << 21,
        max_bitmap_bytes: 1 << 20,
        block_shift: 21,
        requests: 0,
    };

    const HEADER: Header = Header {
        id: 0,
        page_shift: 21,
        base_pfn: 0x0102_0304_0506,
        bmap_len: 192,
    };

    #[test]
    fn header_bytes_are_the_2016_layout() {
        let golden = [
            0, 0, 0, 0, 21, 0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 0, 192, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert!(HEADER.encode() == golden);
        assert!(Header::decode(&golden) == Ok(HEADER));
        assert!(Header::decode(&golden[..23]) == Err(RecordError::Short(23)));
    }

    #[test]
    fn announcement_bytes() {
        let golden = [
            0x50, 0x42, 0x4d, 0x50, 1, 0, 0, 0, 0, 0x10, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 21, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert!(DEVICE.encode() == golden);
        assert!(Announcement::decode(&golden) == Ok(DEVICE));
    }

    #[test]
    fn announcement_refusals() {
        let bad = |at: usize, value: u8| {
            let mut bytes = DEVICE.encode();
            bytes[at] = value;
            Announcement::decode(&bytes)
        };
        assert!(bad(0, b'X') == Err(AnnouncementError::Magic));
        assert!(bad(4, 2) == Err(AnnouncementError::Version(2)));
        assert!(bad(9, 0) == Err(AnnouncementError::PageShifts(1 << 21)));
        assert!(bad(8, 1) == Err(AnnouncementError::PageShifts(1 << 12 | 1 << 21 | 1)));
        assert!(bad(18, 0) == Err(AnnouncementError::MaxBitmapBytes(0)));
        assert!(bad(20, 22) == Err(AnnouncementError::BlockShift(22)));
        assert!(bad(20, 200) == Err(AnnouncementError::BlockShift(200)));
        assert!(bad(20, 0).is_ok());
    }

    #[test]
    fn each_bad_field_is_named() {
        let with = |f: fn(&mut Header)| {
            let mut h = HEADER;
            f(&mut h);
            h.check(&DEVICE, 192)
        };
        assert!(with(|_| ()) == Ok(()));
        assert!(with(|h| h.id = 7) == Err(RecordError::Id(7)));
        assert!(with(|h| h.page_shift = 13) == Err(RecordError::PageShift(13)));
        assert!(with(|h| h.page_shift = 64) == Err(RecordError::PageShift(64)));
        assert!(with(|h| h.page_shift = u32::MAX) == Err(RecordError::PageShift(u32::MAX)));
        assert!(with(|h| h.bmap_len = 0) == Err(RecordError::BmapLen(0)));
        assert!(with(|h| h.bmap_len = 12) == Err(RecordError::BmapLen(12)));
        assert!(with(|h| h.bmap_len = u64::MAX - 7) == Err(RecordError::BmapLen(u64::MAX - 7)));
        assert!(
            with(|h| h.bmap_len = 200)
                == Err(RecordError::Truncated {
                    bmap_len: 200,
                    have: 192
                })
        );
        assert!(with(|h| h.base_pfn = u64::MAX) == Err(RecordError::BasePfn(u64::MAX)));
    }

    #[test]
    fn frames_end_at_the_last_64_bit_address() {
        let end = u64::MAX >> 21;
        let mut h = HEADER;
        h.base_pfn = end - 192 * 8;
        assert!(h.check(&DEVICE, 192) == Ok(()));
        h.base_pfn += 1;
        assert!(h.check(&DEVICE, 192) == Err(RecordError::BasePfn(h.base_pfn)));
    }
}
