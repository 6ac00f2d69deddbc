// SPDX-License-Identifier: GPL-2.0

//! Virtqueues for blocks of memory that are lent to the device until it has used them.

use super::{
    attachment::{
        Attachment,
        Virtqueue, //
    },
    event::Event,
    queue::AnyQueue, //
};
use crate::{
    bindings,
    mm::Block,
    page_list::PageList, //
};
use core::{
    cell::UnsafeCell,
    ptr::NonNull, //
};
use kernel::{
    bindings::scatterlist,
    new_spinlock,
    prelude::*,
    sync::SpinLock,
    time::Jiffies, //
};

/// What the device has used.
pub(crate) enum Used {
    /// A word that was sent to it.
    Word,
    /// A block that was lent to it, which it does not touch any more.
    Block(Block),
}

/// A virtqueue, which of the words are on their way, and how many guest pages are lent.
struct Inner {
    vq: Attachment,
    busy: u32,
    lent: u64,
}

/// A virtqueue for blocks that the device may write, and for words that it reads, in order.
///
/// Nothing is allocated for either: a block is its own token, and there is room for a few words.
///
/// Locks: `inner` before `returned`; both are held for short, in process context only. Interrupts only
/// signal `used`.
///
/// # Invariants
///
/// Each token in the virtqueue is either a pointer to one of `words`, whose bit in `busy` is set, or the
/// first page of a [`Block`] whose order stands in its list fields.
#[pin_data]
pub(crate) struct BlockQueue {
    name: &'static CStr,
    words: KBox<UnsafeCell<[[u8; 4]; Self::WORDS]>>,
    #[pin]
    inner: SpinLock<Inner>,
    #[pin]
    returned: SpinLock<PageList>,
    #[pin]
    used: Event,
}

// SAFETY: A virtqueue can be used from any thread.
unsafe impl Send for BlockQueue {}

// SAFETY: All operations on the virtqueue, and all access to `words`, are serialised by `inner`.
unsafe impl Sync for BlockQueue {}

impl BlockQueue {
    /// The most words that are on their way.
    const WORDS: usize = 8;

