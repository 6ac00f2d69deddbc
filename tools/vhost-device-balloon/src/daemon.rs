// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The life of the daemon: listen, serve, clean up.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use balloon_control::size::Size;
use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGINT, SIGTERM};
use tracing::{info, warn};
use vhost::vhost_user::{Error as VhostError, Listener};
use vhost_user_backend::{Error as BackendError, VhostUserDaemon};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use crate::args::Args;
use crate::channel::Known;
use crate::control;
use crate::device::{Device, WAKE_EVENT};
use crate::fault::Faults;
use crate::socket::{Access, Socket, SocketError};
use crate::state::State;

/// Why the daemon cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Options contradict each other.
    #[error("{0}")]
    Usage(String),
    /// A socket cannot be listened on.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The frontend did not keep to the vhost-user protocol.
    #[error("the frontend cannot be served: {0}")]
    Backend(BackendError),
    /// The system refuses something else.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> DaemonError {
    move |source| DaemonError::Io { what, source }
}

/// Runs the daemon until the frontend disconnects or a signal comes.
///
/// # Errors
///
/// If it cannot start, or the frontend breaks the protocol.
pub fn run(args: &Args) -> Result<(), DaemonError> {
    let settings = args.settings().map_err(DaemonError::Usage)?;
    let target = args
        .target
        .parse()
        .and_then(|size: Size| size.pages(0))
        .map_err(|e| DaemonError::Usage(format!("--target: {e}")))?;
    let state = Arc::new(State::new(settings, Faults::new(args.fault.clone())));
    if target != 0 {
        state.set_target(target);
    }

    // Signals become readable bytes, so that one poll waits for them and for the frontend.
    let (signal, sender) = UnixStream::pair().map_err(io_error("signals cannot be received"))?;
    for number in [SIGTERM, SIGINT] {
        sender
            .try_clone()
            .and_then(|s| signal_hook::low_level::pipe::register(number, s))
            .map_err(io_error("signals cannot be received"))?;
    }

    let socket = Socket::listen(&args.socket_path, Access::Umask)?;
    if let Some(path) = &args.control_path {
        let control = Socket::listen(path, Access::Owner)?;
        let listener = control
            .listener
            .try_clone()
            .map_err(io_error("the control socket cannot be served"))?;
        control::spawn(Arc::clone(&state), listener)
            .map_err(io_error("the control socket cannot be served"))?;
        serve(args, &state, &socket, &signal)?;
        drop(control);
        return Ok(());
    }
    serve(args, &state, &socket, &signal)
}

fn serve(
    args: &Args,
    state: &Arc<State>,
    socket: &Socket,
    signal: &UnixStream,
) -> Result<(), DaemonError> {
    if state.faults.allowed() {
        warn!(
            "faults are played, this is for tests: {:?}",
            state.faults.list()
        );
        let state = Arc::clone(state);
        thread::Builder::new()
            .name("storm".to_owned())
            .spawn(move || storm(&state))
            .map_err(io_error("faults cannot be played"))?;
    }
    info!(
        "listening on {}, dialect {}, features {}",
        args.socket_path.display(),
        state.settings.dialect.name(),
        state.settings.features
    );
    loop {
        let listener = &socket.listener;
        if !readable(listener, signal).map_err(io_error("no frontend can be waited for"))? {
            info!("ending on a signal");
            return Ok(());
        }
        let result = session(state, socket, signal);
        state.disconnected();
        match result {
            Err(e @ DaemonError::Backend(_)) if args.persist => {
                warn!("{e}; waiting");
                // Out of file descriptors, perhaps: no reason to spin.
                thread::sleep(Duration::from_millis(100));
            }
            Err(e) => return Err(e),
            Ok(End::Signal) => {
                info!("ending on a signal");
                return Ok(());
            }
            Ok(End::Nobody) => info!("a connection ended without a word, waiting"),
            Ok(End::Disconnect) if args.persist => info!("the frontend disconnected, waiting"),
            Ok(End::Disconnect) => {
                info!("the frontend disconnected, ending");
                return Ok(());
            }
        }
    }
}

/// Why a session ended.
enum End {
    Disconnect,
    Nobody,
    Signal,
}

/// Serves one frontend.
fn session(state: &Arc<State>, socket: &Socket, signal: &UnixStream) -> Result<End, DaemonError> {
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
    // All sockets of our own come before this look at them.
    let (over, waiting) = UnixStream::pair().map_err(io_error("signals cannot be received"))?;
    let known = Known::now().map_err(io_error("open files cannot be listed"))?;
    let device = Device::new(Arc::clone(state), known);
    let device = Arc::new(device.map_err(io_error("no event can be made"))?);
    let mut daemon = VhostUserDaemon::new("vhost-user".to_owned(), Arc::clone(&device), memory)
        .map_err(DaemonError::Backend)?;
    for handler in daemon.get_epoll_handlers() {
        use std::os::fd::AsRawFd as _;
        let fd = device.wake_event().as_raw_fd();
        handler
            .register_listener(fd, EventSet::IN, WAKE_EVENT)
            .map_err(io_error("the device's thread cannot be woken"))?;
    }
    let listener = socket
        .listener
        .try_clone()
        .map_err(io_error("no frontend can be accepted"))?;
    daemon
        .start(&mut Listener::from(listener))
        .map_err(DaemonError::Backend)?;
    info!("a frontend connected");
    state.connected(Arc::clone(&device) as Arc<_>);

    // While this thread waits for the session's end, another waits for a signal.
    let shutdown = daemon.shutdown_handle();
    let mut signalled = false;
    let mut result = Ok(());
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let came = matches!(readable(&waiting, signal), Ok(false));
            if came {
                device.stop();
                if let Some(handle) = &shutdown {
                    handle.shutdown();
                }
            }
            came
        });
        result = daemon.wait();
        drop(over);
        signalled = watcher.join().unwrap_or(false);
    });
    device.stop();
    match result {
        _ if signalled => Ok(End::Signal),
        Ok(())
        | Err(BackendError::HandleRequest(VhostError::Disconnected | VhostError::PartialMessage)) => {
            Ok(if device.spoken() {
                End::Disconnect
            } else {
                End::Nobody
            })
        }
        Err(e) => Err(DaemonError::Backend(e)),
    }
}

/// Waits until `wanted` is readable. Returns false if a signal came first.
fn readable(wanted: &impl std::os::fd::AsFd, signal: &UnixStream) -> io::Result<bool> {
    loop {
        let mut fds = [
            PollFd::new(signal, PollFlags::IN),
            PollFd::new(wanted, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        let [signal, wanted] = fds.map(|fd| !fd.revents().is_empty());
        if signal || wanted {
            return Ok(!signal);
        }
    }
}

/// Plays the faults that need a clock.
fn storm(state: &State) {
    const IDLE: Duration = Duration::from_millis(20);
    let mut zero = false;
    loop {
        match state.faults.storm() {
            None => {
                if zero {
                    zero = false;
                    state.falsify_target(false);
                }
                thread::sleep(IDLE);
            }
            Some((pause, flip)) => {
                if flip {
                    zero = !zero;
                    state.falsify_target(zero);
                } else {
                    state.notify();
                }
                thread::sleep(pause);
            }
        }
    }
}
