// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The page: one file, readable without a network.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::Result;

use super::{plot, short, short_or_dash};
use crate::case::{Case, Run, sides};
use crate::environment::Environment;

const STYLE: &str = "
body { font: 16px/1.45 sans-serif; color: #212121; background: #fff; max-width: 960px; margin: 2em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2em }
table { border-collapse: collapse; font-size: 14px; margin: .5em 0 }
th, td { text-align: left; padding: .2em .7em; border-bottom: 1px solid #ddd; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.held { color: #2e7d32 } .missed { color: #c62828; font-weight: bold }
.wide { overflow-x: auto } svg { max-width: 100%; height: auto }
summary { cursor: pointer; margin: .4em 0 } .note { color: #555; font-size: 14px }
";

/// Writes it.
///
/// # Errors
///
/// If a plot cannot be drawn.
pub fn page(environment: &Environment, cases: &[Case]) -> Result<String> {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>virtio_balloon_rs: benchmarks</title>\n<style>{STYLE}</style></head><body>\n\
         <h1>virtio_balloon_rs: benchmarks</h1>\n"
    );
    paragraph(&mut html, &super::table::summary(cases));
    html.push_str("<table>\n");
    for (name, value) in environment.rows() {
        let _infallible = writeln!(html, "<tr><th>{name}</th><td>{}</td></tr>", escape(&value));
    }
    html.push_str("</table>\n");

    html.push_str("<h2>Against what is required</h2>\n");
    paragraph(
        &mut html,
        "A bar that goes beyond the line is better than required, by the factor on the axis (logarithmic). \
         Behind it stand the ratio that was measured and the one that is required. All values are medians; \
         the contestants were measured in turn, in one run.",
    );
    html.push_str(&plot::ratios(cases)?);
    overview(&mut html, cases);

    html.push_str("<h2>Where the time goes</h2>\n");
    paragraph(
        &mut html,
        "Seen from outside: what the daemon spends in the system calls that give memory back; what else it \
         computes (reading requests, mostly); what the guest computes (allocating and marking pages, telling, \
         and for QEMU all of QEMU: emulation, and with its own balloon also the discards); and the rest, in \
         which nobody works. Guest and daemon work at the same time, so that the parts may be more than the \
         total, which stands behind the bar.",
    );
    html.push_str(&plot::breakdown(cases)?);

    for case in cases {
        if let Some(svg) = plot::scaling(case)? {
            html.push_str("<h2>Over the size of the guest</h2>\n");
            paragraph(
                &mut html,
                "The shaded band is what is allowed around the middle of the compared sizes.",
            );
            html.push_str(&svg);
        }
    }

    html.push_str("<h2>Each case</h2>\n");
    for case in cases {
        details(&mut html, case);
    }
    html.push_str("</body></html>");
    Ok(html)
}

fn overview(html: &mut String, cases: &[Case]) {
    html.push_str(
        "<div class=\"wide\"><table>\n<tr><th>Case</th><th class=\"n\">Ours</th><th class=\"n\">Reference</th><th>Unit</th>\
         <th class=\"n\">Ratio</th><th class=\"n\">Required</th><th></th></tr>\n",
    );
    for case in cases {
        let (class, verdict) = verdict(case);
        let _infallible = writeln!(
            html,
            "<tr><td><a href=\"#{0}\">{0}</a></td><td class=\"n\">{1}</td><td class=\"n\">{2}</td><td>{3}</td>\
             <td class=\"n\">{4}</td><td class=\"n\">{5} {6}</td><td class=\"{class}\">{verdict}</td></tr>",
            escape(&case.name),
            short_or_dash(case.ours),
            short_or_dash(case.reference),
            escape(&case.unit),
            short_or_dash(case.ratio),
            case.direction,
            short(case.required),
        );
    }
    html.push_str("</table></div>\n");
}

fn verdict(case: &Case) -> (&'static str, &'static str) {
    match (case.held, &case.error) {
        (_, Some(_)) => ("missed", "not measured"),
        (true, _) => ("held", "held"),
        (false, _) => ("missed", "missed"),
    }
}

fn details(html: &mut String, case: &Case) {
    let (class, verdict) = verdict(case);
    let _infallible = writeln!(
        html,
        "<h3 id=\"{0}\">{0}: <span class=\"{class}\">{verdict}</span></h3>\n<p>{1}.<br>Against: {2}.</p>",
        escape(&case.name),
        escape(&case.what),
        escape(&case.against),
    );
    if let Some(why) = &case.error {
        paragraph(html, why);
    }
    if !case.counters.is_empty() {
        figures(html, case);
    }
    for note in &case.notes {
        let _infallible = writeln!(html, "<p class=\"note\">{}</p>", escape(note));
    }
    if !case.runs.is_empty() {
        html.push_str("<details><summary>All runs</summary>\n");
        raw(html, case, &case.runs);
        html.push_str("</details>\n");
    }
    if !case.first_runs.is_empty() {
        html.push_str(
            "<details><summary>Runs of the first attempt, which was disturbed</summary>\n",
        );
        raw(html, case, &case.first_runs);
        html.push_str("</details>\n");
    }
}

/// Medians of all figures, a column for each side.
fn figures(html: &mut String, case: &Case) {
    let sides = sides(&case.runs);
    let names: BTreeSet<&String> = case.counters.values().flat_map(|f| f.keys()).collect();
    html.push_str("<div class=\"wide\"><table>\n<tr><th>Median</th>");
    for side in &sides {
        let _infallible = write!(html, "<th class=\"n\">{}</th>", escape(side));
    }
    let _infallible = write!(html, "</tr>\n<tr><td>{}</td>", escape(&case.unit));
    for side in &sides {
        let value = crate::case::side(&case.runs, side);
        let spread = case.spread.get(*side).copied().unwrap_or_default();
        let _infallible = write!(
            html,
            "<td class=\"n\">{} (middle half over {:.0} %)</td>",
            short_or_dash(value),
            spread * 100.0
        );
    }
    html.push_str("</tr>\n");
    for name in names {
        let _infallible = write!(html, "<tr><td>{}</td>", escape(&name.replace('_', " ")));
        for side in &sides {
            let value = case.counters.get(*side).and_then(|f| f.get(name)).copied();
            let _infallible = write!(html, "<td class=\"n\">{}</td>", short_or_dash(value));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table></div>\n");
}

/// The values of all runs, a line for each side.
fn raw(html: &mut String, case: &Case, runs: &[Run]) {
    let _infallible = write!(
        html,
        "<div class=\"wide\"><table>\n<tr><th>{}, by round</th></tr>\n",
        escape(&case.unit)
    );
    for side in sides(runs) {
        let _infallible = write!(html, "<tr><td>{}</td>", escape(side));
        for run in runs.iter().filter(|run| run.side == side) {
            let _infallible = write!(html, "<td class=\"n\">{}</td>", short(run.value));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table></div>\n");
}

fn paragraph(html: &mut String, text: &str) {
    let _infallible = writeln!(html, "<p>{}</p>", escape(text));
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_words_is_shown_as_it_is() {
        assert_eq!(escape("a<b> & \"c\""), "a&lt;b&gt; &amp; &quot;c&quot;");
    }
}
