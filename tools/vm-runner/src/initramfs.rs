// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! What a guest boots into: busybox, `vbrs-guest` with the libraries it needs, the drivers, and an
//! init script.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};

use crate::cpio::Archive;
use crate::paths::{self, Driver, Guest};

/// The init script. `VBRS_AGENT`, the agent's line, comes from the kernel's command line, and so does
/// `VBRS_RESUME`, the disk from which a guest that has hibernated wakes up.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mount -t debugfs debug /sys/kernel/debug 2>/dev/null
mount -t tmpfs -o size=100% memory /mem
for module in $(cat /lib/vbrs/first); do
	insmod /lib/vbrs/$module || echo "vbrs: insmod $module: $?" >/dev/console
done
if [ -n "$VBRS_RESUME" ]; then
	cat "/sys/class/block/$VBRS_RESUME/dev" >/sys/power/resume
fi
# Short enough that a test sees it.
echo 20 2>/dev/null >/proc/sys/kernel/hung_task_timeout_secs
# Caches are dropped often; the kernel need not log it each time.
echo 4 2>/dev/null >/proc/sys/vm/drop_caches
dmesg -n 8
vbrs-guest agent "$VBRS_AGENT" >/dev/console 2>&1 </dev/null
poweroff -f
"#;

/// The profile of the shell that a person gets.
fn profile() -> String {
    format!("PS1='{PROMPT}'\ncat /etc/motd\n")
}

/// What that shell shows when it waits for a command.
pub const PROMPT: &str = "guest# ";

/// Modules that a guest needs before anything else, where its kernel has not got them built in.
const BUS_DRIVERS: [&str; 2] = ["virtio_pci", "virtio_mmio"];

/// What runs another kernel from a running one, where the system has it.
const KEXEC: &str = "/usr/sbin/kexec";

/// The folder of the drivers in a guest.
pub const DRIVER_FOLDER: &str = "/lib/vbrs";

/// The initramfs for `guest`, made once for the whole run.
///
/// # Errors
///
/// If something that belongs into it is missing.
pub fn of(guest: Guest) -> Result<Arc<Vec<u8>>> {
    static MADE: Mutex<BTreeMap<Guest, Arc<Vec<u8>>>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(archive) = made.get(&guest) {
        return Ok(Arc::clone(archive));
    }
    let archive = build(guest).with_context(|| format!("the initramfs of the {guest} guest"))?;
    let archive = Arc::new(archive);
    made.insert(guest, Arc::clone(&archive));
    Ok(archive)
}

fn build(guest: Guest) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for folder in ["dev", "proc", "sys", "mem", "tmp", "etc"] {
        archive.directory(folder)?;
    }
    archive.character_device("dev/console", 5, 1)?;
    archive.character_device("dev/null", 1, 3)?;
    archive.file("init", 0o755, INIT.as_bytes())?;
    archive.file("etc/profile", 0o644, profile().as_bytes())?;
    archive.file("etc/motd", 0o644, b"")?;
    archive.file("bin/busybox", 0o755, &read(&busybox()?)?)?;
    archive.file(
        "bin/vbrs-guest",
        0o755,
        &read(&paths::sibling("vbrs-guest")?)?,
    )?;
    // The bench's own helper, linked like the agent; who does not have it does not need it.
    if let Ok(helper) = paths::sibling("vbrs-bench-guest") {
        archive.file("bin/vbrs-bench-guest", 0o755, &read(&helper)?)?;
    }
    let mut libraries = libraries()?;
    let kexec = Path::new(KEXEC);
    if !guest.is_uml() && kexec.exists() {
        archive.file("bin/kexec", 0o755, &read(kexec)?)?;
        // The same library may be found on two ways.
        let have = |path: &PathBuf| libraries.iter().any(|l| l.file_name() == path.file_name());
        let more: Vec<PathBuf> = libraries_of(kexec)?
            .into_iter()
            .filter(|path| !have(path))
            .collect();
        libraries.extend(more);
    }
    for library in libraries {
        let path = library.to_string_lossy();
        archive.file(path.trim_start_matches('/'), 0o755, &read(&library)?)?;
        // The program loader, which programs name by this path.
        let name = library.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("ld-linux") {
            archive.link(&format!("lib64/{name}"), &path)?;
        }
    }

    let inside = DRIVER_FOLDER.trim_start_matches('/');
    let mut first = String::new();
    if let Some(folder) = guest.module_folder() {
        for module in needed(&folder, &BUS_DRIVERS)? {
            let name = format!("{}.ko", module_name(&module));
            archive.file(&format!("{inside}/{name}"), 0o644, &read_module(&module)?)?;
            first.push_str(&name);
            first.push('\n');
        }
    }
    archive.file(&format!("{inside}/first"), 0o644, first.as_bytes())?;
    for driver in [Driver::Rust, Driver::C] {
        // Which of them a test needs is the test's business.
        if let Ok(path) = guest.driver(driver) {
            let name = format!("{inside}/{}.ko", driver.module());
            archive.file(&name, 0o644, &read_module(&path)?)?;
        }
    }
    Ok(archive.finish())
}

