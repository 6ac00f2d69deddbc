// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The few statistics that are needed.

/// The middle value; of an even number of values, the mean of the two in the middle.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The value below which the share `q` of `values` lies, interpolated between neighbours.
pub fn quantile(values: &[f64], q: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let at = q.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (at.floor() as usize, at.ceil() as usize);
    let part = at - at.floor();
    Some(sorted[below] * (1.0 - part) + sorted[above] * part)
}

/// The arithmetic mean.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// How far the middle half of the values lies apart, as a share of the median: one odd value on
/// either side does not count.
pub fn spread(values: &[f64]) -> Option<f64> {
    let middle = median(values)?;
    let width = quantile(values, 0.75)? - quantile(values, 0.25)?;
    Some(if middle == 0.0 {
        0.0
    } else {
        width / middle.abs()
    })
}

/// Drops digits that nobody reads: keeps four behind the point.
pub fn tidy(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn middles() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), Some(3.0));
        assert_eq!(median(&[f64::NAN, 1.0]), Some(1.0));
        assert_eq!(mean(&[1.0, 2.0, 6.0]), Some(3.0));
        assert_eq!(mean(&[]), None);
    }

    #[test]
    fn quantiles_lie_between_neighbours() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(quantile(&values, 1.0), Some(5.0));
        assert_eq!(quantile(&values, 0.25), Some(2.0));
        assert_eq!(quantile(&values, 0.125), Some(1.5));
    }

    #[test]
    fn one_odd_value_is_no_spread() {
        assert_eq!(spread(&[10.0, 10.0, 10.0, 10.0, 99.0]), Some(0.0));
        assert_eq!(spread(&[1.0, 8.0, 10.0, 12.0, 99.0]), Some(0.4));
        assert_eq!(spread(&[0.0, 0.0]), Some(0.0));
        assert_eq!(spread(&[]), None);
    }
}
