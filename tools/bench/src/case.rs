// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The result of a case, as it stands in `bench.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::spec::{Direction, Ratio, Spec};
use crate::stats::{median, spread, tidy};

/// The name of our side.
pub const OURS: &str = "ours";
/// The name of what ours is compared with.
pub const REFERENCE: &str = "reference";

/// Figures by name.
pub type Figures = BTreeMap<String, f64>;

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Who was measured: [`OURS`], [`REFERENCE`], or one that is shown besides.
    pub side: String,
    /// In which round.
    pub round: u32,
    /// What came out, in the unit of the case.
    pub value: f64,
    /// What else was seen.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub figures: Figures,
}

impl Run {
    /// A run without further figures.
    pub fn new(side: &str, round: u32, value: f64) -> Self {
        Self {
            side: side.to_owned(),
            round,
            value: tidy(value),
            figures: Figures::new(),
        }
    }

    /// Adds figures.
    #[must_use]
    pub fn with(mut self, figures: Figures) -> Self {
        self.figures.extend(figures);
        self
    }
}

/// What came out of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// What was measured.
    pub what: String,
    /// What it was measured against.
    pub against: String,
    /// The unit of `ours`, `reference` and the runs' values.
    pub unit: String,
    /// Median of our runs.
    pub ours: Option<f64>,
    /// Median of the reference's runs.
    pub reference: Option<f64>,
    /// What must hold is about this.
    pub ratio: Option<f64>,
    /// What the ratio must be.
    pub required: f64,
    /// Which way.
    pub direction: Direction,
    /// Whether it is so.
    pub held: bool,
    /// For each side, how far the middle half of its values lies apart, as a share of the median.
    pub spread: Figures,
    /// For each side, the median of each figure of its runs.
    pub counters: BTreeMap<String, Figures>,
    /// Whatever must be known to understand the result.
    pub notes: Vec<String>,
    /// The measurements.
    pub runs: Vec<Run>,
    /// Those of the first attempt, if they lay too far apart and the case was measured again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_runs: Vec<Run>,
    /// Why nothing was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Case {
    /// Judges `runs` by the rules of `spec`.
    pub fn of(spec: &Spec, runs: Vec<Run>, notes: Vec<String>) -> Self {
        let mut case = Self::empty(spec);
        case.spread = each_side(&runs, |runs| spread(&values(runs)).map(tidy));
        case.counters = each_side(&runs, |runs| Some(medians(runs)));
        case.counters.retain(|_, figures| !figures.is_empty());
        (case.ours, case.reference) = match spec.ratio {
            Ratio::Deviation => extremes(&runs),
            _ => (side(&runs, OURS), side(&runs, REFERENCE)),
        };
        let ratio = match (spec.ratio, case.ours, case.reference) {
            (Ratio::PairedShare, _, _) => median(&pairs(&runs)),
            (_, None, _) | (_, _, None) => None,
            (Ratio::TimesAsFast, Some(ours), Some(reference)) => Some(reference / ours),
            (Ratio::Share, Some(ours), Some(reference)) => Some(ours / reference),
            (Ratio::Deviation, Some(most), Some(least)) => Some((most - least) / (most + least)),
        };
        let ratio = ratio.filter(|r| r.is_finite());
        case.held = ratio.is_some_and(|r| spec.bound.holds(r));
        case.ratio = ratio.map(tidy);
        case.ours = case.ours.map(tidy);
        case.reference = case.reference.map(tidy);
        case.runs = runs;
        case.notes = notes;
        case
    }

    /// A case that could not be measured.
    pub fn failed(spec: &Spec, why: String) -> Self {
        Self {
            error: Some(why),
            ..Self::empty(spec)
        }
    }

    fn empty(spec: &Spec) -> Self {
        Self {
            name: spec.name.to_owned(),
            what: spec.what.to_owned(),
            against: spec.against.to_owned(),
            unit: spec.unit.to_owned(),
            ours: None,
            reference: None,
            ratio: None,
            required: spec.bound.value(),
            direction: spec.bound.direction(),
            held: false,
            spread: Figures::new(),
            counters: BTreeMap::new(),
            notes: Vec::new(),
            runs: Vec::new(),
            first_runs: Vec::new(),
            error: None,
        }
    }

    /// The largest spread of a side that the ratio is made from, with the side's name.
    pub fn worst_spread(&self) -> Option<(&str, f64)> {
        let judged = |name: &str| {
            let sizes = !self.spread.contains_key(OURS);
            sizes || name == OURS || name == REFERENCE
        };
        self.spread
            .iter()
            .filter(|(name, _)| judged(name))
            .map(|(name, &spread)| (name.as_str(), spread))
            .max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

fn values(runs: &[&Run]) -> Vec<f64> {
    runs.iter().map(|run| run.value).collect()
}

/// The median of one side's values.
pub fn side(runs: &[Run], name: &str) -> Option<f64> {
    let of_side: Vec<&Run> = runs.iter().filter(|run| run.side == name).collect();
    median(&values(&of_side))
}

/// Sides in the order in which they come first.
pub fn sides(runs: &[Run]) -> Vec<&str> {
    let mut names = Vec::new();
    for run in runs {
        if !names.contains(&run.side.as_str()) {
            names.push(run.side.as_str());
        }
    }
    names
}

fn each_side<T>(runs: &[Run], f: impl Fn(&[&Run]) -> Option<T>) -> BTreeMap<String, T> {
    let mut map = BTreeMap::new();
    for name in sides(runs) {
        let of_side: Vec<&Run> = runs.iter().filter(|run| run.side == name).collect();
        if let Some(value) = f(&of_side) {
            map.insert(name.to_owned(), value);
        }
    }
    map
}

fn medians(runs: &[&Run]) -> Figures {
    let mut all: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for run in runs {
        for (name, &value) in &run.figures {
            all.entry(name).or_default().push(value);
        }
    }
    all.into_iter()
        .filter_map(|(name, values)| Some((name.to_owned(), tidy(median(&values)?))))
        .collect()
}

/// Ours by the reference of the same round.
fn pairs(runs: &[Run]) -> Vec<f64> {
    let value = |side: &str, round| {
        let mut found = runs.iter().filter(|r| r.side == side && r.round == round);
        found.next().map(|r| r.value)
    };
    let ours = runs.iter().filter(|run| run.side == OURS);
    ours.filter_map(|run| Some(run.value / value(REFERENCE, run.round)?))
        .collect()
}

/// The largest and the smallest of the medians of all sides that count: those with a figure `judged`.
fn extremes(runs: &[Run]) -> (Option<f64>, Option<f64>) {
    let counts = |name: &str| {
        let mut found = runs.iter().filter(|run| run.side == name);
        found.any(|run| run.figures.contains_key(JUDGED))
    };
    let names = sides(runs).into_iter().filter(|name| counts(name));
    let medians: Vec<f64> = names.filter_map(|name| side(runs, name)).collect();
    let most = medians.iter().copied().reduce(f64::max);
    let least = medians.iter().copied().reduce(f64::min);
    (most, least)
}

/// The figure that marks runs which count for [`Ratio::Deviation`].
pub const JUDGED: &str = "judged";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Bound;

    fn spec(ratio: Ratio, bound: Bound) -> Spec {
        Spec {
            name: "x",
            what: "w",
            against: "a",
            unit: "ms",
            ratio,
            bound,
        }
    }

    fn runs(ours: &[f64], reference: &[f64]) -> Vec<Run> {
        let side = |name: &str, values: &[f64]| -> Vec<Run> {
            (0..)
                .zip(values)
                .map(|(i, &v)| Run::new(name, i, v))
                .collect()
        };
        [side(OURS, ours), side(REFERENCE, reference)].concat()
    }

    #[test]
    fn times_as_fast() {
        let spec = spec(Ratio::TimesAsFast, Bound::AtLeast(80.0));
        let case = Case::of(
            &spec,
            runs(&[2.0, 3.0, 99.0], &[240.0, 300.0, 200.0]),
            Vec::new(),
        );
        assert_eq!(
            (case.ours, case.reference, case.ratio),
            (Some(3.0), Some(240.0), Some(80.0))
        );
        assert!(case.held);
        assert_eq!(case.worst_spread().map(|(side, _)| side), Some(OURS));
        let case = Case::of(&spec, runs(&[3.0], &[]), Vec::new());
        assert_eq!((case.ratio, case.held), (None, false));
    }

    #[test]
    fn pairs_are_of_the_same_round() {
        let spec = spec(Ratio::PairedShare, Bound::AtMost(1.1));
        let case = Case::of(
            &spec,
            runs(&[105.0, 2100.0, 54.0], &[100.0, 2000.0, 50.0]),
            Vec::new(),
        );
        assert_eq!(case.ratio, Some(1.05));
        assert!(case.held);
    }

    #[test]
    fn deviation_is_of_the_judged_only() {
        let judged = Figures::from([(JUDGED.to_owned(), 1.0)]);
        let runs = vec![
            Run::new("1 GiB", 0, 100.0),
            Run::new("4 GiB", 0, 5.0).with(judged.clone()),
            Run::new("16 GiB", 0, 3.0).with(judged),
        ];
        let spec = spec(Ratio::Deviation, Bound::AtMost(0.25));
        let case = Case::of(&spec, runs, Vec::new());
        assert_eq!(
            (case.ours, case.reference, case.ratio),
            (Some(5.0), Some(3.0), Some(0.25))
        );
        assert!(case.held);
    }

    #[test]
    fn nothing_divided_by_nothing_is_not_held() {
        let spec = spec(Ratio::Share, Bound::AtMost(1.0));
        let case = Case::of(&spec, runs(&[0.0], &[0.0]), Vec::new());
        assert_eq!((case.ratio, case.held), (None, false));
    }

    #[test]
    fn figures_have_medians() {
        let figures = |n| Figures::from([("kicks".to_owned(), n)]);
        let runs = vec![
            Run::new(OURS, 0, 1.0).with(figures(1.0)),
            Run::new(OURS, 1, 1.0).with(figures(3.0)),
            Run::new(OURS, 2, 1.0).with(figures(2.0)),
        ];
        let spec = spec(Ratio::Share, Bound::AtMost(1.0));
        let case = Case::of(&spec, runs, Vec::new());
        assert_eq!(case.counters[OURS]["kicks"], 2.0);
    }
}
