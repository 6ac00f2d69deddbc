// SPDX-License-Identifier: GPL-2.0

//! Work that is done later, in a context that may sleep.
//!
//! Unlike the kernel crate's items, these can be cancelled, which a driver that can be unloaded
//! needs.
//!
//! C header: [`include/linux/workqueue.h`](srctree/include/linux/workqueue.h)

use crate::bindings;
use core::ptr::NonNull;
use kernel::{
    container_of,
    prelude::*,
    sync::Arc,
    time::Jiffies,
    types::Opaque, //
};

/// A work queue of a device.
///
/// It is not frozen when the system goes to sleep: an item that waits for a host that does not answer would
/// keep it from that. Tasks are disabled when the device is put to sleep.
///
/// # Invariants
///
/// Points at a valid work queue that nobody else destroys.
pub(crate) struct WorkQueue(NonNull<kernel::bindings::workqueue_struct>);

// SAFETY: A work queue can be used and destroyed from any thread.
unsafe impl Send for WorkQueue {}

// SAFETY: The C side serialises all operations on a work queue.
unsafe impl Sync for WorkQueue {}

impl WorkQueue {
    /// Allocates a work queue whose items run on any CPU. May sleep.
    pub(crate) fn new(name: &'static CStr) -> Result<Self> {
        // SAFETY: The format takes one C string.
        let raw = unsafe {
            kernel::bindings::alloc_workqueue_noprof(
                c"%s".as_char_ptr(),
                bindings::VBRS_WQ_UNBOUND,
                0,
                name.as_char_ptr(),
            )
        };

        // INVARIANT: It was just allocated.
        NonNull::new(raw).map(Self).ok_or(ENOMEM)
    }
}

impl Drop for WorkQueue {
    fn drop(&mut self) {
        // SAFETY: By the type invariants it is valid and ours. Tasks hold a reference to their queue
        // and are cancelled when dropped, so there are none left.
        unsafe { kernel::bindings::destroy_workqueue(self.0.as_ptr()) };
    }
}

/// What a [`Task`] does.
pub(crate) trait Job: Send + Sync + 'static {
    /// Does the work. May sleep. Never runs twice at a time for a task.
    ///
    /// Returns when to run again, if it was not scheduled for some other time meanwhile.
    fn run(&self) -> Option<Jiffies>;
}

/// A job that is done each time it is scheduled, by a work queue.
///
/// Dropping the task cancels it, and waits for the job if it runs.
#[pin_data(PinnedDrop)]
pub(crate) struct Task<J: Job> {
    #[pin]
    work: Opaque<kernel::bindings::delayed_work>,
    job: Arc<J>,
    queue: Arc<WorkQueue>,
}

// SAFETY: The C side serialises all operations on the work item; the job is `Send` and `Sync`.
unsafe impl<J: Job> Send for Task<J> {}

// SAFETY: As above.
unsafe impl<J: Job> Sync for Task<J> {}

impl<J: Job> Task<J> {
    // CAST: a small constant that the C side takes as `int`.
    const ANY_CPU: c_int = kernel::bindings::wq_misc_consts_WORK_CPU_UNBOUND as c_int;

    /// A task that is not scheduled yet, and cannot be before [`Task::enable`].
    pub(crate) fn new(queue: Arc<WorkQueue>, job: Arc<J>) -> impl PinInit<Self> {
        pin_init!(Self {
            work <- Opaque::ffi_init(|slot: *mut kernel::bindings::delayed_work| {
                // SAFETY: `slot` is valid for writes and stays pinned, by `ffi_init`; the class keys
                // are static.
                unsafe {
                    kernel::bindings::init_work_with_key(
                        &raw mut (*slot).work,
                        Some(Self::run),
                        false,
                        c"Task::work".as_char_ptr(),
                        kernel::static_lock_class!().as_ptr(),
                    );
                    kernel::bindings::timer_init_key(
                        &raw mut (*slot).timer,
                        Some(kernel::bindings::delayed_work_timer_fn),
                        kernel::bindings::TIMER_IRQSAFE,
                        c"Task::timer".as_char_ptr(),
                        kernel::static_lock_class!().as_ptr(),
                    );
                    kernel::bindings::disable_delayed_work_sync(slot);
                }
            }),
            job,
            queue,
        })
    }

    extern "C" fn run(work: *mut kernel::bindings::work_struct) {
        // SAFETY: The work queue calls this with the item of a `Task<J>`, which is pinned and not
        // dropped before the call returns, since dropping waits for it.
        let this = unsafe {
            let delayed = container_of!(work, kernel::bindings::delayed_work, work);
            let opaque = Opaque::cast_from(delayed.cast_const());
            &*container_of!(opaque, Self, work)
        };

        if let Some(delay) = this.job.run() {
            // SAFETY: The work item was initialised in `new`, and the queue is valid. Unlike
            // `schedule` this does not put off what was scheduled while the job ran.
            unsafe {
                kernel::bindings::queue_delayed_work_on(
                    Self::ANY_CPU,
                    this.queue.0.as_ptr(),
                    this.work.get(),
                    delay,
                )
            };
        }
    }

    /// Schedules the job in `delay`, or at once; replaces an earlier time. Can be called from any
    /// context.
    pub(crate) fn schedule(&self, delay: Jiffies) {
        // SAFETY: The work item was initialised in `new`, and the queue is valid.
        unsafe {
            kernel::bindings::mod_delayed_work_on(
                Self::ANY_CPU,
                self.queue.0.as_ptr(),
                self.work.get(),
                delay,
            )
        };
    }

    /// Cancels the job, waits for it if it runs, and ignores further schedules until
    /// [`Task::enable`]. May sleep. Calls nest.
    pub(crate) fn disable(&self) {
        // SAFETY: The work item was initialised in `new`.
        unsafe { kernel::bindings::disable_delayed_work_sync(self.work.get()) };
    }

    /// Undoes one [`Task::disable`].
    pub(crate) fn enable(&self) {
        // SAFETY: The work item was initialised in `new`.
        unsafe { kernel::bindings::enable_delayed_work(self.work.get()) };
    }
}

#[pinned_drop]
impl<J: Job> PinnedDrop for Task<J> {
    fn drop(self: Pin<&mut Self>) {
        self.disable();
    }
}
