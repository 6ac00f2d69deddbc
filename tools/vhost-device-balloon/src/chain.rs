// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Descriptor chains of any shape, bounded.

use std::ops::Deref;

use balloon_wire::wire::BITMAP_BYTES_MAX;
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, GuestAddress, GuestMemory, GuestMemoryMmap};

use crate::ranges::Range;
use crate::refusal::Refusal;

/// The most bytes a request may have: the largest bitmap and as much again for more records. It
/// bounds for how long one request can keep a queue from being stopped.
pub const BYTES_MAX: usize = 2 * BITMAP_BYTES_MAX as usize;

/// Who may write the buffers of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The guest gives data.
    Readable,
    /// The guest gives room.
    Writable,
}

/// A chain whose descriptors all have one direction. Whether they lie in guest memory is not known
/// before they are used.
#[derive(Debug)]
pub struct Chain {
    head: u16,
    pieces: Vec<(GuestAddress, u32)>,
}

impl Direction {
    /// That of a chain's first descriptor; an empty one counts as readable.
    pub fn of<M>(chain: &DescriptorChain<M>) -> Self
    where
        M: Deref + Clone,
        M::Target: GuestMemory,
    {
        match chain.clone().next() {
            Some(descriptor) if descriptor.is_write_only() => Self::Writable,
            _ => Self::Readable,
        }
    }
}

impl Chain {
    /// Follows a chain to its end.
    ///
    /// # Errors
    ///
    /// If it is empty, does not end, or has a descriptor of another direction.
    pub fn walk<M>(chain: DescriptorChain<M>, direction: Direction) -> Result<Self, Refusal>
    where
        M: Deref,
        M::Target: GuestMemory,
    {
        let head = chain.head_index();
        let mut pieces = Vec::new();
        let mut last: Option<Descriptor> = None;
        // The iterator stops after as many descriptors as the table has, and after 4 GiB.
        for (index, descriptor) in chain.enumerate() {
            let writable = descriptor.is_write_only();
            if writable != (direction == Direction::Writable) {
                return Err(Refusal::ChainDirection {
                    head,
                    index,
                    writable,
                });
            }
            pieces.push((descriptor.addr(), descriptor.len()));
            last = Some(descriptor);
        }
        match last {
            None => Err(Refusal::ChainEmpty { head }),
            // It stopped although there is a next one.
            Some(descriptor) if descriptor.has_next() => Err(Refusal::ChainEndless {
                head,
                count: pieces.len(),
            }),
            Some(_) => Ok(Self { head, pieces }),
        }
    }

    /// Replaces `buffer` by the bytes of the chain.
    ///
    /// # Errors
    ///
    /// If there are too many, or some are not in guest memory.
    pub fn read(&self, memory: &GuestMemoryMmap, buffer: &mut Vec<u8>) -> Result<(), Refusal> {
        buffer.clear();
        let bytes = self.pieces.iter().map(|(_, len)| u64::from(*len)).sum();
        if bytes > BYTES_MAX as u64 {
            return Err(Refusal::ChainBytes {
                head: self.head,
                bytes,
                max: BYTES_MAX,
            });
        }
        for (index, (addr, len)) in self.pieces.iter().enumerate() {
            let start = buffer.len();
            buffer.resize(start + *len as usize, 0);
            let into = buffer.get_mut(start..).unwrap_or_default();
            memory
                .read_slice(into, *addr)
                .map_err(|_| self.outside(index, *addr, *len))?;
        }
        Ok(())
    }

    /// What is wrong with a piece that is not in guest memory.
    fn outside(&self, index: usize, addr: GuestAddress, len: u32) -> Refusal {
        Refusal::ChainMemory {
            head: self.head,
            index,
            addr: addr.0,
            len,
        }
    }

    /// Writes bytes into the chain.
    ///
    /// # Errors
    ///
    /// If there is not enough room, or some of it is not in guest memory.
    pub fn write(&self, memory: &GuestMemoryMmap, bytes: &[u8]) -> Result<(), Refusal> {
        let room = self.pieces.iter().map(|(_, len)| u64::from(*len)).sum();
        if room < bytes.len() as u64 {
            return Err(Refusal::RequestRoom {
                head: self.head,
                room,
                len: bytes.len(),
            });
        }
        let mut rest = bytes;
        for (index, (addr, len)) in self.pieces.iter().enumerate() {
            let (part, after) = rest.split_at(rest.len().min(*len as usize));
            memory
                .write_slice(part, *addr)
                .map_err(|_| self.outside(index, *addr, *len))?;
            rest = after;
        }
        Ok(())
    }

    /// The addresses of the chain.
    ///
    /// # Errors
    ///
    /// If one of them ends beyond 64 bits.
    pub fn ranges(&self) -> Result<Vec<Range>, Refusal> {
        let range = |(index, (addr, len)): (usize, &(GuestAddress, u32))| {
            let end = addr.0.checked_add(u64::from(*len));
            let end = end.ok_or_else(|| self.outside(index, *addr, *len))?;
            Ok(Range { start: addr.0, end })
        };
        self.pieces.iter().enumerate().map(range).collect()
    }
}
