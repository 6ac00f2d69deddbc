// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The life of the daemon: listen, serve, clean up.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use balloon_control::size::Size;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
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

/// How long to wait before trying again what failed for lack of something.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
/// Files that a session needs, at least: two for each queue, and about as many besides.
const SESSION_FILES: usize = 32;
/// How long a session may take to end after a signal.
const GRACE: Duration = Duration::from_millis(800);

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

impl DaemonError {
    /// Whether the system is short of something, file descriptors mostly, and it may work later.
    fn is_shortage(&self) -> bool {
        use rustix::io::Errno;
        let error = match self {
            Self::Io { source, .. } => source,
            Self::Backend(
                BackendError::StartDaemon(source)
                | BackendError::CreateBackendListener(VhostError::SocketError(source)),
            ) => source,
            // An event, a thread or the like; there is no other reason.
            Self::Backend(BackendError::NewVhostUserHandler(_)) => return true,
            _ => return false,
        };
        let short = [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOBUFS,
            Errno::NOMEM,
            Errno::AGAIN,
        ];
        short.iter().any(|e| source_is(error, *e))
    }
}

fn source_is(error: &io::Error, errno: rustix::io::Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
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
    serve(args, &state(args)?)
}

/// What the device is to be, before anybody uses it.
///
/// # Errors
///
/// If options contradict each other.
pub fn state(args: &Args) -> Result<Arc<State>, DaemonError> {
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
    Ok(state)
}

/// Serves frontends until the last one disconnects or a signal comes.
///
/// # Errors
///
/// If it cannot begin, or the frontend breaks the protocol.
pub fn serve(args: &Args, state: &Arc<State>) -> Result<(), DaemonError> {
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
        control::spawn(Arc::clone(state), listener)
            .map_err(io_error("the control socket cannot be served"))?;
        sessions(args, state, &socket, &signal)?;
        drop(control);
        return Ok(());
    }
    sessions(args, state, &socket, &signal)
}

fn sessions(
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
    let mut short = false;
    loop {
        let listener = &socket.listener;
        if !readable(listener, signal).map_err(io_error("no frontend can be waited for"))? {
            info!("ending on a signal");
            return Ok(());
        }
        let result = session(state, socket, signal);
        state.disconnected();
        if let Some(error) = result.as_ref().err().filter(|e| e.is_shortage()) {
            // The frontend waits meanwhile.
            if !std::mem::replace(&mut short, true) {
                warn!("{error}; trying again until it can be");
            }
            thread::sleep(SHORTAGE_PAUSE);
            continue;
        }
        short = false;
        match result {
            Err(e @ DaemonError::Backend(_)) if args.persist => {
                warn!("{e}; waiting");
                // A frontend that comes again and again is no reason to spin.
                thread::sleep(SHORTAGE_PAUSE);
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

/// A frontend being served, by the threads of the backend crate.
struct Serving {
    daemon: VhostUserDaemon<Arc<Device>>,
    device: Arc<Device>,
    /// Closed when all is over.
    _over: UnixStream,
}

impl Serving {
    fn new(device: Arc<Device>, over: UnixStream) -> Result<Self, DaemonError> {
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
        let daemon = VhostUserDaemon::new("vhost-user".to_owned(), Arc::clone(&device), memory)
            .map_err(DaemonError::Backend)?;
        for handler in daemon.get_epoll_handlers() {
            let fd = device.wake_event().as_raw_fd();
            if let Err(error) = handler.register_listener(fd, EventSet::IN, WAKE_EVENT) {
                // The device's thread cannot be told to end, and dropping this waits for it.
                std::mem::forget(daemon);
                return Err(io_error("the device's thread cannot be woken")(error));
            }
        }
        Ok(Self {
            daemon,
            device,
            _over: over,
        })
    }

    /// Accepts the frontend that is waiting.
    fn accept(&mut self, listener: &UnixListener) -> Result<(), DaemonError> {
        let listener = listener
            .try_clone()
            .map_err(io_error("no frontend can be accepted"))?;
        self.daemon
            .start(&mut Listener::from(listener))
            .map_err(DaemonError::Backend)
    }

    /// Serves until the frontend disconnects.
    fn wait(mut self) -> Result<(), BackendError> {
        self.daemon.wait()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Dropping the daemon waits for the device's thread.
        self.device.stop();
    }
}

/// Serves one frontend.
fn session(state: &Arc<State>, socket: &Socket, signal: &UnixStream) -> Result<End, DaemonError> {
    // Before anybody is accepted, who would be lost if there is no room for a session.
    (0..SESSION_FILES)
        .map(|_| signal.try_clone())
        .collect::<Result<Vec<_>, _>>()
        .map_err(io_error("no frontend can be accepted"))?;
    // All sockets of our own come before this look at them.
    let (over, waiting) = UnixStream::pair().map_err(io_error("no frontend can be accepted"))?;
    let known = Known::now().map_err(io_error("open files cannot be listed"))?;
    let device = Device::new(Arc::clone(state), known);
    let device = Arc::new(device.map_err(io_error("no event can be made"))?);
    let mut serving = Serving::new(Arc::clone(&device), over)?;
    serving.accept(&socket.listener)?;
    info!("a frontend connected");
    state.connected(Arc::clone(&device) as Arc<_>);

    // While another thread waits for the session's end, this one waits for a signal.
    let shutdown = serving.daemon.shutdown_handle();
    let thread = thread::Builder::new()
        .name("session".to_owned())
        .spawn(move || serving.wait())
        .map_err(io_error("no frontend can be served"))?;
    if !readable(&waiting, signal).map_err(io_error("the frontend cannot be waited for"))? {
        device.stop();
        if let Some(handle) = &shutdown {
            handle.shutdown();
        }
        if !readable_within(&waiting, GRACE) {
            warn!("a request is still in work; ending without it");
            return Ok(End::Signal);
        }
        let _ = thread.join();
        return Ok(End::Signal);
    }
    let panicked = |_| {
        Err(BackendError::StartDaemon(io::Error::other(
            "a thread panicked",
        )))
    };
    match thread.join().unwrap_or_else(panicked) {
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
fn readable(wanted: &impl AsFd, signal: &UnixStream) -> io::Result<bool> {
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

/// Waits until `wanted` is readable, but no longer than `timeout`. Returns whether it is.
fn readable_within(wanted: &impl AsFd, timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(wanted, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result.is_ok_and(|ready| ready != 0),
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
