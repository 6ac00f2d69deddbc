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

/// What both sides have to agree on, apart from the features offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Circumstances {
    /// What config space says, read only if [`F_PAGE_BITMAP`] is offered and config space is large
    /// enough.
    pub announcement: Option<Result<Announcement, AnnouncementError>>,
    /// The user's word that this host means bitmaps by bit 3.
    pub dialect_2016: bool,
    /// Whether config space is known to have the field for free page hints, which a host of 2016 does not
    /// have.
    pub hint_field: bool,
    /// Whether the device shows a queue that a host of 2016 does not have.
    pub free_page_queue: bool,
    /// What the guest writes to each byte of memory that is freed, if anything.
    pub poison: Option<u8>,
}

impl Negotiated {
    /// Whether the device wants to know of free memory when it is migrated.
    pub const fn wants_hints(&self) -> bool {
        self.features.has(F_FREE_PAGE_HINT) && !matches!(self.protocol, Protocol::PageBitmap2016)
    }
}

/// Whether bit 3 of a device means free page hints beyond doubt. A host of 2016 means page bitmaps by it,
/// and would take arrays of frame numbers for such once the bit is acknowledged.
const fn means_hints(offered: Features, given: &Circumstances) -> bool {
    let newer = given.hint_field
        || offered.has(F_REPORTING)
        || offered.has(F_PAGE_POISON)
        || matches!(given.announcement, Some(Ok(_)));

    offered.has(F_FREE_PAGE_HINT) && newer && !given.dialect_2016
}

