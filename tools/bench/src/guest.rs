// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What runs inside the guests: the binary `vbrs-bench-guest`.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// The largest order of which a fragmented guest may have free blocks: 64 KiB.
pub const FRAGMENT_ORDER: usize = 4;

/// What a thread that only looks at the clock has seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stalls {
    /// How long it looked, in milliseconds.
    pub watched_ms: f64,
    /// The longest gaps between two looks, the longest first, in milliseconds.
    pub longest_ms: Vec<f64>,
    /// Time in gaps of more than a tenth of a millisecond, in milliseconds.
    pub lost_ms: f64,
}

/// How long before its end [`stalls`] leaves off: then somebody comes to end it, who needs the processor himself.
pub const STALLS_TAIL: Duration = Duration::from_millis(300);

/// Looks at the clock until `path`, which it creates, is gone. What happens in the last [`STALLS_TAIL`] does not
/// count.
///
/// # Errors
///
/// If `path` cannot be created.
pub fn stalls(path: &Path) -> Result<Stalls> {
    /// How often the file is looked for.
    const LOOK: Duration = Duration::from_millis(20);
    /// Gaps shorter than this are what looking at the clock takes.
    const LONG: Duration = Duration::from_micros(100);
    /// Of so many gaps is told.
    const TOLD: usize = 5;
    /// So many are noted without looking for memory.
    const ROOM: usize = 1 << 17;

    // Written to before it begins: a page of the guest that is touched for the first time is a stall of its own.
    let mut gaps = vec![(Instant::now(), LONG); ROOM];
    black_box(&mut gaps).clear();
    let _touched = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let begun = Instant::now();
    let mut last = begun;
    let mut look = begun + LOOK;
    loop {
        let now = Instant::now();
        let gap = now - last;
        last = now;
        if gap > LONG {
            gaps.push((now, gap));
        }
        if now >= look {
            if !path.exists() {
                break;
            }
            look = Instant::now() + LOOK;
        }
    }
    let end = last
        .checked_sub(STALLS_TAIL)
        .map_or(begun, |end| end.max(begun));
    gaps.retain(|(at, _)| *at <= end);
    let lost: Duration = gaps.iter().map(|(_, gap)| *gap).sum();
    gaps.sort_by_key(|(_, gap)| std::cmp::Reverse(*gap));
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    let longest = (0..TOLD).map(|i| gaps.get(i).map_or(Duration::ZERO, |(_, gap)| *gap));
    Ok(Stalls {
        watched_ms: ms(end - begun),
        longest_ms: longest.map(ms).collect(),
        lost_ms: ms(lost),
    })
}

/// Copies `bytes` bytes from one buffer to another, again and again for `time`; gives the time of each
/// copy, in milliseconds.
///
/// # Errors
///
/// If there is no memory for that.
pub fn copies(bytes: u64, time: Duration) -> Result<Vec<f64>> {
    let bytes = usize::try_from(bytes)?;
    ensure!(bytes > 0, "nothing to copy");
    let mut from = vec![1_u8; bytes];
    let mut to = vec![2_u8; bytes];
    // The first time, pages are still being mapped.
    to.copy_from_slice(black_box(&from));
    let mut steps = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < time {
        let step = Instant::now();
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        steps.push(step.elapsed().as_secs_f64() * 1000.0);
        std::mem::swap(&mut from, &mut to);
    }
    Ok(steps)
}

/// Writes `bytes` bytes to a file at `path`, in a tmpfs, and removes it: so much memory was used once.
///
/// # Errors
///
/// If the file cannot be written.
pub fn touch(path: &Path, bytes: u64) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let chunk = vec![1_u8; MIB as usize];
    let mut left = bytes;
    while left > 0 {
        let n = left.min(MIB);
        file.write_all(&chunk[..n as usize]).context("use memory")?;
        left -= n;
    }
    fs::remove_file(path).context("give memory back")
}

/// What is left of a guest's free memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Buddies {
    /// Free bytes in blocks of each order.
    pub bytes: Vec<u64>,
}

