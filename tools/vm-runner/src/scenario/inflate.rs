// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Inflating and deflating, by each protocol.

use super::{Scenario, only};
use crate::host::Dialect;
use crate::session::{Device, Setup};
use crate::size::MIB;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "pfn-array",
    about: "inflates and deflates by PFN arrays, on a host that knows nothing else",
    setup: Setup {
        device: Device::speaking(Dialect::PfnArray),
        ..Setup::USUAL
    },
    parts: &[only(|s| {
        let up = s.inflate(256 * MIB)?;
        s.sentinel_intact()?;
        let down = s.deflate()?;
        s.note(format!("{:.0?} up, {:.0?} down", up, down));
        Ok(())
    })],
    any_driver: true,
    ..Scenario::USUAL
}];
