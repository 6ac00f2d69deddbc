// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! `vbrs-vm`: boots guests with the balloon module and the host daemon, and tests them.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use vm_runner::check::{self, Options};
use vm_runner::machine::qemu::Accelerator;
use vm_runner::paths::{self, Driver, Guest};
use vm_runner::session::Choice;
use vm_runner::{demo, libvirt, log, parity, results, shell};

/// Boots guests with the balloon module and the host daemon, and tests them.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// How QEMU runs guests.
    #[arg(long, global = true, value_enum, default_value = "auto")]
    accel: Accelerator,
    /// The driver to load.
    #[arg(long, global = true, value_enum, default_value = "rust")]
    driver: Driver,
    /// Say more about what is done; twice for even more.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Command {
    /// Run the tests in guests.
    Check(Check),
    /// Show a stock guest giving 3 of its 4 GiB back to the host.
    Demo,
    /// Give an interactive guest with the driver and the daemon.
    Shell(Shell),
    /// Run the same tests with the C driver and with ours, and compare.
    Parity(Parity),
    /// Start and steer the sample of a libvirt guest with virsh.
    Libvirt,
    /// Run another step of the checks, and keep its result for `check --all`.
    Record(Record),
}

#[derive(clap::Args)]
struct Check {
    /// Only tests whose names contain one of these.
    filter: Vec<String>,
    /// Not what comes before them in the same guest, either; some tests need that.
    #[arg(long)]
    alone: bool,
    /// Only list the tests.
    #[arg(long)]
    list: bool,
    /// Guests at the same time; by default three for two processors.
    #[arg(short, long)]
    jobs: Option<usize>,
    /// Only tests in this guest; may be repeated.
    #[arg(long, value_enum)]
    guest: Vec<Guest>,
    /// Keep the folders of all tests, not only of those that failed.
    #[arg(long)]
    keep: bool,
    /// Add the results of the steps recorded before to the closing line.
    #[arg(long)]
    all: bool,
    /// Where `record` put them; by default results/ in the build folder.
    #[arg(long)]
    results: Option<PathBuf>,
}

#[derive(clap::Args)]
struct Shell {
    /// The guest.
    #[arg(long, value_enum, default_value = "uml")]
    guest: Guest,
    /// Its memory.
    #[arg(long, value_parser = parse_size, default_value = "1G")]
    memory: u64,
    /// Parameters of the driver.
    #[arg(long, default_value = "")]
    parameters: String,
    /// Run this instead of a shell, and end with its exit status.
    #[arg(long, short)]
    command: Option<String>,
}

#[derive(clap::Args)]
struct Parity {
    /// Only rows whose tests contain one of these.
    filter: Vec<String>,
    /// Only a few quick ones.
    #[arg(long)]
    short: bool,
    /// Write the table to this file as well, as reStructuredText.
    #[arg(long)]
    write: Option<PathBuf>,
}

#[derive(clap::Args)]
struct Record {
    /// The step's name.
    #[arg(long)]
    name: String,
    /// Where to put the result; by default results/ in the build folder.
    #[arg(long)]
    results: Option<PathBuf>,
    /// The command; it says by exit status 77 that the step was skipped.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

fn parse_size(text: &str) -> Result<u64, String> {
    vm_runner::size::parse(text).map_err(|e| format!("{e:#}"))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log::to_stderr(cli.verbose);
    match run(cli) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("vbrs-vm: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    let choice = Choice {
        driver: cli.driver,
        accelerator: cli.accel,
    };
    let folder =
        |given: Option<PathBuf>| given.unwrap_or_else(|| paths::build_folder().join("results"));
    let good = match cli.command {
        Command::Check(check) => check::run(&Options {
            choice,
            filter: check.filter,
            alone: check.alone,
            guests: check.guest,
            list: check.list,
            jobs: check.jobs,
            keep: check.keep,
            results: check.all.then(|| folder(check.results)),
        })?,
        Command::Parity(p) => parity::run(&parity::Options {
            accelerator: cli.accel,
            filter: p.filter,
            short: p.short,
            write: p.write,
        })?,
        Command::Libvirt => {
            libvirt::available()?;
            libvirt::run(cli.driver)?;
            true
        }
        Command::Demo => demo::run(cli.accel),
        Command::Shell(s) => {
            return shell::run(
                s.guest,
                choice,
                s.memory,
                &s.parameters,
                s.command.as_deref(),
            );
        }
        Command::Record(record) => {
            let folder = folder(record.results);
            results::record(
                &folder,
                &record.name,
                &record.command,
                &mut std::io::stdout(),
            )?;
            true
        }
    };
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
