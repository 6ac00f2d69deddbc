// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Shows results: as JSON for programs, as a page with plots, and as a table.

pub mod page;
pub mod plot;
pub mod table;

use std::path::Path;

use anyhow::{Context, Result};

use crate::case::Case;
use crate::environment::Environment;

/// The name of the file with a list of all cases.
pub const JSON: &str = "bench.json";
/// The name of the file with machine, versions and date.
pub const ENVIRONMENT: &str = "environment.json";
/// The name of the page.
pub const PAGE: &str = "index.html";

/// Writes all files to `folder`.
///
/// # Errors
///
/// If one cannot be written.
pub fn write(folder: &Path, environment: &Environment, cases: &[Case]) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let put = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text + "\n").with_context(|| format!("write {}", path.display()))
    };
    put(JSON, serde_json::to_string_pretty(cases)?)?;
    put(ENVIRONMENT, serde_json::to_string_pretty(environment)?)?;
    put(PAGE, page::page(environment, cases)?)
}

/// A number with three significant digits, for people.
pub(crate) fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 99.95 || v == 0.0 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// The same of something that may be missing.
pub(crate) fn short_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        for (value, text) in [
            (0.0, "0"),
            (0.0123, "0.012"),
            (1.0, "1.00"),
            (9.999, "10.0"),
            (45.67, "45.7"),
            (99.99, "100"),
            (12345.6, "12346"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
