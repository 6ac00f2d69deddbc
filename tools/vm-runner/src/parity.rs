// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The C driver and this one side by side: the same test with each, on the same machine, and a table of
//! what is the same, better or worse.

mod rows;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use self::rows::{DEFECTS, ROWS, Row};
use crate::check::{self, End, Report};
use crate::machine::qemu::Accelerator;
use crate::paths::{Driver, Guest};
use crate::scenario::{self, Scenario};
use crate::session::Choice;

/// What to compare.
#[derive(Clone, Debug)]
pub struct Options {
    /// How QEMU runs guests.
    pub accelerator: Accelerator,
    /// Only rows whose tests contain one of these; all if there is none.
    pub filter: Vec<String>,
    /// Only a few quick rows.
    pub short: bool,
    /// Where the table goes as well.
    pub write: Option<PathBuf>,
}

/// How this driver compares in one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    Better,
    Worse,
    Neither,
    Unknown,
}

/// A row with its outcome.
struct Compared {
    row: &'static Row,
    c: Report,
    ours: Report,
}

impl Verdict {
    fn of(c: &End, ours: &End) -> Self {
        match (c, ours) {
            (End::Passed, End::Passed) => Self::Same,
            (End::Failed(_), End::Passed) => Self::Better,
            (End::Passed, End::Failed(_)) => Self::Worse,
            (End::Failed(_), End::Failed(_)) => Self::Neither,
            _ => Self::Unknown,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Neither => "neither",
            Self::Unknown => "not run",
        }
    }
}

impl Compared {
    fn verdict(&self) -> Verdict {
        Verdict::of(&self.c.end, &self.ours.end)
    }

    /// Why they differ, or what was measured.
    fn reason(&self) -> String {
        let short = |why: &str| why.lines().next().unwrap_or_default().to_owned();
        let mut words = Vec::new();
        for (who, report) in [("C", &self.c), ("this", &self.ours)] {
            match &report.end {
                End::Failed(why) | End::Skipped(why) => {
                    words.push(format!("{who}: {}", short(why)))
                }
                End::Passed if !report.notes.is_empty() => {
                    words.push(format!("{who}: {}", report.notes.join(", ")));
                }
                End::Passed => {}
            }
        }
        words.join("; ")
    }
}

/// Compares what `options` say, prints a table, and says whether this driver is nowhere worse.
///
/// # Errors
///
/// If there is no such row, or the table cannot be written.
pub fn run(options: &Options) -> Result<bool> {
    let wanted = |row: &&Row| {
        (row.short || !options.short)
            && (options.filter.is_empty()
                || options.filter.iter().any(|f| row.test.contains(f.as_str())))
    };
    let rows: Vec<&'static Row> = ROWS.iter().filter(wanted).collect();
    ensure!(!rows.is_empty(), "no row has such a test");
    let mut compared: Vec<Compared> = Vec::new();
    // Rows of one scenario share its boots.
    let mut done: Vec<(String, [Vec<Report>; 2])> = Vec::new();
    for row in rows {
        let (guest, scenario) = row.find()?;
        let key = format!("{guest}/{}", scenario.name);
        if !done.iter().any(|(name, _)| *name == key) {
            let both = [Driver::C, Driver::Rust].map(|driver| {
                let choice = Choice {
                    driver,
                    accelerator: options.accelerator,
                };
                check::run_one(scenario, guest, choice)
            });
            done.push((key.clone(), both));
        }
        let (_, [c, ours]) = done
            .iter_mut()
            .find(|(name, _)| *name == key)
            .context("it was just run")?;
        let take = |reports: &mut Vec<Report>| {
            let at = reports.iter().position(|r| r.name == row.test);
            at.map(|at| reports.remove(at))
                .with_context(|| format!("{} has not run", row.test))
        };
        let one = Compared {
            row,
            c: take(c)?,
            ours: take(ours)?,
        };
        println!(
            "{:<8} {:<46} {}",
            one.verdict().name(),
            row.about,
            one.reason()
        );
        compared.push(one);
        // Row by row: it takes long, and what is there is worth something.
        if let Some(path) = &options.write {
            std::fs::write(path, page(&compared)?)
                .with_context(|| format!("write {}", path.display()))?;
        }
    }
    let count = |verdict| compared.iter().filter(|c| c.verdict() == verdict).count();
    println!(
        "parity: {} same, {} better, {} worse, {} where neither passes, {} not run",
        count(Verdict::Same),
        count(Verdict::Better),
        count(Verdict::Worse),
        count(Verdict::Neither),
        count(Verdict::Unknown)
    );
    Ok(count(Verdict::Worse) + count(Verdict::Neither) + count(Verdict::Unknown) == 0)
}

