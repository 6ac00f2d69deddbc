// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Tools that fill, verify, hold and fragment a guest's memory.
//!
//! Files are meant to lie in a tmpfs: their pages are the guest's memory, and no page of theirs is
//! mapped anywhere, so filling a gigabyte takes no page fault.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FallocateFlags, fallocate};

/// Bytes of a page of every guest here.
const PAGE: usize = 4096;
/// Bytes that are written or read in one call.
const CHUNK: usize = 64 * PAGE;

/// The word at index `i` of a file filled with `seed`: splitmix64, which has no short period and
/// needs no state, so that any page can be checked on its own.
fn word(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn pattern(seed: u64, from: u64, chunk: &mut [u8]) {
    for (i, bytes) in (from / 8..).zip(chunk.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word(seed, i).to_le_bytes());
    }
}

/// Creates `path` with `bytes` bytes of the pattern of `seed`.
///
/// # Errors
///
/// If it cannot be created or written, so also when memory is short.
pub fn fill(path: &Path, bytes: u64, seed: u64) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    while at < bytes {
        let n = usize::try_from(bytes - at).map_or(CHUNK, |left| left.min(CHUNK));
        pattern(seed, at, &mut chunk);
        file.write_all(&chunk[..n])
            .with_context(|| format!("write {} at {at}", path.display()))?;
        at += n as u64;
    }
    Ok(())
}

/// The stamps of a file: one on every so many of its pages.
#[derive(Clone, Copy, Debug)]
pub struct Stamps {
    /// Length of the file.
    pub bytes: u64,
    /// What they are made from.
    pub seed: u64,
    /// One page of so many has one.
    pub every: usize,
}

impl Stamps {
    /// Where each is, and what it says.
    fn each(self) -> impl Iterator<Item = (u64, u64)> {
        let pages = (0..self.bytes / PAGE as u64).step_by(self.every.max(1));
        pages.map(move |page| (page * PAGE as u64, word(self.seed, page)))
    }
}

/// Creates `path` with `bytes` bytes of memory, of which only some pages are written, and of these only
/// the first word. Much faster than [`fill`] where the kernel is slow.
///
/// # Errors
///
/// As [`fill`].
pub fn stamp(path: &Path, stamps: Stamps) -> Result<()> {
    let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    fallocate(&file, FallocateFlags::empty(), 0, stamps.bytes).context("allocate")?;
    for (at, word) in stamps.each() {
        file.write_all_at(&word.to_le_bytes(), at)
            .with_context(|| format!("write {} at {at}", path.display()))?;
    }
    Ok(())
}

/// Checks the words that [`stamp`] wrote.
///
/// # Errors
///
/// If one cannot be read or differs.
pub fn check_stamps(path: &Path, stamps: Stamps) -> Result<()> {
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let mut have = [0; 8];
    for (at, want) in stamps.each() {
        file.read_exact_at(&mut have, at)?;
        let have = u64::from_le_bytes(have);
        ensure!(
            have == want,
            "{}: at byte {at}: {have:#018x} instead of {want:#018x}",
            path.display()
        );
    }
    Ok(())
}

/// Reads `path` back and compares it with the pattern of `seed`; answers with its length.
///
/// # Errors
///
/// If it cannot be read or any byte differs; the message names the first one.
pub fn verify(path: &Path, seed: u64) -> Result<u64> {
    let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let mut have = vec![0; CHUNK];
    let mut want = vec![0; CHUNK];
    let mut at = 0;
    loop {
        let n = read_full(&mut file, &mut have)?;
        pattern(seed, at, &mut want);
        if have[..n] != want[..n] {
            bail!(
                "{}: {}",
                path.display(),
                difference(&have[..n], &want, at, seed)
            );
        }
        at += n as u64;
        if n < CHUNK {
            return Ok(at);
        }
    }
}

/// Describes how `have`, read at `at`, differs from `want`.
fn difference(have: &[u8], want: &[u8], at: u64, seed: u64) -> String {
    let first = have.iter().zip(want).position(|(a, b)| a != b).unwrap_or(0);
    let pages = || have.chunks(PAGE).zip(want.chunks(PAGE));
    let bad = pages().filter(|(a, b)| *a != &b[..a.len()]).count();
    let zero = pages()
        .filter(|(a, _)| a.iter().all(|&byte| byte == 0))
        .count();
    let mut text = format!(
        "differs first at byte {}: {:#04x} instead of {:#04x}; of {} pages there {bad} differ, {zero} \
         are all zero",
        at + first as u64,
        have[first],
        want[first],
        have.len().div_ceil(PAGE),
    );
    // A page that belongs elsewhere tells more than one that is just wrong.
    let begin = first / PAGE * PAGE;
    if let Some(word_there) = have.get(begin..begin + 8) {
        let elsewhere = (0..at + have.len() as u64).step_by(PAGE);
        let same = |&place: &u64| word(seed, place / 8).to_le_bytes() == word_there;
        if let Some(place) = elsewhere.into_iter().find(same) {
            text.push_str(&format!("; the page holds what belongs to byte {place}"));
        }
    }
    text
}

