// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The guest's memory, and giving parts of it back to the host.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use balloon_control::message::{MemoryStatus, RegionStatus};
use rustix::fs::{FallocateFlags, FileType, SeekFrom, fallocate, fstat, fstatfs, seek};
use vm_memory::{
    Address as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
};

use crate::ranges::Range;
use crate::refusal::Refusal;
use crate::sys::{self, Advise};

/// `f_type` of hugetlbfs.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The most regions that people see; a frontend can have hundreds, and an answer has its limit.
pub(crate) const REGIONS_SHOWN: usize = 128;

/// Whether deflated memory is made ready before the guest uses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Prefetch {
    /// No: it comes when it is touched.
    #[default]
    Off,
    /// Ask the host to bring it in (MADV_WILLNEED); swapped or file-backed memory profits.
    Willneed,
    /// Have it there (MADV_POPULATE_WRITE), in the time of the request.
    Populate,
}

/// What becomes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Discard,
    Prefetch(Advise),
}

/// What came of ranges of memory.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Bytes of them that are guest memory.
    pub inside: u64,
    /// Bytes of them that were dealt with.
    pub done: u64,
    /// Bytes left alone because they are only a part of a host page.
    pub partial: u64,
    /// System calls made.
    pub calls: u64,
    /// Time these took.
    pub time: Duration,
    /// Bytes that are not guest memory, and the address of the first.
    outside: Option<(u64, u64)>,
    /// The first failure: address, bytes, reason.
    failed: Option<(u64, u64, io::Error)>,
    prefetch: bool,
}

impl Outcome {
    /// What was refused or failed, each kind once.
    pub fn refusals(self) -> impl Iterator<Item = Refusal> {
        let outside = self
            .outside
            .map(|(addr, bytes)| Refusal::OutsideRam { addr, bytes });
        let prefetch = self.prefetch;
        let failed = self.failed.map(|(addr, bytes, error)| match prefetch {
            false => Refusal::Discard { addr, bytes, error },
            true => Refusal::Prefetch { addr, bytes, error },
        });
        outside.into_iter().chain(failed)
    }

    fn note_outside(&mut self, part: Range) {
        if !part.is_empty() {
            let (_, bytes) = self.outside.get_or_insert((part.start, 0));
            *bytes = bytes.saturating_add(part.len());
        }
    }
}

/// The guest's memory as the daemon has mapped it.
#[derive(Debug, Default)]
pub struct Ram {
    memory: GuestMemoryMmap,
    regions: Vec<Region>,
}

#[derive(Debug)]
struct Region {
    range: Range,
    /// Where it is mapped, only to know its alignment.
    host_addr: u64,
    /// The file behind shared memory, and where in it the region begins.
    file: Option<(Arc<File>, u64)>,
    host_page: u64,
}

impl Ram {
    /// Takes a look at memory.
    ///
    /// # Errors
    ///
    /// If a region goes beyond the end of its file, or the host's page size for it cannot be found
    /// out.
    pub fn new(memory: &GuestMemoryMmap) -> io::Result<Self> {
        let mut regions = Vec::new();
        for region in memory.iter() {
            let start = region.start_addr().raw_value();
            let file = region
                .file_offset()
                .map(|offset| (Arc::clone(offset.arc()), offset.start()));
            if let Some((file, offset)) = &file {
                check_size(file, *offset, region.len(), start)?;
            }
            let host_page = match &file {
                Some((file, _)) => host_page(file)?,
                None => rustix::param::page_size() as u64,
            };
            regions.push(Region {
                range: Range {
                    start,
                    end: start.saturating_add(region.len()),
                },
                host_addr: region.as_ptr().addr() as u64,
                file,
                host_page,
            });
        }
        regions.sort_by_key(|r| r.range.start);
        Ok(Self {
            memory: memory.clone(),
            regions,
        })
    }

