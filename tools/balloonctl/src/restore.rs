// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A snapshot put back into a file with a guest's memory.
//!
//! All of the file that is guest memory becomes as the image is: pages of zeros are holes in it, like
//! those that were free, so holes are zeros in the file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::str::FromStr;

use balloon_control::draft::Draft;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use serde::Serialize;

/// What is copied at a time.
const PIECE: u64 = 1 << 20;

/// A region of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// Guest physical address, and place in an image.
    address: u64,
    bytes: u64,
    /// Place in the file.
    offset: u64,
}

impl FromStr for Region {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WHAT: &str =
            "a region is ADDRESS:BYTES:OFFSET, such as 0x100000000:2147483648:0x80000000";
        let parts: Vec<_> = text.split(':').map(number).collect();
        let &[Some(address), Some(bytes), Some(offset)] = parts.as_slice() else {
            return Err(WHAT);
        };
        let region = Self {
            address,
            bytes,
            offset,
        };
        let fits = |start: u64| {
            let end = start.checked_add(bytes);
            end.is_some_and(|end| i64::try_from(end).is_ok())
        };
        match bytes > 0 && fits(address) && fits(offset) {
            true => Ok(region),
            false => Err("a region has at least one byte, and ends below 8 EiB"),
        }
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

impl Region {
    /// What is in the region, from `from` on, of a part of an image.
    fn part(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let start = start.max(self.address);
        let end = end.min(self.address.saturating_add(self.bytes));
        (start < end).then_some((start, end))
    }

    /// Where an address of the region is in the file.
    fn place(&self, address: u64) -> u64 {
        address
            .saturating_sub(self.address)
            .saturating_add(self.offset)
    }
}

/// What was done.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Restored {
    pub(crate) written_bytes: u64,
    pub(crate) zero_bytes: u64,
}

/// Makes the regions of a file as they are in an image. A new file is there when all of it is.
pub(crate) fn restore(image: &Path, file: &Path, regions: &[Region]) -> Result<Restored, String> {
    let about = |path: &Path, e: io::Error| format!("{}: {e}", path.display());
    let source = File::open(image).map_err(|e| about(image, e))?;
    let from = source.metadata().map_err(|e| about(image, e))?;
    let length = from.len();
    if !from.is_file() || length == 0 {
        return Err(format!(
            "{}: an image is a file that is not empty, as snapshot writes it",
            image.display()
        ));
    }
    let flat = [Region {
        address: 0,
        bytes: length,
        offset: 0,
    }];
    let whole = regions.is_empty();
    let regions = if whole { &flat } else { regions };
    check(regions, length)?;
    let data = extents(&source, length).map_err(|e| about(image, e))?;
    covered(regions, &data)?;
    let made = match Draft::new(file) {
        Ok(draft) => Some(draft),
        Err(_) if file.exists() => None,
        Err(e) => return Err(about(file, e)),
    };
    let opened = match &made {
        Some(draft) => draft.file().try_clone(),
        None => OpenOptions::new().write(true).open(file),
    };
    let target = opened.map_err(|e| about(file, e))?;
    let to = target.metadata().map_err(|e| about(file, e))?;
    if !to.is_file() {
        return Err(format!("{}: not a file", file.display()));
    }
    if (to.dev(), to.ino()) == (from.dev(), from.ino()) {
        return Err(format!("{}: this is the image itself", file.display()));
    }
    if whole && to.len() > length {
        return Err(format!(
            "{}: has {} bytes, the image {length}: this is not the memory of the same guest, and is not cut; \
             remove it, or say by --region what is to be where",
            file.display(),
            to.len()
        ));
    }
    let job = Job {
        source: &source,
        target: &target,
        data: &data,
    };
    let restored = job.run(regions).map_err(|e| about(file, e))?;
    match made.map_or(Ok(()), Draft::finish) {
        Ok(()) => Ok(restored),
        Err(e) => Err(about(file, e)),
    }
}

