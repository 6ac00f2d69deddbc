// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Runs tests in guests, several guests at a time, and reports.

use std::collections::VecDeque;
use std::fs;
use std::io::Write;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::folder;
use crate::klog;
use crate::ktap;
use crate::paths::Guest;
use crate::results::{self, Tally};
use crate::scenario::{self, After, Part, Scenario};
use crate::session::{Choice, Session};

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Driver and accelerator.
    pub choice: Choice,
    /// Only tests whose names contain one of these; all if there is none.
    pub filter: Vec<String>,
    /// Without the parts of a scenario whose names do not, though they run first otherwise.
    pub alone: bool,
    /// Only tests in these guests; in all if there is none.
    pub guests: Vec<Guest>,
    /// Only list them.
    pub list: bool,
    /// Guests at the same time.
    pub jobs: Option<usize>,
    /// Keep the folders of tests that passed.
    pub keep: bool,
    /// Where the results of other steps lie, if they are to be added.
    pub results: Option<PathBuf>,
}

/// A scenario in one of its guests.
#[derive(Clone, Copy)]
struct Run {
    scenario: &'static Scenario,
    guest: Guest,
}

/// What came out of a test.
#[derive(Debug)]
pub struct Report {
    /// Guest, scenario and part.
    pub name: String,
    /// How long it took.
    pub took: Duration,
    /// How it ended.
    pub end: End,
    /// What it has measured.
    pub notes: Vec<String>,
}

/// How a test ended.
#[derive(Clone, Debug)]
pub enum End {
    /// Well.
    Passed,
    /// For this reason.
    Failed(String),
    /// It did not run, for this reason.
    Skipped(String),
}

/// Runs one scenario in one of its guests, once, and prints nothing.
pub fn run_one(scenario: &'static Scenario, guest: Guest, choice: Choice) -> Vec<Report> {
    let options = Options {
        choice,
        filter: Vec::new(),
        alone: false,
        guests: Vec::new(),
        list: false,
        jobs: None,
        keep: false,
        results: None,
    };
    Run { scenario, guest }.execute(&options)
}

/// Runs what `options` say and prints it; whether all was well.
///
/// # Errors
///
/// If the tests cannot be run at all.
pub fn run(options: &Options) -> Result<bool> {
    let runs = selected(options);
    if options.list {
        for run in &runs {
            for part in run.scenario.parts {
                println!("{:<44} {}", run.test(part.name), run.scenario.about);
            }
        }
        return Ok(true);
    }
    anyhow::ensure!(
        !runs.is_empty() || options.results.is_some(),
        "no test has such a name; --list shows them"
    );

    let jobs = options.jobs.unwrap_or_else(|| {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        // Guests also wait, for time to pass and for each other.
        processors + processors / 2
    });
    let queue = Mutex::new(VecDeque::from(runs));
    let tally = Mutex::new(Tally::default());
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let Some(run) = lock(&queue).pop_front() else {
                        return;
                    };
                    let reports = run.execute_twice(options);
                    let mut tally = lock(&tally);
                    for report in reports {
                        report.print();
                        tally.add(report.tally());
                    }
                }
            });
        }
    });

    let mut tally = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(folder) = &options.results {
        match results::collect(folder) {
            Ok(others) => tally.add(others),
            Err(e) => {
                let why = format!("{e:#}");
                println!("FAIL results of the other steps: {why}");
                tally.failed += 1;
                tally
                    .failures
                    .push(("results of the other steps".into(), why));
            }
        }
    }
    // Once more, where the end of a long log shows them.
    for (name, why) in &tally.failures {
        println!("failed {name}: {why}");
    }
    for (name, why) in &tally.skipped {
        println!("skip {name}: {why}");
    }
    println!("{}", tally.line());
    Ok(tally.failed == 0)
}

fn selected(options: &Options) -> Vec<Run> {
    let mut runs: Vec<Run> = scenario::all()
        .filter(|scenario| scenario.suits(options.choice.driver))
        .flat_map(|scenario| {
            scenario
                .guests
                .iter()
                .map(move |&guest| Run { scenario, guest })
        })
        .filter(|run| options.guests.is_empty() || options.guests.contains(&run.guest))
        .filter(|run| run.scenario.parts.iter().any(|p| run.wants(options, p)))
        .collect();
    if !options.list {
        // The slow ones first, so that no processor is idle in the end.
        runs.sort_by_key(|run| std::cmp::Reverse(run.cost()));
    }
    runs
}

