// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Starting User Mode Linux.
//!
//! The agent's line is the second console, on standard input and output; everything the kernel has
//! to say goes to standard error.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use super::{Balloon, Ends, Plan, mebibytes};
use crate::paths;
use crate::process::{Process, bound};

/// Starts the machine of `plan` with its files in `folder`.
pub(super) fn start(plan: &Plan, folder: &Path) -> Result<Ends> {
    let kernel = plan.guest.kernel()?;
    let mut command = bound(&kernel.to_string_lossy());
    command
        .arg(format!("mem={}M", mebibytes(plan.memory)?))
        .arg(format!(
            "initrd={}",
            folder.join("initramfs.cpio").display()
        ))
        .args([
            "con=null",
            "con0=null,fd:2",
            "con1=fd:0,fd:1",
            "console=tty0",
        ])
        .args(["seccomp=on", "panic=-1", "oops=panic", "loglevel=5"])
        .arg("VBRS_AGENT=/dev/tty1")
        .arg(format!("uml_dir={}/", folder.display()));
    for balloon in &plan.balloons {
        match balloon {
            Balloon::VhostUser { socket, .. } => {
                let path = folder.join(socket);
                command.arg(format!("virtio_uml.device={}:5", path.display()));
            }
            Balloon::Qemu(_) => bail!("User Mode Linux has no balloon device of its own"),
        }
    }
    if plan.disk > 0 {
        let path = folder.join("disk");
        std::fs::File::create(&path)?.set_len(plan.disk)?;
        command.arg(format!("ubd0={}", path.display()));
    }
    command
        .args(plan.command_line.split_whitespace())
        .current_dir(folder)
        .env("TMPDIR", paths::memory_folder()?)
        .env("HOME", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let process = Process::start("linux", command)?;
    let (write, read, console) =
        process.take(|child| (child.stdin.take(), child.stdout.take(), child.stderr.take()));
    Ok(Ends {
        process,
        console: Box::new(console.context("no standard error")?),
        read: Box::new(read.context("no standard output")?),
        write: Box::new(write.context("no standard input")?),
    })
}
