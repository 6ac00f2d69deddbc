// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The table on standard output.

use super::{short, short_or_dash};
use crate::case::{Case, OURS, REFERENCE};

/// The heading of the table.
pub fn heading() -> String {
    format!(
        "{:<26} {:>10} {:>10}  {:<10} {:>8}  {:<8} {:<6} {}",
        "case", "ours", "reference", "unit", "ratio", "must be", "", "spread"
    )
}

/// A line of it.
pub fn line(case: &Case) -> String {
    let verdict = match (case.held, &case.error) {
        (_, Some(_)) => "ERROR",
        (true, _) => "held",
        (false, _) => "MISSED",
    };
    let spread = |side: &str| case.spread.get(side).map(|s| format!("{:.0} %", s * 100.0));
    let spread = match (spread(OURS), spread(REFERENCE)) {
        (Some(ours), Some(reference)) => format!("{ours} / {reference}"),
        _ => case
            .worst_spread()
            .map_or_else(String::new, |(_, s)| format!("{:.0} %", s * 100.0)),
    };
    format!(
        "{:<26} {:>10} {:>10}  {:<10} {:>8}  {} {:<6} {verdict:<6} {spread}",
        case.name,
        short_or_dash(case.ours),
        short_or_dash(case.reference),
        case.unit,
        short_or_dash(case.ratio),
        case.direction,
        short(case.required),
    )
    .trim_end()
    .to_owned()
}

/// What must be said of a case besides.
pub fn remarks(case: &Case) -> Vec<String> {
    let of_the_run =
        |note: &&String| note.starts_with("measured again") || note.contains("disturbed");
    let notes = case.notes.iter().filter(of_the_run).cloned();
    let error = case.error.iter().map(|why| why.replace('\n', " | "));
    error.chain(notes).collect()
}

/// The last line.
pub fn summary(cases: &[Case]) -> String {
    let held = cases.iter().filter(|case| case.held).count();
    let missed: Vec<&str> = cases
        .iter()
        .filter(|c| !c.held)
        .map(|c| c.name.as_str())
        .collect();
    match missed.as_slice() {
        [] => format!("bench: all {held} requirements hold"),
        missed => format!(
            "bench: {held} of {} requirements hold; not: {}",
            cases.len(),
            missed.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Run;
    use crate::spec::{Bound, Ratio, Spec};

    const SPEC: Spec = Spec {
        name: "a-case",
        what: "w",
        against: "a",
        unit: "ms",
        ratio: Ratio::TimesAsFast,
        bound: Bound::AtLeast(80.0),
    };

    #[test]
    fn lines_say_what_held() {
        let runs = vec![Run::new(OURS, 0, 3.0), Run::new(REFERENCE, 0, 300.0)];
        let held = Case::of(&SPEC, runs, Vec::new());
        let line = line(&held);
        assert!(line.contains("100  ≥ 80.0   held"), "{line}");
        let failed = Case::failed(&SPEC, "one\ntwo".to_owned());
        assert!(super::line(&failed).contains("ERROR"));
        assert_eq!(remarks(&failed), ["one | two"]);
        assert_eq!(summary(&[held.clone()]), "bench: all 1 requirements hold");
        assert_eq!(
            summary(&[held, failed]),
            "bench: 1 of 2 requirements hold; not: a-case"
        );
    }
}
