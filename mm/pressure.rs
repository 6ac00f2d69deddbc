// SPDX-License-Identifier: GPL-2.0

//! Giving memory back that is only kept, before the guest runs out of it.

use super::{
    oom::{
        OomHandler,
        OomNotifier, //
    },
    shrinker::{
        Shrink,
        Shrinker, //
    },
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Both registrations of one who keeps memory: reclaim asks for some of it as long as it finds anything at all,
/// and if that was not enough, all of it is given back before a process is killed.
///
/// Dropping it ends both, and waits for a call under way.
#[must_use = "dropping it ends the registrations"]
pub(crate) struct Pressure<S: Shrink + OomHandler> {
    _shrinker: Shrinker<S>,
    _oom: Pin<KBox<OomNotifier<S>>>,
}

impl<S: Shrink + OomHandler> Pressure<S> {
    /// Registers `who`. May sleep.
    pub(crate) fn new(name: &'static CStr, who: Arc<S>) -> Result<Self> {
        Ok(Self {
            _shrinker: Shrinker::new(name, who.clone())?,
            _oom: KBox::pin_init(OomNotifier::new(who), GFP_KERNEL)?,
        })
    }
}
