// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Feature bits, their names, and what they make of the queues.

use std::fmt;
use std::str::FromStr;

use balloon_wire::wire;

/// `VIRTIO_RING_F_EVENT_IDX`.
pub const EVENT_IDX: u64 = 1 << 29;
/// `VHOST_USER_F_PROTOCOL_FEATURES`.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VIRTIO_F_VERSION_1`.
pub const VERSION_1: u64 = 1 << 32;

/// The balloon features that can be offered, by name and bit.
const NAMES: [(&str, u32); 7] = [
    ("must-tell-host", wire::F_MUST_TELL_HOST),
    ("stats", wire::F_STATS_VQ),
    ("deflate-on-oom", wire::F_DEFLATE_ON_OOM),
    ("free-page-hint", wire::F_FREE_PAGE_HINT),
    ("page-poison", wire::F_PAGE_POISON),
    ("reporting", wire::F_REPORTING),
    ("host-request", wire::F_HOST_REQUEST),
];

/// What the device speaks on the inflate and deflate queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    /// Page bitmaps on bit 23, announced in config space; PFN arrays for a driver without it.
    #[default]
    Bitmap,
    /// Page bitmaps as proposed in 2016: bit 3, an 8-byte config space, one record a request.
    #[value(name = "2016")]
    Draft2016,
    /// PFN arrays only, as the virtio specification has them.
    PfnArray,
}

impl Dialect {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bitmap => "bitmap",
            Self::Draft2016 => "2016",
            Self::PfnArray => "pfn-array",
        }
    }

    /// The feature bit by which a driver takes up page bitmaps, as a mask; 0 if there is none.
    pub const fn feature(self) -> u64 {
        match self {
            Self::Bitmap => 1 << wire::F_PAGE_BITMAP,
            Self::Draft2016 => 1 << wire::F_PAGE_BITMAP_2016,
            Self::PfnArray => 0,
        }
    }

    /// Size of config space, in bytes.
    pub const fn config_len(self) -> usize {
        match self {
            Self::Bitmap => wire::CONFIG_LEN,
            Self::Draft2016 => wire::CONFIG_HINT_CMD_ID,
            Self::PfnArray => wire::CONFIG_POISON_VAL + 4,
        }
    }
}

/// A set of balloon features, without those of the transport and the dialect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Features(u64);

/// Why a text is not a list of features.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeatureError {
    /// A name that is none.
    #[error("feature '{0}' is not known; allowed are {names} and none", names = all_names())]
    Unknown(String),
    /// Requests are announced where page bitmaps are.
    #[error("host-request needs the bitmap dialect; leave one out")]
    RequestsWithoutBitmap,
    /// Bit 3 cannot mean both.
    #[error("free-page-hint and the 2016 dialect use the same feature bit 3; leave one out")]
    HintIn2016,
}

fn all_names() -> String {
    NAMES.map(|(name, _)| name).join(", ")
}

impl Features {
    /// From bits as they are negotiated.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// As they are negotiated.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether a feature is in the set.
    pub const fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// Checks that the dialect leaves these features their bits.
    ///
    /// # Errors
    ///
    /// [`FeatureError::HintIn2016`] or [`FeatureError::RequestsWithoutBitmap`].
    pub const fn check(self, dialect: Dialect) -> Result<(), FeatureError> {
        match dialect {
            Dialect::Draft2016 if self.has(wire::F_FREE_PAGE_HINT) => Err(FeatureError::HintIn2016),
            Dialect::Draft2016 | Dialect::PfnArray if self.has(wire::F_HOST_REQUEST) => {
                Err(FeatureError::RequestsWithoutBitmap)
            }
            _ => Ok(()),
        }
    }

    /// The names of those in the set, where bit 3 means what it means in `dialect`.
    pub fn names(self, dialect: Dialect) -> Vec<String> {
        let mut names: Vec<String> = NAMES
            .iter()
            .filter(|(_, bit)| self.has(*bit) && 1 << bit != dialect.feature())
            .map(|(name, _)| (*name).to_owned())
            .collect();
        match dialect.feature() & self.0 {
            0 => {}
            _ if dialect == Dialect::Bitmap => names.push("page-bitmap-v1".to_owned()),
            _ => names.push("page-bitmap-2016".to_owned()),
        }
        names
    }
}

impl Default for Features {
    fn default() -> Self {
        Self(1 << wire::F_MUST_TELL_HOST | 1 << wire::F_STATS_VQ)
    }
}

impl FromStr for Features {
    type Err = FeatureError;

    fn from_str(text: &str) -> Result<Self, FeatureError> {
        let mut bits = 0;
        for word in text.split(',').map(str::trim).filter(|w| !w.is_empty()) {
            match NAMES.iter().find(|(name, _)| *name == word) {
                Some((_, bit)) => bits |= 1 << bit,
                None if word == "none" => {}
                None => return Err(FeatureError::Unknown(word.to_owned())),
            }
        }
        Ok(Self(bits))
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names(Dialect::PfnArray).join(",").as_str() {
            "" => f.write_str("none"),
            names => f.write_str(names),
        }
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Features({self})")
    }
}

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Pages the guest gives.
    Inflate,
    /// Pages the guest takes back.
    Deflate,
    /// Statistics of the guest.
    Stats,
    /// Free page hints.
    Hint,
    /// Free pages reported.
    Report,
    /// Requests of the host.
    Request,
    /// Answers to them.
    Answer,
}

