// SPDX-License-Identifier: GPL-2.0

//! Giving memory to the host that is free anyway.

use crate::{
    mm::{
        PageReporting,
        Report, //
    },
    virtio::{
        LoanQueue,
        Segments, //
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// The queue for free memory.
#[pin_data]
pub(super) struct Reports {
    #[pin]
    queue: LoanQueue,
}

impl Report for Reports {
    fn report(&self, segments: &Segments<'_>) -> Result {
        self.queue.lend(segments)
    }
}

/// What there is if the device wants to know of free memory.
#[pin_data]
pub(super) struct ReportPart {
    reports: Arc<Reports>,
    /// Outlives the use of the device: a report ends at the latest when the device has been reset,
    /// and not before that if the device does not answer.
    #[pin]
    registration: Mutex<Option<Pin<KBox<PageReporting<Reports>>>>>,
}

impl ReportPart {
    /// Not registered yet. May sleep.
    pub(super) fn new() -> Result<Pin<KBox<Self>>> {
        let reports = Arc::pin_init(
            pin_init!(Reports {
                queue <- LoanQueue::new(c"reporting"),
            }),
            GFP_KERNEL,
        )?;

        KBox::pin_init(
            pin_init!(Self {
                reports,
                registration <- new_mutex!(None, "ReportPart::registration"),
            }),
            GFP_KERNEL,
        )
    }

    /// The queue for free memory.
    pub(super) fn queue(&self) -> &LoanQueue {
        &self.reports.queue
    }

    /// Begins to report. To be called when the device is ready. May sleep.
    ///
    /// # Errors
    ///
    /// [`EBUSY`] if somebody else reports already.
    pub(super) fn start(&self) -> Result {
        let capacity = self.queue().capacity()?;
        let registration = KBox::pin_init(
            PageReporting::new(self.reports.clone(), capacity),
            GFP_KERNEL,
        )?;

        *self.registration.lock() = Some(registration);
        Ok(())
    }

    /// Ends reporting. To be called when the device has been reset. May sleep.
    pub(super) fn end(&self) {
        let registration = self.registration.lock().take();

        drop(registration);
    }
}
