// SPDX-License-Identifier: GPL-2.0

//! Memory that a device reads or writes.

use core::ops::Range;
use kernel::{
    alloc::Flags,
    bindings,
    prelude::*, //
};

/// A part of a message: kmalloc'ed words, and which of their bytes the device gets.
struct Piece {
    words: KVec<u64>,
    sent: Range<usize>,
}

/// Memory that a device reads, or writes, in pieces, and what the driver wants to know when it comes back.
///
/// All memory is allocated when the message is made. It is in the kernel's linear map, since
/// [`KVec`] is backed by `kmalloc()`, and it does not move, nor does the driver read or write it, while a
/// queue has the message: the queue owns it then.
pub(crate) struct Message<T> {
    pieces: KVec<Piece>,
    table: KVec<bindings::scatterlist>,
    /// Whether it is the device that writes.
    writable: bool,
    /// How many bytes the device says to have written.
    written: usize,
    /// What the driver wants to know when the message comes back.
    pub(crate) cargo: T,
    /// The next one in a chain of messages that were taken back from a deleted queue.
    pub(super) next: Option<KBox<Message<T>>>,
}

// SAFETY: The scatter list is only looked at under the lock of the queue that owns the message; the
// pages it points at belong to `pieces`.
unsafe impl<T: Send> Send for Message<T> {}

impl<T> Message<T> {
    /// The largest piece, in words: 32 KiB, so that no allocation is above order 3.
    pub(crate) const PIECE_WORDS: usize = 4096;

    /// Allocates a message with pieces of `lengths` words each, of which nothing is sent yet.
    ///
    /// Allocates as `flags` say.
    pub(crate) fn new(
        lengths: impl Iterator<Item = usize>,
        cargo: T,
        flags: Flags,
    ) -> Result<KBox<Self>> {
        let mut pieces = KVec::new();
        let mut table = KVec::new();

        for words in lengths {
            if words > Self::PIECE_WORDS {
                return Err(EINVAL);
            }
            pieces.push(
                Piece {
                    words: KVec::zeroed(words, flags)?,
                    sent: 0..0,
                },
                flags,
            )?;
            table.push(bindings::scatterlist::default(), flags)?;
        }
        Ok(KBox::new(
            Self {
                pieces,
                table,
                writable: false,
                written: 0,
                cargo,
                next: None,
            },
            flags,
        )?)
    }

    /// Allocates a message of `words` words for the device to write.
    ///
    /// Allocates as `flags` say.
    pub(crate) fn new_writable(words: usize, cargo: T, flags: Flags) -> Result<KBox<Self>> {
        let mut this = Self::new(core::iter::once(words), cargo, flags)?;

        this.writable = true;
        this.select(0, 0..usize::MAX);
        Ok(this)
    }

    /// Copies the first bytes of what the device has written, as many as there is room for, if it has
    /// written so many. A device that lies about that gives what was there before.
    pub(crate) fn received<const N: usize>(&self) -> Option<[u8; N]> {
        let mut out = [0; N];
        let words = &self.pieces.first()?.words;

        if !self.writable || self.written.min(words.len() * size_of::<u64>()) < N {
            return None;
        }
        for (bytes, word) in out.chunks_mut(size_of::<u64>()).zip(words) {
            bytes.copy_from_slice(word.to_ne_bytes().get(..bytes.len())?);
        }
        Some(out)
    }

    /// Whether it is the device that writes.
    pub(super) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Takes note of how many bytes the device says to have written.
    pub(super) fn note_written(&mut self, bytes: usize) {
        self.written = bytes;
    }

    /// The words of a piece; none if there is no such piece.
    pub(crate) fn piece_mut(&mut self, piece: usize) -> &mut [u64] {
        match self.pieces.get_mut(piece) {
            Some(piece) => &mut piece.words,
            None => &mut [],
        }
    }

    /// Says which bytes of a piece are sent, as far as the piece has them.
    pub(crate) fn select(&mut self, piece: usize, bytes: Range<usize>) {
        if let Some(piece) = self.pieces.get_mut(piece) {
            let end = bytes.end.min(piece.words.len() * size_of::<u64>());
            piece.sent = bytes.start.min(end)..end;
        }
    }

    /// Zeroes what was sent, and sends nothing.
    pub(crate) fn clear_sent(&mut self) {
        for piece in &mut self.pieces {
            let sent = core::mem::take(&mut piece.sent);
            let words = sent.start / size_of::<u64>()..sent.end.div_ceil(size_of::<u64>());

            if let Some(words) = piece.words.get_mut(words) {
                words.fill(0);
            }
        }
    }

    /// Describes what is sent as a scatter list; returns it with the number of its entries.
    pub(super) fn scatterlist(&mut self) -> (*mut bindings::scatterlist, c_uint) {
        let sent = self.pieces.iter().filter(|p| !p.sent.is_empty()).count();
        // CAST: a message has less than 100 pieces.
        let entries = sent as c_uint;

        if sent == 0 {
            return (core::ptr::null_mut(), 0);
        }
        // SAFETY: `table` has an entry for each piece, hence at least `entries`.
        unsafe { bindings::sg_init_table(self.table.as_mut_ptr(), entries) };
        let filled = self.pieces.iter_mut().filter(|p| !p.sent.is_empty());
        for (piece, entry) in filled.zip(self.table.iter_mut()) {
            // SAFETY: `sent` is within `words`, by `select`; `words` is in the linear map.
            unsafe {
                crate::bindings::sg_set_buf(
                    entry,
                    piece
                        .words
                        .as_mut_ptr()
                        .cast::<u8>()
                        .add(piece.sent.start)
                        .cast(),
                    // CAST: a piece has at most 32 KiB.
                    piece.sent.len() as c_uint,
                )
            };
        }
        (self.table.as_mut_ptr(), entries)
    }
}