/// Decides what to acknowledge of `offered`. What comes out, offered again, comes out again, if
/// `hint_field` is set then and the rest is the same.
pub fn negotiate(offered: Features, given: &Circumstances) -> Negotiated {
    // What this driver does not do, or does only beside the right protocol, is never acknowledged.
    let mut plain = offered.without(F_HOST_REQUEST).without(F_PAGE_BITMAP);
    if given.poison.is_none() {
        plain = plain.without(F_PAGE_POISON);
    } else if !offered.has(F_PAGE_POISON) {
        // The guest would find other contents in a page than what it has written when freeing it.
        plain = plain.without(F_REPORTING);
    }
    if !means_hints(offered, given) && offered.has(F_FREE_PAGE_HINT) {
        plain = plain.without(F_FREE_PAGE_HINT);
        // Hosts number their queues over what they offer, and the guest over what it takes: without
        // the free page queue the two do not agree on the number of the one behind it.
        plain = plain.without(F_REPORTING);
    }
    let mut out = Negotiated {
        protocol: Protocol::PfnArray,
        features: plain,
        refusal: None,
        mistrust: None,
    };

    // Records are little-endian by definition, so the older byte orders have no page bitmaps.
    if offered.has(F_PAGE_BITMAP) && offered.has(F_VERSION_1) {
        match given.announcement {
            Some(Ok(device)) => {
                out.protocol = Protocol::PageBitmap(device);
                out.features = Features(plain.0 | 1 << F_PAGE_BITMAP);
                if offered.has(F_HOST_REQUEST) && device.requests != 0 {
                    out.features.0 |= 1 << F_HOST_REQUEST;
                }
                return out;
            }
            Some(Err(e)) => out.mistrust = Some(e),
            None => out.mistrust = Some(AnnouncementError::Magic),
        }
    }
    if given.dialect_2016 {
        out.refusal = if !offered.has(F_PAGE_BITMAP_2016) {
            Some(Refusal::NotOffered)
        } else if offered.has(F_REPORTING) {
            Some(Refusal::Reporting)
        } else if offered.has(F_PAGE_POISON) {
            Some(Refusal::PagePoison)
        } else if given.free_page_queue {
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

    const PLAIN: Circumstances = Circumstances {
        announcement: None,
        dialect_2016: false,
        hint_field: false,
        free_page_queue: false,
        poison: None,
    };

    const ANNOUNCED: Circumstances = Circumstances {
        announcement: Some(Ok(DEVICE)),
        ..PLAIN
    };

    const ASKED: Circumstances = Circumstances {
        dialect_2016: true,
        ..PLAIN
    };

    fn bits(set: &[u32]) -> Features {
        Features(set.iter().fold(0, |f, b| f | 1 << b))
    }

    #[test]
    fn bit_23_counts_only_with_its_announcement() {
        let offered = bits(&[0, 23, 32]);
        let out = negotiate(offered, &ANNOUNCED);
        assert!(out.protocol == Protocol::PageBitmap(DEVICE));
        assert!(out.features == offered);

        let out = negotiate(
            offered,
            &Circumstances {
                announcement: Some(Err(AnnouncementError::Magic)),
                ..PLAIN
            },
        );
        assert!(out.protocol == Protocol::PfnArray);
        assert!(out.features == bits(&[0, 32]));
        assert!(out.mistrust == Some(AnnouncementError::Magic));

        let out = negotiate(offered, &PLAIN);
        assert!(out.protocol == Protocol::PfnArray && out.mistrust.is_some());
    }

    #[test]
    fn host_requests_need_an_announcement_that_names_some() {
        let asks = Announcement {
            requests: 2,
            ..DEVICE
        };
        for (offered, announcement, taken) in [
            (bits(&[22, 23, 32]), Some(Ok(asks)), bits(&[22, 23, 32])),
            (bits(&[22, 23, 32]), Some(Ok(DEVICE)), bits(&[23, 32])),
            (bits(&[23, 32]), Some(Ok(asks)), bits(&[23, 32])),
            (bits(&[22, 32]), Some(Ok(asks)), bits(&[32])),
            (bits(&[22, 23]), Some(Ok(asks)), bits(&[])),
            (
                bits(&[22, 23, 32]),
                Some(Err(AnnouncementError::Magic)),
                bits(&[32]),
            ),
            (bits(&[3, 22]), None, bits(&[3])),
        ] {
            let given = Circumstances {
                announcement,
                ..ASKED
            };
            assert!(negotiate(offered, &given).features == taken);
        }
    }

    #[test]
    fn bit_3_is_never_a_bitmap_by_default() {
        for others in 0..256 {
            let out = negotiate(Features(others | 1 << 3), &PLAIN);
            assert!(out.protocol == Protocol::PfnArray && out.refusal.is_none());
        }
    }

    #[test]
    fn bit_3_means_hints_only_beyond_doubt() {
        let field = Circumstances {
            hint_field: true,
            ..PLAIN
        };

        for (offered, given, hints) in [
            (bits(&[0, 1, 3]), PLAIN, false),
            (bits(&[0, 1, 3, 32]), PLAIN, false),
            (bits(&[3]), field, true),
            (bits(&[3, 4]), PLAIN, true),
            (bits(&[3, 5]), PLAIN, true),
            (bits(&[3, 23, 32]), ANNOUNCED, true),
            (bits(&[3, 23, 32]), PLAIN, false),
            (bits(&[0, 1, 4, 5]), field, false),
        ] {
            let out = negotiate(offered, &given);
            assert!(out.wants_hints() == hints && out.features.has(3) == hints);
            // Who asks for the dialect of 2016 never gets bit 3 for hints.
            let asked = Circumstances {
                dialect_2016: true,
                ..given
            };
            assert!(!negotiate(offered, &asked).wants_hints());
        }
    }

    #[test]
    fn what_was_acknowledged_is_acknowledged_again() {
        let shift = |others: u64| others & 0xff | (others >> 8 & 1) << 23 | 1 << 32;

        for others in 0..1 << 9 {
            for given in [PLAIN, ANNOUNCED, ASKED] {
                for poison in [None, Some(0xaa)] {
                    for hint_field in [false, true] {
                        let given = Circumstances {
                            poison,
                            hint_field,
                            ..given
                        };
                        let first = negotiate(Features(shift(others)), &given);
                        let again = Circumstances {
                            hint_field: true,
                            ..given
                        };
                        let second = negotiate(first.features, &again);
                        assert!(second.features == first.features);
                        assert!(second.protocol == first.protocol);
                    }
                }
            }
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
            let out = negotiate(
                offered,
                &Circumstances {
                    free_page_queue: queue,
                    ..ASKED
                },
            );
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
        let out = negotiate(
            bits(&[3, 23, 32]),
            &Circumstances {
                dialect_2016: true,
                ..ANNOUNCED
            },
        );
        assert!(out.protocol == Protocol::PageBitmap(DEVICE));
        assert!(!out.features.has(3));
    }

    #[test]
    fn page_bitmaps_need_a_device_of_version_1() {
        let out = negotiate(bits(&[0, 23]), &ANNOUNCED);
        assert!(out.protocol == Protocol::PfnArray);
        assert!(!out.features.has(23));
    }

    #[test]
    fn what_is_not_done_is_not_acknowledged() {
        let out = negotiate(Features(u64::MAX), &ANNOUNCED);
        for bit in [4, 22] {
            assert!(!out.features.has(bit));
        }
    }

    #[test]
    fn reporting_needs_a_host_that_knows_of_poison() {
        for (offered, poison, taken) in [
            (bits(&[5]), None, bits(&[5])),
            (bits(&[4, 5]), None, bits(&[5])),
            (bits(&[4]), None, bits(&[])),
            (bits(&[5]), Some(0xaa), bits(&[])),
            (bits(&[5]), Some(0), bits(&[])),
            (bits(&[4, 5]), Some(0xaa), bits(&[4, 5])),
            (bits(&[4]), Some(0), bits(&[4])),
            (bits(&[3, 4, 5]), Some(0), bits(&[3, 4, 5])),
            (bits(&[3, 5]), Some(0), bits(&[3])),
            (bits(&[3, 5]), None, bits(&[3, 5])),
        ] {
            let out = negotiate(offered, &Circumstances { poison, ..PLAIN });
            assert!(out.features == taken);
        }
    }
}