/// Regions must be in the image, and must not have anything in common.
fn check(regions: &[Region], length: u64) -> Result<(), String> {
    if let Some(region) = regions.iter().find(|r| r.address + r.bytes > length) {
        return Err(format!(
            "the image has {length} bytes, a region ends at {}",
            region.address + region.bytes
        ));
    }
    let apart = |of: fn(&Region) -> u64| {
        let mut sorted: Vec<_> = regions.iter().map(|r| (of(r), r.bytes)).collect();
        sorted.sort_unstable();
        let mut pairs = sorted.iter().zip(sorted.iter().skip(1));
        pairs.all(|((start, bytes), (next, _))| start + bytes <= *next)
    };
    match apart(|r| r.address) && apart(|r| r.offset) {
        true => Ok(()),
        false => Err("regions must not overlap".to_owned()),
    }
}

/// The parts of an image that are no holes.
fn extents(image: &File, length: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < length {
        let start = match seek(image, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        at = seek(image, SeekFrom::Hole(start))?;
        found.push((start, at));
    }
    Ok(found)
}

/// Nothing of an image may be left behind.
fn covered(regions: &[Region], data: &[(u64, u64)]) -> Result<(), String> {
    for &(start, end) in data {
        let parts = regions.iter().filter_map(|r| r.part(start, end));
        let inside: u64 = parts.map(|(start, end)| end - start).sum();
        if inside != end - start {
            return Err(format!(
                "the image has data from {start:#x} to {end:#x}, which is not in the regions"
            ));
        }
    }
    Ok(())
}

struct Job<'a> {
    source: &'a File,
    target: &'a File,
    data: &'a [(u64, u64)],
}

