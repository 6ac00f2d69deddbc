// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! From what a device offers to how the driver speaks with it.

#![forbid(unsafe_code)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "compiled into the module and into the host crates; neither uses all of it"
)]

use super::wire::{
    Announcement,
    AnnouncementError,
    BALLOON_PAGE_SHIFT,
    F_FREE_PAGE_HINT,
    F_HOST_REQUEST,
    F_PAGE_BITMAP,
    F_PAGE_BITMAP_2016,
    F_PAGE_POISON,
    F_REPORTING,
    F_VERSION_1, //
};

/// log2 of the size of a block in bytes, where the device has no wish of its own: 2 MiB.
pub const BLOCK_SHIFT: u32 = 21;

/// A set of feature bits, of those below 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// Whether a bit is in the set.
    pub const fn has(self, bit: u32) -> bool {
        bit < u64::BITS && self.0 >> bit & 1 == 1
    }

    /// The set without a bit.
    pub const fn without(self, bit: u32) -> Self {
        if bit >= u64::BITS {
            return self;
        }
        Self(self.0 & !(1 << bit))
    }
}

/// How pages are told to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Page bitmaps, bit 23, with the device's announcement.
    PageBitmap(Announcement),
    /// Page bitmaps as proposed in 2016, bit 3, nothing announced.
    PageBitmap2016,
    /// Arrays of 32-bit page frame numbers.
    PfnArray,
}

impl Protocol {
    /// The name that users see.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::PageBitmap(_) => "page-bitmap-v1",
            Self::PageBitmap2016 => "page-bitmap-2016",
            Self::PfnArray => "pfn-array",
        }
    }

    /// Largest bitmap the device takes, in bytes; `None` if it takes none.
    pub const fn max_bitmap_bytes(&self) -> Option<u32> {
        match self {
            Self::PageBitmap(device) => Some(device.max_bitmap_bytes),
            Self::PageBitmap2016 => Some(u32::MAX),
            Self::PfnArray => None,
        }
    }

    /// log2 of the size of the blocks to ask the guest for first, in bytes: what the device likes, or
    /// 2 MiB.
    pub const fn block_shift(&self) -> u32 {
        match self {
            Self::PageBitmap(device) if device.block_shift >= BLOCK_SHIFT => device.block_shift,
            _ => BLOCK_SHIFT,
        }
    }

    /// Whether the device takes records of frames of `1 << page_shift` bytes.
    pub const fn takes(&self, page_shift: u32) -> bool {
        match self {
            Self::PageBitmap(device) => device.takes(page_shift),
            Self::PageBitmap2016 => page_shift >= BALLOON_PAGE_SHIFT,
            Self::PfnArray => false,
        }
    }
}

/// Why the dialect of 2016 is refused although the user asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Bit 3 is not offered at all.
    NotOffered,
    /// REPORTING is offered: the device is newer than the proposal, and bit 3 is free page hinting.
    Reporting,
    /// PAGE_POISON is offered: the same.
    PagePoison,
    /// There is a free page queue: bit 3 is free page hinting.
    FreePageQueue,
}

impl Refusal {
    /// What is wrong, to be put behind "the page-bitmap dialect of 2016 is refused: ".
    pub const fn reason(self) -> &'static str {
        match self {
            Self::NotOffered => "the device does not offer feature bit 3",
            Self::Reporting => "the device offers REPORTING (5), so its bit 3 is free page hinting",
            Self::PagePoison => {
                "the device offers PAGE_POISON (4), so its bit 3 is free page hinting"
            }
            Self::FreePageQueue => {
                "the device has a free page queue, so its bit 3 is free page hinting"
            }
        }
    }
}

/// What became of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// How pages are told to the device.
    pub protocol: Protocol,
    /// The bits to acknowledge, of those offered.
    pub features: Features,
    /// Set if the user wants the dialect of 2016 and does not get it.
    pub refusal: Option<Refusal>,
    /// Set if bit 23 is offered with an announcement that cannot be relied on.
    pub mistrust: Option<AnnouncementError>,
}

