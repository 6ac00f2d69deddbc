// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The plots, as SVG that stands in the page itself.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{short, short_or_dash};
use crate::case::{Case, Figures, sides};
use crate::spec::Direction;

const GOOD: RGBColor = RGBColor(46, 125, 50);
const BAD: RGBColor = RGBColor(198, 40, 40);
const INK: RGBColor = RGBColor(33, 33, 33);
const PALE: RGBColor = RGBColor(224, 224, 224);

/// What a movement's time is made of, as far as it can be seen from outside.
pub const STAGES: [(&str, RGBColor); 4] = [
    ("host discards", RGBColor(21, 101, 192)),
    ("rest of the daemon", RGBColor(100, 181, 246)),
    ("guest", RGBColor(239, 108, 0)),
    ("waiting, nobody works", RGBColor(189, 189, 189)),
];

/// Size of letters; the backend makes 14 pixels of it.
const FONT: f64 = 17.4;
/// Width of all plots, in pixels.
const WIDTH: u32 = 940;
/// Where bars begin: names stand before.
const LEFT: i32 = 250;
/// Where bars end at the latest: numbers stand behind.
const RIGHT: i32 = 720;
/// From one bar to the next.
const STEP: i32 = 26;
/// Of this, what is coloured.
const BAR: i32 = 18;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws with `f` on a canvas of this height.
fn draw(height: u32, f: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        f(&area)?;
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

fn failed(e: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("draw: {e}")
}

fn text(area: &Area<'_>, words: &str, at: (i32, i32), side: HPos, color: &RGBColor) -> Result<()> {
    let style = ("sans-serif", FONT)
        .into_font()
        .color(color)
        .pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(words.to_owned(), at, style))
        .map_err(failed)
}

fn bar(area: &Area<'_>, from: (i32, i32), to: i32, color: &RGBColor) -> Result<()> {
    let (x, y) = from;
    let corners = [(x, y - BAR / 2), (to.max(x + 1), y + BAR / 2)];
    area.draw(&Rectangle::new(corners, color.filled()))
        .map_err(failed)
}

/// How many times better than required a case came out: 1 is exactly enough.
fn margin(case: &Case) -> Option<f64> {
    let ratio = case.ratio?;
    let margin = match case.direction {
        Direction::AtLeast => ratio / case.required,
        Direction::AtMost => case.required / ratio,
    };
    (margin.is_finite() && margin > 0.0).then_some(margin)
}

/// A bar for each case: by how much it is better or worse than required.
///
/// # Errors
///
/// If it cannot be drawn.
pub fn ratios(cases: &[Case]) -> Result<String> {
    /// A bar never goes further than this, and the axis always at least to the half and the double.
    const FURTHEST: f64 = 100.0;

    let height = 60 + STEP as u32 * cases.len() as u32;
    let margins: Vec<Option<f64>> = cases.iter().map(margin).collect();
    let known = || {
        margins
            .iter()
            .flatten()
            .map(|m| m.clamp(1.0 / FURTHEST, FURTHEST))
    };
    let (low, high) = (known().fold(0.5, f64::min), known().fold(2.0, f64::max));
    let x = |margin: f64| {
        let part = (margin.clamp(low, high) / low).ln() / (high / low).ln();
        LEFT + (part * f64::from(RIGHT - LEFT)).round() as i32
    };
    draw(height, |area| {
        let bottom = 40 + STEP * cases.len() as i32;
        let line = |at: i32, color: &RGBColor, width: u32| {
            let path = PathElement::new(vec![(at, 30), (at, bottom)], color.stroke_width(width));
            area.draw(&path).map_err(failed)
        };
        for tick in [0.01, 0.1, 0.2, 0.5, 2.0, 5.0, 10.0, 100.0] {
            if tick >= low && tick <= high {
                line(x(tick), &PALE, 1)?;
                text(area, &format!("{tick}"), (x(tick), 18), HPos::Center, &INK)?;
            }
        }
        for (i, (case, margin)) in (0..).zip(cases.iter().zip(&margins)) {
            let y = 40 + STEP / 2 + STEP * i;
            let color = if case.held { &GOOD } else { &BAD };
            text(area, &case.name, (LEFT - 10, y), HPos::Right, &INK)?;
            if let Some(margin) = margin {
                bar(area, (LEFT, y), x(*margin), color)?;
            }
            let words = format!(
                "{} ({} {})",
                short_or_dash(case.ratio),
                case.direction,
                short(case.required)
            );
            text(area, &words, (RIGHT + 10, y), HPos::Left, color)?;
        }
        line(x(1.0), &INK, 2)?;
        text(area, "required", (x(1.0), 18), HPos::Center, &INK)
    })
}

