// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The back channel to the frontend, for the one message a balloon sends on it.
//!
//! A frontend hands the daemon a socket (`VHOST_USER_SET_BACKEND_REQ_FD`), on which
//! `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG` tells it that config space changed. The `vhost` crate
//! takes that socket, but can send only other messages and does not lend it. So it is looked up: it
//! is the only unnamed Unix stream socket that was not there before the frontend connected. All
//! others are named (what a listener accepts has the listener's name) or [`Known`].

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendFlags, SocketType, send, sockopt};

use crate::sys;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE_MSG: u32 = 2;
/// The version of the message format, without "needs a reply".
const FLAGS: u32 = 1;

/// The sockets that were open at some time, by inode.
#[derive(Debug, Default)]
pub struct Known(BTreeSet<u64>);

impl Known {
    /// Notes which sockets are open now; call it before a frontend is let in.
    ///
    /// # Errors
    ///
    /// If `/proc/self/fd` cannot be read.
    pub fn now() -> io::Result<Self> {
        Ok(Self(
            sockets()?.into_iter().map(|(_, inode)| inode).collect(),
        ))
    }
}

/// The channel, owned.
#[derive(Debug)]
pub struct Channel(UnixStream);

impl Channel {
    /// Finds the channel that a frontend just handed over.
    ///
    /// # Errors
    ///
    /// If there is no such socket, or more than one.
    pub fn find(known: &Known) -> io::Result<Self> {
        let mut found: Option<(u64, UnixStream)> = None;
        for (fd, inode) in sockets()? {
            if known.0.contains(&inode) || found.as_ref().is_some_and(|(i, _)| *i == inode) {
                continue;
            }
            let Ok(fd) = sys::duplicate(fd) else {
                continue;
            };
            let stream = UnixStream::from(fd);
            if !is_unnamed_stream(&stream) {
                continue;
            }
            if found.replace((inode, stream)).is_some() {
                return Err(io::Error::other(
                    "more than one socket could be the back channel",
                ));
            }
        }
        match found {
            Some((_, stream)) => Ok(Self(stream)),
            None => Err(io::Error::other("no socket is the back channel")),
        }
    }

    /// Tells the frontend that config space changed. Does not wait: a frontend that has not read
    /// the last such messages will look at config space anyway.
    ///
    /// # Errors
    ///
    /// If the frontend is gone. That it reads too slowly is no error.
    pub fn config_changed(&self) -> io::Result<()> {
        let mut message = [0; 12];
        // Request, flags, size of the payload; in the byte order of the machine.
        for (at, word) in message
            .chunks_exact_mut(4)
            .zip([CONFIG_CHANGE_MSG, FLAGS, 0])
        {
            at.copy_from_slice(&word.to_ne_bytes());
        }
        match send(&self.0, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            // Twelve bytes are queued whole or not at all.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// The open sockets: number and inode.
fn sockets() -> io::Result<Vec<(RawFd, u64)>> {
    let mut sockets = Vec::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // A descriptor may be closed while the list is read.
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let inode = target
            .to_str()
            .and_then(|t| t.strip_prefix("socket:["))
            .and_then(|t| t.strip_suffix(']'))
            .and_then(|t| t.parse().ok());
        let fd = entry.file_name().to_str().and_then(|n| n.parse().ok());
        if let (Some(fd), Some(inode)) = (fd, inode) {
            sockets.push((fd, inode));
        }
    }
    Ok(sockets)
}

/// Whether it is a Unix socket at all, of the stream type, and without a name.
fn is_unnamed_stream(socket: &UnixStream) -> bool {
    let stream = sockopt::socket_type(socket).is_ok_and(|t| t == SocketType::STREAM);
    stream && socket.local_addr().is_ok_and(|name| name.is_unnamed())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// One test, as all tests of a process see each other's sockets.
    #[test]
    fn the_new_unnamed_socket_is_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("named");
        let listener = UnixListener::bind(&path).expect("a listener");
        let known = Known::now().expect("what is open");
        assert!(Channel::find(&known).is_err(), "nothing new yet");

        // Accepted from a named listener, with a connecting end that is not ours in the daemon.
        let _client = UnixStream::connect(&path).expect("connected");
        let (_accepted, _) = listener.accept().expect("accepted");
        let known = Known::now().expect("what is open");

        let (mut frontend, backend) = UnixStream::pair().expect("a pair");
        assert!(Channel::find(&known).is_err(), "two are too many");
        let known = {
            let mut known = known;
            let (_, inode) = sockets()
                .expect("open sockets")
                .into_iter()
                .find(|(fd, _)| *fd == std::os::fd::AsRawFd::as_raw_fd(&frontend))
                .expect("the frontend's end");
            known.0.insert(inode);
            known
        };
        let channel = Channel::find(&known).expect("found");
        drop(backend);
        channel.config_changed().expect("sent");
        let mut message = [0; 12];
        frontend.read_exact(&mut message).expect("received");
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);

        // A frontend that never reads does not stop us.
        for _ in 0..100_000 {
            channel.config_changed().expect("sent or left out");
        }
        drop(frontend);
        assert!(channel.config_changed().is_err(), "gone");
    }
}