    /// A queue to be found under this name. May sleep.
    pub(crate) fn new(name: &'static CStr) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            name,
            words: KBox::new(UnsafeCell::new([[0; 4]; Self::WORDS]), GFP_KERNEL)?,
            inner <- new_spinlock!(
                Inner {
                    vq: Attachment::Absent,
                    busy: 0,
                    lent: 0,
                },
                "BlockQueue::inner"
            ),
            returned <- new_spinlock!(PageList::new(), "BlockQueue::returned"),
            used <- Event::new(),
        })
    }

    fn with_live<R>(&self, f: impl FnOnce(Virtqueue<'_>) -> Result<R>) -> Result<R> {
        f(self.inner.lock().vq.live()?)
    }

    /// Where a word is; `i` is below [`Self::WORDS`].
    fn word(&self, i: usize) -> NonNull<[u8; 4]> {
        let words: NonNull<[u8; 4]> = NonNull::from(&*self.words).cast();

        // SAFETY: It is one of the array's.
        unsafe { words.add(i % Self::WORDS) }
    }

    /// Sends four bytes, in order with the blocks. The device is told by [`Self::kick`].
    ///
    /// # Errors
    ///
    /// [`ENOSPC`] if the ring is full or too many words are on their way, [`EIO`] if the device is
    /// broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn tell(&self, bytes: [u8; 4]) -> Result {
        let mut inner = self.inner.lock();
        let vq = inner.vq.live()?;
        let free = (0..Self::WORDS).find(|i| inner.busy >> i & 1 == 0);
        let i = free.ok_or(ENOSPC)?;
        let word = self.word(i);
        let mut entry = scatterlist::default();

        // SAFETY: By the type invariants the device does not read this word now, and it is in memory from
        // `kmalloc()`. It stays until its token is back, or until the queue goes, which is after the
        // virtqueue is deleted.
        unsafe {
            word.write(bytes);
            kernel::bindings::sg_init_table(&mut entry, 1);
            // CAST: four.
            bindings::sg_set_buf(&mut entry, word.as_ptr().cast(), bytes.len() as c_uint);
            vq.add_out(&mut entry, 1, word.cast())?;
        }
        // INVARIANT: The token is in the virtqueue.
        inner.busy |= 1 << i;
        Ok(())
    }

    /// Lends a block to the device, which is told by [`Self::kick`]. No more than `most` guest pages are lent
    /// at a time, or a single block.
    ///
    /// # Errors
    ///
    /// The block comes back with [`ENOSPC`] if the ring is full or too much is lent, [`EIO`] if the device is
    /// broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn lend(&self, block: Block, most: u64) -> Result<(), (Block, Error)> {
        let mut inner = self.inner.lock();
        let vq = match inner.vq.live() {
            Ok(vq) => vq,
            Err(e) => return Err((block, e)),
        };
        let order = block.order();
        let lent = inner.lent.saturating_add(block.pages());
        if inner.lent > 0 && lent > most {
            return Err((block, ENOSPC));
        }
        let page = block.into_raw();
        let mut entry = scatterlist::default();

        // SAFETY: The block is ours, and so are its list fields. It is handed out again only when its token
        // is back, or when the virtqueue is deleted.
        unsafe {
            bindings::page_set_link(page.as_ptr(), core::ptr::null_mut(), order as usize);
            kernel::bindings::sg_init_table(&mut entry, 1);
            bindings::sg_set_block(&mut entry, page.as_ptr(), order);
            // INVARIANT: The order was put into the list fields.
            vq.add_in(&mut entry, 1, page.cast())
                .map_err(|e| (Block::from_raw(page, order), e))?;
        }
        inner.lent = lent;
        Ok(())
    }

    /// Tells the device that there is something new.
    ///
    /// # Errors
    ///
    /// [`EIO`] if the device is broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn kick(&self) -> Result {
        self.with_live(|vq| vq.kick())
    }

    /// Takes something that the device has used, if there is anything.
    ///
    /// # Errors
    ///
    /// [`EIO`] if the device is broken, [`ENODEV`] if the queue is revoked.
    pub(crate) fn take_used(&self) -> Result<Option<Used>> {
        let mut inner = self.inner.lock();

        let Some((token, _)) = inner.vq.live()?.take()? else {
            return Ok(None);
        };
        // SAFETY: The token was in the virtqueue until now.
        let used = unsafe { self.redeem(&mut inner.busy, token) };
        if let Used::Block(block) = &used {
            inner.lent = inner.lent.saturating_sub(block.pages());
        }
        Ok(Some(used))
    }

    /// How many guest pages the device has.
    pub(crate) fn lent(&self) -> u64 {
        self.inner.lock().lent
    }

    /// What a token stands for.
    ///
    /// # Safety
    ///
    /// The token must just have been taken out of the virtqueue.
    unsafe fn redeem(&self, busy: &mut u32, token: NonNull<c_void>) -> Used {
        if let Some(i) = (0..Self::WORDS).find(|i| self.word(*i).cast() == token) {
            *busy &= !(1 << i);
            return Used::Word;
        }
        // SAFETY: By the type invariants it is the first page of a block, whose order is in the list
        // fields.
        Used::Block(unsafe {
            let order = bindings::page_order(token.as_ptr().cast());
            // CAST: an order, as put there by `lend`.
            Block::from_raw(token.cast(), order as u32)
        })
    }

    /// Asks for an interrupt when the device uses something. Returns whether it has already, for which
    /// there will be none.
    ///
    /// # Errors
    ///
    /// [`ENODEV`] if the queue is revoked.
    pub(crate) fn watch(&self) -> Result<bool> {
        self.with_live(|vq| Ok(vq.enable_interrupts()))
    }

    /// Asks for no more interrupts.
    pub(crate) fn set_quiet(&self) {
        if let Ok(vq) = self.inner.lock().vq.live() {
            vq.disable_interrupts();
        }
    }

    /// Sleeps until the device may have used something, for `timeout` at most; less if there were
    /// interrupts that nobody has waited for.
    ///
    /// For one waiter at a time. Must be called from a context that may sleep.
    pub(crate) fn wait(&self, timeout: Jiffies) {
        if self.watch() == Ok(false) {
            self.used.wait(timeout);
            self.set_quiet();
        }
    }
}

impl AnyQueue for BlockQueue {
    fn name(&self) -> &'static CStr {
        self.name
    }

    unsafe fn attach(&self, vq: NonNull<bindings::virtqueue>) {
        let mut inner = self.inner.lock();

        // INVARIANT: The caller guarantees that `vq` is valid until `reclaim` and has no tokens.
        inner.vq = Attachment::Live(vq);
        inner.busy = 0;
        inner.lent = 0;
        drop(inner);
        self.set_quiet();
    }

    fn on_used(&self) {
        self.used.signal();
    }

    fn revoke(&self) {
        self.inner.lock().vq.revoke();
        self.used.signal();
    }

    fn reclaim(&self) {
        let mut inner = self.inner.lock();
        let Inner { vq, busy, .. } = &mut *inner;

        vq.detach(|token| {
            // SAFETY: The token was in the virtqueue until now.
            if let Used::Block(block) = unsafe { self.redeem(busy, token) } {
                self.returned.lock().push(block);
            }
        });
    }

    fn release(&self) {
        self.inner.lock().vq = Attachment::Absent;

        let returned = core::mem::replace(&mut *self.returned.lock(), PageList::new());
        drop(returned);
    }
}
