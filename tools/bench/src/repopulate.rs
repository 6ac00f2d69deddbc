// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Has the host allocate and map a guest's memory again that a balloon gave back before, as if the guest
//! had touched it: all runs of a case begin alike.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vm_runner::host::Host;
use vm_runner::machine::qemu::QMP;
use vm_runner::qmp::Qmp;
use vm_runner::session::Session;
use vm_runner::size::{GIB, MIB};

/// Reads all of a QEMU guest's memory through QEMU's own mapping of it, by which every page gets
/// allocated and mapped.
///
/// # Errors
///
/// If QEMU refuses, or a page is missing afterwards.
pub fn by_qemu(session: &Session) -> Result<()> {
    let begun = Instant::now();
    let memory = session.machine().memory();
    let mut own;
    let mut shared;
    let qmp = match session.host() {
        Host::Qemu { qmp, .. } => {
            shared = qmp
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            &mut *shared
        }
        _ => {
            own = Qmp::connect(&session.folder().join(QMP))?;
            &mut own
        }
    };
    for (address, bytes) in parts(memory) {
        let mut at = address;
        while at < address + bytes {
            // QEMU does nothing else meanwhile, and an answer is awaited for some seconds only.
            let size = GIB.min(address + bytes - at);
            let file = json!({ "val": at, "size": size, "filename": "/dev/null" });
            qmp.execute("pmemsave", &file)
                .context("have QEMU read the guest's memory")?;
            at += size;
        }
    }
    let allocated = session.host_memory()?;
    tracing::info!(
        "{}: populated after {:.1?}",
        session.folder().display(),
        begun.elapsed()
    );
    ensure!(
        allocated + 16 * MIB >= memory,
        "the host has allocated {} MiB only",
        allocated / MIB
    );
    Ok(())
}

/// Where the memory of a q35 machine lies: addresses and sizes.
fn parts(memory: u64) -> Vec<(u64, u64)> {
    /// From this size on, what lies below 4 GiB ends at 2 GiB.
    const SPLIT: u64 = 0xb000_0000;

    if memory < SPLIT {
        vec![(0, memory)]
    } else {
        vec![(0, 2 * GIB), (4 * GIB, memory - 2 * GIB)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_make_the_whole() {
        assert_eq!(parts(2 * GIB), [(0, 2 * GIB)]);
        assert_eq!(parts(4 * GIB), [(0, 2 * GIB), (4 * GIB, 2 * GIB)]);
    }
}