/// A busybox that needs no libraries: whatever the kernel lacks, a shell should come up.
fn busybox() -> Result<PathBuf> {
    match std::env::var_os("VBRS_BUSYBOX") {
        Some(path) => Ok(path.into()),
        None => paths::program("busybox"),
    }
}

/// The libraries `vbrs-guest` needs: both programs come from one workspace and one compiler, so they
/// are among those mapped here.
fn libraries() -> Result<BTreeSet<PathBuf>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    Ok(maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|path| path.starts_with('/') && path.contains(".so"))
        .map(PathBuf::from)
        .collect())
}

/// The libraries that a program of the system needs.
fn libraries_of(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let out = Command::new("ldd")
        .arg(program)
        .output()
        .context("run ldd")?;
    ensure!(
        out.status.success(),
        "ldd {}: {}",
        program.display(),
        out.status
    );
    // "libz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x…)", or the loader's path alone.
    Ok(String::from_utf8_lossy(&out.stdout)
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// Reads a module, decompressed.
fn read_module(path: &Path) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(|e| e.to_str()) {
        Some("ko") => return read(path),
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => bail!("{} is no module", path.display()),
    };
    let out = Command::new(tool)
        .arg("-dc")
        .arg(path)
        .output()
        .with_context(|| format!("run {tool}"))?;
    ensure!(
        out.status.success(),
        "{tool} -dc {}: {}",
        path.display(),
        out.status
    );
    Ok(out.stdout)
}

fn module_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.split_once('.').map_or(&*name, |(stem, _)| stem);
    stem.replace('-', "_")
}

/// The files of `wanted` and all they depend on, in the order they must be loaded; what is built into
/// the kernel is left out.
fn needed(folder: &Path, wanted: &[&str]) -> Result<Vec<PathBuf>> {
    let list = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    // Some modules beside a kernel that has the rest built in: a line has a module last, and before it
    // what it needs.
    let few = list("load-order");
    let built_in = list("modules.builtin");
    let built_in: BTreeSet<String> = built_in
        .lines()
        .map(|line| module_name(Path::new(line)))
        .collect();
    let deps = list("modules.dep");
    let mut lines: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for line in few.lines() {
        let files: Vec<&str> = line.split_whitespace().collect();
        if let Some(last) = files.last() {
            lines.insert(module_name(Path::new(last)), files);
        }
    }
    for (file, needs) in deps.lines().filter_map(|line| line.split_once(':')) {
        // `modules.dep` has what a module needs last first.
        let files = needs.split_whitespace().rev().chain([file]).collect();
        lines.insert(module_name(Path::new(file)), files);
    }

    let mut order: Vec<PathBuf> = Vec::new();
    for &name in wanted {
        if built_in.contains(name) {
            continue;
        }
        let Some(files) = lines.get(name) else {
            ensure!(
                built_in.is_empty() && deps.is_empty(),
                "{name} is neither built in nor among the modules of {}",
                folder.display()
            );
            continue;
        };
        for file in files {
            let path = folder.join(file);
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("modules.builtin", "kernel/a/in-built.ko\n");
        write(
            "modules.dep",
            "k/top-one.ko.xz: k/mid.ko.xz k/low.ko.xz\nk/mid.ko.xz: k/low.ko.xz\nk/low.ko.xz:\n",
        );
        let names = |wanted: &[&str]| -> Vec<String> {
            needed(dir.path(), wanted)
                .unwrap()
                .iter()
                .map(|p| module_name(p))
                .collect()
        };
        assert_eq!(names(&["in_built"]), Vec::<String>::new());
        assert_eq!(names(&["top_one", "mid"]), ["low", "mid", "top_one"]);
        assert!(needed(dir.path(), &["absent"]).is_err());
    }

    #[test]
    fn a_folder_with_a_few_modules_has_the_rest_built_in() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("load-order");
        std::fs::write(list, "one.ko\ntwo-a.ko three.ko\n").unwrap();
        let names: Vec<String> = needed(dir.path(), &["absent", "three", "one"])
            .unwrap()
            .iter()
            .map(|p| module_name(p))
            .collect();
        assert_eq!(names, ["two_a", "three", "one"]);
    }

    #[test]
    fn own_libraries_are_found() {
        let libraries = libraries().unwrap();
        assert!(
            libraries
                .iter()
                .any(|l| l.to_string_lossy().contains("libc.so"))
        );
        assert!(libraries.iter().all(|l| l.is_file()));
    }
}
