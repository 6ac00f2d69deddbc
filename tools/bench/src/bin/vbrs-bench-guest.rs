// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! `vbrs-bench-guest`: the part of the benchmarks that runs inside the guests. Prints JSON.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use bench::guest;

const USAGE: &str = "usage: vbrs-bench-guest stalls FILE          watch the clock; FILE appears; until FILE is removed
       vbrs-bench-guest copies BYTES MS      copy BYTES again and again for MS milliseconds
       vbrs-bench-guest touch FILE BYTES     write BYTES bytes of memory, and free them
       vbrs-bench-guest fragment FILE REST   leave no free block above 64 KiB, except in REST bytes";

fn main() -> ExitCode {
    match run() {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("vbrs-bench-guest: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Ok(match args.as_slice() {
        ["stalls", file] => serde_json::to_string(&guest::stalls(Path::new(file))?)?,
        ["copies", bytes, ms] => {
            let time = Duration::from_millis(ms.parse()?);
            serde_json::to_string(&guest::copies(bytes.parse()?, time)?)?
        }
        ["touch", file, bytes] => {
            guest::touch(Path::new(file), bytes.parse()?)?;
            "null".to_owned()
        }
        ["fragment", file, rest] => {
            serde_json::to_string(&guest::fragment(Path::new(file), rest.parse()?)?)?
        }
        _ => bail!("{USAGE}"),
    })
}
