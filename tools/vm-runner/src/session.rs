// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A guest with a balloon, and the verbs a test is written in.
//!
//! Amounts are bytes. What a verb promises is checked in it, so that a test needs no assertions of
//! its own for it: [`Session::inflate`] fails if a single page is missing in any of the places that
//! count them.

mod body;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use self::body::Body;
pub use self::body::Migrated;
use crate::account::{self, Account};
use crate::host::{self, Daemon, Dialect, Host};
use crate::initramfs::DRIVER_FOLDER;
use crate::klog;
use crate::ktap;
use crate::machine::{self, Balloon, Machine, Plan, qemu};
use crate::paths::{Driver, Guest};
use crate::process::poll;
use crate::size::{GIB, KIB, MIB, PAGE, show};

/// The machines that one guest can live in, one after the other.
const BODIES: usize = 4;

/// Virtqueues that the daemon's device has in QEMU: as many as any driver asks for.
const QUEUES: u32 = 8;

/// The file in the guest that must survive everything, and what it is filled with.
const SENTINEL: &str = "/mem/sentinel";
const SENTINEL_SEED: u64 = 20_161_116;

/// The feature bit by which the balloon's pages stay part of `MemTotal`.
const DEFLATE_ON_OOM: usize = 2;

/// How far free memory may be from where it was: the guest's kernel and its caches take some and
/// give some back all the time.
const SLACK: u64 = 6 * MIB;

/// What a test needs.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Guest memory, in bytes.
    pub memory: u64,
    /// Virtual processors; in User Mode Linux there is one.
    pub cpus: u32,
    /// Who offers the balloon.
    pub device: Device,
    /// The driver's module parameters, if it is to be loaded before the test begins.
    pub load: Option<&'static str>,
    /// Has the host allocate all of the guest's memory, as if the guest had used it all once, so that
    /// it can be seen what comes back.
    pub populated: bool,
    /// Bytes of a disk that the guest gets; 0 for none.
    pub disk: u64,
    /// What QEMU plays.
    pub board: qemu::Board,
    /// More for QEMU's command line.
    pub hardware: &'static [&'static str],
    /// Further daemons beside the device: what they speak, and their options.
    pub others: &'static [(Dialect, &'static [&'static str])],
    /// Bytes of a file in the guest whose contents must survive.
    pub sentinel: u64,
    /// More for the kernel's command line.
    pub command_line: &'static str,
}

/// Who offers the balloon.
#[derive(Clone, Copy, Debug)]
pub enum Device {
    /// Our daemon.
    Daemon {
        /// What it speaks.
        dialect: Dialect,
        /// More for its command line.
        options: &'static [&'static str],
    },
    /// QEMU itself, with these properties of the device.
    Qemu(&'static [&'static str]),
    /// Nobody.
    None,
}

impl Setup {
    /// The usual: a small guest whose memory the host has allocated, our driver, our daemon, page
    /// bitmaps.
    pub const USUAL: Self = Self {
        memory: 256 * MIB,
        cpus: 2,
        device: Device::speaking(Dialect::Bitmap),
        load: Some(""),
        populated: true,
        disk: 0,
        board: qemu::Board::Q35,
        hardware: &[],
        others: &[],
        sentinel: 16 * MIB,
        command_line: "",
    };
}

impl Device {
    /// Our daemon without further options.
    pub const fn speaking(dialect: Dialect) -> Self {
        Self::Daemon {
            dialect,
            options: &[],
        }
    }
}

/// What differs from run to run, not from test to test.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// The driver that is tested.
    pub driver: Driver,
    /// How QEMU runs guests.
    pub accelerator: qemu::Accelerator,
}

/// A guest with a balloon.
pub struct Session {
    /// Where the guest has lived; it lives in the last one.
    bodies: [OnceLock<Body>; BODIES],
    plan: Plan,
    others: Vec<Daemon>,
    setup: Setup,
    choice: Choice,
    folder: PathBuf,
    /// The guest's memory before the driver came.
    before: Account,
    /// Host memory the guest took then.
    allocated: u64,
    expected: Mutex<Vec<String>>,
    notes: Mutex<Vec<String>>,
    unit_tests: Mutex<Vec<ktap::Case>>,
    buffers: AtomicU64,
    expected_taint: AtomicU64,
}

