// SPDX-License-Identifier: GPL-2.0

//! The pages in a balloon, with the kernel's accounts of them.
//!
//! Single pages are in the hands of the kernel's balloon core, so that compaction can move them.
//! Blocks are not; the accounts that the core keeps for single pages are kept for them here.
//!
//! C header: [`include/linux/balloon.h`](srctree/include/linux/balloon.h)

use super::{
    block::Block,
    marked::{
        self,
        Mark, //
    },
};
use crate::{
    bindings,
    page_list::PageList, //
};
use core::{
    ops::Range,
    ptr::NonNull, //
};
use kernel::{
    bindings::{
        list_head,
        page, //
    },
    container_of,
    error::from_result,
    new_mutex,
    num::casts::usize_as_u64,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
    types::Opaque, //
};

/// A page that takes part in a migration: the one that is left, or the one that replaces it.
pub(crate) struct MigratingPage<'a>(&'a Opaque<page>);

impl MigratingPage<'_> {
    /// The frame number, in guest pages.
    pub(crate) fn pfn(&self) -> u64 {
        // SAFETY: The page is valid while it is being migrated.
        usize_as_u64(unsafe { bindings::page_to_pfn(self.0.get()) })
    }

    /// Keeps the page from being used by anyone, whatever becomes of the migration, for as long as
    /// what is returned exists.
    pub(crate) fn hold(&self) -> HeldPage {
        // SAFETY: The page is valid while it is being migrated.
        unsafe { bindings::get_page(self.0.get()) };
        // INVARIANT: The reference was just taken.
        HeldPage(self.0.get())
    }
}

/// A page that nobody uses as long as this exists.
///
/// Unlike a [`Block`] it leaves the list fields alone, which are the migration's own while it goes
/// on.
///
/// # Invariants
///
/// Owns a reference to the page.
pub(crate) struct HeldPage(*mut page);

// SAFETY: Pages can be used and freed from any thread.
unsafe impl Send for HeldPage {}

impl Drop for HeldPage {
    fn drop(&mut self) {
        // SAFETY: By the type invariants the reference is ours; if it is the last one the page is
        // freed.
        unsafe { kernel::bindings::__free_pages(self.0, 0) };
    }
}

/// What is done when compaction moves a page of the balloon.
pub(crate) trait Migrate: Send + Sync + 'static {
    /// Tells the host that `new` takes the place of `old`.
    ///
    /// Called with the page locked and in the path of memory allocation: must neither allocate nor
    /// wait for whoever does.
    ///
    /// # Errors
    ///
    /// [`EAGAIN`] if the page cannot be moved now.
    fn migrate(&self, new: MigratingPage<'_>, old: MigratingPage<'_>) -> Result;
}

/// The pages in a balloon.
///
/// Locks: `blocks` is taken before the core's own lock, which is a spin lock. Nothing is allocated
/// under either.
///
/// # Invariants
///
/// `pages` is the number of pages in `blocks` and in the core's list, those isolated for migration
/// included. The blocks in `blocks`, and no others, have `mark`.
#[pin_data(PinnedDrop)]
pub(crate) struct BalloonPages<M: Migrate> {
    #[pin]
    info: Opaque<bindings::balloon_dev_info>,
    #[pin]
    blocks: Mutex<PageList>,
    pages: Atomic<u64>,
    adjusts_managed: bool,
    whole_from: u32,
    mark: Mark,
    migrate: Arc<M>,
}

// SAFETY: The C side serialises all operations on `struct balloon_dev_info`.
unsafe impl<M: Migrate> Send for BalloonPages<M> {}

// SAFETY: As above.
unsafe impl<M: Migrate> Sync for BalloonPages<M> {}

impl<M: Migrate> BalloonPages<M> {
    /// How many pages to exchange with the core at a time, which has interrupts off meanwhile.
    const AT_ONCE: u64 = 512;

    /// An empty balloon. `adjusts_managed` tells whether its pages are taken from the memory that
    /// the guest has in total (`MemTotal`), or count as used. Blocks of an order below `whole_from`
    /// are split into single pages.
    pub(crate) fn new(
        adjusts_managed: bool,
        whole_from: u32,
        migrate: Arc<M>,
    ) -> impl PinInit<Self> {
        pin_init!(Self {
            info <- Opaque::ffi_init(|slot: *mut bindings::balloon_dev_info| {
                // SAFETY: `slot` is valid for writes and stays pinned, by `ffi_init`.
                unsafe {
                    bindings::balloon_devinfo_init(slot);
                    // Done here, for many pages at a time.
                    (*slot).adjust_managed_page_count = false;
                    (*slot).migratepage = Some(Self::migrate_callback);
                }
            }),
            blocks <- new_mutex!(PageList::new(), "BalloonPages::blocks"),
            pages: Atomic::new(0),
            adjusts_managed,
            whole_from,
            mark: Mark::new(),
            migrate,
        })
    }