impl Job<'_> {
    fn run(&self, regions: &[Region]) -> io::Result<Restored> {
        let mut restored = Restored::default();
        let end = regions.iter().map(|r| r.offset + r.bytes).max();
        let end = end.unwrap_or_default();
        if self.target.metadata()?.len() < end {
            self.target.set_len(end)?;
        }
        for region in regions {
            let mut at = region.address;
            let first = self.data.partition_point(|(_, end)| *end <= at);
            for &(start, end) in self.data.iter().skip(first) {
                let Some((start, end)) = region.part(start, end) else {
                    break;
                };
                restored.zero_bytes += self.clear(region, at, start)?;
                restored.written_bytes += self.copy(region, start, end)?;
                at = end;
            }
            restored.zero_bytes += self.clear(region, at, region.address + region.bytes)?;
        }
        self.target.sync_all()?;
        Ok(restored)
    }

    fn copy(&self, region: &Region, start: u64, end: u64) -> io::Result<u64> {
        let mut buffer = Vec::new();
        let mut at = start;
        while at < end {
            let len = PIECE.min(end - at);
            buffer.resize(len as usize, 0);
            self.source.read_exact_at(&mut buffer, at)?;
            self.target.write_all_at(&buffer, region.place(at))?;
            at += len;
        }
        Ok(end - start)
    }

    /// Makes a part zeros, and has the file give back what it can.
    fn clear(&self, region: &Region, start: u64, end: u64) -> io::Result<u64> {
        if start < end {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let place = region.place(start);
            match fallocate(self.target, how, place, end - start) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP) => self.write_zeros(place, end - start)?,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(end - start)
    }

    fn write_zeros(&self, place: u64, bytes: u64) -> io::Result<()> {
        let zeros = vec![0; PIECE as usize];
        let mut done = 0;
        while done < bytes {
            let piece = zeros.get(..PIECE.min(bytes - done) as usize);
            let piece = piece.unwrap_or_default();
            self.target.write_all_at(piece, place + done)?;
            done += piece.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn region(text: &str) -> Region {
        text.parse().expect(text)
    }

    #[test]
    fn regions_are_read() {
        let found = region("0x1000:8192:0x80");
        assert_eq!(
            (found.address, found.bytes, found.offset),
            (4096, 8192, 128)
        );
        for bad in [
            "",
            "1:2",
            "1:2:3:4",
            "0:0:0",
            "x:1:1",
            "1:18446744073709551615:0",
            "0xffffffffffffffff:2:0",
            "0:4096:0x7fffffffffffffff",
        ] {
            assert!(bad.parse::<Region>().is_err(), "{bad}");
        }
    }

    /// Two regions that lie the other way round in the file: all of both is as in the image, and what
    /// is around them is not touched.
    #[test]
    fn a_file_becomes_as_the_image_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let (image, file) = (folder.path().join("image"), folder.path().join("file"));
        let source = File::create(&image).expect("an image");
        source.set_len(16 * PAGE).expect("sized");
        source.write_all_at(&[1; 4096], PAGE).expect("written");
        source.write_all_at(&[2; 8192], 10 * PAGE).expect("written");
        std::fs::write(&file, vec![9; 20 * PAGE as usize]).expect("scribbled");
        let regions = [region("0:16384:0x8000"), region("0x8000:0x8000:0")];
        let restored = restore(&image, &file, &regions).expect("restored");
        assert_eq!(
            (restored.written_bytes, restored.zero_bytes),
            (3 * PAGE, 9 * PAGE)
        );
        let bytes = std::fs::read(&file).expect("read");
        let pages: Vec<u8> = bytes
            .chunks(PAGE as usize)
            .map(|page| {
                assert!(page.iter().all(|byte| *byte == page[0]));
                page[0]
            })
            .collect();
        assert_eq!(
            pages,
            [0, 0, 2, 2, 0, 0, 0, 0, 0, 1, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9]
        );
    }

    #[test]
    fn nothing_is_left_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let (image, file) = (folder.path().join("image"), folder.path().join("file"));
        let source = File::create(&image).expect("an image");
        source.set_len(4 * PAGE).expect("sized");
        source.write_all_at(&[1; 4096], 2 * PAGE).expect("written");
        for (regions, part) in [
            (&["0:8192:0"][..], "not in the regions"),
            (&["0:0x5000:0"], "the image has 16384 bytes"),
            (&["0:0x3000:0", "0x2000:0x2000:0x3000"], "overlap"),
            (&["0:0x2000:0", "0x2000:0x2000:0x1000"], "overlap"),
        ] {
            let regions: Vec<_> = regions.iter().map(|text| region(text)).collect();
            let error = restore(&image, &file, &regions).expect_err("refused");
            assert!(error.contains(part), "{error}");
            assert!(!file.exists());
        }
        // Without regions, all of it, into a new file.
        restore(&image, &file, &[]).expect("restored");
        let bytes = std::fs::read(&file).expect("read");
        assert_eq!(bytes, std::fs::read(&image).expect("read"));
        // It is memory of a guest, for its owner alone.
        assert_eq!(
            std::fs::metadata(&file).expect("there").mode() & 0o777,
            0o600
        );
        // Also over one that was shorter; but nothing is cut off.
        std::fs::write(&file, vec![9; 2 * PAGE as usize]).expect("scribbled");
        restore(&image, &file, &[]).expect("restored");
        let bytes = std::fs::read(&file).expect("read");
        assert_eq!(bytes, std::fs::read(&image).expect("read"));
        std::fs::write(&file, vec![9; 6 * PAGE as usize]).expect("scribbled");
        let error = restore(&image, &file, &[]).expect_err("refused");
        assert!(error.contains("is not cut"), "{error}");
        assert_eq!(std::fs::metadata(&file).expect("there").len(), 6 * PAGE);
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let (image, file) = (folder.path().join("image"), folder.path().join("file"));
        std::fs::write(&image, "").expect("written");
        for none in [image.as_path(), folder.path(), Path::new("/dev/null")] {
            let error = restore(none, &file, &[]).expect_err("refused");
            assert!(error.contains("an image is a file"), "{error}");
            assert!(!file.exists());
        }
        std::fs::write(&image, vec![1; PAGE as usize]).expect("written");
        for (none, part) in [
            (image.as_path(), "the image itself"),
            (Path::new("/dev/null"), "not a file"),
        ] {
            let error = restore(&image, none, &[]).expect_err("refused");
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(std::fs::read(&image).expect("read"), vec![1; PAGE as usize]);
    }
}
