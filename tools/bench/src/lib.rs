// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Measures how fast the balloon driver is: against the kernel's own driver, and against what the
//! host cannot avoid. See `Documentation/benchmarks.rst`.
//!
//! ```text
//!  runner ──► cases ──► subject ──► vm-runner
//!    │          └─────► host, repopulate, helper
//!    └─► case ──► report (JSON, table, page with plots)
//! ```
//!
//! [`cases`] boot guests and give [`case::Run`]s, round after round, the contestants in turn;
//! [`runner`] chooses the cases, repeats those that were disturbed, and makes [`case::Case`]s of the
//! runs by the rules of their [`spec`]; [`report`] shows them. [`guest`] is what runs inside the
//! guests.

pub mod case;
pub mod cases;
pub mod environment;
pub mod guest;
pub mod helper;
pub mod host;
pub mod repopulate;
pub mod report;
pub mod runner;
pub mod smoke;
pub mod spec;
pub mod stats;
pub mod subject;