    /// The number of guest pages in the balloon.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Takes in pages that the host was told of. May sleep.
    pub(crate) fn admit(&self, mut list: PageList) {
        let mut blocks = self.blocks.lock();

        self.pages.add(list.pages(), Relaxed);
        while let Some(order) = list.first_order() {
            if order < self.whole_from {
                self.enqueue(&mut list);
            } else if let Some(block) = list.pop() {
                self.account(&block, 1);
                // SAFETY: Counts events.
                unsafe { bindings::count_inflate(1 << block.order()) };
                blocks.push(block);
            }
        }
    }

    /// Takes up to `want` pages out of the balloon and puts them into `out`: blocks as long as they
    /// fit, then single pages, then pages of a block that is split for that. Returns how many.
    ///
    /// May be less while compaction has pages isolated. May sleep.
    pub(crate) fn remove(&self, want: u64, out: &mut PageList) -> u64 {
        let mut blocks = self.blocks.lock();
        let mut left = want;

        while blocks.first_order().is_some_and(|order| 1 << order <= left) {
            let Some(block) = blocks.pop() else {
                break;
            };
            self.account(&block, -1);
            // SAFETY: Counts events.
            unsafe { bindings::count_deflate(1 << block.order()) };
            left -= block.pages();
            out.push(block);
        }
        left -= self.dequeue(left, out);
        if left > 0 {
            if let Some(block) = blocks.pop() {
                left -= self.split(block, left, out);
            }
        }
        self.pages.fetch_sub(want - left, Relaxed);
        want - left
    }

    /// Takes all blocks with a page in `frames` out of the balloon and puts them into `out`. Returns how many
    /// pages that is. May sleep.
    pub(crate) fn remove_blocks(&self, frames: &Range<u64>, out: &mut PageList) -> u64 {
        let mut blocks = self.blocks.lock();
        let mut others = PageList::new();
        let mut taken = 0;

        while let Some(block) = blocks.pop() {
            if block.pfn() < frames.end && frames.start < block.pfn() + block.pages() {
                self.account(&block, -1);
                // SAFETY: Counts events.
                unsafe { bindings::count_deflate(1 << block.order()) };
                taken += block.pages();
                out.push(block);
            } else {
                others.push(block);
            }
        }
        *blocks = others;
        self.pages.fetch_sub(taken, Relaxed);
        taken
    }

    /// Splits a block of the balloon, gives `want` pages or all of them to `out`, and the rest to
    /// the core. Returns how many went out.
    fn split(&self, block: Block, want: u64, out: &mut PageList) -> u64 {
        let mut singles = PageList::new();
        let mut taken = 0;

        self.account(&block, -1);
        block.split(&mut singles);
        while taken < want {
            let Some(page) = singles.pop() else {
                break;
            };
            out.push(page);
            taken += 1;
        }
        // CAST: less than the pages of a block.
        let kept = singles.pages() as c_long;
        self.enqueue(&mut singles);
        // SAFETY: Counts events. The pages that stay were counted as inflated before, and once more
        // by the core just now.
        unsafe {
            bindings::count_deflate(taken as c_long);
            bindings::count_inflate(-kept);
        }
        taken
    }

    /// Gives the pages at the front of a list, up to the first block that stays whole, to the core.
    fn enqueue(&self, pages: &mut PageList) {
        let mut list = list_head::default();
        let mut managed = Managed::new(self.adjusts_managed, -1);

        // SAFETY: `list` is on the stack, does not move, and is empty again at the end, since the
        // core takes all of it; `info` was initialised in `new`. The blocks are ours, so their list
        // fields are; after the split each page is one of its own.
        unsafe {
            bindings::init_list_head(&mut list);
            let mut waiting = 0;
            while pages.first_order().is_some_and(|o| o < self.whole_from) {
                let Some(block) = pages.pop() else {
                    break;
                };
                let order = block.order();
                let page = block.into_raw().as_ptr();

                if order > 0 {
                    kernel::bindings::split_page(page, order);
                }
                bindings::list_add_pages(page, 1 << order, &mut list);
                managed.count(page, 1 << order);
                waiting += 1 << order;
                if waiting >= Self::AT_ONCE {
                    bindings::balloon_page_list_enqueue(self.info.get(), &mut list);
                    waiting = 0;
                }
            }
            bindings::balloon_page_list_enqueue(self.info.get(), &mut list);
        }
    }

