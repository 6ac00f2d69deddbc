// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Times as people write them.

use std::time::Duration;

/// Reads `500ms`, `10s`, `1.5s`, `2m` or `1h`.
pub(crate) fn timeout(text: &str) -> Result<Duration, String> {
    let allowed = || format!("'{text}' is not a time; write it like 500ms, 10s, 1.5s, 2m or 1h");
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .ok_or_else(allowed)?;
    let (number, unit) = text.split_at(split);
    let unit_ms = match unit {
        "ms" => 1.0,
        "s" => 1000.0,
        "m" => 60_000.0,
        "h" => 3_600_000.0,
        _ => return Err(allowed()),
    };
    let number: f64 = number.parse().map_err(|_| allowed())?;
    Duration::try_from_secs_f64(number * unit_ms / 1000.0).map_err(|_| allowed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, ms) in [
            ("0s", 0),
            ("500ms", 500),
            ("10s", 10_000),
            ("1.5s", 1500),
            ("2m", 120_000),
            ("1h", 3_600_000),
        ] {
            assert_eq!(timeout(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in [
            "",
            "10",
            "s",
            "-1s",
            "1 s",
            "1e3s",
            "1..2s",
            "10sec",
            "inf",
            "9".repeat(400).as_str(),
        ] {
            assert!(timeout(text).is_err(), "{text}");
        }
        assert!(timeout(&format!("{}h", "9".repeat(40))).is_err());
    }
}