/// Decides what to acknowledge of `offered`.
///
/// `announcement` is what config space says, read only if [`F_PAGE_BITMAP`] is offered and config
/// space is large enough; `dialect_2016` is the user's word that this host means bitmaps by bit 3,
/// and `free_page_queue` tells whether the device shows a queue that such a host does not have.
pub fn negotiate(
    offered: Features,
    announcement: Option<Result<Announcement, AnnouncementError>>,
    dialect_2016: bool,
    free_page_queue: bool,
) -> Negotiated {
    // What this driver does not do, or does only beside the right protocol, is never acknowledged.
    let plain = offered
        .without(F_FREE_PAGE_HINT)
        .without(F_PAGE_POISON)
        .without(F_REPORTING)
        .without(F_HOST_REQUEST)
        .without(F_PAGE_BITMAP);
    let mut out = Negotiated {
        protocol: Protocol::PfnArray,
        features: plain,
        refusal: None,
        mistrust: None,
    };

    // Records are little-endian by definition, so the older byte orders have no page bitmaps.
    if offered.has(F_PAGE_BITMAP) && offered.has(F_VERSION_1) {
        match announcement {
            Some(Ok(device)) => {
                out.protocol = Protocol::PageBitmap(device);
                out.features = Features(plain.0 | 1 << F_PAGE_BITMAP);
                return out;
            }
            Some(Err(e)) => out.mistrust = Some(e),
            None => out.mistrust = Some(AnnouncementError::Magic),
        }
    }
    if dialect_2016 {
        out.refusal = if !offered.has(F_PAGE_BITMAP_2016) {
            Some(Refusal::NotOffered)
        } else if offered.has(F_REPORTING) {
            Some(Refusal::Reporting)
        } else if offered.has(F_PAGE_POISON) {
            Some(Refusal::PagePoison)
        } else if free_page_queue {
            Some(Refusal::FreePageQueue)
        } else {
            out.protocol = Protocol::PageBitmap2016;
            out.features = Features(plain.0 | 1 << F_PAGE_BITMAP_2016);
            None
        };
    }
    out
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(CONFIG_KUNIT, kernel::prelude::kunit_tests(virtio_balloon_rs_features))]
mod tests {
    use super::*;

    const DEVICE: Announcement = Announcement {
        version: 1,
        page_shifts: 1 << 12 | 1 << 21,
        max_bitmap_bytes: 4096,
        block_shift: 21,
        requests: 0,
    };

    fn bits(set: &[u32]) -> Features {
        Features(set.iter().fold(0, |f, b| f | 1 << b))
    }

    #[test]
    fn bit_23_counts_only_with_its_announcement() {
        let offered = bits(&[0, 23, 32]);
        let out = negotiate(offered, Some(Ok(DEVICE)), false, false);
        assert!(out.protocol == Protocol::PageBitmap(DEVICE));
        assert!(out.features == offered);

        let out = negotiate(offered, Some(Err(AnnouncementError::Magic)), false, false);
        assert!(out.protocol == Protocol::PfnArray);
        assert!(out.features == bits(&[0, 32]));
        assert!(out.mistrust == Some(AnnouncementError::Magic));

        let out = negotiate(offered, None, false, false);
        assert!(out.protocol == Protocol::PfnArray && out.mistrust.is_some());
    }

    #[test]
    fn bit_3_is_never_a_bitmap_by_default() {
        for others in 0..256 {
            let out = negotiate(Features(others | 1 << 3), None, false, false);
            assert!(out.protocol == Protocol::PfnArray);
            assert!(!out.features.has(3) && out.refusal.is_none());
        }
    }

    #[test]
    fn the_2016_dialect_and_its_vetoes() {
        for (offered, queue, refusal) in [
            (bits(&[0, 1, 3]), false, None),
            (bits(&[0, 1]), false, Some(Refusal::NotOffered)),
            (bits(&[3, 5]), false, Some(Refusal::Reporting)),
            (bits(&[3, 4]), false, Some(Refusal::PagePoison)),
            (bits(&[3]), true, Some(Refusal::FreePageQueue)),
        ] {
            let out = negotiate(offered, None, true, queue);
            assert!(out.refusal == refusal);
            assert!(out.features.has(3) == refusal.is_none());
            assert!(
                out.protocol
                    == match refusal {
                        None => Protocol::PageBitmap2016,
                        Some(_) => Protocol::PfnArray,
                    }
            );
        }
    }

    #[test]
    fn the_newer_protocol_wins_over_the_parameter() {
        let out = negotiate(bits(&[3, 23, 32]), Some(Ok(DEVICE)), true, false);
        assert!(out.protocol == Protocol::PageBitmap(DEVICE));
        assert!(!out.features.has(3));
    }

    #[test]
    fn page_bitmaps_need_a_device_of_version_1() {
        let out = negotiate(bits(&[0, 23]), Some(Ok(DEVICE)), false, false);
        assert!(out.protocol == Protocol::PfnArray);
        assert!(!out.features.has(23));
    }

    #[test]
    fn what_is_not_done_is_not_acknowledged() {
        let out = negotiate(Features(u64::MAX), Some(Ok(DEVICE)), true, true);
        for bit in [3, 4, 5, 22] {
            assert!(!out.features.has(bit));
        }
    }
}
