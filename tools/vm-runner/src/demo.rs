// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The demonstration: a stock kernel in a stock QEMU gives 3 of its 4 GiB back, first through the
//! kernel's own driver to QEMU's own balloon, then through ours to our daemon.

use std::cell::Cell;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::folder;
use crate::host::Dialect;
use crate::machine::qemu;
use crate::paths::{Driver, Guest};
use crate::session::{Choice, Device, Session, Setup};
use crate::size::{GIB, MIB};

/// What the guest has.
const MEMORY: u64 = 4 * GIB;
/// What the host asks for.
const ASKED: u64 = 3 * GIB;
/// How much of it must have come back, in hundredths.
const ENOUGH: u64 = 95;
/// Keeps the kernel from zeroing each page that it allocates.
const NO_ZEROING: &str = "init_on_alloc=0";
/// How long either driver may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// What one driver did.
#[derive(Debug)]
struct Run {
    took: Duration,
    back: Duration,
    /// Bytes that the host has free again.
    returned: u64,
    /// How pages were told, and in how many requests, where that is known.
    told: Option<(String, u64)>,
}

/// Shows it; whether it went well.
pub fn run(accelerator: qemu::Accelerator) -> bool {
    match show(accelerator) {
        Ok(line) => {
            println!("demo: ok: {line}");
            true
        }
        Err(e) => {
            println!("demo: failed: {}", format!("{e:#}").replace('\n', " | "));
            false
        }
    }
}

fn show(accelerator: qemu::Accelerator) -> Result<String> {
    let how = match accelerator {
        qemu::Accelerator::Kvm => "KVM",
        qemu::Accelerator::Tcg => "TCG, without KVM",
        qemu::Accelerator::Auto if qemu::kvm_works() => "KVM",
        qemu::Accelerator::Auto => "TCG, since KVM does not work here",
    };
    println!(
        "A stock kernel in a stock QEMU ({how}) has 4096 MiB, all of them allocated on the host."
    );
    println!("It is asked for 3072 MiB.\n");

    let mut number = 0;
    let mut run = |driver: Driver, command_line: &'static str| -> Result<Run> {
        number += 1;
        let (what, device) = match driver {
            Driver::C => (
                "The kernel's own driver, QEMU's own balloon",
                Device::Qemu(&[]),
            ),
            Driver::Rust => (
                "This project's driver and daemon",
                Device::speaking(Dialect::Bitmap),
            ),
        };
        let given = if command_line.is_empty() {
            "as it boots by default"
        } else {
            command_line
        };
        println!("{number}. {what}; {given}:");
        drive(driver, device, command_line, accelerator)
            .with_context(|| format!("{}, {given}", driver.module()))
    };
    let default_c = run(Driver::C, "")?;
    let default_ours = run(Driver::Rust, "")?;
    let c = run(Driver::C, NO_ZEROING)?;
    let ours = run(Driver::Rust, NO_ZEROING)?;

    println!("                       kernel as it boots          {NO_ZEROING}");
    println!("                      C driver  this driver    C driver  this driver");
    let line = |what: &str, value: &dyn Fn(&Run) -> u128| {
        let [a, b, c, d] = [&default_c, &default_ours, &c, &ours].map(value);
        println!("   {what:<14}  {a:>11}  {b:>11} {c:>11}  {d:>11}");
    };
    line("inflate, ms", &|run| run.took.as_millis());
    line("deflate, ms", &|run| run.back.as_millis());
    line("returned, MiB", &|run| u128::from(run.returned / MIB));
    println!(
        "   The distribution's kernel zeroes each page it allocates, also for a balloon. No driver can"
    );
    println!("   help that, and emulation makes it slow; on the right it is switched off.\n");

    let (protocol, requests) = ours
        .told
        .as_ref()
        .context("the daemon has counted nothing")?;
    ensure!(protocol == "page-bitmap-v1", "the guest speaks {protocol}");
    let returned = ours.returned.min(default_ours.returned);
    let percent = returned * 100 / ASKED;
    ensure!(percent >= ENOUGH, "only {} MiB came back", returned / MIB);
    let factor = |c: &Run, ours: &Run| c.took.as_secs_f64() / ours.took.as_secs_f64();
    Ok(format!(
        "asked {} MiB, returned {} MiB to the host ({percent} %) by page bitmap v1 in {requests} \
         requests in {} ms; C driver on the same machine: {} ms ({:.0} x) \
         (both with {NO_ZEROING}; as the kernel boots by default: {} ms, C driver {} ms, {:.0} x)",
        ASKED / MIB,
        returned / MIB,
        ours.took.as_millis(),
        c.took.as_millis(),
        factor(&c, &ours),
        default_ours.took.as_millis(),
        default_c.took.as_millis(),
        factor(&default_c, &default_ours),
    ))
}

/// Boots the guest, inflates, deflates, unloads and powers off.
fn drive(
    driver: Driver,
    device: Device,
    command_line: &'static str,
    accelerator: qemu::Accelerator,
) -> Result<Run> {
    let folder = folder::create(&format!("demo-{}", driver.module()))?;
    let setup = Setup {
        memory: MEMORY,
        device,
        load: None,
        sentinel: 16 * MIB,
        command_line,
        ..Setup::USUAL
    };
    let choice = Choice {
        driver,
        accelerator,
    };
    step("boots");
    let run = Session::start(Guest::Stock, setup, choice, &folder).and_then(|session| {
        let run = steps(&session, driver);
        session.machine().kill();
        run
    });
    if run.is_ok() {
        folder::remove(&folder);
    } else {
        folder::keep(&folder);
    }
    run.with_context(|| format!("everything is in {}", folder.display()))
}

fn steps(session: &Session, driver: Driver) -> Result<Run> {
    let release = session.sh("uname -r")?;
    step(&format!("runs {release}, loads {}", driver.module()));
    session.load("")?;

    let took = inflate(session)?;
    let told = match session.host().daemon() {
        Ok(daemon) => {
            let status = daemon.status()?;
            let requests = status.movement.counters.inflate_requests;
            Some((status.frontend.protocol, requests))
        }
        Err(_) => None,
    };
    session.balanced(ASKED)?;
    let returned = session.returned(ASKED)?;
    session.alive_and_well()?;
    let requests = match &told {
        Some((_, requests)) => format!(" in {requests} requests"),
        None => String::new(),
    };
    step(&format!(
        "has given {} MiB back to the host in {} ms{requests}",
        returned / MIB,
        took.as_millis()
    ));
    let back = session.deflate()?;
    session.sentinel_intact()?;
    step(&format!("has them again after {} ms", back.as_millis()));
    session.unload()?;
    session.finish()?;
    step("unloaded and powered off, no complaint in its log\n");
    Ok(Run {
        took,
        back,
        returned,
        told,
    })
}

/// Inflates and shows how far it is.
fn inflate(session: &Session) -> Result<Duration> {
    const EVERY: u64 = 512 * MIB;

    let begun = Instant::now();
    let next = Cell::new(EVERY);
    session.target(ASKED)?;
    session.await_balloon(PATIENCE, "3 GiB", |actual| {
        while actual >= next.get() && next.get() < ASKED {
            step(&format!("{:>5} of {} MiB", next.get() / MIB, ASKED / MIB));
            next.set(next.get() + EVERY);
        }
        actual == ASKED
    })?;
    Ok(begun.elapsed())
}

fn step(what: &str) {
    println!("   {what}");
    let _closed = std::io::stdout().flush();
}
