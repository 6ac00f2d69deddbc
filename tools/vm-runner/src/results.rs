// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Results of the steps around the guests: lint, host tests. `vbrs-vm record` writes one file a step,
//! `vbrs-vm check --all` adds them up, so that `make check` ends with one line.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The exit status by which a step says that it was skipped.
const SKIPPED: i32 = 77;

/// What came out of a step, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u32,
    /// Tests that failed.
    pub failed: u32,
    /// What is to be said of them once more in the end: name and reason, in a line.
    #[serde(default)]
    pub failures: Vec<(String, String)>,
    /// Tests that did not run: name and reason.
    pub skipped: Vec<(String, String)>,
}

impl Tally {
    /// Adds `other` to this.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.failures.extend(other.failures);
        self.skipped.extend(other.skipped);
    }

    /// The closing line.
    pub fn line(&self) -> String {
        format!(
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failed,
            self.skipped.len()
        )
    }
}

/// Runs a step, copies what it says to `out`, and writes its result to `folder`. Whether the step passed is in
/// the file, not in the outcome of this.
///
/// # Errors
///
/// If the result cannot be written.
pub fn record(
    folder: &Path,
    name: &str,
    command: &[OsString],
    out: &mut impl Write,
) -> Result<Tally> {
    std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let mut tally = run(name, command, out).unwrap_or_else(|e| {
        eprintln!("{name}: {e:#}");
        Tally {
            failed: 1,
            ..Tally::default()
        }
    });
    if tally.failed > 0 {
        tally.failures.push((name.to_owned(), tally.line()));
    }
    let word = if tally.failed > 0 { "FAIL" } else { "ok  " };
    writeln!(out, "{word} {name}: {}", tally.line())?;
    let path = folder.join(format!("{name}.json"));
    std::fs::write(&path, serde_json::to_vec_pretty(&tally)?)
        .with_context(|| format!("write {}", path.display()))?;
    Ok(tally)
}

fn run(name: &str, command: &[OsString], out: &mut impl Write) -> Result<Tally> {
    let (program, arguments) = command.split_first().context("no command was given")?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", program.to_string_lossy()))?;
    let output = child.stdout.take().context("no standard output")?;
    let (mut tally, last) = count(output, out)?;
    let status = child.wait()?;
    if status.code() == Some(SKIPPED) {
        tally = Tally {
            skipped: vec![(name.to_owned(), last)],
            ..Tally::default()
        };
    } else if !status.success() && tally.failed == 0 {
        // It failed outside of its tests: in the compiler, for example.
        tally.failed = 1;
    } else if status.success() && tally == Tally::default() {
        tally.passed = 1;
    }
    Ok(tally)
}

/// Copies `output`, adds up the closing lines of `cargo test` in it, and gives the last line.
fn count(output: impl Read, copy: &mut impl Write) -> Result<(Tally, String)> {
    let mut tally = Tally::default();
    let mut last = String::new();
    for line in BufReader::new(output).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(copy, "{line}")?;
        let text = line.trim();
        if let Some(name) = text
            .strip_prefix("test ")
            .and_then(|t| t.split_once(" ... ignored"))
        {
            let why = name.1.trim_start_matches(',').trim();
            let why = if why.is_empty() { "ignored" } else { why };
            tally.skipped.push((name.0.to_owned(), why.to_owned()));
        }
        if let Some(rest) = text.strip_prefix("test result: ") {
            let number = |what: &str| -> u32 {
                let before = rest.split(what).next().unwrap_or_default();
                let word = before.split_whitespace().next_back();
                word.and_then(|w| w.parse().ok()).unwrap_or(0)
            };
            tally.passed += number(" passed");
            tally.failed += number(" failed");
        }
        if !text.is_empty() {
            last = text.to_owned();
        }
    }
    Ok((tally, last))
}

/// Adds up what `record` wrote to `folder`. That nothing was written counts as a failure: whoever
/// asks for it has run the steps.
///
/// # Errors
///
/// If a file cannot be read or is none of ours.
pub fn collect(folder: &Path) -> Result<Tally> {
    let mut sum = Tally::default();
    let mut files = 0;
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "json") {
            let bytes = std::fs::read(&path)?;
            let tally =
                serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?;
            sum.add(tally);
            files += 1;
        }
    }
    anyhow::ensure!(files > 0, "{} has no results", folder.display());
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Tally {
        run(
            "step",
            &["sh".into(), "-c".into(), script.into()],
            &mut std::io::sink(),
        )
        .unwrap()
    }

    #[test]
    fn tests_are_counted() {
        let tally = sh("echo 'test a ... ok'; echo 'test b ... ignored, no Miri'; \
             echo 'test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s'; \
             echo 'test result: ok. 4 passed; 0 failed; 0 ignored'");
        assert_eq!(tally.line(), "7 passed, 0 failed, 1 skipped");
        assert_eq!(tally.skipped, [("b".to_owned(), "no Miri".to_owned())]);
        let tally = sh("echo 'test result: FAILED. 3 passed; 2 failed; 0 ignored'; exit 101");
        assert_eq!(tally.line(), "3 passed, 2 failed, 0 skipped");
    }

    #[test]
    fn a_step_without_tests_is_one() {
        assert_eq!(sh("true").line(), "1 passed, 0 failed, 0 skipped");
        assert_eq!(sh("false").line(), "0 passed, 1 failed, 0 skipped");
        let skipped = sh("echo no Miri here; exit 77");
        assert_eq!(
            skipped.skipped,
            [("step".to_owned(), "no Miri here".to_owned())]
        );
    }

    #[test]
    fn results_add_up() {
        let dir = tempfile::tempdir().unwrap();
        assert!(collect(dir.path()).is_err());
        let step = |name: &str, script: &str| {
            let command = ["sh".into(), "-c".into(), script.into()];
            record(dir.path(), name, &command, &mut std::io::sink()).unwrap()
        };
        step("one", "true");
        step("two", "exit 1");
        step("three", "/no/such/program");
        let sum = collect(dir.path()).unwrap();
        assert_eq!(sum.line(), "1 passed, 2 failed, 0 skipped");
        let mut names: Vec<_> = sum.failures.iter().map(|f| f.0.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["three", "two"]);
    }
}
