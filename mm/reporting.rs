// SPDX-License-Identifier: GPL-2.0

//! Being told which memory is free.
//!
//! C header: [`include/linux/page_reporting.h`](srctree/include/linux/page_reporting.h)

use crate::{
    bindings,
    virtio::Segments, //
};
use kernel::{
    bindings::scatterlist,
    container_of,
    error::{
        from_result,
        to_result, //
    },
    prelude::*,
    sync::Arc,
    types::Opaque, //
};

/// What is done with memory that is free.
pub(crate) trait Report: Send + Sync + 'static {
    /// Deals with blocks of free memory, which nobody uses until this returns. May sleep, but must
    /// not allocate.
    ///
    /// # Errors
    ///
    /// The blocks count as not reported.
    fn report(&self, segments: &Segments<'_>) -> Result;
}

/// A registration for reports of free memory. Dropping it ends them, and waits for one under way.
#[must_use = "dropping it ends the reports"]
#[pin_data(PinnedDrop)]
pub(crate) struct PageReporting<R: Report> {
    #[pin]
    info: Opaque<bindings::page_reporting_dev_info>,
    report: Arc<R>,
}

// SAFETY: A reporting device can be unregistered from any thread.
unsafe impl<R: Report> Send for PageReporting<R> {}

impl<R: Report> PageReporting<R> {
    /// Registers `report`, for reports of up to `capacity` blocks. May sleep.
    ///
    /// # Errors
    ///
    /// [`EBUSY`] if somebody else has registered: there is one place only.
    pub(crate) fn new(report: Arc<R>, capacity: c_uint) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            report,
            info <- Opaque::try_ffi_init(|slot: *mut bindings::page_reporting_dev_info| {
                // SAFETY: `slot` is valid for writes and stays pinned until it is unregistered in
                // `drop`. `report` is initialised already.
                unsafe {
                    slot.write(bindings::page_reporting_dev_info::default());
                    (*slot).report = Some(Self::report_callback);
                    (*slot).order = bindings::VBRS_REPORTING_ORDER;
                    (*slot).capacity = capacity;
                    to_result(bindings::page_reporting_register(slot))
                }
            }),
        })
    }

    /// # Safety
    ///
    /// Only for the reporting core to call, with what was registered in `new`.
    unsafe extern "C" fn report_callback(
        info: *mut bindings::page_reporting_dev_info,
        table: *mut scatterlist,
        entries: c_uint,
    ) -> c_int {
        // SAFETY: The core calls this with registered information, which is part of a
        // `PageReporting<R>`.
        let this = unsafe { &*container_of!(Opaque::cast_from(info.cast_const()), Self, info) };
        // SAFETY: The core has taken these blocks out of the allocator until this returns.
        let segments = unsafe { Segments::new(table, entries) };

        from_result(|| this.report.report(&segments).map(|()| 0))
    }
}

#[pinned_drop]
impl<R: Report> PinnedDrop for PageReporting<R> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: It was registered in `new`.
        unsafe { bindings::page_reporting_unregister(self.info.get()) };
    }
}
