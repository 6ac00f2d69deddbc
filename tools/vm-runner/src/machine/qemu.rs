// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Starting a kernel in QEMU.
//!
//! The first serial port is the console, on QEMU's standard output; the second is the agent's line,
//! on a socket. A third socket takes QMP commands.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::{Balloon, Ends, Plan, mebibytes};
use crate::paths::{self, Guest};
use crate::process::{POLL, Process, bound};

/// Who runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Accelerator {
    /// KVM if a guest boots with it here, else TCG.
    Auto,
    /// The processor.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// The name of the QMP socket in the run folder.
pub const QMP: &str = "qmp";
/// The name of the agent's socket in the run folder.
const AGENT: &str = "agent";
/// A thread of its own for the balloon, where its properties name it: free page hinting needs one.
const BALLOON_IO: &str = "iothread,id=balloon-io";
const BALLOON_IO_PROPERTY: &str = "iothread=balloon-io";
/// The name of the disk in the run folder.
pub const DISK: &str = "disk";
/// How long QEMU may take to connect to the agent's socket.
const CONNECT: Duration = Duration::from_secs(20);

/// What the board is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Board {
    /// A PC with PCI Express.
    #[default]
    Q35,
    /// A small machine without PCI: its devices are on virtio-mmio.
    Microvm,
}

impl Board {
    fn machine(self) -> &'static str {
        match self {
            Self::Q35 => "q35,memory-backend=ram",
            Self::Microvm => "microvm,memory-backend=ram",
        }
    }

    /// What the kernel must be told besides, on an emulated board.
    ///
    /// The small machine has no clock but the PIT to measure the time stamp counter by. Under emulation,
    /// a busy host makes that fail, and the kernel then waits for ever for the PIT's first interrupt.
    /// QEMU's translator passes the host's counter on, so the host's frequency is right.
    fn emulated_clock(self) -> String {
        match (self, kilohertz()) {
            (Self::Microvm, Some(kilohertz)) => format!("tsc_early_khz={kilohertz}"),
            _ => String::new(),
        }
    }

    /// The name of QEMU's own balloon on its bus.
    fn balloon(self) -> &'static str {
        match self {
            Self::Q35 => "virtio-balloon-pci",
            Self::Microvm => "virtio-balloon-device",
        }
    }

    /// The name of a vhost-user device of any kind on its bus.
    fn vhost_user(self) -> &'static str {
        match self {
            Self::Q35 => "vhost-user-test-device-pci",
            Self::Microvm => "vhost-user-test-device",
        }
    }
}

/// QEMU without any device, dying with the runner.
pub fn bare() -> Command {
    let mut command = bound("qemu-system-x86_64");
    command.args([
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
    ]);
    command
}

/// The object `ram`: memory in a nameless file of the host, `populated` if the host is to allocate it
/// all at once.
pub fn ram(megabytes: u64, populated: bool) -> String {
    let populated = if populated { ",prealloc=on" } else { "" };
    format!("memory-backend-memfd,id=ram,size={megabytes}M,share=on{populated}")
}

/// Starts the machine of `plan` with its files in `folder`.
pub(super) fn start(plan: &Plan, folder: &Path) -> Result<Ends> {
    let agent = UnixListener::bind(folder.join(AGENT)).context("the agent's socket")?;
    agent.set_nonblocking(true)?;
    let mut command = command(plan, folder)?;
    command
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let process = Process::start("qemu", command)?;
    let (console, complaints) = process.take(|child| (child.stdout.take(), child.stderr.take()));
    let console = console.context("no standard output")?;
    let complaints = complaints.context("no standard error")?;
    let line = accept(&agent, &process, complaints, folder)?;
    Ok(Ends {
        process,
        console: Box::new(console),
        read: Box::new(line.try_clone()?),
        write: Box::new(line),
    })
}

/// The command line of the machine of `plan`.
fn command(plan: &Plan, folder: &Path) -> Result<Command> {
    let kvm = match plan.accelerator {
        Accelerator::Kvm => true,
        Accelerator::Tcg => false,
        Accelerator::Auto => kvm_works(),
    };
    let clock = if kvm {
        String::new()
    } else {
        plan.board.emulated_clock()
    };
    let megabytes = mebibytes(plan.memory)?;
    let mut command = bare();
    command
        .args(["-run-with", "exit-with-parent=on"])
        .args(["-machine", plan.board.machine()])
        .args(["-smp", &plan.cpus.to_string()])
        .args(["-m", &memory(megabytes, &plan.hardware)]);
    if kvm {
        command.args(["-accel", "kvm", "-cpu", "host"]);
    } else {
        command.args(["-accel", "tcg,thread=multi"]);
    }
    command
        .arg("-object")
        .arg(ram(megabytes, plan.populated))
        .arg("-kernel")
        .arg(plan.guest.kernel()?)
        .args(["-initrd", "initramfs.cpio", "-append"])
        .arg(format!(
            "console=ttyS0 panic=-1 oops=panic loglevel=5 VBRS_AGENT=/dev/ttyS1 {clock} {}",
            plan.command_line
        ))
        .args([
            "-chardev",
            "stdio,id=console,signal=off",
            "-serial",
            "chardev:console",
        ])
        .args(["-chardev", &format!("socket,id=agent,path={AGENT}")]);
    match plan.board {
        Board::Q35 => command.args(["-serial", "chardev:agent"]),
        // It has one serial port by itself.
        Board::Microvm => command.args(["-device", "isa-serial,chardev=agent,iobase=0x2f8,irq=3"]),
    };
    command.args(["-qmp", &format!("unix:{QMP},server=on,wait=off")]);
    if plan.incoming {
        command.args(["-incoming", "defer"]);
    }
    command.args(plan.hardware.iter().filter(|word| !is_slots(word)));
    balloon(&mut command, plan);
    // After the balloon, so that the balloon stays the first device of virtio.
    if plan.disk > 0 {
        disk(&mut command, plan, folder)?;
    }
    Ok(command)
}