    /// Takes up to `want` pages from the core.
    fn dequeue(&self, want: u64, out: &mut PageList) -> u64 {
        let mut taken = list_head::default();
        let mut managed = Managed::new(self.adjusts_managed, 1);
        let mut n = 0;

        if want == 0 {
            return 0;
        }
        // SAFETY: `taken` is on the stack, does not move, and is empty again at the end; `info` was
        // initialised in `new`. The pages that come back are ours, one by one.
        unsafe {
            bindings::init_list_head(&mut taken);
            while n < want {
                // CAST: at most `AT_ONCE`.
                let few = (want - n).min(Self::AT_ONCE) as usize;
                if bindings::balloon_page_list_dequeue(self.info.get(), &mut taken, few) == 0 {
                    break;
                }
                while let Some(page) = NonNull::new(bindings::list_pop_page(&mut taken)) {
                    managed.count(page.as_ptr(), 1);
                    out.push(Block::from_raw(page, 0));
                    n += 1;
                }
            }
        }
        n
    }

    /// Adjusts the accounts for a block that comes (1) or goes (-1), as the core does for a page, and its mark.
    fn account(&self, block: &Block, sign: c_long) {
        let pages = sign << block.order();

        // SAFETY: The block is ours and valid. Pages of a block are all in one zone.
        unsafe {
            if self.adjusts_managed {
                kernel::bindings::adjust_managed_page_count(block.as_raw(), -pages);
            }
            bindings::mod_balloon_pages(block.as_raw(), pages);
        }
        if sign > 0 {
            self.mark.put(block);
        } else {
            self.mark.take_off(block);
        }
    }

    /// Calls `each` with the runs of guest pages within `frames` that are in the balloon, in ascending
    /// order. Pages that come or go meanwhile may be among them. May sleep.
    pub(crate) fn for_each(&self, frames: Range<u64>, each: &mut dyn FnMut(Range<u64>)) {
        let _blocks = self.blocks.lock();

        // SAFETY: By the type invariants; nothing leaves the list while it is locked. What the core puts
        // into the private field of its pages is the address of `info`.
        unsafe { marked::for_each_marked(frames, self.mark, Some(self.info.get() as usize), each) };
    }

    extern "C" fn migrate_callback(
        info: *mut bindings::balloon_dev_info,
        new: *mut page,
        old: *mut page,
        _mode: bindings::migrate_mode,
    ) -> c_int {
        // SAFETY: The core calls this with the `info` of a balloon that has the page `old`, so that
        // the balloon exists.
        let this = unsafe { &*container_of!(Opaque::cast_from(info.cast_const()), Self, info) };
        // SAFETY: Both pages are valid during the call.
        let (new, old) = unsafe {
            (
                MigratingPage(&*Opaque::cast_from(new.cast_const())),
                MigratingPage(&*Opaque::cast_from(old.cast_const())),
            )
        };

        from_result(|| {
            let (from, to) = (old.0.get(), new.0.get());

            this.migrate.migrate(new, old)?;
            // SAFETY: Both pages are valid during the call.
            unsafe {
                if this.adjusts_managed && bindings::page_zone(from) != bindings::page_zone(to) {
                    kernel::bindings::adjust_managed_page_count(from, 1);
                    kernel::bindings::adjust_managed_page_count(to, -1);
                }
            }
            Ok(0)
        })
    }
}

/// Adjusts the number of pages that the zones manage, once for many pages of a zone.
///
/// # Invariants
///
/// `page` is a valid page if `pages` is not 0.
struct Managed {
    enabled: bool,
    sign: c_long,
    page: *mut page,
    pages: c_long,
}

impl Managed {
    /// Nothing to adjust yet. `sign` is -1 for pages that are taken from the guest, and 1 for such
    /// as it gets back.
    fn new(enabled: bool, sign: c_long) -> Self {
        Self {
            enabled,
            sign,
            page: core::ptr::null_mut(),
            pages: 0,
        }
    }

    /// Counts `n` pages of a zone.
    ///
    /// # Safety
    ///
    /// `page` must be a valid page.
    unsafe fn count(&mut self, page: *mut page, n: c_long) {
        // SAFETY: By the type invariants and the safety requirements both pages are valid.
        if self.pages != 0 && unsafe { bindings::page_zone(self.page) != bindings::page_zone(page) }
        {
            self.flush();
        }
        // INVARIANT: By the safety requirements `page` is valid.
        self.page = page;
        self.pages += n;
    }

    fn flush(&mut self) {
        if self.enabled && self.pages != 0 {
            // SAFETY: By the type invariants the page is valid; only its zone is looked at.
            unsafe {
                kernel::bindings::adjust_managed_page_count(self.page, self.sign * self.pages)
            };
        }
        self.pages = 0;
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        self.flush();
    }
}

#[pinned_drop]
impl<M: Migrate> PinnedDrop for BalloonPages<M> {
    fn drop(self: Pin<&mut Self>) {
        // What is left, after an unclean end, goes back to the guest with the accounts right. The
        // owner sees to it that no page is isolated any more.
        let mut list = PageList::new();

        self.remove(self.pages(), &mut list);
    }
}