/// The stages of a movement, in milliseconds, from the figures of its runs.
pub fn stages(figures: &Figures) -> Option<[f64; 4]> {
    let figure = |name: &str| figures.get(name).copied();
    let total = figure("total_ms")?;
    let guest = figure("guest_cpu_ms")?;
    let discard = figure("discard_ms").unwrap_or(0.0);
    let daemon = (figure("daemon_cpu_ms").unwrap_or(0.0) - discard).max(0.0);
    let waiting = (total - discard - daemon - guest).max(0.0);
    Some([discard, daemon, guest, waiting])
}

/// For each side of each case that moved a balloon, what the time is made of.
///
/// # Errors
///
/// If it cannot be drawn.
pub fn breakdown(cases: &[Case]) -> Result<String> {
    let mut rows: Vec<(String, [f64; 4], f64)> = Vec::new();
    for case in cases {
        for side in sides(&case.runs) {
            let Some(figures) = case.counters.get(side) else {
                continue;
            };
            if let (Some(stages), Some(&total)) = (stages(figures), figures.get("total_ms")) {
                rows.push((format!("{}, {side}", case.name), stages, total));
            }
        }
    }
    let height = 60 + STEP as u32 * rows.len() as u32;
    draw(height, |area| {
        let mut at = LEFT;
        for (name, color) in STAGES {
            bar(area, (at, 18), at + BAR, &color)?;
            text(area, name, (at + BAR + 6, 18), HPos::Left, &INK)?;
            at += 40 + 8 * name.len() as i32;
        }
        for (i, (name, stages, total)) in (0..).zip(&rows) {
            let y = 40 + STEP / 2 + STEP * i;
            text(area, name, (LEFT - 10, y), HPos::Right, &INK)?;
            let sum: f64 = stages.iter().sum();
            let mut before = 0.0;
            for (stage, (_, color)) in stages.iter().zip(&STAGES) {
                let x = |ms: f64| LEFT + (ms / sum * f64::from(RIGHT - LEFT)).round() as i32;
                if *stage > 0.0 && sum > 0.0 {
                    bar(area, (x(before), y), x(before + stage), color)?;
                }
                before += stage;
            }
            text(
                area,
                &format!("{} ms", short(*total)),
                (RIGHT + 10, y),
                HPos::Left,
                &INK,
            )?;
        }
        Ok(())
    })
}

