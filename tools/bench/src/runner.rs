// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Chooses the cases, measures them, and measures again what was disturbed.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::case::{Case, Run};
use crate::cases::{ALL, Bench, Context, Group, Sample, When};
use crate::spec::Spec;

/// A spread above this is too large: the machine was busy with something else.
const SPREAD_MAX: f64 = 0.30;

/// How a run is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What the cases are told.
    pub context: Context,
    /// How often each contestant is measured.
    pub rounds: u32,
}

/// The groups, each with those of its cases that are wanted.
///
/// # Errors
///
/// If a name fits no case.
pub fn choose(wanted: &[String], smoke: bool) -> Result<Vec<(Group, Vec<&'static Spec>)>> {
    let names = || {
        ALL.iter()
            .flat_map(|group| group.specs)
            .map(|spec| spec.name)
    };
    for word in wanted {
        ensure!(
            names().any(|name| name.contains(word.as_str())),
            "there is no case {word:?}; there are: {}",
            names().collect::<Vec<_>>().join(", ")
        );
    }
    // A whole name means that case only, not others whose names begin alike.
    let means = |word: &String, name: &str| match names().any(|n| n == word) {
        true => name == word,
        false => name.contains(word.as_str()),
    };
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|word| means(word, name));
    let groups = ALL.into_iter().filter(|group| match group.when {
        When::Smoke => true,
        When::Always => !smoke,
        When::Named => !smoke && !wanted.is_empty(),
    });
    let chosen = groups.map(|group| {
        let specs = group.specs.iter().filter(|spec| wants(spec.name)).collect();
        (group, specs)
    });
    Ok(chosen
        .filter(|(_, specs): &(_, Vec<_>)| !specs.is_empty())
        .collect())
}

/// What became of a group's cases.
pub struct Outcome {
    /// The cases, in the order in which they were wanted.
    pub cases: Vec<Case>,
    /// What was wrong, if runs lie so far apart that they should be measured again.
    pub disturbed: Vec<String>,
    took: Duration,
}

/// Measures a group's cases; what does not work is in their `error`.
pub fn measure(group: &Group, specs: &[&Spec], options: &Options) -> Outcome {
    let begun = Instant::now();
    let cases = measured(group, specs, options, 0..options.rounds);
    let disturbed = if options.rounds > 2 {
        cases.iter().filter_map(disturbance).collect()
    } else {
        Vec::new()
    };
    let took = begun.elapsed();
    tracing::info!("{} took {:.1} s", group.specs[0].name, took.as_secs_f64());
    Outcome {
        cases,
        disturbed,
        took,
    }
}

impl Outcome {
    /// Measures disturbed cases again, if that can be over at `end`; else notes that there was no time.
    /// Returns whether there was.
    pub fn repeat(
        &mut self,
        group: &Group,
        specs: &[&Spec],
        options: &Options,
        end: Instant,
    ) -> bool {
        let why = self.disturbed.join("; ");
        if Instant::now() + self.took > end {
            let note = format!("disturbed, and no time to measure again: {why}");
            self.cases
                .iter_mut()
                .for_each(|case| case.notes.push(note.clone()));
            return false;
        }
        let again = measured(group, specs, options, options.rounds..2 * options.rounds);
        for (case, again) in self.cases.iter_mut().zip(again) {
            let first = std::mem::replace(case, again);
            repeated(case, first, &why);
        }
        true
    }
}

fn measured(group: &Group, specs: &[&Spec], options: &Options, which: Range<u32>) -> Vec<Case> {
    try_measure(group, specs, options, which).unwrap_or_else(|e| {
        let failed = |spec: &&Spec| Case::failed(spec, format!("{e:#}"));
        specs.iter().map(failed).collect()
    })
}

fn try_measure(
    group: &Group,
    specs: &[&Spec],
    options: &Options,
    which: Range<u32>,
) -> Result<Vec<Case>> {
    let mut bench = (group.open)(&options.context).context("set up")?;
    let samples = rounds(&mut *bench, which)?;
    let mut cases = judge(specs, &samples);
    let notes = bench.close()?;
    for case in &mut cases {
        case.notes.extend(notes.iter().cloned());
    }
    Ok(cases)
}

fn rounds(bench: &mut dyn Bench, rounds: Range<u32>) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for round in rounds {
        samples.extend(
            bench
                .round(round)
                .with_context(|| format!("round {round}"))?,
        );
    }
    Ok(samples)
}

fn judge(specs: &[&Spec], samples: &[Sample]) -> Vec<Case> {
    let runs = |name: &str| -> Vec<Run> {
        let own = samples.iter().filter(|sample| sample.case == name);
        own.map(|sample| sample.run.clone()).collect()
    };
    specs
        .iter()
        .map(|spec| Case::of(spec, runs(spec.name), Vec::new()))
        .collect()
}

/// What is wrong with the runs of a case, if they lie too far apart.
fn disturbance(case: &Case) -> Option<String> {
    let (side, spread) = case.worst_spread()?;
    let name = &case.name;
    (spread > SPREAD_MAX).then(|| {
        format!(
            "{name}: the middle half of {side} spreads over {:.0} %",
            spread * 100.0
        )
    })
}

