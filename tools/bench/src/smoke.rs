// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Looks whether what was written is what the benchmarks promise to write. Times are not looked at.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::case::Case;
use crate::report::{JSON, PAGE};

/// Checks the files in `folder`, which must be about the cases `names`.
///
/// # Errors
///
/// If something is missing or cannot be.
pub fn check(folder: &Path, names: &[&str]) -> Result<()> {
    let text = std::fs::read_to_string(folder.join(JSON)).context("read the results")?;
    let cases: Vec<Case> =
        serde_json::from_str(&text).context("the results are not as they should be")?;
    let have: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    ensure!(
        have == names,
        "there are results of {have:?} instead of {names:?}"
    );
    for case in &cases {
        sound(case).with_context(|| case.name.clone())?;
    }
    let page = std::fs::read_to_string(folder.join(PAGE)).context("read the page")?;
    ensure!(page.matches("<svg").count() == page.matches("</svg>").count());
    ensure!(page.contains("<svg"), "the page has no plot");
    for name in names {
        ensure!(page.contains(name), "the page says nothing of {name}");
    }
    for outside in ["<script src", "<link", "<img", "@import", "url("] {
        ensure!(
            !page.contains(outside),
            "the page needs something from outside: {outside}"
        );
    }
    Ok(())
}

fn sound(case: &Case) -> Result<()> {
    if let Some(why) = &case.error {
        anyhow::bail!("not measured: {why}");
    }
    for (what, value) in [
        ("ours", case.ours),
        ("reference", case.reference),
        ("ratio", case.ratio),
    ] {
        let value = value.with_context(|| format!("there is no {what}"))?;
        ensure!(value.is_finite() && value >= 0.0, "{what} is {value}");
    }
    ensure!(!case.runs.is_empty() && !case.unit.is_empty() && !case.what.is_empty());
    for run in &case.runs {
        ensure!(
            run.value.is_finite() && run.value > 0.0,
            "{} is {}",
            run.side,
            run.value
        );
        let bad = run.figures.iter().find(|(_, value)| !value.is_finite());
        ensure!(bad.is_none(), "{}: {bad:?}", run.side);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{OURS, REFERENCE, Run};
    use crate::environment::Environment;
    use crate::report;
    use crate::spec::{Bound, Ratio, Spec};

    fn case(ours: f64) -> Case {
        let spec = Spec {
            name: "a-case",
            what: "w <b>",
            against: "a",
            unit: "ms",
            ratio: Ratio::TimesAsFast,
            bound: Bound::AtLeast(2.0),
        };
        Case::of(
            &spec,
            vec![Run::new(OURS, 0, ours), Run::new(REFERENCE, 0, 10.0)],
            vec!["n & m".to_owned()],
        )
    }

    #[test]
    fn what_the_report_writes_is_good() {
        let dir = tempfile::tempdir().unwrap();
        report::write(dir.path(), &Environment::default(), &[case(1.0)]).unwrap();
        check(dir.path(), &["a-case"]).unwrap();
        assert!(check(dir.path(), &["another"]).is_err());
        std::fs::remove_file(dir.path().join(PAGE)).unwrap();
        assert!(check(dir.path(), &["a-case"]).is_err());
    }

    #[test]
    fn a_slow_result_is_good_and_a_missing_one_is_not() {
        assert!(!case(1000.0).held);
        sound(&case(1000.0)).unwrap();
        assert!(sound(&case(0.0)).is_err());
        let without = Case {
            runs: Vec::new(),
            ..case(1.0)
        };
        assert!(sound(&without).is_err());
    }
}
