//! Scales and ticks.

use crate::text::thousands;

/// Ratio of the ends of a range from which on it is drawn on a logarithmic scale, with and without a zero.
const LOG_RATIOS: [f64; 2] = [20.0, 4.0];

/// Ticks of a linear scale, at most.
const TICKS_MAX: f64 = 6.0;

/// A range of values on a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
}

impl Scale {
    /// The scale over values: logarithmic where they are positive and spread widely, otherwise linear. A linear scale
    /// with `from_zero` begins at zero. `None` without finite values.
    pub fn over(values: impl Iterator<Item = f64> + Clone, from_zero: bool) -> Option<Scale> {
        let finite = values.filter(|value| value.is_finite());
        let low = finite.clone().reduce(f64::min)?;
        let high = finite.reduce(f64::max)?;
        let is_log = low > 0.0 && high / low >= LOG_RATIOS[usize::from(!from_zero)];
        let low = if from_zero && !is_log { low.min(0.0) } else { low };
        // A single value is drawn in the middle.
        let (low, high) = if low == high { (low - 0.5, high + 0.5) } else { (low, high) };
        Some(Scale { low, high, is_log })
    }

    /// The linear scale over values. `None` without finite values.
    pub fn linear(values: impl Iterator<Item = f64>) -> Option<Scale> {
        let finite: Vec<f64> = values.filter(|value| value.is_finite()).collect();
        let low = finite.iter().copied().reduce(f64::min)?;
        let high = finite.into_iter().reduce(f64::max)?;
        let high = if low == high { low + 1.0 } else { high };
        Some(Scale { low, high, is_log: false })
    }

    /// The logarithmic scale over positive values with room beyond its ends: a factor. `None` without values.
    pub fn logarithmic(values: impl Iterator<Item = f64>, room: f64) -> Option<Scale> {
        let positive: Vec<f64> = values.filter(|value| value.is_finite() && *value > 0.0).collect();
        let low = positive.iter().copied().reduce(f64::min)?;
        let high = positive.into_iter().reduce(f64::max)?;
        Some(Scale { low: low / room, high: high * room, is_log: true })
    }

    /// The lower end.
    pub fn low(&self) -> f64 {
        self.low
    }

    /// The upper end.
    pub fn high(&self) -> f64 {
        self.high
    }

    /// The scale with room beyond its ends: a share of the whole.
    pub fn padded(self, share: f64) -> Scale {
        let [low, high] = [self.low, self.high].map(|value| self.scaled(value));
        let room = (high - low) * share;
        let unscaled = |value: f64| if self.is_log { value.exp() } else { value };
        let padded_low = if !self.is_log && self.low == 0.0 { 0.0 } else { unscaled(low - room) };
        Scale { low: padded_low, high: unscaled(high + room), ..self }
    }

    fn scaled(&self, value: f64) -> f64 {
        if self.is_log { value.max(f64::MIN_POSITIVE).ln() } else { value }
    }

    /// Position of a value between the ends, from 0 to 1.
    pub fn position(&self, value: f64) -> f64 {
        let [low, high] = [self.low, self.high].map(|end| self.scaled(end));
        (self.scaled(value) - low) / (high - low)
    }

    /// The value at a position between the ends, from 0 to 1.
    pub fn value(&self, position: f64) -> f64 {
        let [low, high] = [self.low, self.high].map(|end| self.scaled(end));
        let scaled = low + position * (high - low);
        if self.is_log { scaled.exp() } else { scaled }
    }

    /// Round values within the scale, with their labels.
    pub fn labelled_ticks(&self) -> Vec<(f64, String)> {
        let ticks = self.ticks();
        let labels = labels(&ticks);
        ticks.into_iter().zip(labels).collect()
    }

    /// Round values within the scale.
    pub fn ticks(&self) -> Vec<f64> {
        if self.is_log { self.log_ticks() } else { self.linear_ticks() }
    }

    fn linear_ticks(&self) -> Vec<f64> {
        let rough = (self.high - self.low) / TICKS_MAX;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough);
        let step = step.unwrap_or(10.0 * power);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).map(|index| index as f64 * step).collect()
    }

    /// 1, 2 and 5 times the powers of ten; only the powers where these are many, and more multiples within a decade.
    fn log_ticks(&self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        let multiples: &[f64] = match decades {
            0.0..=1.0 => &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0],
            1.0..=3.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        powers
            .flat_map(|power| multiples.iter().map(move |m| m * 10_f64.powi(power)))
            .filter(|tick| (self.low..=self.high).contains(tick))
            .collect()
    }
}

