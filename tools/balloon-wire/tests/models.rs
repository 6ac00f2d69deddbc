// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The pure code against naive models of it.

use std::collections::{BTreeMap, BTreeSet};

use balloon_wire::bitmap::{PfnBitmap, Runs};
use balloon_wire::logic::hold::Hold;
use balloon_wire::logic::request::{Answer, Desk, Done, Guest, No, Reason, Request, Status};
use balloon_wire::logic::target::{Backoff, Step, default_reserve, step};
use balloon_wire::logic::units::PageSize;
use balloon_wire::logic::window::{Place, Window, WindowSize, WindowTable};
use balloon_wire::wire::{Announcement, Header, RecordError, VERSION};
use proptest::collection::vec;
use proptest::prelude::*;

/// Words in which runs are as likely as single bits.
fn words() -> impl Strategy<Value = Vec<u64>> {
    let word = prop_oneof![
        Just(0),
        Just(u64::MAX),
        any::<u64>(),
        (0..64u32).prop_map(|b| 1 << b)
    ];
    vec(word, 0..20).prop_map(|words| words.into_iter().map(u64::to_le).collect())
}

/// Bit i of wire bytes, by the words of the specification.
fn bit(bytes: &[u8], i: usize) -> bool {
    bytes[i / 8] >> (i % 8) & 1 == 1
}

fn wire_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

/// Numbers at the borders of ranges as often as any.
fn edgy() -> impl Strategy<Value = u64> {
    let near = |n: u64| (0..3u64).prop_map(move |d| n.wrapping_add(d).wrapping_sub(1));
    prop_oneof![
        any::<u64>(),
        0..10_000u64,
        (0..64u32).prop_flat_map(move |s| near(1 << s)),
        (0..64u32).prop_flat_map(move |s| near(u64::MAX >> s)),
    ]
}

