// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Faults on purpose, so that drivers can be tested against a slow, broken or hostile device.
//!
//! Not for use with a guest that matters. Faults are given with `--fault`, which may be repeated,
//! and can be changed over the control socket if there was at least one `--fault` (`none` will do).
//!
//! | fault | what the device does |
//! |---|---|
//! | `none` | nothing; faults may be set later |
//! | `withhold[=N]` | completes N requests (0), then takes requests without completing them |
//! | `delay=MS` | waits before it completes a request |
//! | `die[=N]` | completes N requests (0), then exits at once with status 70 |
//! | `used-id=ID` | puts this id into the used ring instead of the right one |
//! | `used-len=LEN` | puts this length into the used ring instead of 0 |
//! | `no-interrupt` | completes requests without telling the guest |
//! | `storm=HZ` | sends config-change notifications that often |
//! | `flip=HZ` | changes `num_pages` between the target and 0 that often, with notifications |
//! | `reverse=N` | keeps N requests of a queue, then completes them, the last one first |
//! | `request=HEX` | sends these bytes as a request of the host, once |
//! | `queue=NAME` | plays the faults above with requests of this queue only; may be repeated |
//! | `config=OFFSET:HEX` | shows these bytes in config space from this offset on |
//!
//! Requests are those of the inflate, deflate, hinting, reporting and answer queues, counted from when
//! the faults were last set. With the request queue only the id and the length in the used ring, and
//! interrupts, can be wrong. The names of queues are those of `status`.

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use balloon_wire::logic::request::Request;

use crate::config::READ_MAX;
use crate::features::Role;
use crate::state::lock;

/// Exit status of `die`.
pub const DIE_STATUS: i32 = 70;

/// The most faults that are played at a time, so that all of them fit into an answer.
pub const FAULTS_MAX: usize = 32;

/// The queues whose requests faults are played with.
const FAULTY: [Role; 6] = [
    Role::Inflate,
    Role::Deflate,
    Role::Hint,
    Role::Report,
    Role::Request,
    Role::Answer,
];
/// The longest bytes that are sent instead of a request: the guest's buffers have room for no more.
const REQUEST_MAX: usize = Request::LEN;

const KINDS: &str = "none, withhold[=N], delay=MS, die[=N], used-id=ID, used-len=LEN, \
                     no-interrupt, reverse=N, queue=NAME, request=HEX, storm=HZ, flip=HZ and \
                     config=OFFSET:HEX";

/// A fault; the [module](self) says what each does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `none`.
    None,
    /// `withhold`.
    Withhold(u64),
    /// `delay`, in milliseconds.
    Delay(u64),
    /// `die`.
    Die(u64),
    /// `used-id`.
    UsedId(u32),
    /// `used-len`.
    UsedLen(u32),
    /// `no-interrupt`.
    NoInterrupt,
    /// `reverse`, requests.
    Reverse(u64),
    /// `queue`.
    Queue(Role),
    /// `request`.
    Request(Vec<u8>),
    /// `storm`, in Hz.
    Storm(u32),
    /// `flip`, in Hz.
    Flip(u32),
    /// `config`.
    Config {
        /// In bytes.
        offset: usize,
        /// What is shown.
        bytes: Vec<u8>,
    },
}