/// Time per GiB over the size of the guest, with the band that is allowed.
///
/// # Errors
///
/// If it cannot be drawn.
pub fn scaling(case: &Case) -> Result<Option<String>> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for side in sides(&case.runs) {
        let size = case
            .counters
            .get(side)
            .and_then(|figures| figures.get("guest_gib"));
        if let (Some(&size), Some(value)) = (size, crate::case::side(&case.runs, side)) {
            points.push((size, value));
        }
    }
    let (Some(first), Some(last), Some(most), Some(least)) =
        (points.first(), points.last(), case.ours, case.reference)
    else {
        return Ok(None);
    };
    let (from, to) = (first.0, last.0);
    let centre = f64::midpoint(most, least);
    let (low, high) = (
        centre * (1.0 - case.required),
        centre * (1.0 + case.required),
    );
    let top = points.iter().map(|p| p.1).fold(high, f64::max) * 1.2;
    let svg = draw(360, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(15)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d((from * 0.8..to * 1.25).log_scale(), 0.0..top)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("guest memory, GiB")
            .y_desc(&case.unit)
            .x_label_formatter(&|x| short(*x))
            .y_label_formatter(&|y| short(*y))
            .label_style(("sans-serif", FONT))
            .draw()
            .map_err(failed)?;
        let band = Rectangle::new([(from, low), (to, high)], GOOD.mix(0.15).filled());
        chart.draw_series(std::iter::once(band)).map_err(failed)?;
        let line = LineSeries::new(
            points.iter().copied(),
            RGBColor(21, 101, 192).stroke_width(2),
        );
        chart.draw_series(line).map_err(failed)?;
        let dots = points
            .iter()
            .map(|&p| Circle::new(p, 5, RGBColor(21, 101, 192).filled()));
        chart.draw_series(dots).map_err(failed)?;
        let labels = points.iter().map(|&(x, y)| {
            let words = format!(
                "{} GiB: {}",
                short(x).trim_end_matches('0').trim_end_matches('.'),
                short(y)
            );
            let style = ("sans-serif", FONT).into_font().color(&INK);
            Text::new(
                words,
                (x, y + top * 0.08),
                style.pos(Pos::new(HPos::Center, VPos::Center)),
            )
        });
        chart.draw_series(labels).map_err(failed)?;
        Ok(())
    })?;
    Ok(Some(svg))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{JUDGED, OURS, REFERENCE, Run};
    use crate::spec::{Bound, Ratio, Spec};

    fn figures(values: &[(&str, f64)]) -> Figures {
        values
            .iter()
            .map(|&(name, value)| (name.to_owned(), value))
            .collect()
    }

    #[test]
    fn stages_make_the_whole() {
        let seen = figures(&[
            ("total_ms", 10.0),
            ("guest_cpu_ms", 3.0),
            ("discard_ms", 4.0),
            ("daemon_cpu_ms", 5.0),
        ]);
        assert_eq!(stages(&seen), Some([4.0, 1.0, 3.0, 2.0]));
        let overlapping = figures(&[("total_ms", 2.0), ("guest_cpu_ms", 3.0)]);
        assert_eq!(stages(&overlapping), Some([0.0, 0.0, 3.0, 0.0]));
        assert_eq!(stages(&Figures::new()), None);
    }

    #[test]
    fn all_plots_can_be_drawn() {
        let spec = Spec {
            name: "a-case",
            what: "w",
            against: "a",
            unit: "ms",
            ratio: Ratio::TimesAsFast,
            bound: Bound::AtLeast(2.0),
        };
        let seen = figures(&[("total_ms", 10.0), ("guest_cpu_ms", 3.0)]);
        let runs = vec![
            Run::new(OURS, 0, 1.0).with(seen),
            Run::new(REFERENCE, 0, 1000.0),
        ];
        let cases = [
            Case::of(&spec, runs, Vec::new()),
            Case::failed(&spec, "no".to_owned()),
        ];
        assert_eq!(margin(&cases[0]), Some(500.0));
        for svg in [
            ratios(&cases),
            breakdown(&cases),
            ratios(&[]),
            breakdown(&[]),
        ] {
            let svg = svg.unwrap();
            assert!(
                svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
                "{svg}"
            );
            assert!(!svg.contains("NaN"), "{svg}");
        }
        assert!(ratios(&cases).unwrap().contains("a-case"));
        assert!(scaling(&cases[0]).unwrap().is_none());

        let spec = Spec {
            ratio: Ratio::Deviation,
            bound: Bound::AtMost(0.25),
            ..spec
        };
        let runs = [1.0, 4.0, 64.0].map(|size| {
            let seen = figures(&[("guest_gib", size), (JUDGED, 1.0)]);
            Run::new(&format!("{size} GiB"), 0, size.sqrt()).with(seen)
        });
        let svg = scaling(&Case::of(&spec, runs.to_vec(), Vec::new()))
            .unwrap()
            .unwrap();
        assert!(svg.contains("64 GiB"));
    }
}
