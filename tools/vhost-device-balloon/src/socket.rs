// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Listening on a path, and leaving none behind.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;

/// Why a path cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Something else is there.
    #[error("{} exists and is not a socket; remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// Somebody listens there.
    #[error("another program listens on {}; stop it or choose another path", .0.display())]
    InUse(PathBuf),
    /// The system refuses.
    #[error("cannot listen on {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Who may connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The daemon's user only.
    Owner,
    /// As the umask says.
    Umask,
}

/// A listening socket; its path is removed when it is dropped, unless something else is there by
/// then.
#[derive(Debug)]
pub struct Socket {
    /// The socket.
    pub listener: UnixListener,
    path: PathBuf,
    identity: (u64, u64),
}

impl Socket {
    /// Listens on `path`. A socket that nobody listens on any more is replaced.
    ///
    /// For [`Access::Owner`] the umask of the process is changed for a moment: call it before there
    /// are threads that create files.
    ///
    /// # Errors
    ///
    /// If something else is at `path`, somebody listens there, or the system refuses.
    pub fn listen(path: &Path, access: Access) -> Result<Self, SocketError> {
        let failed = |source| SocketError::Io {
            path: path.to_owned(),
            source,
        };
        match fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed(e)),
            Ok(found) if !found.file_type().is_socket() => {
                return Err(SocketError::NotASocket(path.to_owned()));
            }
            Ok(_) if in_use(path).map_err(failed)? => {
                return Err(SocketError::InUse(path.to_owned()));
            }
            Ok(_) => match fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
                _ => {}
            },
        }
        // With the mask in place there is no moment at which others could connect.
        let mask =
            (access == Access::Owner).then(|| rustix::process::umask(Mode::from_raw_mode(0o177)));
        let bound = UnixListener::bind(path);
        if let Some(mask) = mask {
            rustix::process::umask(mask);
        }
        let listener = bound.map_err(failed)?;
        let found = fs::symlink_metadata(path).map_err(failed)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            identity: (found.dev(), found.ino()),
        })
    }
}

/// Whether a socket at a path belongs to a living program. It is not connected to, as a daemon would
/// take that for its frontend.
fn in_use(path: &Path) -> io::Result<bool> {
    const PROTOTYPE: i32 = rustix::io::Errno::PROTOTYPE.raw_os_error();
    match UnixDatagram::unbound()?.connect(path) {
        Ok(()) => Ok(true),
        // There is a socket, but of another type than ours.
        Err(e) if e.raw_os_error() == Some(PROTOTYPE) => Ok(true),
        Err(e) => match e.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => Ok(false),
            _ => Err(e),
        },
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == self.identity);
        if ours {
            // There is nobody to tell if it cannot be removed.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn made_for_the_owner_and_removed() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("socket");
        let socket = Socket::listen(&path, Access::Owner).expect("listening");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(
            Socket::listen(&path, Access::Owner),
            Err(SocketError::InUse(_))
        ));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn stale_sockets_are_replaced_and_files_are_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).expect("bound"));
        assert!(path.exists());
        drop(Socket::listen(&path, Access::Umask).expect("replaced"));
        fs::write(&path, "precious").expect("written");
        assert!(matches!(
            Socket::listen(&path, Access::Owner),
            Err(SocketError::NotASocket(_))
        ));
        std::os::unix::fs::symlink("nowhere", dir.path().join("link")).expect("linked");
        assert!(matches!(
            Socket::listen(&dir.path().join("link"), Access::Owner),
            Err(SocketError::NotASocket(_))
        ));
        assert_eq!(fs::read(&path).expect("still there"), b"precious");
        let error = Socket::listen(&dir.path().join("no/socket"), Access::Owner)
            .expect_err("no such folder");
        assert!(error.to_string().starts_with("cannot listen on "));
    }

    #[test]
    fn anothers_socket_is_left_alone() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("socket");
        let socket = Socket::listen(&path, Access::Umask).expect("listening");
        fs::rename(&path, dir.path().join("moved")).expect("moved");
        let _other = UnixListener::bind(&path).expect("bound");
        drop(socket);
        assert!(path.exists());
    }
}