impl Buddies {
    /// Reads `/proc/buddyinfo`.
    ///
    /// # Errors
    ///
    /// If it is not what the kernel prints.
    pub fn parse(text: &str) -> Result<Self> {
        let mut bytes = Vec::new();
        for line in text.lines() {
            let counts = line
                .split_whitespace()
                .skip_while(|word| *word != "zone")
                .skip(2);
            for (order, count) in counts.enumerate() {
                if bytes.len() == order {
                    bytes.push(0);
                }
                let count: u64 = count
                    .parse()
                    .with_context(|| format!("buddyinfo: {line:?}"))?;
                bytes[order] += count * (PAGE << order);
            }
        }
        ensure!(!bytes.is_empty(), "buddyinfo has no zone");
        Ok(Self { bytes })
    }

    /// All of it.
    pub fn free(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// Bytes in blocks above `order`.
    pub fn above(&self, order: usize) -> u64 {
        self.bytes.iter().skip(order + 1).sum()
    }
}

/// Takes all free memory but `rest` bytes into the file at `path`, in a tmpfs, and gives it back but for
/// the last page of each 128 KiB: no free block above 64 KiB remains, except in the rest.
///
/// Memory is taken in whole, and not written, so that it stays untouched on the host.
///
/// # Errors
///
/// If the file cannot be made.
pub fn fragment(path: &Path, rest: u64) -> Result<Buddies> {
    /// At a time.
    const CHUNK: u64 = MIB;
    /// Pages of a free block and its buddy, one of which must not be free altogether.
    const PERIOD: u64 = 2 << FRAGMENT_ORDER;

    let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut bytes = 0;
    while free_memory()? > rest + CHUNK {
        fallocate(&file, FallocateFlags::empty(), bytes, CHUNK).context("take memory")?;
        bytes += CHUNK;
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for at in (0..bytes).step_by((PERIOD * PAGE).try_into()?) {
        fallocate(&file, punch, at, (PERIOD - 1) * PAGE).context("give memory back")?;
    }
    Buddies::parse(&fs::read_to_string("/proc/buddyinfo").context("read buddyinfo")?)
}

/// `MemFree`, in bytes.
fn free_memory() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("read meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemFree:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    let kib: u64 = number.context("meminfo has no MemFree")?.parse()?;
    Ok(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buddies_of_all_zones() {
        let text = "Node 0, zone      DMA      1      0      2\nNode 0, zone   Normal      3      1      0\n";
        let buddies = Buddies::parse(text).unwrap();
        assert_eq!(buddies.bytes, [4 * 4096, 2 * 4096, 8 * 4096]);
        assert_eq!(buddies.free(), 14 * 4096);
        assert_eq!(buddies.above(0), 10 * 4096);
        assert_eq!(buddies.above(2), 0);
        assert!(Buddies::parse("").is_err());
        assert!(Buddies::parse("Node 0, zone DMA x").is_err());
    }

    #[test]
    fn copies_take_time() {
        let steps = copies(1 << 16, Duration::from_millis(5)).unwrap();
        assert!(!steps.is_empty());
        assert!(steps.iter().all(|&ms| ms > 0.0));
        assert!(copies(0, Duration::ZERO).is_err());
    }

    #[test]
    fn a_gap_is_at_most_the_whole_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("go");
        let remover = path.clone();
        let thread = std::thread::spawn(move || {
            while !remover.exists() {
                std::thread::yield_now();
            }
            std::thread::sleep(STALLS_TAIL + Duration::from_millis(50));
            fs::remove_file(remover).unwrap();
        });
        let seen = stalls(&path).unwrap();
        thread.join().unwrap();
        assert_eq!(seen.longest_ms.len(), 5);
        assert!(seen.watched_ms > 0.0);
        assert!(seen.longest_ms[0] <= seen.watched_ms);
        assert!(seen.longest_ms.windows(2).all(|w| w[0] >= w[1]));
    }

    #[test]
    fn touching_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        touch(&dir.path().join("f"), (1 << 20) + 5).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn free_memory_is_read() {
        assert!(free_memory().unwrap() > 0);
    }
}