    /// The mappings.
    pub const fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Size of all regions, in bytes.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|r| r.range.len()).sum()
    }

    /// What people see of it.
    pub fn status(&self) -> MemoryStatus {
        let region = |r: &Region| RegionStatus {
            guest_addr: r.range.start,
            bytes: r.range.len(),
            backing: if r.file.is_some() {
                "shared".to_owned()
            } else {
                "private".to_owned()
            },
            host_page_bytes: r.host_page,
            file_offset: r.file.as_ref().map(|(_, offset)| *offset),
        };
        MemoryStatus {
            bytes: self.bytes(),
            regions: self
                .regions
                .iter()
                .take(REGIONS_SHOWN)
                .map(region)
                .collect(),
            regions_left_out: self.regions.len().saturating_sub(REGIONS_SHOWN),
        }
    }

    /// The parts of a range that are guest memory.
    pub fn inside(&self, range: Range) -> impl Iterator<Item = Range> + '_ {
        let first = self.regions.partition_point(|r| r.range.end <= range.start);
        let regions = self.regions.iter().skip(first);
        regions
            .map(move |region| range.and(region.range))
            .take_while(|part| !part.is_empty())
    }

    /// All guest memory, region by region.
    pub fn ranges(&self) -> impl Iterator<Item = Range> + '_ {
        self.regions.iter().map(|region| region.range)
    }

    /// The first part of a range within one region that the host has allocated, or an empty one at
    /// its end. What is before that reads as zeros.
    ///
    /// The host looks at each page of that part: whoever wants to know about many small ranges should
    /// ask once, not for each.
    pub fn data(&self, range: Range) -> Range {
        let none = Range {
            start: range.end,
            end: range.end,
        };
        let region = self.regions.iter().find(|region| {
            let within = range.and(region.range);
            within == range
        });
        let Some((region, (file, offset))) = region.and_then(|r| Some((r, r.file.as_ref()?)))
        else {
            return range;
        };
        let to_file = |addr: u64| addr - region.range.start + offset;
        let to_guest = |at: u64| at.saturating_sub(*offset) + region.range.start;
        // On a description of our own: the position of the other is the frontend's.
        let Ok(file) = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())) else {
            return range;
        };
        let start = match seek(&file, SeekFrom::Data(to_file(range.start))) {
            Ok(at) => to_guest(at),
            Err(rustix::io::Errno::NXIO) => return none,
            Err(_) => return range,
        };
        if start >= range.end {
            return none;
        }
        let end = seek(&file, SeekFrom::Hole(to_file(start))).map_or(range.end, to_guest);
        Range {
            start,
            end: end.min(range.end),
        }
    }

    /// Looks how much of merged ranges is guest memory.
    pub fn look(&self, ranges: &[Range]) -> Outcome {
        self.each(ranges, None)
    }

    /// Gives merged ranges back to the host, in one call for each and region. What is not guest
    /// memory is skipped, and so are parts of host pages.
    pub fn discard(&self, ranges: &[Range]) -> Outcome {
        self.each(ranges, Some(Fate::Discard))
    }

    /// Makes merged ranges ready for use.
    pub fn prefetch(&self, ranges: &[Range], how: Prefetch) -> Outcome {
        let fate = match how {
            Prefetch::Off => None,
            Prefetch::Willneed => Some(Fate::Prefetch(Advise::WillNeed)),
            Prefetch::Populate => Some(Fate::Prefetch(Advise::Populate)),
        };
        self.each(ranges, fate)
    }

    fn each(&self, ranges: &[Range], fate: Option<Fate>) -> Outcome {
        let mut outcome = Outcome {
            prefetch: fate != Some(Fate::Discard),
            ..Outcome::default()
        };
        for range in ranges {
            let mut rest = *range;
            let first = self.regions.partition_point(|r| r.range.end <= rest.start);
            for region in self.regions.iter().skip(first) {
                let part = rest.and(region.range);
                if part.is_empty() {
                    break;
                }
                outcome.note_outside(Range {
                    start: rest.start,
                    end: part.start,
                });
                outcome.inside += part.len();
                if let Some(fate) = fate {
                    region.treat(&self.memory, part, fate, &mut outcome);
                }
                rest.start = part.end;
            }
            outcome.note_outside(rest);
        }
        outcome
    }
}

impl Region {
    /// Where an address of the region lies on the host, for alignment: in the file or in memory.
    fn anchor(&self) -> u64 {
        match &self.file {
            Some((_, offset)) => *offset,
            None => self.host_addr,
        }
    }

    /// The whole host pages in a part of the region.
    fn whole_pages(&self, part: Range) -> Range {
        let anchor = self.anchor() % self.host_page;
        let into = |addr: u64| anchor + (addr - self.range.start);
        let up = into(part.start).next_multiple_of(self.host_page);
        let down = into(part.end) / self.host_page * self.host_page;
        if up >= down {
            return Range {
                start: part.start,
                end: part.start,
            };
        }
        Range {
            start: self.range.start + (up - anchor),
            end: self.range.start + (down - anchor),
        }
    }

