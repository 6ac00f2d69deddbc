// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Sizes as people write them: `1G`, `512M`, `1.5GiB`, `25%`, `4096`.

use std::fmt;
use std::str::FromStr;

use crate::BALLOON_PAGE_BYTES;

/// The size of a balloon: bytes, or a share of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// A number of bytes.
    Bytes(u64),
    /// A share of guest memory, in millionths of a percent; at most 100 %.
    Share(u32),
}

/// Millionths of a percent in one percent.
const PER_PERCENT: u32 = 1_000_000;
/// The most digits after the point.
const FRACTION_DIGITS: usize = 12;

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// There is no number at the start.
    #[error(
        "'{0}' does not start with a number; write a size like 512M, 1.5G, 1GiB, 4096 (bytes) or 25%"
    )]
    Number(String),
    /// The unit is none that is known.
    #[error(
        "unit '{0}' is not known; allowed are none or B (bytes), K, M, G, T or KiB, MiB, GiB, TiB \
         (powers of 1024) and %"
    )]
    Unit(String),
    /// A decimal unit, which people mean in two ways.
    #[error("unit '{0}' is ambiguous; write {1} for powers of 1024")]
    Ambiguous(String, &'static str),
    /// More than 100 %.
    #[error("{0} is more than all of the guest's memory; a share is at most 100%")]
    Share(String),
    /// More than 64 bits of bytes.
    #[error("{0} is too large; allowed is less than 16 TiB")]
    Large(String),
    /// Not a whole number of bytes or pages.
    #[error("{text} is not a whole number of pages of 4096 bytes; the next below is {below}")]
    Unaligned {
        /// What was written.
        text: String,
        /// The next smaller size that will do, in bytes.
        below: u64,
    },
    /// A share was given while the guest's memory is not known.
    #[error(
        "a share of the guest's memory is unknown as long as no guest is connected; give bytes"
    )]
    NoGuest,
}

impl Size {
    /// The size in balloon pages of 4096 bytes; a share is rounded down to a page.
    ///
    /// # Errors
    ///
    /// If it is not a whole number of pages, needs more than 32 bits, or is a share and
    /// `guest_bytes` is 0 (no guest).
    pub fn pages(self, guest_bytes: u64) -> Result<u32, SizeError> {
        let bytes = match self {
            Self::Bytes(bytes) if bytes % BALLOON_PAGE_BYTES != 0 => {
                return Err(SizeError::Unaligned {
                    text: bytes.to_string(),
                    below: bytes - bytes % BALLOON_PAGE_BYTES,
                });
            }
            Self::Bytes(bytes) => bytes,
            Self::Share(_) if guest_bytes == 0 => return Err(SizeError::NoGuest),
            Self::Share(share) => {
                let whole = 100 * u128::from(PER_PERCENT);
                let bytes = u128::from(guest_bytes) * u128::from(share) / whole;
                u64::try_from(bytes).unwrap_or(u64::MAX)
            }
        };
        u32::try_from(bytes / BALLOON_PAGE_BYTES).map_err(|_| SizeError::Large(self.to_string()))
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let split = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let unit = unit.trim_start();
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        if whole.is_empty()
            || fraction.is_empty()
            || fraction.contains('.')
            || fraction.len() > FRACTION_DIGITS
        {
            return Err(SizeError::Number(text.to_owned()));
        }
        let large = || SizeError::Large(text.to_owned());
        let scale = 10u128.pow(fraction.len() as u32);
        let whole: u128 = whole.parse().map_err(|_| large())?;
        let fraction: u128 = fraction.parse().map_err(|_| large())?;
        // The number times `scale`; both parts are decimal digits only.
        let scaled = whole
            .checked_mul(scale)
            .and_then(|n| n.checked_add(fraction))
            .ok_or_else(large)?;

        let shift = match unit.to_ascii_lowercase().as_str() {
            "%" => {
                let share = scaled
                    .checked_mul(u128::from(PER_PERCENT))
                    .ok_or_else(large)?
                    / scale;
                return match u32::try_from(share) {
                    Ok(share) if scaled <= 100 * scale => Ok(Self::Share(share)),
                    _ => Err(SizeError::Share(text.to_owned())),
                };
            }
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            "t" | "tib" => 40,
            "kb" => return Err(SizeError::Ambiguous(unit.to_owned(), "K or KiB")),
            "mb" => return Err(SizeError::Ambiguous(unit.to_owned(), "M or MiB")),
            "gb" => return Err(SizeError::Ambiguous(unit.to_owned(), "G or GiB")),
            "tb" => return Err(SizeError::Ambiguous(unit.to_owned(), "T or TiB")),
            _ => return Err(SizeError::Unit(unit.to_owned())),
        };
        let scaled = scaled.checked_mul(1u128 << shift).ok_or_else(large)?;
        let bytes = u64::try_from(scaled / scale).map_err(|_| large())?;
        if scaled % scale != 0 {
            return Err(SizeError::Unaligned {
                text: text.to_owned(),
                below: bytes - bytes % BALLOON_PAGE_BYTES,
            });
        }
        Ok(Self::Bytes(bytes))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Bytes(bytes) => f.write_str(&human(bytes)),
            Self::Share(share) => {
                let text = format!("{}.{:06}", share / PER_PERCENT, share % PER_PERCENT);
                let text = text.trim_end_matches('0').trim_end_matches('.');
                write!(f, "{text}%")
            }
        }
    }
}