/// Values on one axis in one form: `5k`, `10k`, or with all digits where a value has more than three: `8,192`, `16,384`.
pub fn labels(values: &[f64]) -> Vec<String> {
    let is_whole = |value: &f64| value.fract() == 0.0 && (0.0..1e6).contains(value);
    let is_exact = |value: &f64| *value >= 1e3 && value % 100.0 != 0.0;
    let has_thousands = values.iter().any(|value| (1e4..1e6).contains(&value.abs()));
    let has_all_digits = values.iter().all(is_whole) && values.iter().any(is_exact);
    let label = |value: &f64| match value.abs() {
        _ if has_thousands && has_all_digits => thousands(*value as u64),
        1e3..1e4 if has_thousands => in_unit(*value, 1e3, "k"),
        _ => label(*value),
    };
    values.iter().map(label).collect()
}

/// A value on a scale: `0.05`, `1.5`, `200`, `20k`, `3M`.
pub fn label(value: f64) -> String {
    match value.abs() {
        10_000.0..1e6 => in_unit(value, 1e3, "k"),
        1e6..1e9 => in_unit(value, 1e6, "M"),
        1e9..1e12 => in_unit(value, 1e9, "G"),
        1e12.. => in_unit(value, 1e12, "T"),
        _ => in_unit(value, 1.0, ""),
    }
}

/// A value with at most three decimals of a unit.
fn in_unit(value: f64, factor: f64, unit: &str) -> String {
    let text = format!("{:.3}", value / factor);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    match text.trim_start_matches('-') {
        "0" if value != 0.0 => format!("{value:.0e}"),
        _ => format!("{text}{unit}"),
    }
}

/// The [`label`] of a value with three significant digits.
pub fn rounded(value: f64) -> String {
    let power = 10_f64.powf(2.0 - value.abs().max(f64::MIN_POSITIVE).log10().floor());
    label((value * power).round() / power)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale_over(values: &[f64], from_zero: bool) -> Scale {
        Scale::over(values.iter().copied(), from_zero).expect("values")
    }

    #[test]
    fn wide_ranges_are_logarithmic() {
        let wide = scale_over(&[8.0, 64.0, 512.0], false);
        assert!((wide.position(64.0) - 0.5).abs() < 1e-12);
        assert_eq!(wide.ticks(), [10.0, 20.0, 50.0, 100.0, 200.0, 500.0]);
        let narrow = scale_over(&[10.0, 30.0], true);
        assert_eq!(narrow.position(0.0), 0.0);
        assert_eq!(narrow.ticks(), [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]);
    }

    #[test]
    fn one_value_is_drawn_in_the_middle() {
        assert_eq!(scale_over(&[4.0], false).position(4.0), 0.5);
        assert_eq!(Scale::over([f64::NAN].into_iter(), false), None);
    }

    #[test]
    fn padding_keeps_the_scale() {
        let padded = scale_over(&[1.0, 100.0], false).padded(0.1);
        assert!(padded.position(1.0) > 0.0 && padded.position(100.0) < 1.0);
        assert!((padded.position(10.0) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn three_digits_are_significant() {
        for (value, text) in
            [(252.6, "253"), (5.671, "5.67"), (0.0456, "0.046"), (41_234.0, "41.2k")]
        {
            assert_eq!(rounded(value), text);
        }
    }

    #[test]
    fn labels_of_an_axis_have_one_form() {
        for (values, expected) in [
            (&[4096.0, 8192.0, 16_384.0][..], "4,096 8,192 16,384"),
            (&[0.0, 5000.0, 10_000.0, 15_000.0], "0 5k 10k 15k"),
            (&[1000.0, 2048.0], "1000 2048"),
            (&[0.5, 1.0, 20_480.0], "0.5 1 20.48k"),
            (&[1e6, 2_500_000.0], "1M 2.5M"),
        ] {
            assert_eq!(labels(values).join(" "), expected);
        }
    }

    #[test]
    fn labels_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.05, "0.05"),
            (512.0, "512"),
            (32_768.0, "32.768k"),
            (3e6, "3M"),
            (1e-6, "1e-6"),
        ] {
            assert_eq!(label(value), text);
        }
    }
}