impl Row {
    /// Its scenario and guest.
    fn find(&self) -> Result<(Guest, &'static Scenario)> {
        for scenario in scenario::all() {
            for &guest in scenario.guests {
                let base = format!("{guest}/{}", scenario.name);
                let named = |part: &scenario::Part| match part.name {
                    "" => base == self.test,
                    part => format!("{base}/{part}") == self.test,
                };
                if scenario.parts.iter().any(named) {
                    return Ok((guest, scenario));
                }
            }
        }
        anyhow::bail!("there is no test {}", self.test)
    }
}

/// The page of the documentation.
fn page(compared: &[Compared]) -> Result<String> {
    let mut out = String::from(
        ".. SPDX-License-Identifier: GPL-2.0\n.. Written by `make parity`; changes belong into \
         tools/vm-runner/src/parity/rows.rs.\n\n\
         =======================================\nThe C driver and this one, side by side\n\
         =======================================\n\n",
    );
    let date = output("date", &["-u", "+%Y-%m-%d"])?;
    let qemu = output("qemu-system-x86_64", &["--version"])?;
    let qemu = qemu.lines().next().unwrap_or_default();
    let kernel = std::env::var("VBRS_KERNEL_STOCK").unwrap_or_else(|_| "unknown".into());
    let _infallible = write!(
        out,
        "Each row is one test that runs the same steps with the kernel's own ``virtio_balloon`` and with\n\
         this driver, one after the other on the same machine. ``make parity`` runs it and writes this\n\
         page; ``make check`` runs the short rows.\n\n\
         Run on {date}: kernel {kernel} (stock; the same source for the guests with checks and for User\n\
         Mode Linux), {qemu}.\n\n\
         *same*: both pass. *better*: only this driver passes; the words say why the C driver does not.\n\
         *not run*: not in the run that this page is from.\n\n\
         .. list-table::\n   :header-rows: 1\n   :widths: 25 25 10 40\n\n\
         \x20  * - what\n     - test\n     - this driver is\n     - what was seen\n"
    );
    for one in compared {
        let _infallible = write!(
            out,
            "   * - {}\n     - ``{}``\n     - {}\n     - {}\n",
            one.row.about,
            one.row.test,
            one.verdict().name(),
            escape(&one.reason())
        );
    }
    let missing = |row: &&Row| !compared.iter().any(|one| one.row.test == row.test);
    for row in ROWS.iter().filter(missing) {
        let _infallible = writeln!(
            out,
            "   * - {}\n     - ``{}``\n     - not run\n     -",
            row.about, row.test
        );
    }
    out.push_str(
        "\n\nDefects of the C driver\n=======================\n\n\
         Found by reading and by running it, with the test that shows that this driver has none of them.\n\n\
         .. list-table::\n   :header-rows: 1\n   :widths: 5 50 45\n\n\
         \x20  * -\n     - the C driver\n     - test\n",
    );
    for defect in DEFECTS {
        let tests: Vec<String> = defect.tests.iter().map(|t| format!("``{t}``")).collect();
        let _infallible = write!(
            out,
            "   * - {}\n     - {}\n     - {}\n",
            defect.letter,
            defect.about,
            tests.join(", ")
        );
    }
    Ok(out)
}

/// Characters that mean something else in the page.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if matches!(c, '*' | '`' | '|' | '_' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let out = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("run {program}"))?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_test_that_exists() {
        for row in ROWS {
            row.find().unwrap();
        }
    }

    /// A defect's test is one of a guest, or `file: function` for one that needs none.
    #[test]
    fn every_defect_has_a_test_that_exists() {
        let letters: String = DEFECTS.iter().map(|d| d.letter).collect();
        assert_eq!(letters, "abcdefghijklmnopqr");
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        for test in DEFECTS.iter().flat_map(|d| d.tests) {
            match test.split_once(": ") {
                Some((file, function)) => {
                    let text = std::fs::read_to_string(format!("{root}/{file}")).unwrap();
                    assert!(text.contains(&format!("fn {function}(")), "{test}");
                }
                None => {
                    let row = Row {
                        about: "",
                        test,
                        short: false,
                    };
                    assert!(row.find().is_ok(), "{test}");
                }
            }
        }
    }

    #[test]
    fn verdicts() {
        let failed = End::Failed("why\nmore".into());
        assert_eq!(Verdict::of(&End::Passed, &End::Passed), Verdict::Same);
        assert_eq!(Verdict::of(&failed, &End::Passed), Verdict::Better);
        assert_eq!(Verdict::of(&End::Passed, &failed), Verdict::Worse);
        assert_eq!(Verdict::of(&failed, &failed), Verdict::Neither);
    }
}
