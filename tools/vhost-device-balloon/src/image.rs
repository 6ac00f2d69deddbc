// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Writes guest memory down: a sparse file in which the byte at guest physical address A is at
//! offset A. Pages that need not be kept, and pages of zeros, are holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use vm_memory::{Bytes as _, GuestAddress};

use crate::page_set::PageSet;
use crate::ram::Ram;
use crate::ranges::Range;

/// What is read at a time.
const PIECE: u64 = 1 << 20;
/// What is a hole if it is all zeros: a page of most file systems.
const GRAIN: usize = 4096;
const ZEROS: [u8; GRAIN] = [0; GRAIN];

/// What is in an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Bytes written.
    pub data: u64,
    /// Bytes left out because nobody needs them.
    pub skipped: u64,
    /// Bytes left out because they are zeros.
    pub zeros: u64,
}

/// Writes all of `ram` into an empty file, but for the pages in `skip`.
///
/// # Errors
///
/// As reading memory and writing files.
pub fn write(ram: &Ram, skip: &PageSet, file: &File) -> io::Result<Written> {
    let mut image = Image {
        ram,
        file,
        buffer: Vec::new(),
        allocated: Range { start: 0, end: 0 },
        written: Written::default(),
    };
    let mut end = 0;
    for region in ram.ranges() {
        image.allocated = ram.data(region);
        let mut at = region.start;
        for skipped in skip.ranges(region.start) {
            let skipped = skipped.and(region);
            if skipped.is_empty() {
                break;
            }
            let kept = Range {
                start: at,
                end: skipped.start,
            };
            image.copy(kept, region)?;
            image.written.skipped += skipped.len();
            at = skipped.end;
        }
        let kept = Range {
            start: at,
            end: region.end,
        };
        image.copy(kept, region)?;
        end = region.end;
    }
    // The last pages may be a hole.
    file.set_len(end)?;
    Ok(image.written)
}

struct Image<'a> {
    ram: &'a Ram,
    file: &'a File,
    buffer: Vec<u8>,
    /// What the host has allocated of the region from here on: found once for many ranges, since the
    /// host looks at each page of it.
    allocated: Range,
    written: Written,
}

impl Image<'_> {
    /// Copies a range of a region, but for what the host has not allocated: that is zeros. Ranges
    /// come in ascending order.
    fn copy(&mut self, range: Range, region: Range) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            if self.allocated.end <= at {
                self.allocated = self.ram.data(Range {
                    start: at,
                    end: region.end,
                });
            }
            let start = self.allocated.start.clamp(at, range.end);
            let end = self.allocated.end.clamp(start, range.end);
            self.written.zeros += start - at;
            at = start;
            while at < end {
                let len = PIECE.min(end - at);
                self.copy_piece(at, len)?;
                at += len;
            }
        }
        Ok(())
    }

    fn copy_piece(&mut self, at: u64, len: u64) -> io::Result<()> {
        self.buffer.resize(len as usize, 0);
        self.ram
            .memory()
            .read_slice(&mut self.buffer, GuestAddress(at))
            .map_err(io::Error::other)?;
        let Self {
            file,
            buffer,
            written,
            ..
        } = self;
        // As one comparison of memory, which is much faster than a look at each byte.
        let is_zero = |grain: &&[u8]| ZEROS.starts_with(grain);
        let mut grains = buffer.chunks(GRAIN).peekable();
        let mut from = 0;
        while let Some(first) = grains.next() {
            let zero = is_zero(&first);
            let mut to = from + first.len();
            while let Some(grain) = grains.next_if(|grain| is_zero(grain) == zero) {
                to += grain.len();
            }
            if zero {
                written.zeros += (to - from) as u64;
            } else {
                let bytes = buffer.get(from..to).unwrap_or_default();
                file.write_all_at(bytes, at + from as u64)?;
                written.data += bytes.len() as u64;
            }
            from = to;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use vm_memory::{FileOffset, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

    use super::*;

    const PAGE: u64 = 4096;
    /// Pages of a region.
    const PAGES: u64 = 24;
    /// Where the second region begins, and where it is in the file.
    const HIGH: u64 = 1 << 20;
    const OFFSET: u64 = PAGES * PAGE;

    /// Memory in two regions of one file, and the file.
    fn memory() -> (GuestMemoryMmap, File) {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
        file.set_len(2 * OFFSET).expect("sized");
        let kept = file.try_clone().expect("a file");
        let file = Arc::new(file);
        let regions = [(0, 0), (HIGH, OFFSET)].map(|(addr, offset)| {
            let offset = FileOffset::from_arc(Arc::clone(&file), offset);
            let mapping = MmapRegion::from_file(offset, OFFSET as usize).expect("mapped");
            GuestRegionMmap::new(mapping, GuestAddress(addr)).expect("a region")
        });
        let memory = GuestMemoryMmap::from_regions(regions.into()).expect("memory");
        (memory, kept)
    }

    /// What a page is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Page {
        /// The host has not allocated it.
        Hole,
        /// It is zeros.
        Zeros,
        /// It has something in it.
        Data,
    }

    proptest! {
        /// Whatever is allocated and whatever is left out: the rest is as in memory.
        #[test]
        fn all_that_is_not_left_out_is_there(
            pages in prop::collection::vec(
                (prop::sample::select(&[Page::Hole, Page::Zeros, Page::Data][..]), any::<bool>()),
                2 * PAGES as usize,
            ),
        ) {
            let (memory, file) = memory();
            let mut skip = PageSet::default();
            let address = |i: u64| if i < PAGES { i * PAGE } else { HIGH + (i - PAGES) * PAGE };
            for (i, (page, skipped)) in (0..).zip(&pages) {
                match page {
                    Page::Hole => {}
                    Page::Zeros => file.write_all_at(&[0; 4096], i * PAGE).expect("written"),
                    Page::Data => file.write_all_at(&[7; 4096], i * PAGE).expect("written"),
                }
                if *skipped {
                    let start = address(i);
                    skip.add(Range { start, end: start + PAGE });
                }
            }
            let ram = Ram::new(&memory).expect("ram");
            let image = tempfile::tempfile().expect("an image");
            let written = write(&ram, &skip, &image).expect("written");
            let mut sums = Written::default();
            for (i, (page, skipped)) in (0..).zip(&pages) {
                let mut bytes = [1; 4096];
                image.read_exact_at(&mut bytes, address(i)).expect("read");
                let data = *page == Page::Data && !skipped;
                prop_assert!(bytes == [if data { 7 } else { 0 }; 4096], "page {}", i);
                match (skipped, data) {
                    (true, _) => sums.skipped += PAGE,
                    (false, true) => sums.data += PAGE,
                    (false, false) => sums.zeros += PAGE,
                }
            }
            prop_assert_eq!(written, sums);
            prop_assert_eq!(image.metadata().expect("its size").len(), HIGH + OFFSET);
        }
    }
}
