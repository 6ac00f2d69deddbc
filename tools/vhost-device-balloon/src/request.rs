// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The bytes of an inflate or deflate request, turned into ranges.

use balloon_wire::bitmap::Runs;
use balloon_wire::wire::{Announcement, BALLOON_PAGE_SHIFT, Header, PFN_BYTES, RecordError};

use crate::features::Protocol;
use crate::ranges::Range;
use crate::refusal::Refusal;

/// How requests are written.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// What was negotiated.
    pub protocol: Protocol,
    /// What the device takes.
    pub limits: Announcement,
}

impl Format {
    /// Reads a request and gives each of its ranges, in the order of the request, to `each`.
    ///
    /// Nothing is given unless the whole request is good. Returns the number of page-bitmap
    /// records.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn read(&self, bytes: &[u8], each: impl FnMut(Range)) -> Result<usize, Refusal> {
        match self.protocol {
            Protocol::PfnArray => read_pfns(bytes, each).map(|()| 0),
            Protocol::PageBitmap => self.read_records(bytes, each),
            Protocol::PageBitmap2016 => match self.records(bytes).next() {
                Some(Ok((header, _))) if bytes.len() > Header::LEN + header.bmap_len as usize => {
                    let record = Header::LEN + header.bmap_len as usize;
                    Err(Refusal::Trailing(bytes.len() - record))
                }
                _ => self.read_records(bytes, each),
            },
        }
    }

    fn read_records(&self, bytes: &[u8], mut each: impl FnMut(Range)) -> Result<usize, Refusal> {
        let mut count = 0;
        for record in self.records(bytes) {
            record?;
            count += 1;
        }
        let mut words = Vec::new();
        for (header, bitmap) in self.records(bytes).flatten() {
            runs(&header, bitmap, &mut words, &mut each);
        }
        Ok(count)
    }

    /// Reads the records of an answer to the host's request `id`, each with a set bit at least.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong; what is before it was given.
    pub fn read_answer(
        &self,
        id: u32,
        bytes: &[u8],
        mut each: impl FnMut(Range),
    ) -> Result<(), Refusal> {
        let mut words = Vec::new();
        for record in self.records_of(id, bytes) {
            let (header, bitmap) = record?;
            let mut any = false;
            runs(&header, bitmap, &mut words, |range| {
                any = true;
                each(range);
            });
            if !any {
                return Err(Refusal::AnswerOrder(id));
            }
        }
        Ok(())
    }

    /// The records of a request up to the first bad one; an empty request is a bad one.
    fn records<'a>(&'a self, bytes: &'a [u8]) -> Records<'a> {
        self.records_of(0, bytes)
    }

    fn records_of<'a>(&'a self, id: u32, bytes: &'a [u8]) -> Records<'a> {
        Records {
            id,
            limits: &self.limits,
            bytes,
            offset: 0,
            count: 0,
            done: false,
        }
    }
}

/// Gives the runs of a record that was checked; `words` is room to work in.
fn runs(header: &Header, bitmap: &[u8], words: &mut Vec<u64>, mut each: impl FnMut(Range)) {
    words.clear();
    words.extend(bitmap.chunks_exact(8).map(|word| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        // Bitmap words are little-endian in memory, as they are on the wire.
        u64::from_ne_bytes(bytes)
    }));
    for run in Runs::new(words) {
        // `Header::check` made sure that these are 64-bit addresses.
        let start = (header.base_pfn + run.start as u64) << header.page_shift;
        let len = (run.len as u64) << header.page_shift;
        each(Range {
            start,
            end: start + len,
        });
    }
}

fn read_pfns(bytes: &[u8], mut each: impl FnMut(Range)) -> Result<(), Refusal> {
    if bytes.is_empty() || bytes.len() % PFN_BYTES != 0 {
        return Err(Refusal::PfnArrayLength(bytes.len()));
    }
    for pfn in bytes.chunks_exact(PFN_BYTES) {
        let mut le = [0; PFN_BYTES];
        le.copy_from_slice(pfn);
        let pfn = u64::from(u32::from_le_bytes(le));
        each(Range {
            start: pfn << BALLOON_PAGE_SHIFT,
            end: (pfn + 1) << BALLOON_PAGE_SHIFT,
        });
    }
    Ok(())
}

struct Records<'a> {
    id: u32,
    limits: &'a Announcement,
    bytes: &'a [u8],
    offset: usize,
    count: usize,
    done: bool,
}

impl<'a> Records<'a> {
    fn take(&mut self) -> Result<(Header, &'a [u8]), RecordError> {
        let rest = self.bytes.get(self.offset..).unwrap_or_default();
        let header = Header::decode(rest)?;
        let body = rest.get(Header::LEN..).unwrap_or_default();
        header.check_of(self.id, self.limits, body.len() as u64)?;
        // `check` made sure that the bitmap is there.
        let bitmap = usize::try_from(header.bmap_len)
            .ok()
            .and_then(|len| body.get(..len))
            .ok_or(RecordError::BmapLen(header.bmap_len))?;
        self.offset += Header::LEN + bitmap.len();
        self.count += 1;
        Ok((header, bitmap))
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<(Header, &'a [u8]), Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done || (self.count != 0 && self.offset == self.bytes.len()) {
            return None;
        }
        let (record, offset) = (self.count, self.offset);
        let item = self.take();
        self.done = item.is_err();
        Some(item.map_err(|error| Refusal::Record {
            record,
            offset,
            error,
        }))
    }
}

#[cfg(test)]
mod tests {
    use balloon_wire::wire;
    use proptest::prelude::*;

    use super::*;
    use crate::refusal::Kind;

