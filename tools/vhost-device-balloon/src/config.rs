// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The balloon's config space.

use balloon_wire::logic::hint::STOP;
use balloon_wire::wire::{self, Announcement};

use crate::features::Dialect;
use crate::refusal::Refusal;

/// The most a frontend may read or write at once, in bytes (`VHOST_USER_MAX_CONFIG_SIZE`).
pub const READ_MAX: usize = 256;

/// The fields, and how much of them the guest sees.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    /// What the balloon is to hold, in balloon pages.
    pub num_pages: u32,
    /// What it holds according to the driver, in balloon pages.
    pub actual: u32,
    /// The round of free page hinting that is asked for, or a word.
    pub hint_cmd_id: u32,
    /// What the driver fills freed pages with.
    pub poison_val: u32,
    /// What is said of page bitmaps.
    announcement: Option<Announcement>,
    /// Size in bytes.
    len: usize,
}

impl ConfigSpace {
    /// Config space as it is before a driver comes.
    pub fn new(dialect: Dialect, limits: &Announcement) -> Self {
        Self {
            num_pages: 0,
            actual: 0,
            hint_cmd_id: STOP,
            poison_val: 0,
            announcement: (dialect == Dialect::Bitmap).then_some(*limits),
            len: dialect.config_len(),
        }
    }

    /// Size in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no size; it always has one.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it, and zeros after its end.
    pub fn bytes(&self) -> [u8; READ_MAX] {
        let mut bytes = [0; READ_MAX];
        let mut put = |at: usize, value: &[u8]| {
            if let Some(part) = bytes.get_mut(at..at + value.len()) {
                part.copy_from_slice(value);
            }
        };
        put(wire::CONFIG_NUM_PAGES, &self.num_pages.to_le_bytes());
        put(wire::CONFIG_ACTUAL, &self.actual.to_le_bytes());
        if self.len > wire::CONFIG_POISON_VAL {
            put(wire::CONFIG_HINT_CMD_ID, &self.hint_cmd_id.to_le_bytes());
            put(wire::CONFIG_POISON_VAL, &self.poison_val.to_le_bytes());
        }
        if let Some(announcement) = &self.announcement {
            put(wire::CONFIG_ANNOUNCEMENT, &announcement.encode());
        }
        bytes
    }

    /// Takes what the driver wrote at `offset`. Some frontends send all of config space when the
    /// driver writes one field; what is not the driver's to write is left as it is.
    ///
    /// # Errors
    ///
    /// If no field of the driver's is touched.
    pub fn write(&mut self, offset: u32, data: &[u8]) -> Result<(), Refusal> {
        let mut actual = self.actual.to_le_bytes();
        let mut poison = self.poison_val.to_le_bytes();
        let mut touched = false;
        for (i, byte) in data.iter().enumerate().take(READ_MAX) {
            let at = offset as usize + i;
            let field = match at {
                wire::CONFIG_ACTUAL..wire::CONFIG_HINT_CMD_ID => {
                    actual.get_mut(at - wire::CONFIG_ACTUAL)
                }
                wire::CONFIG_POISON_VAL.. if at < self.len => {
                    poison.get_mut(at - wire::CONFIG_POISON_VAL)
                }
                _ => None,
            };
            if let Some(field) = field {
                *field = *byte;
                touched = true;
            }
        }
        if !touched {
            return Err(Refusal::ConfigWrite {
                offset,
                len: data.len(),
            });
        }
        self.actual = u32::from_le_bytes(actual);
        self.poison_val = u32::from_le_bytes(poison);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Announcement = Announcement {
        version: wire::VERSION,
        page_shifts: 1 << 12,
        max_bitmap_bytes: 64,
        block_shift: 0,
        requests: 0,
    };

    #[test]
    fn each_dialect_shows_its_size() {
        let of = |dialect| {
            let mut space = ConfigSpace::new(dialect, &LIMITS);
            space.poison_val = 0x55;
            let bytes = space.bytes();
            (space.len(), bytes[12], bytes[32])
        };
        assert_eq!(of(Dialect::Bitmap), (64, 0x55, b'P'));
        assert_eq!(of(Dialect::Draft2016), (8, 0, 0));
        assert_eq!(of(Dialect::PfnArray), (16, 0x55, 0));
    }

    #[test]
    fn only_the_drivers_fields_are_taken() {
        let mut space = ConfigSpace::new(Dialect::Bitmap, &LIMITS);
        space.num_pages = 7;
        let before = space.bytes();
        space
            .write(0, &[0xff; 64])
            .expect("some of it is the driver's");
        let after = space.bytes();
        for (i, (a, b)) in before.iter().zip(after).enumerate() {
            let drivers = (4..8).contains(&i) || (12..16).contains(&i);
            assert_eq!(b, if drivers { 0xff } else { *a }, "byte {i}");
        }
        space.write(4, &3u32.to_le_bytes()).expect("actual");
        assert_eq!(space.actual, 3);
        space.write(5, &[1]).expect("a byte of actual");
        assert_eq!(space.actual, 0x103);
        for (offset, len) in [(0, 4), (8, 4), (16, 48), (32, 32), (u32::MAX, 8), (4, 0)] {
            assert!(
                space.write(offset, &vec![0; len]).is_err(),
                "{offset} {len}"
            );
        }
    }

    #[test]
    fn an_8_byte_space_has_no_poison() {
        let mut space = ConfigSpace::new(Dialect::Draft2016, &LIMITS);
        space.write(0, &[1; 64]).expect("actual is in it");
        assert_eq!(space.poison_val, 0);
        assert!(space.write(12, &[1; 4]).is_err());
    }
}
