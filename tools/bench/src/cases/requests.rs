// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What the host asks the guest for. There is nothing like it in the C driver to compare with.

pub(super) mod drop_caches;
pub(super) mod free_pages;
pub(super) mod snapshot;

use std::time::Duration;

use anyhow::Result;
use balloon_control::Client;
use balloon_control::message::{Reply, Request};
use vm_runner::host::Dialect;
use vm_runner::session::Device;

use crate::subject::{Plan, Subject};

/// How long the guest may take for an answer.
const PATIENCE_MS: u64 = 120_000;
/// What a guest still does after its answer is part of its work.
const AFTER: Duration = Duration::from_millis(20);

/// A guest that can be asked.
const PLAN: Plan = Plan {
    name: "bench-requests",
    device: Device::Daemon {
        dialect: Dialect::Bitmap,
        options: &["--features", "must-tell-host,stats,host-request"],
    },
    ..Plan::UML
};

fn connect(subject: &Subject) -> Result<Client> {
    Ok(Client::connect(
        subject.session().host().daemon()?.control_path(),
    )?)
}

fn ask(client: &mut Client, request: &Request) -> Result<Reply> {
    Ok(client.ask(request)?)
}