    const LIMITS: Announcement = Announcement {
        version: wire::VERSION,
        page_shifts: 1 << 12 | 1 << 21,
        max_bitmap_bytes: 4096,
        block_shift: 21,
        requests: 0,
    };

    fn format(protocol: Protocol) -> Format {
        Format {
            protocol,
            limits: LIMITS,
        }
    }

    fn record(page_shift: u32, base_pfn: u64, words: &[u64]) -> Vec<u8> {
        let header = Header {
            id: 0,
            page_shift,
            base_pfn,
            bmap_len: words.len() as u64 * 8,
        };
        let mut bytes = header.encode().to_vec();
        bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        bytes
    }

    fn read(protocol: Protocol, bytes: &[u8]) -> Result<(usize, Vec<(u64, u64)>), Refusal> {
        let mut ranges = Vec::new();
        let records = format(protocol).read(bytes, |r| ranges.push((r.start, r.end)))?;
        Ok((records, ranges))
    }

    fn refused(protocol: Protocol, bytes: &[u8]) -> Kind {
        let mut given = 0;
        let refusal = format(protocol)
            .read(bytes, |_| given += 1)
            .expect_err("a bad request");
        assert_eq!(given, 0, "a bad request changes nothing");
        refusal.kind()
    }

    #[test]
    fn records_back_to_back() {
        let mut bytes = record(21, 64, &[0b11]);
        bytes.extend(record(12, 0, &[1 << 63, 1]));
        let (records, ranges) = read(Protocol::PageBitmap, &bytes).expect("good");
        assert_eq!(records, 2);
        assert_eq!(
            ranges,
            [(64 << 21, 66 << 21), (63 << 12, 65 << 12)],
            "runs cross words"
        );
    }

    #[test]
    fn the_proposal_of_2016_has_one_record() {
        let mut bytes = record(12, 0, &[1]);
        assert!(read(Protocol::PageBitmap2016, &bytes).is_ok());
        bytes.extend(record(12, 64, &[1]));
        assert_eq!(refused(Protocol::PageBitmap2016, &bytes), Kind::Trailing);
        assert_eq!(
            refused(Protocol::PageBitmap2016, &[0; 8]),
            Kind::HeaderShort
        );
    }

    #[test]
    fn one_bad_record_refuses_the_request() {
        let good = record(12, 0, &[u64::MAX]);
        for (at, value, kind) in [
            (0, 1, Kind::RecordId),
            (4, 13, Kind::PageShift),
            (4, 0xff, Kind::PageShift),
            (15, 0xff, Kind::BasePfn),
            (16, 0, Kind::BmapLen),
            (16, 7, Kind::BmapLen),
            (17, 0x20, Kind::BmapLen),
            (23, 0x80, Kind::BmapLen),
            (16, 16, Kind::Truncated),
        ] {
            let mut bytes = good.clone();
            bytes.extend(&good);
            let at_second = good.len() + at;
            bytes[at_second] = value;
            assert_eq!(refused(Protocol::PageBitmap, &bytes), kind, "{at} {value}");
        }
        assert_eq!(refused(Protocol::PageBitmap, &[]), Kind::HeaderShort);
        assert_eq!(
            refused(Protocol::PageBitmap, &good[..23]),
            Kind::HeaderShort
        );
        let mut bytes = good.clone();
        bytes.push(0);
        assert_eq!(refused(Protocol::PageBitmap, &bytes), Kind::HeaderShort);
    }

    #[test]
    fn page_frame_numbers() {
        let bytes: Vec<u8> = [3u32, 2, u32::MAX]
            .iter()
            .flat_map(|p| p.to_le_bytes())
            .collect();
        let (records, ranges) = read(Protocol::PfnArray, &bytes).expect("good");
        assert_eq!(records, 0);
        assert_eq!(
            ranges,
            [
                (3 << 12, 4 << 12),
                (2 << 12, 3 << 12),
                (0xffff_ffff << 12, 1 << 44)
            ]
        );
        assert_eq!(refused(Protocol::PfnArray, &[]), Kind::PfnArrayLength);
        assert_eq!(
            refused(Protocol::PfnArray, &bytes[..7]),
            Kind::PfnArrayLength
        );
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for protocol in [Protocol::PageBitmap, Protocol::PageBitmap2016, Protocol::PfnArray] {
                let _ = read(protocol, &bytes);
            }
        }

        /// Headers that are nearly right get further than random bytes.
        #[test]
        fn bitmaps_against_a_model(
            list in prop::collection::vec(
                (prop::sample::select(vec![12u32, 21]), any::<u64>(), prop::collection::vec(any::<u64>(), 1..4)),
                1..4,
            ),
        ) {
            let mut bytes = Vec::new();
            let mut points = Vec::new();
            for (shift, base, words) in &list {
                let base = base >> 24;
                bytes.extend(record(*shift, base, words));
                for (i, word) in words.iter().enumerate() {
                    for bit in 0..64 {
                        if word >> bit & 1 == 1 {
                            points.push((base + i as u64 * 64 + bit) << shift);
                        }
                    }
                }
            }
            let mut found = Vec::new();
            let result = format(Protocol::PageBitmap).read(&bytes, |r| found.push(r));
            prop_assert_eq!(result.ok(), Some(list.len()));
            let total: u128 = found.iter().map(|r| u128::from(r.len())).sum();
            let mut next = found.iter().peekable();
            for point in points {
                while next.peek().is_some_and(|r| !(r.start..r.end).contains(&point)) {
                    next.next();
                }
                prop_assert!(next.peek().is_some());
            }
            let expected: u128 = list.iter().map(|(shift, _, words)| {
                words.iter().map(|w| u128::from(w.count_ones())).sum::<u128>() << shift
            }).sum();
            prop_assert_eq!(total, expected);
        }
    }
}
