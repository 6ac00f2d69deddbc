// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Results of KUnit suites, in the KTAP form that the kernel prints to its log.

use anyhow::{Result, bail};

/// A test case of a suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// The suite it belongs to.
    pub suite: String,
    /// Its name.
    pub name: String,
    /// How it ended.
    pub end: End,
}

/// How a test case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// As it should.
    Passed,
    /// Not as it should; what the kernel printed meanwhile.
    Failed(Vec<String>),
    /// It did not run, for this reason.
    Skipped(String),
}

/// The cases of all suites whose name begins with `prefix`.
///
/// # Errors
///
/// If a suite stops before its end, or has not as many cases as it announced.
pub fn parse<'a>(log: impl IntoIterator<Item = &'a str>, prefix: &str) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    // The suite being read: its name, the cases it announced, those seen.
    let mut suite: Option<(String, Option<usize>, usize)> = None;
    let mut said = Vec::new();
    for line in log {
        let text = without_time(line);
        let indented = text.starts_with("    ");
        let text = text.trim();
        if let Some(name) = text.strip_prefix("# Subtest: ") {
            if let Some((open, ..)) = &suite {
                bail!("suite {open} does not end");
            }
            said.clear();
            suite = name.starts_with(prefix).then(|| (name.to_owned(), None, 0));
            continue;
        }
        let Some((name, announced, seen)) = &mut suite else {
            continue;
        };
        if announced.is_none() && text.starts_with("1..") {
            *announced = text[3..].parse().ok();
            continue;
        }
        let Some((good, rest)) = result(text) else {
            said.push(text.to_owned());
            continue;
        };
        if indented {
            let (case, directive) = rest.split_once(" # ").unwrap_or((rest, ""));
            let end = match directive.strip_prefix("SKIP") {
                Some(why) => End::Skipped(why.trim().to_owned()),
                None if good => End::Passed,
                None => End::Failed(said.clone()),
            };
            cases.push(Case {
                suite: name.clone(),
                name: case.to_owned(),
                end,
            });
            *seen += 1;
            said.clear();
        } else {
            if *announced != Some(*seen) {
                bail!("suite {name} announced {announced:?} cases and ran {seen}");
            }
            suite = None;
        }
    }
    if let Some((name, ..)) = suite {
        bail!("suite {name} does not end");
    }
    Ok(cases)
}

/// `ok 3 name` or `not ok 3 name`: whether it is ok, and what follows the number.
fn result(text: &str) -> Option<(bool, &str)> {
    let (good, rest) = match text.strip_prefix("not ok ") {
        Some(rest) => (false, rest),
        None => (true, text.strip_prefix("ok ")?),
    };
    let (number, rest) = rest.split_once(' ')?;
    number.parse::<u32>().ok()?;
    Some((good, rest.trim_start_matches("- ")))
}

/// Takes the time off a line of the log, and leaves what follows as it is.
fn without_time(line: &str) -> &str {
    let level = line.strip_prefix('<').and_then(|l| l.split_once('>'));
    let line = level.map_or(line, |(_, rest)| rest);
    match line.strip_prefix('[').and_then(|l| l.split_once("] ")) {
        Some((_, rest)) => rest,
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
[    1.000000] KTAP version 1
[    1.000000] 1..1
[    1.000000]     KTAP version 1
[    1.000000]     # Subtest: other_suite
[    1.000000]     1..1
[    1.000000]     ok 1 elsewhere
[    1.000000] ok 1 other_suite
[    1.000000]     KTAP version 1
[    1.000000]     # Subtest: virtio_balloon_rs_wire
[    1.000000]     # module: virtio_balloon_rs
[    1.000000]     1..3
[    1.000000]     ok 1 header
[    1.000000]     # refusals: ASSERTION FAILED at wire.rs:1
[    1.000000]     not ok 2 refusals
[    1.000000]     ok 3 later # SKIP not here
[    1.000000] # virtio_balloon_rs_wire: pass:1 fail:1 skip:1 total:3
[    1.000000] not ok 2 virtio_balloon_rs_wire";

    #[test]
    fn cases_of_the_wanted_suites() {
        let cases = parse(LOG.lines(), "virtio_balloon_rs_").unwrap();
        let ends: Vec<(&str, &End)> = cases.iter().map(|c| (c.name.as_str(), &c.end)).collect();
        let said = vec!["# refusals: ASSERTION FAILED at wire.rs:1".to_owned()];
        assert_eq!(
            ends,
            [
                ("header", &End::Passed),
                ("refusals", &End::Failed(said)),
                ("later", &End::Skipped("not here".into())),
            ]
        );
    }

    #[test]
    fn what_is_cut_off_is_no_result() {
        let lines: Vec<&str> = LOG.lines().collect();
        assert!(parse(lines[..12].iter().copied(), "virtio_balloon_rs_").is_err());
        let without_one = LOG.lines().filter(|l| !l.contains("later"));
        assert!(parse(without_one, "virtio_balloon_rs_").is_err());
        assert_eq!(parse(LOG.lines(), "nothing").unwrap(), []);
    }
}