/// Keeps in `case` what was measured first, and why it was measured again.
fn repeated(case: &mut Case, first: Case, why: &str) {
    let ratio = first
        .ratio
        .map_or_else(|| "none".to_owned(), |ratio| format!("{ratio:.3}"));
    case.notes
        .push(format!("measured again (first ratio: {ratio}): {why}"));
    if let Some(still) = disturbance(case) {
        case.notes.push(format!("still disturbed: {still}"));
    }
    case.first_runs = first.runs;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{OURS, REFERENCE};
    use crate::spec::{Bound, Ratio};

    const SPEC: Spec = Spec {
        name: "a-case",
        what: "w",
        against: "a",
        unit: "ms",
        ratio: Ratio::TimesAsFast,
        bound: Bound::AtLeast(2.0),
    };

    /// Gives these values for ours, and 10 for the reference.
    struct Play(Vec<f64>);

    impl Bench for Play {
        fn round(&mut self, round: u32) -> Result<Vec<Sample>> {
            let ours = self.0[round as usize];
            let sample = |side, value| Sample {
                case: SPEC.name,
                run: Run::new(side, round, value),
            };
            Ok(vec![sample(OURS, ours), sample(REFERENCE, 10.0)])
        }

        fn close(self: Box<Self>) -> Result<Vec<String>> {
            Ok(vec!["closed".to_owned()])
        }
    }

    fn group(open: fn(&Context) -> Result<Box<dyn Bench>>) -> Group {
        Group {
            specs: &[SPEC],
            when: When::Always,
            open,
        }
    }

    fn run(open: fn(&Context) -> Result<Box<dyn Bench>>, time: Duration) -> Case {
        let options = Options {
            context: Context {
                accelerator: vm_runner::machine::qemu::Accelerator::Tcg,
                uml: vm_runner::paths::Guest::Uml,
            },
            rounds: 4,
        };
        let end = Instant::now() + time;
        let group = group(open);
        let mut outcome = measure(&group, &[&SPEC], &options);
        if !outcome.disturbed.is_empty() {
            let repeated = outcome.repeat(&group, &[&SPEC], &options, end);
            assert_eq!(repeated, time > Duration::ZERO);
        }
        assert_eq!(outcome.cases.len(), 1);
        outcome.cases.remove(0)
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn quiet_runs_are_kept() {
        let case = run(|_| Ok(Box::new(Play(vec![5.0, 5.0, 5.0, 5.0]))), HOUR);
        assert_eq!((case.ratio, case.held), (Some(2.0), true));
        assert_eq!(case.runs.len(), 8);
        assert_eq!(case.notes, ["closed"]);
        assert!(case.first_runs.is_empty());
    }

    #[test]
    fn disturbed_runs_are_repeated_once_and_shown() {
        let play = |_: &Context| -> Result<Box<dyn Bench>> {
            Ok(Box::new(Play(vec![1.0, 5.0, 9.0, 2.0, 5.0, 5.0, 5.0, 5.0])))
        };
        let case = run(play, HOUR);
        assert_eq!(case.ratio, Some(2.0));
        assert_eq!((case.first_runs.len(), case.runs.len()), (8, 8));
        assert_eq!(case.notes[0], "closed");
        assert!(
            case.notes[1].starts_with("measured again"),
            "{:?}",
            case.notes
        );

        let case = run(play, Duration::ZERO);
        assert!(case.notes[1].contains("no time"), "{:?}", case.notes);
        assert!(case.first_runs.is_empty());
    }

    #[test]
    fn failures_are_results() {
        let case = run(|_| anyhow::bail!("no kernel"), HOUR);
        assert_eq!(case.error.as_deref(), Some("set up: no kernel"));
        assert!(!case.held);
    }

    #[test]
    fn names_are_chosen() {
        let names = |wanted: &[&str]| -> Vec<&str> {
            let wanted: Vec<String> = wanted.iter().map(|&w| w.to_owned()).collect();
            let groups = choose(&wanted, false).unwrap();
            groups
                .into_iter()
                .flat_map(|(_, specs)| specs)
                .map(|spec| spec.name)
                .collect()
        };
        assert_eq!(names(&["qemu-prealloc-noinit"]), ["qemu-prealloc-noinit"]);
        assert_eq!(
            names(&["guest-job"]),
            ["guest-job-mean", "guest-job-slowest"]
        );
        assert_eq!(names(&["stall", "scaling"]), ["scaling", "stall"]);
        assert!(names(&[]).len() >= 13);
        // What takes long, and belongs to no comparison of drivers, has to be asked for.
        assert!(!names(&[]).iter().any(|name| name.starts_with("requests-")));
        assert_eq!(names(&["requests"]).len(), 3);
        let why = choose(&["nonsense".to_owned()], false)
            .unwrap_err()
            .to_string();
        assert!(why.contains("uml-idle-inflate"), "{why}");
    }
}
