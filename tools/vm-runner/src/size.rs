// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Amounts of memory: constants, and the way people write them.

use anyhow::{Context, Result, bail};

/// 1024 bytes.
pub const KIB: u64 = 1 << 10;
/// 1024 KiB.
pub const MIB: u64 = 1 << 20;
/// 1024 MiB.
pub const GIB: u64 = 1 << 30;
/// The unit of a balloon's target and size: 4 KiB.
pub const PAGE: u64 = 4 * KIB;
/// The whole block the driver takes first.
pub const BLOCK: u64 = 2 * MIB;

/// Reads `4096`, `64k`, `3M` or `1G` as bytes.
///
/// # Errors
///
/// If it is none of these or does not fit.
pub fn parse(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 1,
        "k" | "kib" => KIB,
        "m" | "mib" => MIB,
        "g" | "gib" => GIB,
        other => bail!("{text:?}: the unit {other:?} is none of k, M, G"),
    };
    let number: u64 = digits
        .parse()
        .with_context(|| format!("{text:?} is no size, such as 512M"))?;
    number
        .checked_mul(unit)
        .with_context(|| format!("{text:?} is too large"))
}

/// Writes bytes in the largest unit that needs no fraction.
pub fn show(bytes: u64) -> String {
    for (unit, name) in [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
        if bytes != 0 && bytes % unit == 0 {
            return format!("{} {name}", bytes / unit);
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64k", 65536),
            ("3M", 3 << 20),
            ("1GiB", 1 << 30),
            ("2g", 2 << 30),
        ] {
            assert_eq!(parse(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "3T", "18446744073709551615k"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_without_fractions() {
        assert_eq!(show(0), "0 bytes");
        assert_eq!(show(4096), "4 KiB");
        assert_eq!(show(3 << 30), "3 GiB");
        assert_eq!(show((3 << 30) + 4096), "3145732 KiB");
    }
}
