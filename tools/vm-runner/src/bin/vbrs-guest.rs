// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! `vbrs-guest`: the part of the VM runner that runs inside the guests.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use vm_runner::guest::memory::Stamps;
use vm_runner::guest::{agent, memory};
use vm_runner::size;

const USAGE: &str = "usage: vbrs-guest agent TTY
       vbrs-guest fill FILE SIZE SEED    write SIZE bytes of a pattern
       vbrs-guest verify FILE SEED       compare FILE with the pattern
       vbrs-guest stamp FILE SIZE SEED EVERY   write a word on every so many pages
       vbrs-guest check FILE SIZE SEED EVERY   compare these words
       vbrs-guest hog SIZE FILE          hold SIZE bytes; FILE appears; until FILE is removed
       vbrs-guest churn SIZE FILE        write, check and free memory; FILE appears; until FILE is removed
       vbrs-guest fragment FILE SIZE     write SIZE bytes, then free every other page of them
       vbrs-guest pages FLAGS            the runs of pages of which the kernel says one of FLAGS";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("vbrs-guest: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["agent", tty] => agent::serve(tty),
        ["fill", file, bytes, seed] => {
            memory::fill(Path::new(file), size::parse(bytes)?, seed.parse()?)
        }
        ["verify", file, seed] => {
            let bytes = memory::verify(Path::new(file), seed.parse()?)?;
            println!("{bytes}");
            Ok(())
        }
        ["stamp", file, rest @ ..] => memory::stamp(Path::new(file), stamps(rest)?),
        ["check", file, rest @ ..] => memory::check_stamps(Path::new(file), stamps(rest)?),
        ["hog", bytes, file] => memory::hog(size::parse(bytes)?, Path::new(file)),
        ["churn", bytes, file] => {
            let checked = memory::churn(size::parse(bytes)?, Path::new(file))?;
            println!("{checked}");
            Ok(())
        }
        ["fragment", file, bytes] => memory::fragment(Path::new(file), size::parse(bytes)?),
        ["pages", flags] => {
            for (first, count) in memory::pages(flags.parse()?)? {
                println!("{first} {count}");
            }
            Ok(())
        }
        _ => bail!("{USAGE}"),
    }
}

fn stamps(args: &[&str]) -> Result<Stamps> {
    match args {
        [bytes, seed, every] => Ok(Stamps {
            bytes: size::parse(bytes)?,
            seed: seed.parse()?,
            every: every.parse()?,
        }),
        _ => bail!("{USAGE}"),
    }
}
