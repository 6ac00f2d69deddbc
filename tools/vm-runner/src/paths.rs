// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Where things are: kernels and modules from the set-up, programs beside this one.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

/// The guests there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum Guest {
    /// User Mode Linux with lock checking: native speed, up within a second.
    Uml,
    /// User Mode Linux without debug options, for timings.
    UmlLean,
    /// The distribution's kernel in QEMU, unmodified.
    Stock,
    /// A kernel with lock checking, atomic-sleep checks, page owner and KFENCE in QEMU.
    Debug,
}

/// The drivers a guest can load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Driver {
    /// Ours.
    Rust,
    /// The kernel's own.
    C,
}

impl fmt::Display for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Uml => "uml",
            Self::UmlLean => "uml-lean",
            Self::Stock => "stock",
            Self::Debug => "debug",
        })
    }
}

impl Guest {
    /// Whether it is User Mode Linux.
    pub fn is_uml(self) -> bool {
        matches!(self, Self::Uml | Self::UmlLean)
    }

    /// The end of the names of its variables.
    fn suffix(self) -> &'static str {
        match self {
            Self::Uml => "UML",
            Self::UmlLean => "UML_LEAN",
            Self::Stock => "STOCK",
            Self::Debug => "DEBUG",
        }
    }

    /// Its kernel.
    ///
    /// # Errors
    ///
    /// If the set-up has not provided it.
    pub fn kernel(self) -> Result<PathBuf> {
        variable(match self {
            Self::Uml => "VBRS_UML",
            Self::UmlLean => "VBRS_UML_LEAN",
            Self::Stock => "VBRS_VMLINUZ_STOCK",
            Self::Debug => "VBRS_DEBUG_BZIMAGE",
        })
    }

    /// The folder with the distribution's modules, for a kernel that has its bus drivers there.
    pub fn module_folder(self) -> Option<PathBuf> {
        (self == Self::Stock)
            .then(|| variable("VBRS_MODDIR_STOCK").ok())
            .flatten()
    }

    /// A driver built for it.
    ///
    /// # Errors
    ///
    /// If it has not been built.
    pub fn driver(self, driver: Driver) -> Result<PathBuf> {
        match driver {
            Driver::C => variable(&format!("VBRS_CDRIVER_{}", self.suffix())),
            Driver::Rust => {
                if let Some(path) = std::env::var_os(format!("VBRS_MODULE_{}", self.suffix())) {
                    return there(path.into());
                }
                there(
                    build_folder()
                        .join(self.to_string())
                        .join("virtio-balloon-rs.ko"),
                )
            }
        }
    }
}

impl Driver {
    /// Its name as a module of the kernel.
    pub fn module(self) -> &'static str {
        match self {
            Self::Rust => "virtio_balloon_rs",
            Self::C => "virtio_balloon",
        }
    }

    /// Its name on the virtio bus.
    pub fn bus_name(self) -> &'static str {
        self.module()
    }
}

/// The project's build folder: `VBRS_BUILD`, or `build` here.
pub fn build_folder() -> PathBuf {
    let folder =
        std::env::var_os("VBRS_BUILD").map_or_else(|| PathBuf::from("build"), PathBuf::from);
    std::path::absolute(&folder).unwrap_or(folder)
}

/// A program that was built together with this one.
///
/// # Errors
///
/// If it lies not beside this one.
pub fn sibling(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("where this program is")?;
    let mut folder = own.parent().unwrap_or(Path::new("."));
    // Tests of cargo run from a folder below.
    if folder.file_name().is_some_and(|n| n == "deps") {
        folder = folder.parent().unwrap_or(folder);
    }
    there(folder.join(name))
}

/// A program of the system.
///
/// # Errors
///
/// If it is not on the search path.
pub fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .with_context(|| format!("{name} is not installed"))
}

/// A folder in memory that allows executable mappings: guests' memory lies there.
///
/// # Errors
///
/// If there is none.
pub fn memory_folder() -> Result<PathBuf> {
    let own = std::env::var_os("VBRS_SHM").map(PathBuf::from);
    for folder in own
        .into_iter()
        .chain([PathBuf::from("/dev/shm"), std::env::temp_dir()])
    {
        let Ok(vfs) = rustix::fs::statvfs(&folder) else {
            continue;
        };
        if !vfs.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC) {
            return Ok(folder);
        }
    }
    bail!("neither VBRS_SHM nor /dev/shm nor the temporary folder allows executable mappings")
}

fn variable(name: &str) -> Result<PathBuf> {
    let value = std::env::var_os(name).with_context(|| format!("{name} is not set"))?;
    there(value.into())
}

fn there(path: PathBuf) -> Result<PathBuf> {
    if path.exists() {
        Ok(path)
    } else {
        bail!("{} is not there", path.display())
    }
}