    fn treat(&self, memory: &GuestMemoryMmap, part: Range, fate: Fate, outcome: &mut Outcome) {
        let whole = self.whole_pages(part);
        outcome.partial += part.len() - whole.len();
        if whole.is_empty() {
            return;
        }
        let offset = whole.start - self.range.start;
        let begun = Instant::now();
        let advise = |what| match memory.find_region(GuestAddress(self.range.start)) {
            Some(region) => sys::advise(region, offset, whole.len(), what),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        let result = match (fate, &self.file) {
            (Fate::Discard, Some((file, start))) => punch(file, start + offset, whole.len()),
            (Fate::Discard, None) => advise(Advise::DontNeed),
            (Fate::Prefetch(how), _) => advise(how),
        };
        outcome.time += begun.elapsed();
        outcome.calls += 1;
        match result {
            Ok(()) => outcome.done += whole.len(),
            Err(error) => {
                outcome
                    .failed
                    .get_or_insert((whole.start, whole.len(), error));
            }
        }
    }
}

fn punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::io::retry_on_intr(|| fallocate(file, how, offset, len))?;
    Ok(())
}

/// Makes sure that a file has the bytes of a region: access beyond its end kills the process
/// (SIGBUS). That the frontend makes it shorter later cannot be helped.
fn check_size(file: &File, offset: u64, bytes: u64, guest_addr: u64) -> io::Result<()> {
    let stat = fstat(file)?;
    // A device has no size.
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(());
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    match offset.checked_add(bytes) {
        Some(end) if end <= size => Ok(()),
        _ => Err(io::Error::other(format!(
            "the memory region at {guest_addr:#x} has {bytes} bytes from offset {offset} on, its \
             file only {size}"
        ))),
    }
}