impl Session {
    /// Starts the host's end, boots the guest and prepares both as `setup` says.
    ///
    /// # Errors
    ///
    /// If something is missing or does not come up.
    pub fn start(guest: Guest, setup: Setup, choice: Choice, folder: &Path) -> Result<Self> {
        let daemon = match setup.device {
            Device::Daemon { dialect, options } => {
                Some(Daemon::start(folder, 0, dialect, options)?)
            }
            _ => None,
        };
        let mut balloons: Vec<Balloon> = match setup.device {
            Device::Qemu(properties) => {
                vec![Balloon::Qemu(
                    properties.iter().map(|&p| p.to_owned()).collect(),
                )]
            }
            Device::Daemon { dialect, .. } => vec![vhost_user(0, dialect)],
            Device::None => Vec::new(),
        };
        let mut others = Vec::new();
        for (i, &(dialect, options)) in (1..).zip(setup.others) {
            others.push(Daemon::start(folder, i, dialect, options)?);
            balloons.push(vhost_user(i, dialect));
        }
        let plan = Plan {
            guest,
            memory: setup.memory,
            cpus: cpus(setup.cpus),
            command_line: setup.command_line.to_owned(),
            balloons,
            populated: setup.populated,
            disk: setup.disk,
            board: setup.board,
            hardware: setup.hardware.to_vec(),
            incoming: false,
            accelerator: choice.accelerator,
        };
        let machine = Machine::boot(&plan, folder)?;
        let host = match (setup.device, daemon) {
            (Device::Qemu(_), _) => Host::of_qemu(folder, setup.memory)?,
            (_, Some(daemon)) => Host::Daemon(daemon),
            _ => Host::None,
        };
        let mut this = Self {
            bodies: Default::default(),
            plan,
            others,
            setup,
            choice,
            folder: folder.to_owned(),
            before: Account::default(),
            allocated: 0,
            expected: Mutex::default(),
            notes: Mutex::default(),
            unit_tests: Mutex::default(),
            buffers: AtomicU64::new(0),
            expected_taint: AtomicU64::new(0),
        };
        this.move_into(Body::new(machine, host)?)?;
        if setup.sentinel > 0 {
            this.sh(&format!(
                "vbrs-guest fill {SENTINEL} {} {SENTINEL_SEED}",
                setup.sentinel
            ))?;
        }
        if setup.populated && guest.is_uml() {
            this.body().memory_file.populate()?;
        }
        this.before = this.account()?;
        this.allocated = this.body().memory_file.allocated()?;
        if let Some(parameters) = setup.load {
            this.load(parameters)?;
        }
        Ok(this)
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.body().machine
    }

    /// The host's end.
    pub fn host(&self) -> &Host {
        &self.body().host
    }

    /// The daemons beside the device, in the order of the setup.
    pub fn others(&self) -> &[Daemon] {
        &self.others
    }

    /// The folder with sockets and logs.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The driver that is tested.
    pub fn driver(&self) -> Driver {
        self.choice.driver
    }

    /// The guest's memory before the driver came.
    pub fn before(&self) -> &Account {
        &self.before
    }

    /// Adds a figure to the report of the test.
    pub fn note(&self, text: String) {
        lock(&self.notes).push(text);
    }

