// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What is compared, and the defects that this driver has none of.

/// A feature or a trouble, and the test that shows how a driver does there.
pub(super) struct Row {
    /// In a few words.
    pub(super) about: &'static str,
    /// Guest, scenario and part.
    pub(super) test: &'static str,
    /// Whether it is quick enough for every `make check`.
    pub(super) short: bool,
}

/// A defect of the C driver.
pub(super) struct Defect {
    /// Its letter.
    pub(super) letter: char,
    /// What it does.
    pub(super) about: &'static str,
    /// The tests that show that ours does not: of a guest, or `file: function`.
    pub(super) tests: &'static [&'static str],
}

const fn row(about: &'static str, test: &'static str) -> Row {
    Row {
        about,
        test,
        short: false,
    }
}

const fn short(about: &'static str, test: &'static str) -> Row {
    Row {
        about,
        test,
        short: true,
    }
}

const fn defect(letter: char, about: &'static str, tests: &'static [&'static str]) -> Defect {
    Defect {
        letter,
        about,
        tests,
    }
}

/// What is compared.
pub(super) const ROWS: &[Row] = &[
    short("Inflating and deflating by PFN arrays", "uml/pfn-array"),
    short("MemTotal, Balloon:, vmstat, zones", "uml/accounting"),
    row(
        "The same with deflate-on-oom",
        "uml/accounting-deflate-on-oom",
    ),
    row("200 random targets", "uml/flips"),
    short("Unbind and bind: fills up again", "uml/unbind-bind"),
    row("Unload and load with a full balloon", "uml/reload"),
    row("Powering off with a full balloon", "uml/power-off"),
    row(
        "Statistics while the balloon is on its way",
        "uml/statistics-under-load",
    ),
    row(
        "Statistics, all figures, through QEMU",
        "stock/hotplug/statistics",
    ),
    row("Statistics after swapping", "stock/statistics-all"),
    row(
        "QEMU device_del with a full balloon",
        "stock/hotplug/unplug",
    ),
    row(
        "Hints and reports in all combinations",
        "stock/hotplug/feature-combinations",
    ),
    row(
        "Legacy, transitional and modern PCI",
        "stock/hotplug/transports",
    ),
    row("ACCESS_PLATFORM demanded", "stock/hotplug/access-platform"),
    row(
        "Device gone from one moment to the next",
        "stock/surprise-removal",
    ),
    row("virtio-mmio (QEMU microvm)", "stock/microvm"),
    row("Migration with hints: bytes", "stock/migration/idle"),
    row("Migration that is cancelled", "stock/migration/cancelled"),
    row("Migration under a writer", "stock/migration/writer"),
    row("Host keeps the blocks that are hinted", "uml/hint-kept"),
    row("Suspend to idle", "stock/sleep/idle"),
    row("Suspend to memory", "stock/sleep/to-memory"),
    row("Hibernation", "stock/hibernate"),
    row(
        "Sleep while the balloon is on its way",
        "debug/sleep-in-flight",
    ),
    row("Poison value, also after sleep", "debug/poison"),
    row("Nothing before DRIVER_OK", "stock/first-kick"),
    row("Memory offlining", "stock/memory-offline"),
    short("Two balloons, both with reports", "uml/two-balloons"),
    row("Target above memory", "uml/unreachable"),
    row("Target above memory, small guest", "uml/small-guest"),
    row("Deflate on OOM", "uml/deflate-on-oom"),
    row("Compaction moves pages", "uml/compaction"),
    row("Host never acknowledges", "uml/withheld"),
    row(
        "Host never acknowledges deflating",
        "uml/withheld-while-full",
    ),
    row("Host gives a wrong used id", "uml/bad-used-id"),
    row("Host never interrupts", "uml/no-interrupt"),
    row("1000 config changes a second", "uml/config-storm"),
    row("Host dies with a full balloon", "uml/daemon-killed"),
];

/// The defects, as they were found.
pub(super) const DEFECTS: &[Defect] = &[
    defect(
        'a',
        "writes the poison value in probe only, and has lost it after sleep",
        &["debug/poison"],
    ),
    defect(
        'b',
        "waits without a way out for a broken or removed device, and hangs removal, sleep and shutdown",
        &[
            "uml/withheld",
            "uml/withheld-while-full",
            "uml/bad-used-id",
            "stock/surprise-removal",
        ],
    ),
    defect(
        'c',
        "counts pages that the host was never told of, and frees them untold",
        &["uml/bad-used-id", "uml/daemon-killed"],
    ),
    defect(
        'd',
        "polls every 200 ms, with a line in the log, and keeps awake while a target cannot be met",
        &["uml/unreachable", "debug/pm-test/kept-awake"],
    ),
    defect('e', "kicks queues before DRIVER_OK", &["stock/first-kick"]),
    defect(
        'f',
        "initialises a lock after it can be used",
        &["uml/statistics", "debug/core/inflate-deflate"],
    ),
    defect(
        'g',
        "wraps at targets near 2^32 on 64 KiB pages, and cuts frames above 16 TiB",
        &[
            "logic/units.rs: targets_are_rounded_up_and_never_wrap",
            "logic/units.rs: array_entries_end_at_16_tib",
        ],
    ),
    defect(
        'h',
        "spins when the hint queue is full, allocating and freeing one block",
        &["uml/hint-kept"],
    ),
    defect(
        'i',
        "leaves notifier and shrinker registered while it sleeps",
        &["debug/sleep-in-flight", "debug/pm-test-qemu"],
    ),
    defect(
        'j',
        "fails the whole probe of a second balloon that offers reports",
        &["uml/two-balloons"],
    ),
    defect(
        'k',
        "rewrites a statistics buffer that the device owns when it is interrupted for nothing",
        &["uml/config-storm", "uml/statistics-under-load"],
    ),
    defect(
        'l',
        "inflates in a kernel that writes a crash dump",
        &["stock/kexec/crash"],
    ),
    defect(
        'm',
        "spins in remove while pages are isolated",
        &["uml/compaction"],
    ),
    defect(
        'n',
        "fails without a reason where ACCESS_PLATFORM is demanded",
        &["stock/hotplug/access-platform"],
    ),
    defect(
        'o',
        "remembers the id of the last hints over a restore",
        &["debug/pm-test-host/hinted"],
    ),
    defect(
        'p',
        "deflates and inflates in turns when memory is short, or does not come back",
        &["uml/deflate-on-oom"],
    ),
    defect(
        'q',
        "gives hinted blocks back to the allocator while the device has them",
        &["uml/hint-kept"],
    ),
    defect(
        'r',
        "leaves nothing for the guest's own kernel under a target that is too high",
        &["uml/small-guest", "uml/unreachable"],
    ),
];