/// Why a text is not a fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// No such fault.
    #[error("fault '{0}' is not known; allowed are {KINDS}")]
    Unknown(String),
    /// Its value is missing or wrong.
    #[error("the value of fault '{0}' is wrong; allowed are {KINDS}")]
    Value(String),
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let (kind, value) = match text.split_once('=') {
            Some((kind, value)) => (kind, Some(value)),
            None => (text, None),
        };
        let wrong = || FaultError::Value(text.to_owned());
        let number = |default: Option<u64>, max: u64| match value {
            None => default.ok_or_else(wrong),
            Some(v) => v.parse().ok().filter(|n| *n <= max).ok_or_else(wrong),
        };
        let u32_max = u64::from(u32::MAX);
        Ok(match kind {
            "none" if value.is_none() => Self::None,
            "withhold" => Self::Withhold(number(Some(0), u64::MAX)?),
            "delay" => Self::Delay(number(None, 3_600_000)?),
            "die" => Self::Die(number(Some(0), u64::MAX)?),
            "used-id" => Self::UsedId(number(None, u32_max)? as u32),
            "used-len" => Self::UsedLen(number(None, u32_max)? as u32),
            "no-interrupt" if value.is_none() => Self::NoInterrupt,
            "reverse" => Self::Reverse(number(None, u16::MAX.into())?),
            "queue" => {
                let role = FAULTY.into_iter().find(|role| Some(role.name()) == value);
                Self::Queue(role.ok_or_else(wrong)?)
            }
            "request" => {
                let bytes = value.and_then(unhex).ok_or_else(wrong)?;
                if bytes.len() > REQUEST_MAX {
                    return Err(wrong());
                }
                Self::Request(bytes)
            }
            "storm" => Self::Storm(number(None, 100_000)?.max(1) as u32),
            "flip" => Self::Flip(number(None, 100_000)?.max(1) as u32),
            "config" => {
                let (offset, hex) = value.and_then(|v| v.split_once(':')).ok_or_else(wrong)?;
                let offset: usize = offset.parse().map_err(|_| wrong())?;
                let bytes = unhex(hex).ok_or_else(wrong)?;
                if bytes.is_empty() || offset > READ_MAX || bytes.len() > READ_MAX - offset {
                    return Err(wrong());
                }
                Self::Config { offset, bytes }
            }
            "none" | "no-interrupt" => return Err(wrong()),
            _ => return Err(FaultError::Unknown(text.to_owned())),
        })
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if text.len() % 2 != 0 {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(text.get(i..i + 2)?, 16).ok())
        .collect()
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Withhold(n) => write!(f, "withhold={n}"),
            Self::Delay(ms) => write!(f, "delay={ms}"),
            Self::Die(n) => write!(f, "die={n}"),
            Self::UsedId(id) => write!(f, "used-id={id}"),
            Self::UsedLen(len) => write!(f, "used-len={len}"),
            Self::NoInterrupt => f.write_str("no-interrupt"),
            Self::Reverse(n) => write!(f, "reverse={n}"),
            Self::Queue(role) => write!(f, "queue={}", role.name()),
            Self::Request(bytes) => {
                f.write_str("request=")?;
                bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
            }
            Self::Storm(hz) => write!(f, "storm={hz}"),
            Self::Flip(hz) => write!(f, "flip={hz}"),
            Self::Config { offset, bytes } => {
                write!(f, "config={offset}:")?;
                bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
            }
        }
    }
}

/// How a request is to be completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Wait first.
    pub delay: Duration,
    /// Exit.
    pub die: bool,
    /// Do not complete it.
    pub withhold: bool,
    /// Keep it until there are so many, then complete the last one first.
    pub reverse: Option<u64>,
    /// The id in the used ring, if not the right one.
    pub used_id: Option<u32>,
    /// The length in the used ring, if not the right one.
    pub used_len: Option<u32>,
    /// Whether the guest may be told.
    pub interrupt: bool,
}

/// As every request is completed without faults.
pub const HONEST: Plan = Plan {
    delay: Duration::ZERO,
    die: false,
    withhold: false,
    reverse: None,
    used_id: None,
    used_len: None,
    interrupt: true,
};

/// The faults now.
#[derive(Debug, Default)]
pub struct Faults {
    allowed: bool,
    set: Mutex<Vec<Fault>>,
    requests: AtomicU64,
}

impl Faults {
    /// The faults of the command line; if there are none, none can be set later.
    pub fn new(set: Vec<Fault>) -> Self {
        Self {
            allowed: !set.is_empty(),
            set: Mutex::new(set.into_iter().filter(|f| *f != Fault::None).collect()),
            requests: AtomicU64::new(0),
        }
    }

    /// Whether there may be faults.
    pub const fn allowed(&self) -> bool {
        self.allowed
    }

    /// Replaces the faults. Returns whether that is allowed.
    #[must_use]
    pub fn replace(&self, set: Vec<Fault>) -> bool {
        if self.allowed {
            let mut now = lock(&self.set);
            *now = set.into_iter().filter(|f| *f != Fault::None).collect();
            self.requests.store(0, Ordering::Relaxed);
        }
        self.allowed
    }

    /// The faults as they are given.
    pub fn list(&self) -> Vec<String> {
        lock(&self.set).iter().map(Fault::to_string).collect()
    }

    /// How the next request, of the queue with this role, is to be completed.
    pub fn plan(&self, role: Role) -> Plan {
        let mut plan = HONEST;
        if !self.allowed || !self.concern(role) {
            return plan;
        }
        let before = self.requests.fetch_add(1, Ordering::Relaxed);
        for fault in lock(&self.set).iter() {
            match *fault {
                Fault::Withhold(n) => plan.withhold |= before >= n,
                Fault::Delay(ms) => plan.delay = Duration::from_millis(ms),
                Fault::Reverse(n) => plan.reverse = Some(n),
                Fault::Die(n) => plan.die |= before >= n,
                Fault::UsedId(id) => plan.used_id = Some(id),
                Fault::UsedLen(len) => plan.used_len = Some(len),
                Fault::NoInterrupt => plan.interrupt = false,
                Fault::None
                | Fault::Queue(_)
                | Fault::Request(_)
                | Fault::Storm(_)
                | Fault::Flip(_)
                | Fault::Config { .. } => {}
            }
        }
        plan
    }