/// What befalls a kernel now and then in emulation, before there is any driver: a processor meets a break point
/// that another one has just taken away, the timer does not tick in time on a busy machine, or the kernel stands
/// still while it looks for its clocks.
const EMULATION: [&str; 3] = [
    "Oops: int3",
    "IO-APIC + timer doesn't work",
    "guest does not come up",
];

impl Run {
    /// The name of a test.
    fn test(&self, part: &str) -> String {
        let separator = if part.is_empty() { "" } else { "/" };
        format!("{}/{}{separator}{part}", self.guest, self.scenario.name)
    }

    /// Whether a part is among the tests that are wanted.
    fn wants(self, options: &Options, part: &Part) -> bool {
        let name = self.test(part.name);
        options.filter.is_empty() || options.filter.iter().any(|f| name.contains(f.as_str()))
    }

    /// The parts that run.
    fn chosen(self, options: &Options) -> Vec<&'static Part> {
        let parts = self.scenario.parts.iter();
        parts
            .filter(|part| !options.alone || self.wants(options, part))
            .collect()
    }

    /// How early it is to begin: guests in emulation are slow.
    fn cost(&self) -> u64 {
        let emulated = if self.guest.is_uml() { 0 } else { 1000 };
        emulated + self.scenario.seconds
    }

    /// A test that failed is tried once more, and says so, where emulation has killed the kernel, which no
    /// driver can help (see testing.rst). Nothing else gets a second try.
    fn execute_twice(self, options: &Options) -> Vec<Report> {
        let reports = self.execute(options);
        let failed = reports.iter().find_map(|report| match &report.end {
            End::Failed(why) => Some(why.lines().next().unwrap_or_default().to_owned()),
            _ => None,
        });
        let excused =
            |why: &String| !self.guest.is_uml() && EMULATION.iter().any(|w| why.contains(w));
        let Some(why) = failed.filter(excused) else {
            return reports;
        };
        let mut reports = self.execute(options);
        for report in &mut reports {
            report.notes.push(format!("SECOND TRY, the first: {why}"));
        }
        reports
    }

    fn execute(self, options: &Options) -> Vec<Report> {
        let needed = [
            self.guest.kernel(),
            self.guest.driver(options.choice.driver),
        ];
        if let Some(why) = needed.into_iter().find_map(Result::err) {
            return self.reports(options, |_| End::Skipped(format!("{why:#}")));
        }
        let folder = match folder::create(&format!("{}-{}", self.guest, self.scenario.name)) {
            Ok(folder) => folder,
            Err(e) => return self.reports(options, |_| End::Failed(format!("{e:#}"))),
        };
        let mut reports = Vec::new();
        let begun = Instant::now();
        // A bug in a test must not take the other tests with it.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            self.parts(options, &folder, &mut reports)
        }));
        let failure = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(format!("{e:#}")),
            Err(panic) => Some(format!("the test panicked: {}", panic_message(&*panic))),
        };
        let failure = match self.scenario.fails_with {
            Some(words) => self.proven(words, failure, begun.elapsed(), &mut reports),
            None => failure,
        };
        if let Some(why) = failure {
            let why = format!("{why}\n{}", last_words(&folder));
            self.fail(options, &mut reports, why);
            folder::keep(&folder);
        } else if options.keep {
            folder::keep(&folder);
        } else {
            folder::remove(&folder);
        }
        reports
    }

    /// Runs the parts one after another and adds a report for each that ended well.
    fn parts(self, options: &Options, folder: &Path, reports: &mut Vec<Report>) -> Result<()> {
        let mut begun = Instant::now();
        let scenario = self.scenario;
        let session =
            Session::start(self.guest, scenario.setup, options.choice, folder).map_err(|e| {
                match complaint_in(&folder.join("console.log")) {
                    Some(complaint) => because(e, anyhow::anyhow!("{complaint}")),
                    None => e,
                }
            })?;
        let finish = |session: &Session| -> Result<()> {
            match scenario.after {
                After::Clean => {
                    session.leave_clean()?;
                    session.finish()
                }
                After::PowerOff => session.finish(),
                After::Nothing => session.console_is_clean(),
            }
        };
        let parts = self.chosen(options);
        for (i, part) in parts.iter().enumerate() {
            let result = (part.run)(&session).and_then(|()| {
                let last = i + 1 == parts.len();
                if last {
                    finish(&session)
                } else {
                    session.console_is_clean()
                }
            });
            if let Err(e) = result {
                // Everything the kernel still has to say is wanted.
                session.machine().kill();
                return Err(match session.console_is_clean() {
                    Err(complaint) => because(e, complaint),
                    Ok(()) => e,
                });
            }
            reports.push(Report {
                name: self.test(part.name),
                took: begun.elapsed(),
                end: End::Passed,
                notes: session.notes(),
            });
            begun = Instant::now();
            for case in session.unit_tests() {
                reports.push(unit_test(self.guest, case));
            }
        }
        Ok(())
    }

    /// Turns the outcome of a test that must fail with `words` around.
    fn proven(
        self,
        words: &str,
        failure: Option<String>,
        took: Duration,
        reports: &mut Vec<Report>,
    ) -> Option<String> {
        let passed = |report: &Report| matches!(report.end, End::Passed);
        match failure {
            Some(why) if why.contains(words) => {
                reports.push(Report {
                    name: self.test(""),
                    took,
                    end: End::Passed,
                    notes: Vec::new(),
                });
                None
            }
            Some(why) => Some(format!(
                "it was to fail with {words:?}, and failed otherwise: {why}"
            )),
            None => {
                reports.retain(|report| !passed(report));
                Some(format!("it was to fail with {words:?}, and did not fail"))
            }
        }
    }

    /// Adds a failed report for the part that failed, and one for each that was not reached.
    fn fail(self, options: &Options, reports: &mut Vec<Report>, why: String) {
        let mut why = Some(why);
        for part in self.chosen(options) {
            let name = self.test(part.name);
            if reports.iter().any(|r| r.name == name) {
                continue;
            }
            reports.push(Report {
                name,
                took: Duration::ZERO,
                end: End::Failed(why.take().unwrap_or_else(|| "was not reached".into())),
                notes: Vec::new(),
            });
        }
    }

    fn reports(self, options: &Options, end: impl Fn(&str) -> End) -> Vec<Report> {
        let report = |part: &Part| Report {
            name: self.test(part.name),
            took: Duration::ZERO,
            end: end(part.name),
            notes: Vec::new(),
        };
        self.chosen(options).into_iter().map(report).collect()
    }
}