fn read_full(file: &mut File, buffer: &mut [u8]) -> Result<usize> {
    let mut have = 0;
    while have < buffer.len() {
        match file.read(&mut buffer[have..]) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(have)
}

/// Holds `bytes` bytes of anonymous memory, all written to, until `path` is gone. Creates `path` when
/// it has them.
///
/// # Errors
///
/// If memory cannot be had or `path` not created.
pub fn hog(bytes: u64, path: &Path) -> Result<()> {
    let mut held = Vec::new();
    let mut left = bytes;
    while left > 0 {
        // Pages are touched as they come, so that memory is used up step by step, as a program does.
        let n = usize::try_from(left.min(4 << 20))?;
        let mut block = vec![0_u8; n];
        for page in block.chunks_mut(PAGE) {
            page[0] = 1;
        }
        held.push(block);
        left -= n as u64;
    }
    File::create(path).with_context(|| format!("create {}", path.display()))?;
    while path.exists() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    ensure!(held.iter().all(|block| block.first() == Some(&1)));
    Ok(())
}

/// Keeps writing, checking and freeing memory, up to `bytes` of it at a time, until `path` is gone;
/// creates `path` when it has all of it for the first time. Gives the number of pieces it has checked.
/// Memory goes back to the kernel with each piece and comes from there again, so whoever lends out or
/// gives away what is free meets it.
///
/// # Errors
///
/// If a byte differs from what was written, or memory cannot be had.
pub fn churn(bytes: u64, path: &Path) -> Result<u64> {
    /// Large enough that a piece is mapped and unmapped by itself, and of no even size.
    const PIECE: usize = 1 << 20 | 5 * PAGE;

    let pieces = (bytes / PIECE as u64).max(2);
    let mut held: std::collections::VecDeque<(u64, Vec<u8>)> = std::collections::VecDeque::new();
    let mut checked = 0;
    let mut want = vec![0; PIECE];
    let mut check = |seed: u64, piece: &[u8]| {
        pattern(seed, 0, &mut want);
        ensure!(
            piece == want,
            "piece {seed}: {}",
            difference(piece, &want, 0, seed)
        );
        Ok(())
    };
    for seed in 0.. {
        if seed == pieces {
            File::create(path).with_context(|| format!("create {}", path.display()))?;
        }
        if seed > pieces && !path.exists() {
            break;
        }
        if held.len() as u64 >= pieces {
            if let Some((seed, piece)) = held.pop_front() {
                check(seed, &piece)?;
                checked += 1;
            }
        }
        let mut piece = vec![0; PIECE];
        pattern(seed, 0, &mut piece);
        held.push_back((seed, piece));
    }
    for (seed, piece) in held {
        check(seed, &piece)?;
        checked += 1;
    }
    Ok(checked)
}

/// Fills a file with `bytes` bytes, then frees every other page of it: what stays allocated leaves
/// no two free pages side by side.
///
/// # Errors
///
/// If the file cannot be written or holes cannot be punched.
pub fn fragment(path: &Path, bytes: u64) -> Result<()> {
    fill(path, bytes, 0)?;
    let file = OpenOptions::new().write(true).open(path)?;
    let page = PAGE as u64;
    for at in (0..bytes / page).step_by(2) {
        fallocate(
            &file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            at * page,
            page,
        )
        .context("punch a hole")?;
    }
    Ok(())
}

/// The runs of page frames of which `/proc/kpageflags` says one of `flags`: the first one, and how many.
///
/// # Errors
///
/// If it cannot be read.
pub fn pages(flags: u64) -> Result<Vec<(u64, u64)>> {
    const WORD: usize = size_of::<u64>();

    let mut file = File::open("/proc/kpageflags").context("open /proc/kpageflags")?;
    let mut chunk = vec![0; CHUNK];
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let mut pfn = 0;
    loop {
        let n = file.read(&mut chunk).context("read /proc/kpageflags")?;
        if n == 0 {
            return Ok(runs);
        }
        ensure!(n % WORD == 0, "/proc/kpageflags gives {n} bytes at a time");
        for word in chunk[..n].chunks_exact(WORD) {
            if u64::from_ne_bytes(word.try_into()?) & flags != 0 {
                match runs.last_mut() {
                    Some((first, count)) if *first + *count == pfn => *count += 1,
                    _ => runs.push((pfn, 1)),
                }
            }
            pfn += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn verify_finds_one_wrong_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let bytes = 3 * CHUNK as u64 + 12;
        fill(&path, bytes, 42).unwrap();
        assert_eq!(verify(&path, 42).unwrap(), bytes);
        assert!(verify(&path, 43).is_err());

        let at = 2 * CHUNK as u64 + 77;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
        let why = verify(&path, 42).unwrap_err().to_string();
        assert!(why.contains(&format!("at byte {at}:")), "{why}");

        let mut page = [0; PAGE];
        file.read_exact_at(&mut page, 7 * PAGE as u64).unwrap();
        file.write_all_at(&page, 3 * PAGE as u64).unwrap();
        let why = verify(&path, 42).unwrap_err().to_string();
        assert!(why.contains("at byte 12288:"), "{why}");
        assert!(why.contains("belongs to byte 28672"), "{why}");
    }

    #[test]
    fn a_wrong_stamp_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let stamps = Stamps {
            bytes: 10 * PAGE as u64,
            seed: 42,
            every: 3,
        };
        stamp(&path, stamps).unwrap();
        check_stamps(&path, stamps).unwrap();
        let more = Stamps { every: 2, ..stamps };
        assert!(check_stamps(&path, more).is_err());
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[0; 8], 6 * PAGE as u64).unwrap();
        let why = check_stamps(&path, stamps).unwrap_err().to_string();
        assert!(why.contains("at byte 24576:"), "{why}");
    }

    #[test]
    fn churning_ends_when_its_file_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let there = path.clone();
        let remover = std::thread::spawn(move || {
            while std::fs::remove_file(&there).is_err() {
                std::thread::yield_now();
            }
        });
        assert!(churn(4 << 20, &path).unwrap() >= 4);
        remover.join().unwrap();
    }

    #[test]
    fn an_emptied_page_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fragment(&path, 64 << 10).unwrap();
        assert!(verify(&path, 0).is_err());
        let allocated = path.metadata().unwrap().blocks() * 512;
        assert_eq!(allocated, 32 << 10);
    }
}