    /// Whether requests that were withheld are to be completed now.
    pub fn released(&self) -> bool {
        !lock(&self.set)
            .iter()
            .any(|f| matches!(f, Fault::Withhold(_) | Fault::Reverse(_)))
    }

    /// What is to be sent instead of good requests of the host.
    pub fn requests(&self) -> Vec<Vec<u8>> {
        let set = lock(&self.set);
        let requests = set.iter().filter_map(|fault| match fault {
            Fault::Request(bytes) => Some(bytes.clone()),
            _ => None,
        });
        requests.collect()
    }

    /// Whether faults are played with a queue.
    fn concern(&self, role: Role) -> bool {
        let set = lock(&self.set);
        let mut queues = set.iter().filter_map(|fault| match fault {
            Fault::Queue(role) => Some(*role),
            _ => None,
        });
        match queues.next() {
            None => true,
            Some(first) => first == role || queues.any(|r| r == role),
        }
    }

    /// How often to send config-change notifications, and whether `num_pages` flips with them.
    pub fn storm(&self) -> Option<(Duration, bool)> {
        lock(&self.set).iter().find_map(|fault| match *fault {
            Fault::Storm(hz) => Some((Duration::from_secs(1) / hz, false)),
            Fault::Flip(hz) => Some((Duration::from_secs(1) / hz, true)),
            _ => None,
        })
    }

    /// Puts false bytes into config space.
    pub fn falsify(&self, space: &mut [u8; READ_MAX]) {
        if !self.allowed {
            return;
        }
        for fault in lock(&self.set).iter() {
            if let Fault::Config { offset, bytes } = fault {
                if let Some(part) = space.get_mut(*offset..*offset + bytes.len()) {
                    part.copy_from_slice(bytes);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for text in [
            "none",
            "withhold=3",
            "delay=20",
            "die=0",
            "used-id=4294967295",
            "used-len=1",
            "no-interrupt",
            "reverse=4",
            "queue=hint",
            "request=0100",
            "storm=1000",
            "flip=10",
            "config=32:00ff",
        ] {
            let fault: Fault = text.parse().expect(text);
            assert_eq!(fault.to_string(), text);
        }
        assert_eq!("withhold".parse(), Ok(Fault::Withhold(0)));
        for text in [
            "",
            "fast",
            "delay",
            "delay=x",
            "delay=-1",
            "used-id=4294967296",
            "reverse",
            "queue=stats",
            "request",
            "request=0",
            "request=0000000000000000000000000000000000",
            "config=32",
            "config=32:0",
            "config=32:zz",
            "config=256:00",
            "config=1:",
            "none=1",
            "config=9999:00",
        ] {
            let error = text.parse::<Fault>().expect_err(text).to_string();
            assert!(error.contains("allowed are none, withhold"), "{error}");
        }
    }

    #[test]
    fn without_the_option_there_are_none() {
        let faults = Faults::new(vec![]);
        assert!(!faults.replace(vec![Fault::Die(0)]));
        assert_eq!(faults.plan(Role::Inflate), HONEST);
    }

    #[test]
    fn withheld_after_some_and_released() {
        let faults = Faults::new(vec![Fault::Withhold(2), Fault::UsedLen(9)]);
        let plans: Vec<_> = (0..4)
            .map(|_| faults.plan(Role::Inflate).withhold)
            .collect();
        assert_eq!(plans, [false, false, true, true]);
        assert!(!faults.released());
        assert!(faults.replace(vec![Fault::None]));
        assert!(faults.released());
        assert_eq!(faults.plan(Role::Inflate), HONEST);
    }

    #[test]
    fn of_some_queues_only() {
        let only = |queues: &[Role]| {
            let mut set = vec![Fault::UsedLen(9)];
            set.extend(queues.iter().map(|role| Fault::Queue(*role)));
            let faults = Faults::new(set);
            FAULTY.map(|role| faults.plan(role) != HONEST)
        };
        assert_eq!(only(&[]), [true; 6]);
        assert_eq!(
            only(&[Role::Hint]),
            [false, false, true, false, false, false]
        );
        let two = [Role::Inflate, Role::Report];
        assert_eq!(only(&two), [true, false, false, true, false, false]);
        // What is not concerned does not count either.
        let faults = Faults::new(vec![Fault::Withhold(1), Fault::Queue(Role::Hint)]);
        for _ in 0..3 {
            assert!(!faults.plan(Role::Inflate).withhold);
        }
        assert!(!faults.plan(Role::Hint).withhold);
        assert!(faults.plan(Role::Hint).withhold);
    }
}