/// Puts a complaint of the kernel before what the test missed: it weighs more.
fn because(error: anyhow::Error, complaint: anyhow::Error) -> anyhow::Error {
    if format!("{error:#}").contains(&complaint.to_string()) {
        return error;
    }
    error.context(complaint)
}

/// The first complaint in a console's log.
fn complaint_in(path: &Path) -> Option<klog::Complaint> {
    let text = String::from_utf8_lossy(&fs::read(path).ok()?).into_owned();
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect();
    klog::complaint(&lines, &[])
}

/// A test case that ran in the kernel.
fn unit_test(guest: Guest, case: ktap::Case) -> Report {
    Report {
        name: format!("{guest}/kunit/{}/{}", case.suite, case.name),
        took: Duration::ZERO,
        end: match case.end {
            ktap::End::Passed => End::Passed,
            ktap::End::Failed(said) => End::Failed(said.join("\n")),
            ktap::End::Skipped(why) => End::Skipped(why),
        },
        notes: Vec::new(),
    }
}

impl Report {
    fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        match &self.end {
            End::Passed => tally.passed = 1,
            End::Failed(why) => {
                tally.failed = 1;
                let why = why.lines().next().unwrap_or_default();
                tally.failures.push((self.name.clone(), why.to_owned()));
            }
            End::Skipped(why) => tally.skipped.push((self.name.clone(), why.clone())),
        }
        tally
    }

    fn print(&self) {
        let mut out = std::io::stdout().lock();
        let _closed = match &self.end {
            End::Passed => {
                let notes = self.notes.join(", ");
                let took = self.took.as_secs_f64();
                writeln!(
                    out,
                    "{}",
                    format!("ok   {:<44} {took:5.1} s  {notes}", self.name).trim_end()
                )
            }
            End::Failed(why) => {
                writeln!(
                    out,
                    "FAIL {}\n     {}",
                    self.name,
                    why.replace('\n', "\n     ")
                )
            }
            // Listed in the end, with the reason.
            End::Skipped(_) => Ok(()),
        };
    }
}

/// What helps to understand a failure.
fn last_words(folder: &Path) -> String {
    const LINES: usize = 12;

    let mut words = String::new();
    for (what, file) in [
        ("console", "console.log"),
        ("daemon", "daemon.log"),
        ("qemu", "qemu.log"),
    ] {
        let Ok(bytes) = fs::read(folder.join(file)) else {
            continue;
        };
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(LINES)..] {
            words.push_str(&format!("{what}: {}\n", line.trim_end()));
        }
    }
    words + &format!("everything is in {}", folder.display())
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|&s| s.to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "without a message".into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