impl Role {
    /// The name people see.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Inflate => "inflate",
            Self::Deflate => "deflate",
            Self::Stats => "stats",
            Self::Hint => "hint",
            Self::Report => "report",
            Self::Request => "request",
            Self::Answer => "answer",
        }
    }
}

/// Whether the host may ask for something: there are page bitmaps for the answers, too.
pub const fn requests(acked: u64, dialect: Dialect) -> bool {
    matches!(dialect, Dialect::Bitmap)
        && acked & dialect.feature() != 0
        && acked >> wire::F_HOST_REQUEST & 1 == 1
}

/// The queues by number, as Linux numbers them: densely over the features negotiated.
pub fn roles(acked: u64, dialect: Dialect) -> impl Iterator<Item = Role> {
    let requests = requests(acked, dialect);
    let acked = Features(acked & !dialect.feature());
    [
        (true, Role::Inflate),
        (true, Role::Deflate),
        (acked.has(wire::F_STATS_VQ), Role::Stats),
        (acked.has(wire::F_FREE_PAGE_HINT), Role::Hint),
        (acked.has(wire::F_REPORTING), Role::Report),
        (requests, Role::Request),
        (requests, Role::Answer),
    ]
    .into_iter()
    .filter_map(|(there, role)| there.then_some(role))
}

/// What the two main queues carry once features are negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Page-bitmap records, any number in a request.
    PageBitmap,
    /// One page-bitmap record in a request.
    PageBitmap2016,
    /// 32-bit page frame numbers.
    PfnArray,
}

impl Protocol {
    /// What the driver chose.
    pub const fn negotiated(acked: u64, dialect: Dialect) -> Self {
        match dialect {
            _ if acked & dialect.feature() == 0 => Self::PfnArray,
            Dialect::Draft2016 => Self::PageBitmap2016,
            _ => Self::PageBitmap,
        }
    }

    /// The name people see.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PageBitmap => "page-bitmap-v1",
            Self::PageBitmap2016 => "page-bitmap-2016",
            Self::PfnArray => "pfn-array",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1 << 1;
    const H: u64 = 1 << 3;
    const R: u64 = 1 << 5;
    const Q: u64 = 1 << 22;
    const B: u64 = 1 << 23;

    #[test]
    fn queues_are_dense_over_what_was_negotiated() {
        use Role::{Answer, Deflate, Hint, Inflate, Report, Request, Stats};
        let of = |acked, dialect| roles(acked, dialect).collect::<Vec<_>>();
        let classic = Dialect::PfnArray;
        assert_eq!(of(0, classic), [Inflate, Deflate]);
        assert_eq!(of(S, classic), [Inflate, Deflate, Stats]);
        assert_eq!(of(H, classic), [Inflate, Deflate, Hint]);
        assert_eq!(of(R, classic), [Inflate, Deflate, Report]);
        assert_eq!(of(S | R, classic), [Inflate, Deflate, Stats, Report]);
        assert_eq!(
            of(S | H | R, Dialect::Bitmap),
            [Inflate, Deflate, Stats, Hint, Report]
        );
        assert_eq!(of(H | S, Dialect::Draft2016), [Inflate, Deflate, Stats]);
        assert_eq!(
            of(S | Q | B, Dialect::Bitmap),
            [Inflate, Deflate, Stats, Request, Answer]
        );
        // Without page bitmaps there is nobody to ask.
        assert_eq!(of(Q, Dialect::Bitmap), [Inflate, Deflate]);
        assert_eq!(of(Q | B, classic), [Inflate, Deflate]);
    }

    #[test]
    fn names_there_and_back() {
        let all: Features =
            "must-tell-host, stats,deflate-on-oom,free-page-hint,page-poison,reporting,host-request"
                .parse()
                .expect("all names are known");
        assert_eq!(all.bits(), 0b11_1111 | Q);
        assert_eq!(all.to_string().parse(), Ok(all));
        assert_eq!("none".parse(), Ok(Features(0)));
        assert_eq!("".parse(), Ok(Features(0)));
        assert_eq!(Features(0).to_string(), "none");
        let error = "stats,fast".parse::<Features>().expect_err("no such name");
        assert!(
            error
                .to_string()
                .starts_with("feature 'fast' is not known; allowed are must-")
        );
    }

    #[test]
    fn bit_3_has_one_meaning() {
        assert_eq!(
            Features(H).check(Dialect::Draft2016),
            Err(FeatureError::HintIn2016)
        );
        assert_eq!(Features(H).check(Dialect::Bitmap), Ok(()));
        assert_eq!(Features(H).names(Dialect::Draft2016), ["page-bitmap-2016"]);
        assert_eq!(Features(H).names(Dialect::PfnArray), ["free-page-hint"]);
        assert_eq!(Protocol::negotiated(H, Dialect::Bitmap), Protocol::PfnArray);
        assert_eq!(
            Protocol::negotiated(H, Dialect::Draft2016),
            Protocol::PageBitmap2016
        );
        assert_eq!(
            Protocol::negotiated(1 << 23, Dialect::Bitmap),
            Protocol::PageBitmap
        );
        assert_eq!(
            Protocol::negotiated(1 << 23, Dialect::PfnArray),
            Protocol::PfnArray
        );
    }
}
