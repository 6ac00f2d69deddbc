// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What a kernel log must not contain.

use std::fmt;

/// Words of a complaint, compared as they stand.
const COMPLAINTS: [&str; 39] = [
    "WARNING:",
    "BUG:",
    "BUG at",
    "kernel BUG",
    "Oops",
    "general protection fault",
    "Call Trace:",
    "Kernel panic",
    "Bad page",
    "bad page",
    "Bad rss",
    "sleeping function called",
    "scheduling while atomic",
    "possible circular locking",
    "possible recursive locking",
    "inconsistent lock state",
    "lock order inversion",
    "bad unlock balance",
    "held lock freed",
    "lock held when returning",
    "non-static key",
    "Invalid wait context",
    "suspicious RCU usage",
    "detected stall",
    "self-detected stall",
    "blocked for more than",
    "soft lockup",
    "workqueue lockup",
    "KASAN",
    "KFENCE",
    "KMSAN",
    "UBSAN",
    "ODEBUG",
    "list_add corruption",
    "list_del corruption",
    "refcount_t:",
    "memory leak",
    "Out of memory",
    "oom-kill",
];

/// Words that are no complaint although they contain one.
const HARMLESS: [&str; 2] = ["kfence: initialized", "LSM: "];

/// The last line of a report that the kernel begins with "cut here".
const END_OF_REPORT: &str = "---[ end trace";

/// Bits of `/proc/sys/kernel/tainted` that are allowed: O (out of tree) and E (unsigned).
pub const TAINT_ALLOWED: u64 = (1 << 12) | (1 << 13);

/// A line of the log that ought not to be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// The line.
    pub line: String,
    /// The lines around it.
    pub around: Vec<String>,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the kernel complains: {}", self.line)?;
        for line in &self.around {
            writeln!(f, "  | {line}")?;
        }
        Ok(())
    }
}

/// The first complaint in `lines`, leaving out lines that contain one of `expected`, and where such
/// a line begins a report, all of the report.
pub fn complaint(lines: &[String], expected: &[String]) -> Option<Complaint> {
    /// How much is shown before and after it.
    const BEFORE: usize = 2;
    const AFTER: usize = 25;

    let has = |line: &str, words: &[&str]| words.iter().any(|word| line.contains(word));
    let mut in_expected_report = false;
    let mut bad = |line: &String| {
        if in_expected_report {
            in_expected_report = !line.contains(END_OF_REPORT);
            return false;
        }
        if !has(line, &COMPLAINTS) || has(line, &HARMLESS) {
            return false;
        }
        let is_expected = expected.iter().any(|words| line.contains(words));
        in_expected_report = is_expected && line.contains("WARNING:");
        !is_expected
    };
    let at = lines.iter().position(&mut bad)?;
    let around = lines[at.saturating_sub(BEFORE)..]
        .iter()
        .take(BEFORE + AFTER);
    Some(Complaint {
        line: lines[at].clone(),
        around: around.cloned().collect(),
    })
}

/// The letters of the taint bits beyond those that are always allowed and those `expected`.
pub fn bad_taint(bits: u64, expected: u64) -> Option<String> {
    const LETTERS: &[u8] = b"PFSRMBUDAWCIOELKXTNJ";

    let bad = bits & !(TAINT_ALLOWED | expected);
    let letter = |bit: u32| {
        let letter = usize::try_from(bit).ok().and_then(|bit| LETTERS.get(bit));
        letter.map_or_else(|| format!("bit {bit}"), |&l| char::from(l).to_string())
    };
    let letters: Vec<String> = (0..u64::BITS)
        .filter(|bit| (bad >> bit) & 1 == 1)
        .map(letter)
        .collect();
    (bad != 0).then(|| letters.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn finds_what_kernels_say_when_something_is_wrong() {
        for bad in [
            "[    1.0] WARNING: CPU: 0 PID: 1 at mm/page_alloc.c:1 f+0x1/0x2",
            "[    1.0] WARNING: possible circular locking dependency detected",
            "[    1.0] BUG: sleeping function called from invalid context at mm/a.c:1",
            "[    1.0] BUG: Bad page state in process swapper  pfn:1",
            "[    1.0] BUG: KFENCE: use-after-free read in f",
            "[    1.0] Oops: general protection fault",
            "[    1.0] INFO: task rmmod:55 blocked for more than 20 seconds.",
            "[    1.0] INFO: trying to register non-static key.",
            "[    1.0] Out of memory: Killed process 1 (sh)",
            "[    1.0] list_del corruption. prev->next should be x",
            "[    1.0] rcu: INFO: rcu_preempt self-detected stall on CPU",
        ] {
            let log = lines(&format!("one\n{bad}\nthree"));
            let found = complaint(&log, &[]);
            assert_eq!(found.as_ref().map(|c| c.line.as_str()), Some(bad));
            assert_eq!(found.unwrap().around.len(), 3);
            assert_eq!(complaint(&log, &[bad[12..].to_owned()]), None);
        }
    }

    #[test]
    fn an_expected_report_is_skipped_to_its_end() {
        let report = "WARNING: a.c:1 at f\nCall Trace:\n---[ end trace 0 ]---\n";
        let expected = ["a.c:1".to_owned()];
        assert_eq!(complaint(&lines(report), &expected), None);
        assert!(complaint(&lines(report), &[]).is_some());
        let twice = format!("{report}Call Trace:\n");
        assert!(complaint(&lines(&twice), &expected).is_some());
    }

    #[test]
    fn leaves_ordinary_lines_alone() {
        let log = lines(
            "kfence: initialized - using 2097152 bytes for 255 objects\n\
             virtio_balloon_rs virtio0: 3 pages short of the target\n\
             virtio_balloon_rs: loading out-of-tree module taints kernel.\n\
             Run /init as init process\n\
             debug: lockdep is on",
        );
        assert_eq!(complaint(&log, &[]), None);
    }

    #[test]
    fn taints_have_letters() {
        assert_eq!(bad_taint(0, 0), None);
        assert_eq!(bad_taint((1 << 12) | (1 << 13), 0), None);
        assert_eq!(bad_taint((1 << 12) | (1 << 9), 0).as_deref(), Some("W"));
        assert_eq!(
            bad_taint((1 << 5) | (1 << 40), 0).as_deref(),
            Some("B, bit 40")
        );
        assert_eq!(
            bad_taint((1 << 5) | (1 << 40), 1 << 5).as_deref(),
            Some("bit 40")
        );
    }
}