    /// Takes the figures noted so far.
    pub fn notes(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.notes))
    }

    /// Adds test cases that ran in the guest's kernel to the report.
    pub fn report_unit_tests(&self, cases: Vec<ktap::Case>) {
        lock(&self.unit_tests).extend(cases);
    }

    /// Takes the test cases reported so far.
    pub fn unit_tests(&self) -> Vec<ktap::Case> {
        std::mem::take(&mut lock(&self.unit_tests))
    }

    /// Declares that lines of the kernel's log that contain `words` are no fault in this test.
    pub fn expect_in_log(&self, words: &str) {
        lock(&self.expected).push(words.to_owned());
    }

    /// Declares that this taint bit is no fault in this test.
    pub fn expect_taint(&self, bit: u32) {
        self.expected_taint.fetch_or(1 << bit, Ordering::Relaxed);
    }

    // ---- the guest ----

    /// Runs a command that must succeed; gives its output.
    ///
    /// # Errors
    ///
    /// If it fails or the guest dies.
    pub fn sh(&self, command: &str) -> Result<String> {
        self.machine().sh(command)
    }

    /// Runs a command until it succeeds.
    ///
    /// # Errors
    ///
    /// If it does not in time, or the guest dies.
    pub fn sh_until(&self, command: &str) -> Result<()> {
        const PAUSE: Duration = Duration::from_millis(100);

        let done = poll(self.patience(), || {
            match self.machine().run(command, machine::COMMAND) {
                Ok(outcome) if outcome.ok() => Some(Ok(())),
                Ok(_) => {
                    std::thread::sleep(PAUSE);
                    None
                }
                Err(e) => Some(Err(e)),
            }
        });
        done.with_context(|| format!("{command}: fails again and again"))?
    }

    /// The guest's memory now, after it has dropped what it can drop.
    ///
    /// # Errors
    ///
    /// If the guest dies.
    pub fn account(&self) -> Result<Account> {
        self.sh("echo 3 >/proc/sys/vm/drop_caches")?;
        self.account_as_is()
    }

    /// The guest's memory now.
    ///
    /// # Errors
    ///
    /// If the guest dies.
    pub fn account_as_is(&self) -> Result<Account> {
        Account::parse(&format!("{}\n", self.sh(account::COMMAND)?))
    }

    /// Waits until `bytes` are free again, within the slack. Without dropping caches: what is hinted to the host
    /// counts as one, and would come back by that.
    ///
    /// # Errors
    ///
    /// If they are not in time; the message has the figures.
    pub fn await_free(&self, bytes: u64, timeout: Duration) -> Result<()> {
        let mut now = 0;
        let back = poll(timeout, || {
            match self.account_as_is().and_then(|a| a.free()) {
                Ok(free) => {
                    now = free;
                    (free + self.slack() >= bytes).then_some(Ok(()))
                }
                Err(e) => Some(Err(e)),
            }
        });
        back.with_context(|| format!("of {} only {} are free again", show(bytes), show(now)))?
    }

    /// The kernel's log so far.
    ///
    /// # Errors
    ///
    /// If the guest dies.
    pub fn log(&self) -> Result<Vec<String>> {
        Ok(self.sh("dmesg")?.lines().map(str::to_owned).collect())
    }

    /// Waits for a line in the kernel's log that contains `words`.
    ///
    /// # Errors
    ///
    /// If none comes in time.
    pub fn await_log(&self, words: &str, timeout: Duration) -> Result<()> {
        ensure!(
            self.machine().life().wait_for(words, timeout),
            "the kernel does not log {words:?} within {timeout:.0?}"
        );
        Ok(())
    }

    /// Checks that the guest is good for something: processes start, and quickly.
    ///
    /// # Errors
    ///
    /// If they do not, or one was killed for lack of memory.
    pub fn alive_and_well(&self) -> Result<()> {
        let begun = Instant::now();
        let many = "for i in $(seq 50); do /bin/busybox true || exit 1; done; \
             ls -lR /sys/devices >/dev/null; echo fine";
        ensure!(self.sh(many)? == "fine");
        let took = begun.elapsed();
        ensure!(
            took < Duration::from_secs(20),
            "50 processes take {took:.1?}"
        );
        let kills = self.account_as_is()?.vmstat("oom_kill")?;
        ensure!(
            kills == 0,
            "{kills} processes were killed for lack of memory"
        );
        Ok(())
    }

    // ---- the driver ----

    /// Loads the driver with these parameters.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub fn load(&self, parameters: &str) -> Result<()> {
        let module = self.choice.driver.module();
        self.sh(&format!("insmod {DRIVER_FOLDER}/{module}.ko {parameters}"))
            .map(drop)
    }

    /// Unloads it.
    ///
    /// # Errors
    ///
    /// If the kernel refuses or it does not end.
    pub fn unload(&self) -> Result<()> {
        self.sh(&format!("rmmod {}", self.choice.driver.module()))
            .map(drop)
    }

    /// Whether it is loaded.
    ///
    /// # Errors
    ///
    /// If the guest dies.
    pub fn loaded(&self) -> Result<bool> {
        let test = format!("test -d /sys/module/{}", self.choice.driver.module());
        Ok(self.machine().run(&test, machine::COMMAND)?.ok())
    }

    /// Whether it has taken the device.
    ///
    /// # Errors
    ///
    /// If the guest dies.
    pub fn bound(&self) -> Result<bool> {
        let test = format!(
            "test -e /sys/bus/virtio/drivers/{}/virtio0",
            self.choice.driver.bus_name()
        );
        Ok(self.machine().run(&test, machine::COMMAND)?.ok())
    }

    /// Takes the device from the driver, or gives it back.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn bind(&self, bind: bool) -> Result<()> {
        let verb = if bind { "bind" } else { "unbind" };
        let driver = self.choice.driver.bus_name();
        self.sh(&format!(
            "echo virtio0 >/sys/bus/virtio/drivers/{driver}/{verb}"
        ))
        .map(drop)
    }

    /// Reads one of the driver's files.
    ///
    /// # Errors
    ///
    /// If it is not there.
    pub fn attribute(&self, name: &str) -> Result<String> {
        self.sh(&format!("cat {}", attribute_path(name)))
    }

    /// Writes one of the driver's files; whether the kernel took it.
    ///
    /// # Errors
    ///
    /// If the guest dies.
    pub fn set_attribute(&self, name: &str, value: &str) -> Result<bool> {
        let command = format!("printf %s '{value}' >{}", attribute_path(name));
        Ok(self.machine().run(&command, machine::COMMAND)?.ok())
    }

    // ---- the balloon ----

    /// Sets the target and does not wait.
    ///
    /// # Errors
    ///
    /// If the host refuses it.
    pub fn target(&self, bytes: u64) -> Result<()> {
        self.host().target(bytes)
    }

    /// What the balloon holds, as the host was told.
    ///
    /// # Errors
    ///
    /// If the host is gone.
    pub fn actual(&self) -> Result<u64> {
        self.host().actual()
    }

    /// Waits until the balloon holds exactly so much.
    ///
    /// # Errors
    ///
    /// If it does not in time, or the guest dies.
    pub fn await_actual(&self, bytes: u64, timeout: Duration) -> Result<()> {
        self.await_balloon(timeout, &show(bytes), |actual| actual == bytes)
            .map(drop)
    }

    /// Waits until the balloon's size is as wanted; gives it.
    ///
    /// # Errors
    ///
    /// If it does not come in time, or the guest dies.
    pub fn await_balloon(
        &self,
        timeout: Duration,
        what: &str,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<u64> {
        let mut last = 0;
        let reached = poll(timeout, || {
            if let Some(why) = self.machine().life().death() {
                return Some(Err(anyhow::anyhow!("the guest is dead: {why}")));
            }
            match self.actual() {
                Ok(actual) => {
                    last = actual;
                    wanted(actual).then_some(Ok(actual))
                }
                Err(e) => Some(Err(e)),
            }
        });
        reached.with_context(|| {
            format!(
                "the balloon holds {} after {timeout:.0?}, not {what}",
                show(last)
            )
        })?
    }

    /// Waits until the balloon's size has not changed for `quiet`; gives it.
    ///
    /// # Errors
    ///
    /// If it never stops changing, or the guest dies.
    pub fn await_standstill(&self, quiet: Duration) -> Result<u64> {
        const LONGEST: Duration = Duration::from_secs(120);

        let mut last = (self.actual()?, Instant::now());
        let still = poll(LONGEST, || match self.actual() {
            Ok(actual) if actual == last.0 => (last.1.elapsed() >= quiet).then_some(Ok(actual)),
            Ok(actual) => {
                last = (actual, Instant::now());
                None
            }
            Err(e) => Some(Err(e)),
        });
        still.context("the balloon never stands still")?
    }

    /// Brings the balloon to `bytes`, checks every account of it, and what the host got back. Gives
    /// the time from the target to the arrival.
    ///
    /// # Errors
    ///
    /// If anything is not as it should be.
    pub fn inflate(&self, bytes: u64) -> Result<Duration> {
        let took = self.resize(bytes)?;
        self.balanced(bytes)?;
        self.returned(bytes)?;
        Ok(took)
    }

    /// Empties the balloon and checks every account of it. Gives the time it took.
    ///
    /// # Errors
    ///
    /// If anything is not as it should be.
    pub fn deflate(&self) -> Result<Duration> {
        let took = self.resize(0)?;
        self.balanced(0)?;
        Ok(took)
    }

    /// Brings the balloon to `bytes`, and checks nothing else.
    ///
    /// # Errors
    ///
    /// If it does not get there in time.
    pub fn resize(&self, bytes: u64) -> Result<Duration> {
        let begun = Instant::now();
        self.target(bytes)?;
        self.await_actual(bytes, self.patience())?;
        Ok(begun.elapsed())
    }

    /// How long anything may take that takes no time normally. Generous: time is not what tests are
    /// about, and the machine may be busy.
    pub fn patience(&self) -> Duration {
        Duration::from_secs(if self.machine().guest().is_uml() {
            120
        } else {
            240
        })
    }

    /// Checks that the guest accounts for a balloon of `bytes` to the page: what it says itself,
    /// `MemTotal` and the pages of all zones, and that what is free, ballooned and used together is
    /// what it was before.
    ///
    /// # Errors
    ///
    /// If any of it differs; the message has the figures.
    pub fn balanced(&self, bytes: u64) -> Result<()> {
        const SETTLE: Duration = Duration::from_secs(10);

        // What a guest's kernel frees, it frees in its own time.
        let mut wrong = String::new();
        let balanced = poll(SETTLE, || {
            match self.account().and_then(|a| self.imbalance(&a, bytes)) {
                Ok(None) => Some(Ok(())),
                Ok(Some(what)) => {
                    wrong = what;
                    None
                }
                Err(e) => Some(Err(e)),
            }
        });
        balanced.with_context(|| format!("with {} in the balloon: {wrong}", show(bytes)))?
    }

    fn imbalance(&self, now: &Account, bytes: u64) -> Result<Option<String>> {
        let before = &self.before;
        let mut wrong = String::new();
        let mut compare = |what: &str, have: u64, want: u64, slack: u64| {
            if have.abs_diff(want) > slack {
                let _infallible = write!(wrong, "{what} is {}, not {}; ", show(have), show(want));
            }
        };
        compare("the size told to the host", self.actual()?, bytes, 0);
        if now.balloon().is_ok() {
            compare("Balloon in meminfo", now.balloon()?, bytes, 0);
        }
        // With this feature the pages still count as the guest's own.
        let missing = if self.negotiated(DEFLATE_ON_OOM)? {
            0
        } else {
            bytes
        };
        compare("MemTotal", now.total()?, before.total()? - missing, 0);
        let pages = |a: &Account| a.managed.values().sum::<u64>() * PAGE;
        compare("what zones manage", pages(now), pages(before) - missing, 0);
        compare(
            "what is free and ballooned",
            now.free()? + bytes,
            before.free()?,
            self.slack(),
        );
        Ok((!wrong.is_empty()).then_some(wrong))
    }

    /// How far free memory may be off without a page being lost.
    pub fn slack(&self) -> u64 {
        SLACK + self.setup.memory / 256 + self.buffers.load(Ordering::Relaxed)
    }

    /// Declares that the driver may use so much more for its buffers, while it is loaded.
    pub fn allow_buffers(&self, bytes: u64) {
        self.buffers.store(bytes, Ordering::Relaxed);
    }

    /// Whether a feature was negotiated, by its bit.
    ///
    /// # Errors
    ///
    /// If the guest dies or has no device.
    pub fn negotiated(&self, bit: usize) -> Result<bool> {
        let bits = self.sh("cat /sys/bus/virtio/devices/virtio0/features")?;
        Ok(bits.as_bytes().get(bit) == Some(&b'1'))
    }

    /// Checks that the host got back what the balloon holds: it had allocated all of the guest's memory
    /// before, and has so much less allocated now. Gives what it got.
    ///
    /// # Errors
    ///
    /// If less than 95 % were given back.
    pub fn returned(&self, bytes: u64) -> Result<u64> {
        const SETTLE: Duration = Duration::from_secs(10);

        if !self.setup.populated {
            return Ok(0);
        }
        let want = bytes / 100 * 95;
        let want = want.saturating_sub(MIB);
        let mut got = 0;
        let enough = poll(SETTLE, || match self.body().memory_file.allocated() {
            Ok(now) => {
                got = self.allocated.saturating_sub(now);
                (got >= want).then_some(Ok(got))
            }
            Err(e) => Some(Err(e)),
        });
        enough.with_context(|| format!("the host got {} KiB back of {}", got / KIB, show(bytes)))?
    }

    /// Has the host allocate all of the guest's memory again, also what it had got back.
    ///
    /// # Errors
    ///
    /// If the machine is gone.
    pub fn populate(&self) -> Result<()> {
        self.body().memory_file.populate()
    }

    /// Host memory that the guest takes now.
    ///
    /// # Errors
    ///
    /// If the machine is gone.
    pub fn host_memory(&self) -> Result<u64> {
        self.body().memory_file.allocated()
    }

    /// The file with the guest's memory.
    pub fn memory_file(&self) -> &Path {
        self.body().memory_file.path()
    }

    // ---- memory ----

    /// Has the guest use nearly all of its free memory, a GiB of it at most in emulation, write to the
    /// pages, read them back and free them: what the balloon gave back can be used.
    ///
    /// # Errors
    ///
    /// If it cannot be written or a byte is wrong.
    pub fn use_all(&self) -> Result<()> {
        const SEED: u64 = 7;
        /// One page of so many is written: system calls are slow in User Mode Linux, and all code is in
        /// emulation.
        const EVERY: u32 = 8;

        let available = self.account()?.available()?;
        // Left for page tables, buffers and the programs themselves.
        let bytes = available.saturating_sub(12 * MIB + available / 16) / MIB * MIB;
        // A large guest in emulation would spend half a minute on the rest.
        let bytes = if self.machine().guest().is_uml() {
            bytes
        } else {
            bytes.min(GIB)
        };
        let file = format!("/mem/all {bytes} {SEED} {EVERY}");
        self.machine()
            .sh_within(
                &format!(
                    "vbrs-guest stamp {file} && vbrs-guest check {file}; \
                     status=$?; rm -f /mem/all; exit $status"
                ),
                self.patience(),
            )
            .with_context(|| format!("use {} of the guest's memory", show(bytes)))?;
        Ok(())
    }

    /// Checks the file that must survive.
    ///
    /// # Errors
    ///
    /// If a byte of it differs.
    pub fn sentinel_intact(&self) -> Result<()> {
        if self.setup.sentinel == 0 {
            return Ok(());
        }
        let length = self.sh(&format!("vbrs-guest verify {SENTINEL} {SENTINEL_SEED}"))?;
        ensure!(
            length.parse() == Ok(self.setup.sentinel),
            "the file that must survive has {length} bytes"
        );
        Ok(())
    }

    // ---- the end ----

    /// What holds after every test, if the driver is still there: the balloon can be emptied, all
    /// memory can be used again, nothing was lost or changed, and the driver unloads.
    ///
    /// # Errors
    ///
    /// If any of it does not hold.
    pub fn leave_clean(&self) -> Result<()> {
        if self.loaded()? {
            if self.bound()? {
                self.deflate().context("afterwards, emptying the balloon")?;
            }
            self.unload().context("afterwards, unloading")?;
        }
        self.left_nothing()
    }

    /// What holds once the driver is gone: all memory is back where it was and can be used, and the
    /// file that must survive has survived.
    ///
    /// # Errors
    ///
    /// If any of it does not hold.
    pub fn left_nothing(&self) -> Result<()> {
        const SETTLE: Duration = Duration::from_secs(10);

        self.allow_buffers(0);

        let mut wrong = String::new();
        let same = poll(SETTLE, || match self.account() {
            Ok(now) => {
                wrong = self.difference(&now);
                wrong.is_empty().then_some(Ok(()))
            }
            Err(e) => Some(Err(e)),
        });
        same.with_context(|| format!("afterwards, without the driver: {wrong}"))??;
        self.sentinel_intact()?;
        self.use_all().context("afterwards")
    }

    fn difference(&self, now: &Account) -> String {
        let mut wrong = String::new();
        if now.managed != self.before.managed {
            wrong = format!(
                "zones manage {:?}, before {:?}; ",
                now.managed, self.before.managed
            );
        }
        for (what, have, want, slack) in [
            ("MemTotal", now.total(), self.before.total(), 0),
            ("free memory", now.free(), self.before.free(), self.slack()),
            ("Balloon", now.balloon().or(Ok(0)), Ok(0), 0),
        ] {
            match (have, want) {
                (Ok(have), Ok(want)) if have.abs_diff(want) <= slack => {}
                (have, want) => {
                    let _infallible = write!(wrong, "{what} is {have:?}, not {want:?}; ");
                }
            }
        }
        wrong
    }

    /// Ends the guest and the daemon, and looks through what the kernel has said.
    ///
    /// # Errors
    ///
    /// If it has complained of anything, is tainted, or does not go down.
    pub fn finish(&self) -> Result<()> {
        const POWER_OFF: Duration = Duration::from_secs(60);

        self.log_is_clean()?;
        self.machine().power_off(POWER_OFF)?;
        self.console_is_clean()?;
        if let Host::Daemon(daemon) = self.host() {
            daemon.stop()?;
        }
        self.others.iter().try_for_each(Daemon::stop)
    }

    /// Checks log, taint and lock checking of a guest that runs.
    ///
    /// # Errors
    ///
    /// If there is a complaint.
    pub fn log_is_clean(&self) -> Result<()> {
        let log = self.log()?;
        if let Some(complaint) = klog::complaint(&log, &lock(&self.expected)) {
            bail!("{complaint}");
        }
        self.console_is_clean()?;
        let taint: u64 = self.sh("cat /proc/sys/kernel/tainted")?.parse()?;
        if let Some(letters) = klog::bad_taint(taint, self.expected_taint.load(Ordering::Relaxed)) {
            bail!("the kernel is tainted: {letters}");
        }
        // Lock checking switches itself off when it has found something.
        let locks = self.sh("grep -s debug_locks /proc/lockdep_stats || true")?;
        ensure!(
            !locks.ends_with(" 0"),
            "lock checking has switched itself off"
        );
        Ok(())
    }

    /// Checks what the console has said, also of a guest that is gone.
    ///
    /// # Errors
    ///
    /// If there is a complaint.
    pub fn console_is_clean(&self) -> Result<()> {
        for body in self.bodies.iter().filter_map(OnceLock::get) {
            let lines = body.machine.life().lines();
            if let Some(complaint) = klog::complaint(&lines, &lock(&self.expected)) {
                bail!("{complaint}");
            }
        }
        Ok(())
    }
}

/// The processors a guest gets: as many as `wanted`, unless `VBRS_CPUS` says otherwise.
fn cpus(wanted: u32) -> u32 {
    let given = std::env::var("VBRS_CPUS")
        .ok()
        .and_then(|text| text.parse().ok());
    given.unwrap_or(wanted)
}

/// The `number`th balloon, a daemon's.
fn vhost_user(number: usize, dialect: Dialect) -> Balloon {
    Balloon::VhostUser {
        socket: host::socket(number),
        queues: QUEUES,
        config_bytes: dialect.config_bytes(),
    }
}

fn attribute_path(name: &str) -> String {
    format!("/sys/bus/virtio/devices/virtio0/balloon/{name}")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