/// What `-m` says: where memory can be plugged in, the test's words for that come after the size.
fn memory(megabytes: u64, hardware: &[&str]) -> String {
    let slots = hardware.iter().copied().filter(|word| is_slots(word));
    slots.fold(megabytes.to_string(), |text, more| {
        format!("{text}M,{more}")
    })
}

fn is_slots(word: &str) -> bool {
    word.starts_with("slots=")
}

fn balloon(command: &mut Command, plan: &Plan) {
    for (i, balloon) in plan.balloons.iter().enumerate() {
        match balloon {
            Balloon::VhostUser {
                socket,
                queues,
                config_bytes,
            } => {
                command
                    .args(["-chardev", &format!("socket,id=balloon{i},path={socket}")])
                    .arg("-device")
                    .arg(format!(
                        "{},id=balloon{i},chardev=balloon{i},virtio-id=5,num_vqs={queues},\
                         vq_size=128,config_size={config_bytes}",
                        plan.board.vhost_user()
                    ));
            }
            Balloon::Qemu(properties) => {
                let mut device = format!("{},id=balloon{i}", plan.board.balloon());
                for property in properties {
                    device.push(',');
                    device.push_str(property);
                }
                if properties.iter().any(|p| p == BALLOON_IO_PROPERTY) {
                    command.args(["-object", BALLOON_IO]);
                }
                command.args(["-device", &device]);
            }
        }
    }
}

/// A disk that the guest's kernel has a driver for.
fn disk(command: &mut Command, plan: &Plan, folder: &Path) -> Result<()> {
    let path = folder.join(DISK);
    // A guest that wakes up finds what it has left there.
    if !path.exists() {
        std::fs::File::create(&path)?.set_len(plan.disk)?;
    }
    let device = match plan.guest {
        Guest::Stock => "nvme,drive=disk,serial=1",
        _ => "virtio-blk-pci,drive=disk",
    };
    command
        .args([
            "-blockdev",
            &format!("driver=file,node-name=disk,filename={DISK},cache.direct=off"),
        ])
        .args(["-device", device]);
    Ok(())
}

/// Waits for QEMU to connect; `complaints`, its standard error, is kept in a file.
fn accept(
    agent: &UnixListener,
    process: &Process,
    mut complaints: impl Read + Send + 'static,
    folder: &Path,
) -> Result<UnixStream> {
    let path = folder.join("qemu.log");
    let mut file = std::fs::File::create(&path)?;
    let copy = std::thread::Builder::new()
        .name("qemu-stderr".into())
        .spawn(move || std::io::copy(&mut complaints, &mut file))?;
    let end = Instant::now() + CONNECT;
    loop {
        match agent.accept() {
            Ok((line, _)) => {
                line.set_nonblocking(false)?;
                return Ok(line);
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
        if let Some(status) = process.ended() {
            let _panicked = copy.join();
            let why = std::fs::read_to_string(&path).unwrap_or_default();
            bail!("QEMU ended with {status}: {}", why.trim());
        }
        if Instant::now() > end {
            bail!("QEMU does not start within {CONNECT:.0?}");
        }
        std::thread::sleep(POLL);
    }
}

/// How fast the host's time stamp counter runs, as its kernel shows it.
fn kilohertz() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("cpu MHz"))?;
    let megahertz: f64 = line.split_once(':')?.1.trim().parse().ok()?;
    Some((megahertz * 1000.0) as u64)
}

/// Whether the stock kernel comes up with KVM here; tried once. On some machines the device is there
/// and does not work.
pub fn kvm_works() -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    *WORKS.get_or_init(|| match try_kvm() {
        Ok(works) => {
            tracing::info!("KVM {}", if works { "works" } else { "does not work" });
            works
        }
        Err(e) => {
            tracing::info!("KVM does not work: {e:#}");
            false
        }
    })
}

fn try_kvm() -> Result<bool> {
    /// A kernel that runs at all says something within this time.
    const BOOT: Duration = Duration::from_secs(5);

    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .context("open /dev/kvm")?;
    let kernel = Guest::Stock.kernel().or_else(|_| Guest::Debug.kernel())?;
    paths::program("qemu-system-x86_64")?;
    let mut command = bare();
    command
        .args([
            "-machine", "q35", "-m", "256", "-accel", "kvm", "-cpu", "host",
        ])
        .arg("-kernel")
        .arg(kernel)
        .args([
            "-append",
            "console=ttyS0 earlyprintk=ttyS0 edd=off panic=-1",
            "-serial",
            "stdio",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let process = Process::start("qemu (trying KVM)", command)?;
    let (console, complaints) = process.take(|child| (child.stdout.take(), child.stderr.take()));
    let (sender, receiver) = std::sync::mpsc::channel();
    // Without a root the kernel panics: then it has come far enough.
    look_for("Unable to mount root fs", console, true, sender.clone())?;
    look_for("KVM internal error", complaints, false, sender)?;
    Ok(receiver.recv_timeout(BOOT).unwrap_or(false))
}

/// Sends `answer` once a line of `stream` contains `words`.
fn look_for(
    words: &'static str,
    stream: Option<impl Read + Send + 'static>,
    answer: bool,
    sender: Sender<bool>,
) -> Result<()> {
    let stream = stream.context("no output")?;
    std::thread::Builder::new().spawn(move || {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        if lines.any(|line| line.contains(words)) {
            let _late = sender.send(answer);
        }
    })?;
    Ok(())
}
