// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The guest's memory statistics.

use std::collections::BTreeMap;

use crate::refusal::Refusal;

/// Size of one statistic: le16 tag, le64 value.
const ENTRY_BYTES: usize = 10;
/// The most that is taken at a time, in bytes.
pub const BYTES_MAX: usize = 64 * ENTRY_BYTES;

/// Names by tag, from the virtio specification.
const NAMES: [&str; 16] = [
    "swap-in",
    "swap-out",
    "major-faults",
    "minor-faults",
    "free-memory",
    "total-memory",
    "available-memory",
    "disk-caches",
    "hugetlb-allocations",
    "hugetlb-failures",
    "oom-kills",
    "alloc-stalls",
    "async-scans",
    "direct-scans",
    "async-reclaims",
    "direct-reclaims",
];

/// Reads statistics; of a tag that comes twice, the last value counts.
///
/// # Errors
///
/// If it is no whole number of statistics, or too many.
pub fn read(bytes: &[u8]) -> Result<BTreeMap<String, u64>, Refusal> {
    if bytes.len() % ENTRY_BYTES != 0 || bytes.len() > BYTES_MAX {
        return Err(Refusal::StatsLength(bytes.len()));
    }
    let entries = bytes.chunks_exact(ENTRY_BYTES).map(|entry| {
        let (mut tag, mut value) = ([0; 2], [0; 8]);
        let (t, v) = entry.split_at(2);
        tag.copy_from_slice(t);
        value.copy_from_slice(v);
        let tag = u16::from_le_bytes(tag);
        let name = match NAMES.get(usize::from(tag)) {
            Some(name) => (*name).to_owned(),
            None => format!("tag-{tag}"),
        };
        (name, u64::from_le_bytes(value))
    });
    Ok(entries.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_by_name() {
        let bytes = [
            4, 0, 1, 2, 0, 0, 0, 0, 0, 0, //
            0xe8, 3, 0, 0, 0, 0, 0, 0, 0, 0x80,
        ];
        let stats = read(&bytes).expect("good");
        assert_eq!(stats.get("free-memory"), Some(&0x201));
        assert_eq!(stats.get("tag-1000"), Some(&(1 << 63)));
        assert_eq!(stats.len(), 2);
        assert!(read(&bytes[1..]).is_err());
        assert!(read(&[0; BYTES_MAX + ENTRY_BYTES]).is_err());
        assert!(read(&[]).is_ok());
    }
}
