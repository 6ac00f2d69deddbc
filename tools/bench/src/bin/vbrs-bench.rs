// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! `vbrs-bench`: measures how fast the balloon driver is.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use bench::case::Case;
use bench::cases::{ALL, Context};
use bench::environment::{self, Environment};
use bench::report::{self, table};
use bench::runner::{self, Options};
use bench::smoke;
use clap::Parser;
use vm_runner::machine::qemu::Accelerator;
use vm_runner::paths::Guest;
use vm_runner::{log, paths};

/// Measures how fast the balloon driver is.
///
/// Writes bench.json, environment.json and index.html, prints a table, and fails if a requirement is
/// missed.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    /// Only cases with this name, or with names that contain it
    case: Vec<String>,
    /// Only list the cases
    #[arg(long)]
    list: bool,
    /// A short run that fails if the output is broken, never because of a time
    #[arg(long)]
    smoke: bool,
    /// How often each contestant is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Where the results go; by default bench/ in the build folder
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// How QEMU runs guests
    #[arg(long, value_enum, default_value = "auto")]
    accel: Accelerator,
    /// Say more about what is done; twice for even more
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log::to_stderr(cli.verbose);
    match run(cli) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("vbrs-bench: {e:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    /// When all has to be over, also what is measured again: a little less than ten minutes.
    const BUDGET: Duration = Duration::from_secs(590);

    if cli.list {
        for spec in ALL.iter().flat_map(|group| group.specs) {
            let bound = spec.bound;
            println!(
                "{:<26} {} {:<6} {}",
                spec.name,
                bound.direction(),
                bound.value(),
                spec.what
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    let folder = cli.out.unwrap_or_else(|| {
        let folder = paths::build_folder();
        folder.join(if cli.smoke { "bench-smoke" } else { "bench" })
    });
    let options = Options {
        context: Context {
            accelerator: cli.accel,
            // The smoke test uses what other tests have set up.
            uml: if cli.smoke {
                Guest::Uml
            } else {
                Guest::UmlLean
            },
        },
        rounds: if cli.smoke { 1 } else { cli.rounds },
    };
    let chosen = runner::choose(&cli.case, cli.smoke)?;
    let begun = Instant::now();
    let mut here = Environment::look();
    println!("{}", table::heading());
    let mut outcomes = Vec::new();
    for (group, specs) in &chosen {
        let outcome = runner::measure(group, specs, &options);
        show(&outcome.cases);
        if !outcome.disturbed.is_empty() {
            println!("    disturbed: {}", outcome.disturbed.join("; "));
        }
        outcomes.push(outcome);
    }
    // In the end, since only then it is known whether there is time for it.
    let mut disturbed: Vec<_> = outcomes
        .iter_mut()
        .zip(&chosen)
        .filter(|(outcome, _)| !outcome.disturbed.is_empty())
        .collect();
    disturbed.sort_by_key(|(outcome, _)| outcome.cases.iter().all(|case| case.held));
    for (outcome, (group, specs)) in disturbed {
        if outcome.repeat(group, specs, &options, begun + BUDGET) {
            println!("measured again:");
            show(&outcome.cases);
        }
    }
    let cases: Vec<_> = outcomes
        .into_iter()
        .flat_map(|outcome| outcome.cases)
        .collect();
    here.load_after = environment::load();
    report::write(&folder, &here, &cases)?;
    println!(
        "\n{} s; load averages before: {}, after: {}",
        begun.elapsed().as_secs(),
        here.load_before,
        here.load_after
    );
    let shown = std::env::current_dir()?;
    let shown = folder.strip_prefix(&shown).unwrap_or(&folder);
    println!(
        "{0}/{1}, {0}/{2}",
        shown.display(),
        report::JSON,
        report::PAGE
    );
    if cli.smoke {
        let names: Vec<&str> = chosen
            .iter()
            .flat_map(|(_, specs)| specs)
            .map(|s| s.name)
            .collect();
        smoke::check(&folder, &names)?;
        println!(
            "bench: the output is sound; the figures mean nothing, from one round and a kernel with checks"
        );
        return Ok(ExitCode::SUCCESS);
    }
    println!("{}", table::summary(&cases));
    let good = cases.iter().all(|case| case.held);
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn show(cases: &[Case]) {
    for case in cases {
        println!("{}", table::line(case));
        for remark in table::remarks(case) {
            println!("    {remark}");
        }
    }
}