/// Writes bytes in the largest unit that keeps them exact to two digits, else in bytes.
pub fn human(bytes: u64) -> String {
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        let one = 1u64 << shift;
        if bytes >= one {
            if bytes % one == 0 {
                return format!("{} {unit}", bytes >> shift);
            }
            let hundredths = u128::from(bytes) * 100;
            if hundredths % u128::from(one) == 0 {
                let hundredths = hundredths / u128::from(one);
                let text = format!("{}.{:02}", hundredths / 100, hundredths % 100);
                return format!("{} {unit}", text.trim_end_matches('0'));
            }
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Size, SizeError> {
        text.parse()
    }

    #[test]
    fn what_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("1k", 1 << 10),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("1G", 1 << 30),
            ("1 GiB", 1 << 30),
            (" 1gib ", 1 << 30),
            ("1.5GiB", 3 << 29),
            ("0.5T", 1 << 39),
            ("724288KiB", 724_288 << 10),
        ] {
            assert_eq!(parse(text), Ok(Size::Bytes(bytes)), "{text}");
        }
        assert_eq!(parse("25%"), Ok(Size::Share(25_000_000)));
        assert_eq!(parse("12.5 %"), Ok(Size::Share(12_500_000)));
        assert_eq!(parse("100%"), Ok(Size::Share(100_000_000)));
    }

    #[test]
    fn what_is_refused_and_what_is_said() {
        for (text, part) in [
            ("", "start with a number"),
            ("G", "start with a number"),
            ("-1G", "start with a number"),
            ("+1G", "start with a number"),
            ("1.G", "start with a number"),
            ("1..5G", "start with a number"),
            (".5G", "start with a number"),
            ("1,5G", "unit ',5G' is not known"),
            ("1X", "unit 'X' is not known"),
            ("1e9", "unit 'e9' is not known"),
            ("0x1000", "unit 'x1000' is not known"),
            ("1GB", "write G or GiB"),
            ("101%", "at most 100%"),
            ("100.000001%", "at most 100%"),
            ("99999999999999999999T", "too large"),
            ("999999999999999999999999999999999999999999", "too large"),
            ("1.3K", "not a whole number"),
            ("1G 2", "unit 'G 2' is not known"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn pages_of_a_guest() {
        let gib = 1 << 30;
        assert_eq!(Size::Bytes(gib).pages(0), Ok(262_144));
        assert_eq!(parse("25%").and_then(|s| s.pages(4 * gib)), Ok(262_144));
        assert_eq!(parse("100%").and_then(|s| s.pages(4097)), Ok(1));
        assert_eq!(
            parse("25%").and_then(|s| s.pages(0)),
            Err(SizeError::NoGuest)
        );
        assert!(matches!(
            Size::Bytes(4097).pages(gib),
            Err(SizeError::Unaligned { below: 4096, .. })
        ));
        assert_eq!(Size::Bytes((1 << 44) - 4096).pages(gib), Ok(u32::MAX));
        assert!(matches!(
            Size::Bytes(1 << 44).pages(gib),
            Err(SizeError::Large(_))
        ));
    }

    #[test]
    fn shown_again() {
        for (bytes, text) in [
            (0, "0 B"),
            (1 << 30, "1 GiB"),
            (3 << 29, "1.5 GiB"),
            (4096, "4 KiB"),
            ((1 << 30) + 4096, "1048580 KiB"),
            (1001, "1001 B"),
        ] {
            assert_eq!(human(bytes), text);
        }
        assert_eq!(Size::Share(12_500_000).to_string(), "12.5%");
        assert_eq!(Size::Share(100_000_000).to_string(), "100%");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = parse(&text);
        }

        #[test]
        fn shown_sizes_are_read_back(bytes: u64) {
            prop_assert_eq!(parse(&human(bytes)), Ok(Size::Bytes(bytes)));
        }

        #[test]
        fn shown_shares_are_read_back(share in 0..=100_000_000u32) {
            prop_assert_eq!(parse(&Size::Share(share).to_string()), Ok(Size::Share(share)));
        }

        #[test]
        fn a_share_is_never_more_than_asked(guest: u64, share in 0..=100_000_000u32) {
            let exact = u128::from(guest) * u128::from(share) / 100_000_000;
            if let Ok(pages) = Size::Share(share).pages(guest) {
                let bytes = u128::from(pages) * 4096;
                prop_assert!(bytes <= exact && exact - bytes < 4096);
            }
        }
    }
}