/// Size of the pages that a file gives back whole.
fn host_page(file: &File) -> io::Result<u64> {
    let fs = fstatfs(file)?;
    // The width of the field differs between architectures; only its low 32 bits mean something.
    if fs.f_type as u64 & 0xffff_ffff == HUGETLBFS_MAGIC {
        return Ok((fs.f_bsize as u64).max(1));
    }
    Ok(rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes as _, FileOffset, GuestRegionMmap, MmapRegion};

    use super::*;

    const PAGE: u64 = 4096;

    fn shared(regions: &[(u64, usize, u64)]) -> GuestMemoryMmap {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
        file.set_len(1 << 24).expect("sized");
        let file = Arc::new(file);
        let regions = regions.iter().map(|(addr, len, offset)| {
            let offset = FileOffset::from_arc(Arc::clone(&file), *offset);
            let mapping = MmapRegion::from_file(offset, *len).expect("mapped");
            GuestRegionMmap::new(mapping, GuestAddress(*addr)).expect("a region")
        });
        GuestMemoryMmap::from_regions(regions.collect()).expect("memory")
    }

    fn private(regions: &[(u64, usize)]) -> GuestMemoryMmap {
        let regions: Vec<_> = regions
            .iter()
            .map(|(a, l)| (GuestAddress(*a), *l))
            .collect();
        GuestMemoryMmap::from_ranges(&regions).expect("memory")
    }

    fn fill(memory: &GuestMemoryMmap) {
        for region in memory.iter() {
            let bytes = vec![0xa5; region.len() as usize];
            memory
                .write_slice(&bytes, region.start_addr())
                .expect("written");
        }
    }

    fn byte(memory: &GuestMemoryMmap, addr: u64) -> u8 {
        memory.read_obj(GuestAddress(addr)).expect("read")
    }

    fn range(start: u64, end: u64) -> Range {
        Range { start, end }
    }

    /// Checks that of all memory exactly `gone` reads as zero.
    fn only(memory: &GuestMemoryMmap, gone: &[Range]) {
        for region in memory.iter() {
            let start = region.start_addr().raw_value();
            for addr in (start..start + region.len()).step_by(PAGE as usize) {
                let zero = gone.iter().any(|r| (r.start..r.end).contains(&addr));
                for at in [addr, addr + PAGE - 1] {
                    assert_eq!(byte(memory, at) == 0, zero, "at {at:#x}");
                }
            }
        }
    }

    #[test]
    fn a_discard_takes_what_it_is_told_and_no_more() {
        for memory in [shared(&[(0, 1 << 20, 0)]), private(&[(0, 1 << 20)])] {
            fill(&memory);
            let ram = Ram::new(&memory).expect("ram");
            let ranges = [range(PAGE, 3 * PAGE), range(10 * PAGE, 11 * PAGE)];
            let outcome = ram.discard(&ranges);
            assert_eq!((outcome.done, outcome.calls), (3 * PAGE, 2));
            assert_eq!((outcome.inside, outcome.partial), (3 * PAGE, 0));
            assert_eq!(outcome.refusals().count(), 0);
            only(&memory, &ranges);
        }
    }

    #[test]
    fn regions_split_a_range_and_offsets_are_kept() {
        // Neighbours in the guest, far apart and swapped in the file, then a hole.
        let memory = shared(&[
            (0, 0x4000, 0x80_0000),
            (0x4000, 0x4000, 0x10_0000),
            (0x10_0000, 0x4000, 0x3000),
        ]);
        fill(&memory);
        let ram = Ram::new(&memory).expect("ram");
        let outcome = ram.discard(&[range(0x3000, 0x10_1000)]);
        assert_eq!(outcome.calls, 3);
        assert_eq!(outcome.done, 0x1000 + 0x4000 + 0x1000);
        let refusals: Vec<_> = outcome.refusals().collect();
        assert!(matches!(
            refusals[..],
            [Refusal::OutsideRam {
                addr: 0x8000,
                bytes: 0xf_8000
            }]
        ));
        only(
            &memory,
            &[range(0x3000, 0x8000), range(0x10_0000, 0x10_1000)],
        );
    }

    #[test]
    fn parts_of_host_pages_stay() {
        for memory in [
            shared(&[(0x1000, 0x8000, 0x2000)]),
            private(&[(0x1000, 0x8000)]),
        ] {
            fill(&memory);
            let ram = Ram::new(&memory).expect("ram");
            let outcome = ram.discard(&[range(0x1800, 0x3fff), range(0x5001, 0x5fff)]);
            assert_eq!((outcome.done, outcome.calls), (0x1000, 1));
            assert_eq!(outcome.partial, 0x800 + 0xfff + 0xffe);
            only(&memory, &[range(0x2000, 0x3000)]);
        }
    }

    #[test]
    fn far_away_addresses_are_skipped() {
        let memory = private(&[(0x1000, 0x1000)]);
        fill(&memory);
        let ram = Ram::new(&memory).expect("ram");
        let outcome = ram.discard(&[range(0, 0x1000), range(0x2000, u64::MAX)]);
        assert_eq!((outcome.done, outcome.inside, outcome.calls), (0, 0, 0));
        assert_eq!(outcome.refusals().count(), 1);
        only(&memory, &[]);
        assert_eq!(Ram::default().discard(&[range(0, u64::MAX)]).calls, 0);
    }

    #[test]
    fn huge_host_pages_are_given_back_whole() {
        let memory = shared(&[(0, 1 << 20, 0)]);
        let mut ram = Ram::new(&memory).expect("ram");
        ram.regions[0].host_page = 0x1_0000;
        fill(&memory);
        let outcome = ram.discard(&[range(0x8000, 0x3_8000)]);
        assert_eq!((outcome.done, outcome.partial), (0x2_0000, 0x1_0000));
        only(&memory, &[range(0x1_0000, 0x3_0000)]);
    }

    #[test]
    fn prefetching_keeps_the_content() {
        for memory in [shared(&[(0, 1 << 20, 0)]), private(&[(0, 1 << 20)])] {
            fill(&memory);
            let ram = Ram::new(&memory).expect("ram");
            let all = [range(0, 1 << 20)];
            assert_eq!(ram.prefetch(&all, Prefetch::Off).calls, 0);
            for how in [Prefetch::Willneed, Prefetch::Populate] {
                let outcome = ram.prefetch(&all, how);
                assert_eq!((outcome.done, outcome.calls), (1 << 20, 1), "{how:?}");
            }
            only(&memory, &[]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn random_ranges_against_a_model(list in prop::collection::vec((0..80u64, 0..9u64), 0..8)) {
            let memory = shared(&[(0x4000, 0x10000, 0x5000), (0x20000, 0x10000, 0x40000)]);
            fill(&memory);
            let ram = Ram::new(&memory).expect("ram");
            let mut ranges = crate::ranges::Ranges::default();
            for (start, len) in list {
                ranges.push(range(start * PAGE / 2, (start + len) * PAGE / 2));
            }
            let ranges = ranges.merge();
            ram.discard(ranges);
            let whole: Vec<_> = ranges.iter().map(|r| range(
                r.start.next_multiple_of(PAGE),
                r.end / PAGE * PAGE,
            )).collect();
            only(&memory, &whole);
        }
    }
}
