// SPDX-License-Identifier: GPL-2.0

//! The module parameters, checked.

use crate::{
    logic::window::WindowSize,
    module_parameters, //
};
use kernel::prelude::*;

/// What the user has asked for when loading the module.
#[derive(Clone, Copy)]
pub(crate) struct Params {
    /// Size of a bitmap window.
    pub(crate) window: WindowSize,
    /// Whether to speak the page-bitmap dialect of 2016.
    pub(crate) dialect_2016: bool,
    /// Memory to leave to the guest, in MiB; `None` to choose by the size of the guest.
    pub(crate) reserve_mib: Option<u32>,
    /// Whether the host may have caches dropped.
    pub(crate) allow_drop_caches: bool,
}

impl Params {
    /// The value of `reserve_mb` that stands for the default.
    pub(crate) const RESERVE_AUTO: u32 = u32::MAX;

    /// Reads the parameters.
    ///
    /// # Errors
    ///
    /// [`EINVAL`], with a message, for a value that is not allowed.
    pub(crate) fn read() -> Result<Self> {
        let bytes = *module_parameters::bitmap_bytes.value_ref();
        let reserve = *module_parameters::reserve_mb.value_ref();
        let Some(window) = WindowSize::new(bytes) else {
            pr_err!("bitmap_bytes={bytes}: must be a power of two from 64 to 1048576\n");
            return Err(EINVAL);
        };

        Ok(Self {
            window,
            dialect_2016: *module_parameters::dialect_2016.value_ref(),
            allow_drop_caches: *module_parameters::allow_drop_caches.value_ref(),
            reserve_mib: (reserve != Self::RESERVE_AUTO).then_some(reserve),
        })
    }
}