proptest! {
    #[test]
    fn runs_are_those_of_the_bits(words in words()) {
        let bytes = wire_bytes(&words);
        let mut expected: Vec<(usize, usize)> = Vec::new();
        for i in (0..bytes.len() * 8).filter(|i| bit(&bytes, *i)) {
            match expected.last_mut() {
                Some((start, len)) if *start + *len == i => *len += 1,
                _ => expected.push((i, 1)),
            }
        }
        let runs: Vec<_> = Runs::new(&words).map(|r| (r.start, r.len)).collect();
        prop_assert_eq!(runs, expected);
    }

    #[test]
    fn bits_are_set_and_cleared_like_a_set(
        size in 0..5usize,
        steps in vec((any::<bool>(), 0..400usize), 0..200),
    ) {
        let mut words = vec![0; size];
        let mut map = PfnBitmap::new(&mut words);
        let mut model = BTreeSet::new();
        for (set, at) in steps {
            let changed = match set {
                true => at < map.len() && model.insert(at),
                false => model.remove(&at),
            };
            prop_assert_eq!(if set { map.set(at) } else { map.clear(at) }, changed);
            prop_assert_eq!(map.get(at), model.contains(&at));
        }
        prop_assert_eq!(map.weight(), model.len());
        let bytes = wire_bytes(&words);
        let set: BTreeSet<_> = (0..bytes.len() * 8).filter(|i| bit(&bytes, *i)).collect();
        prop_assert_eq!(set, model);
    }

    #[test]
    fn headers_come_back(id: u32, page_shift: u32, base_pfn: u64, bmap_len: u64, more in vec(any::<u8>(), 0..9)) {
        let header = Header { id, page_shift, base_pfn, bmap_len };
        let mut bytes = header.encode().to_vec();
        bytes.extend(more);
        prop_assert_eq!(Header::decode(&bytes), Ok(header));
    }

    #[test]
    fn any_bytes_are_a_header_or_too_short(bytes in vec(any::<u8>(), 0..60)) {
        match Header::decode(&bytes) {
            Ok(header) => prop_assert_eq!(&header.encode()[..], &bytes[..Header::LEN]),
            Err(error) => {
                prop_assert_eq!(error, RecordError::Short(bytes.len()));
                prop_assert!(bytes.len() < Header::LEN);
            }
        }
    }

    /// The judgement of a header, in numbers that cannot overflow.
    #[test]
    fn headers_are_judged_as_with_wide_numbers(
        id in prop_oneof![9 => Just(0u32), 1 => any::<u32>()],
        page_shift in prop_oneof![9 => 0..40u32, 1 => any::<u32>()],
        base_pfn in edgy(),
        bmap_len in prop_oneof![edgy(), (0..600u64).prop_map(|n| n * 8)],
        have in prop_oneof![edgy(), 0..5000u64],
        page_shifts: u64,
        max_bitmap_bytes in prop_oneof![any::<u32>(), 0..5000u32],
    ) {
        let device = Announcement {
            version: VERSION, page_shifts, max_bitmap_bytes, block_shift: 0, requests: 0,
        };
        let header = Header { id, page_shift, base_pfn, bmap_len };
        let known = page_shift <= 30 && page_shifts >> page_shift & 1 == 1;
        let expected = if id != 0 {
            Err(RecordError::Id(id))
        } else if !known {
            Err(RecordError::PageShift(page_shift))
        } else if bmap_len == 0 || bmap_len % 8 != 0 || bmap_len > max_bitmap_bytes.into() {
            Err(RecordError::BmapLen(bmap_len))
        } else if bmap_len > have {
            Err(RecordError::Truncated { bmap_len, have })
        } else {
            let frames = u128::from(base_pfn) + u128::from(bmap_len) * 8;
            // The first byte after the last frame is still a 64-bit number.
            match frames << page_shift < 1 << 64 {
                true => Ok(()),
                false => Err(RecordError::BasePfn(base_pfn)),
            }
        };
        prop_assert_eq!(header.check(&device, have), expected);
    }

    #[test]
    fn any_announcement_is_judged(bytes: [u8; 32], good in 0..8u8) {
        let mut bytes = bytes;
        // Mostly with a good start, or the rest would never be looked at.
        if good != 0 {
            bytes[..6].copy_from_slice(b"PBMP\x01\x00");
        }
        if good > 1 {
            bytes[8] = 0;
            bytes[9] = bytes[9] & 0xf0 | 0x10;
            bytes[11] &= 0x7f;
            bytes[12..16].fill(0);
        }
        if let Ok(announcement) = Announcement::decode(&bytes) {
            prop_assert!(announcement.takes(12));
            prop_assert!((0..12).chain(31..200).all(|shift| !announcement.takes(shift)));
            prop_assert!(announcement.max_bitmap_bytes >= 64);
            prop_assert!(announcement.block_shift == 0 || announcement.takes(announcement.block_shift));
            // All but the reserved bytes come back.
            let again = announcement.encode();
            prop_assert_eq!(&again[..6], &bytes[..6]);
            prop_assert_eq!(&again[8..28], &bytes[8..28]);
        }
    }

    /// Windows as the driver uses them, in any order of frames: whatever is sent, in sum it is each
    /// frame once, and each record is one that a host takes.
    #[test]
    fn windows_send_each_frame_once(
        shift in 6..15u32,
        frames in prop::collection::btree_set(prop_oneof![0..5000u64, any::<u64>().prop_map(|f| f >> 13)], 0..200),
        order in any::<prop::sample::Index>(),
    ) {
        const SLOTS: usize = 3;
        let size = WindowSize::new(1 << shift).expect("a power of two");
        let mut list: Vec<_> = frames.iter().copied().collect();
        let turn = order.index(list.len().max(1));
        list.rotate_left(turn);
        let device = Announcement {
            version: VERSION, page_shifts: 1 << 12, max_bitmap_bytes: 1 << shift, block_shift: 0, requests: 0,
        };
        let mut table = WindowTable::<SLOTS>::new();
        let mut maps = vec![vec![0u64; size.bytes() as usize / 8]; SLOTS];
        let mut seen = BTreeMap::<u64, u32>::new();
        let mut send = |window: Window, map: &mut Vec<u64>| {
            let header = window.header(size, 0, 12);
            let words = &map[window.words()];
            assert_eq!(header.check(&device, words.len() as u64 * 8), Ok(()));
            assert_eq!(header.bmap_len, words.len() as u64 * 8);
            assert_eq!(header.base_pfn % 64, 0);
            assert!(words.first() != Some(&0) && words.last() != Some(&0), "not trimmed");
            let outside = map.iter().enumerate().filter(|(i, _)| !window.words().contains(i));
            assert!(outside.map(|(_, w)| *w).all(|w| w == 0), "trimmed too much");
            for run in frames_of(words) {
                for i in run {
                    *seen.entry(header.base_pfn + i).or_insert(0) += 1;
                }
            }
            map.fill(0);
        };
        for frame in list {
            let (number, bit) = size.locate(frame);
            let slot = match table.find(number) {
                Place::Open(slot) | Place::Free(slot) => slot,
                Place::Evict(slot) => {
                    let window = table.close(slot).expect("a window to evict");
                    send(window, &mut maps[slot]);
                    slot
                }
            };
            prop_assert!(PfnBitmap::new(&mut maps[slot]).set(bit));
            table.note(slot, number, bit);
        }
        for (slot, map) in maps.iter_mut().enumerate() {
            if let Some(window) = table.close(slot) {
                send(window, map);
            }
        }
        prop_assert!(seen.values().all(|n| *n == 1));
        prop_assert!(seen.into_keys().eq(frames));
    }

    #[test]
    fn sizes_of_windows(bytes: u32, limit: u32) {
        let good = bytes.is_power_of_two() && (64..=1 << 20).contains(&bytes);
        match WindowSize::new(bytes) {
            Some(size) => {
                prop_assert!(good && size.bytes() == bytes && size.frames() == u64::from(bytes) * 8);
                let best = (6..=20).map(|s| 1u32 << s).filter(|b| *b <= limit && *b <= bytes).max();
                prop_assert_eq!(size.at_most(limit).map(WindowSize::bytes), best);
            }
            None => prop_assert!(!good),
        }
    }

    #[test]
    fn units_in_wide_numbers(shift in 12..=30u32, num_pages: u32, pages in edgy(), order in 0..12u32, page_shift in 12..=30u32) {
        let size = PageSize::from_shift(shift).expect("a size of pages");
        let per = 1u128 << (shift - 12);
        prop_assert_eq!(u128::from(size.guest_pages(num_pages)), u128::from(num_pages).div_ceil(per));
        let actual = (u128::from(pages) * per).min(u32::MAX.into());
        prop_assert_eq!(u128::from(size.actual(pages)), actual);
        let first = u128::from(pages) * per;
        prop_assert_eq!(size.balloon_pfn(pages).map(u128::from), (first <= u32::MAX.into()).then_some(first));
        if let Some((frame, count)) = size.frames(pages, order, page_shift) {
            let start = u128::from(pages) << shift;
            prop_assert_eq!(u128::from(frame) << page_shift, start);
            prop_assert_eq!(u128::from(count) << page_shift, 1u128 << (shift + order));
        }
    }

    #[test]
    fn steps_go_to_the_target_and_not_past_it(
        target in edgy(), actual in edgy(), available in edgy(), reserve in edgy(), limit in 1..5000u64,
    ) {
        match step(target, actual, available, reserve, limit) {
            Step::Rest => prop_assert_eq!(target, actual),
            Step::Starved => prop_assert!(target > actual && available <= reserve),
            Step::Deflate(n) => prop_assert!(n > 0 && n <= limit && n <= actual - target),
            Step::Inflate(n) => {
                prop_assert!(n > 0 && n <= limit && n <= target - actual);
                // The reserve stays.
                prop_assert!(available - n >= reserve);
            }
        }
    }

    #[test]
    fn a_guest_keeps_a_part_of_its_memory(ram in edgy()) {
        let reserve = default_reserve(ram);
        prop_assert!(reserve <= ram / 4 && reserve <= 512 << 20);
    }
}

/// What can happen at a desk.
#[derive(Clone, Debug)]
enum Event {
    Take(Request),
    Part(u64),
    Finish,
    Fail,
    GiveUp,
}

fn request() -> impl Strategy<Value = Request> {
    (1..6u32, 0..6u16, 0..4u16, 0..3u64).prop_map(|(id, command, flags, argument)| Request {
        id,
        command,
        flags,
        argument,
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => request().prop_map(Event::Take),
        2 => (1..100u64).prop_map(Event::Part),
        1 => Just(Event::Finish),
        1 => Just(Event::Fail),
        1 => Just(Event::GiveUp),
    ]
}

proptest! {
    #[test]
    fn any_request_comes_back_and_is_judged(bytes: [u8; 16], announced: u32, drops_caches: bool, poisons: bool) {
        let request = Request::decode(&bytes).expect("enough bytes");
        prop_assert_eq!(request.encode(), bytes);
        let guest = Guest { announced, drops_caches, poisons };
        if request.judge(&guest).is_ok() {
            prop_assert!(request.id != 0 && announced >> request.command & 1 == 1);
            prop_assert!(drops_caches || request.command != 1);
            prop_assert!(!poisons || request.command != 3 || request.flags & 1 == 1);
        }
    }

    #[test]
    fn any_answer_is_read(bytes: [u8; 32]) {
        let answer = Answer::decode(&bytes).expect("enough bytes");
        prop_assert_eq!(Answer::decode(&answer.encode()), Some(answer));
    }

    /// Whatever happens, each request gets one terminal answer, in the order of the requests, and the
    /// sums of its parts are in it; and there are never more answers than the desk says it needs.
    #[test]
    fn a_desk_answers_each_request_once(events in vec(event(), 0..60)) {
        let guest = Guest { announced: 0x1f, drops_caches: true, poisons: false };
        let mut desk = Desk::new();
        let mut asked = Vec::new();
        let mut answered = Vec::new();
        // Parts, and pages in them, of the request that is worked on.
        let mut open: Option<(u64, u64)> = None;
        for (now, event) in events.into_iter().enumerate() {
            let now = now as u64;
            let mut terminal = |answer: Option<Answer>, open: &mut Option<(u64, u64)>| {
                if let Some(answer) = answer {
                    assert!(answer.status.is_terminal());
                    if let Some((parts, pages)) = open.take() {
                        assert_eq!((answer.value, answer.detail), (pages, parts));
                    } else {
                        assert_eq!((answer.value, answer.detail), (0, 0));
                    }
                    answered.push(answer.id);
                }
            };
            prop_assert_eq!(desk.is_busy(), open.is_some());
            match event {
                Event::Take(request) => {
                    let needed = desk.answers_needed();
                    asked.push(request.id);
                    let turn = desk.take(request, &guest, now);
                    let given = usize::from(turn.older.is_some()) + usize::from(turn.task.is_err());
                    // One more if it is worked on now.
                    prop_assert_eq!(given + usize::from(turn.task.is_ok()), needed);
                    terminal(turn.older, &mut open);
                    match turn.task {
                        Ok(task) => {
                            prop_assert_eq!(request.judge(&guest), Ok(task));
                            open = Some((0, 0));
                        }
                        Err(answer) => {
                            prop_assert_eq!(request.judge(&guest), Err(No(answer.status, answer.reason)));
                            terminal(Some(answer), &mut open);
                        }
                    }
                }
                Event::Part(pages) => {
                    let part = desk.part(pages, now);
                    prop_assert_eq!(part.map(|p| (p.status, p.value, p.detail)),
                        open.map(|(parts, _)| (Status::Partial, pages, parts)));
                    open = open.map(|(parts, sum)| (parts + 1, sum + pages));
                }
                Event::Finish => {
                    let answer = desk.finish(now);
                    prop_assert!(answer.is_none_or(|a| a.status == Status::Ok));
                    terminal(answer, &mut open);
                }
                Event::Fail => {
                    let answer = desk.fail(No(Status::Failed, Reason::Error), now);
                    prop_assert!(answer.is_none_or(|a| a.status == Status::Failed));
                    terminal(answer, &mut open);
                }
                Event::GiveUp => terminal(desk.give_up(Reason::Stopping, now), &mut open),
            }
        }
        asked.truncate(answered.len());
        prop_assert_eq!(answered, asked);
    }

    /// What is noted is what an early end tells.
    #[test]
    fn an_early_end_tells_what_was_done(value: u64, detail: u64) {
        let guest = Guest { announced: 0x1f, drops_caches: true, poisons: false };
        let mut desk = Desk::new();
        let request = Request { id: 1, command: 2, flags: 0, argument: 0 };
        prop_assert!(desk.take(request, &guest, 0).task.is_ok());
        desk.note(Done { value, detail });
        let answer = desk.give_up(Reason::Stopping, 1).expect("one was worked on");
        prop_assert_eq!((answer.value, answer.detail), (value, detail));
    }

    /// The host is told that a hold has ended if, and only if, it was told that there is one and does
    /// not end it itself.
    #[test]
    fn a_hold_that_was_told_ends_once(steps in vec(0..4u8, 0..40)) {
        let mut hold = Hold::default();
        let (mut told, mut taking, mut n) = (None, false, 0);
        for step in steps {
            match step {
                0 if told.is_none() => {
                    hold.begin();
                    taking = true;
                }
                1 => {
                    n += 1;
                    match hold.tell(n, u64::from(n) * 10, 0) {
                        Ok(()) => {
                            prop_assert!(taking);
                            told = Some(n);
                        }
                        Err(_) => prop_assert!(!taking || told.is_some()),
                    }
                    taking = false;
                }
                2 => {
                    let ended = hold.end(Reason::Pressure, 0);
                    prop_assert_eq!(ended.map(|a| (a.id, a.value)), told.map(|n| (n, u64::from(n) * 10)));
                    told = None;
                    taking = false;
                }
                3 => {
                    prop_assert_eq!(hold.release(), told.map_or(0, |n| u64::from(n) * 10));
                    told = None;
                    taking = false;
                }
                _ => (),
            }
            prop_assert_eq!(hold.is_told(), told.is_some());
            prop_assert_eq!(hold.is_taking(), taking);
        }
    }
}

/// The set bits of words in steps of runs, as frames from the first.
fn frames_of(words: &[u64]) -> impl Iterator<Item = std::ops::Range<u64>> {
    Runs::new(words).map(|r| r.start as u64..(r.start + r.len) as u64)
}

#[test]
fn back_off_doubles_to_its_limit() {
    let mut backoff = Backoff::default();
    let delays: Vec<_> = (0..10).map(|_| backoff.delay_ms()).collect();
    assert_eq!(delays[0], 200);
    assert!(delays.windows(2).all(|w| w[1] == (w[0] * 2).min(10_000)));
    assert_eq!(delays.last(), Some(&10_000));
    backoff.reset();
    assert_eq!(backoff.delay_ms(), 200);
}
