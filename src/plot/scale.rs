//! Scales and ticks.

use crate::text::thousands;

/// Ratio of the ends of a range from which on it is drawn on a logarithmic scale, with and without a zero.
const LOG_RATIOS: [f64; 2] = [20.0, 4.0];

/// Ticks of a linear scale, at most.
const TICKS_MAX: f64 = 6.0;

/// Decades of a logarithmic scale from which on not every power of ten is a tick.
const DECADES_MAX: f64 = 12.0;

/// Sizes of values that are drawn: those below are zero, those above the largest. With room beyond them, and ticks between
/// them, they stay finite and normal numbers.
const SIZES: [f64; 2] = [1e-300, 1e307];

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
    pub fn over(values: impl Iterator<Item = f64>, from_zero: bool) -> Option<Scale> {
        let [low, high] = ends(values)?;
        let is_log = low > 0.0 && high / low >= LOG_RATIOS[usize::from(!from_zero)];
        let low = if from_zero && !is_log { low.min(0.0) } else { low };
        // A single value is drawn in the middle.
        let room = if low == 0.0 { 0.5 } else { low.abs() / 2.0 };
        let (low, high) = if low == high { (low - room, high + room) } else { (low, high) };
        Some(Scale { low, high, is_log })
    }

    /// The linear scale over values. `None` without finite values.
    pub fn linear(values: impl Iterator<Item = f64>) -> Option<Scale> {
        let [low, high] = ends(values)?;
        let high = if low == high { low + f64::max(1.0, low.abs() / 2.0) } else { high };
        Some(Scale { low, high, is_log: false })
    }

    /// The logarithmic scale over positive values with room beyond its ends: a factor. `None` without values.
    pub fn logarithmic(values: impl Iterator<Item = f64>, room: f64) -> Option<Scale> {
        let [low, high] = ends(values.map(drawn).filter(|value| *value > 0.0))?;
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
        let exp = |value: f64| value.exp().clamp(f64::MIN_POSITIVE, f64::MAX);
        let unscaled = |value: f64| if self.is_log { exp(value) } else { value };
        let padded_low = if !self.is_log && self.low == 0.0 { 0.0 } else { unscaled(low - room) };
        Scale { low: padded_low, high: unscaled(high + room), ..self }
    }

    fn scaled(&self, value: f64) -> f64 {
        if self.is_log { value.max(f64::MIN_POSITIVE).ln() } else { value }
    }

    /// Position of a value between the ends, from 0 to 1.
    pub fn position(&self, value: f64) -> f64 {
        let [low, high] = [self.low, self.high].map(|end| self.scaled(end));
        (self.scaled(drawn(value)) - low) / (high - low)
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

    /// 1, 2 and 5 times the powers of ten; only the powers where these are many, or even fewer, and more multiples within a
    /// decade.
    fn log_ticks(&self) -> Vec<f64> {
        let decades = self.high.log10() - self.low.log10();
        let stride = (decades / DECADES_MAX).ceil().max(1.0) as i32;
        let multiples: &[f64] = match decades {
            0.0..=1.0 => &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0],
            1.0..=3.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        powers
            .filter(|power| power % stride == 0)
            .flat_map(|power| multiples.iter().map(move |m| m * 10_f64.powi(power)))
            .filter(|tick| (self.low..=self.high).contains(tick))
            .collect()
    }
}

/// The smallest and the largest of values as they are drawn; `None` without finite ones.
fn ends(values: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    let finite = values.filter(|value| value.is_finite()).map(drawn);
    let single = finite.map(|value| [value; 2]);
    single.reduce(|[low, high], [value, _]| [low.min(value), high.max(value)])
}

/// A value within [`SIZES`], or zero.
fn drawn(value: f64) -> f64 {
    let [smallest, largest] = SIZES;
    if value.abs() < smallest { 0.0 } else { value.clamp(-largest, largest) }
}

/// Ratio of the largest to the smallest value below which all values of an axis have one unit.
const ONE_UNIT_RATIO: f64 = 20.0;

/// Decimals up to which values are written exactly; more are written only where neighbours need them.
const EXACT_DECIMALS: usize = 3;

/// Relative error below which a value counts as exact.
const ROUNDING: f64 = 1e-9;

/// Decimals beyond which the digits of a number are noise.
const DECIMALS_MAX: usize = 15;

/// Share of the distance to a neighbour by which a label may differ from its value.
const ERROR_MAX: f64 = 0.01;

/// Values on one axis in one form: `5k`, `10k`, or with all digits where these are short: `8,192`, `16,384`. Labels have the
/// digits that distinguish neighbours, at least three significant ones.
pub fn labels(values: &[f64]) -> Vec<String> {
    let is_whole = |value: &f64| value.fract() == 0.0 && (0.0..1e15).contains(value);
    let is_exact = |value: &f64| *value >= 1e3 && value % 100.0 != 0.0;
    let has_thousands = values.iter().any(|value| (1e4..1e6).contains(&value.abs()));
    let has_all_digits = values.iter().all(is_whole);
    let is_short = || has_thousands && values.iter().all(|value| *value < 1e6);
    if has_all_digits && is_short() && values.iter().any(is_exact) {
        return values.iter().map(|value| thousands(*value as u64)).collect();
    }
    let sizes = values.iter().map(|value| value.abs()).filter(|size| *size > 0.0);
    let largest = sizes.clone().fold(0.0, f64::max);
    let smallest = sizes.fold(f64::INFINITY, f64::min);
    let unit = |value: f64| match value.abs() {
        _ if largest < ONE_UNIT_RATIO * smallest => AxisUnit::of(largest),
        1e3..1e4 if has_thousands => AxisUnit { size: 1e3, symbol: "k".into() },
        size => AxisUnit::of(size),
    };
    let distance = |value: f64| {
        let others = values.iter().map(|other| (other - value).abs());
        others.filter(|distance| *distance > 0.0).fold(f64::INFINITY, f64::min)
    };
    let places = values.iter().map(|&value| {
        let unit = unit(value);
        let scaled = value / unit.size;
        let decimals = decimals(scaled, ERROR_MAX * distance(value) / unit.size);
        (scaled, decimals, unit)
    });
    let places: Vec<(f64, usize, AxisUnit)> = places.collect();
    if has_all_digits && places.iter().any(|(_, decimals, _)| *decimals > EXACT_DECIMALS) {
        return values.iter().map(|value| thousands(*value as u64)).collect();
    }
    places.into_iter().map(|(scaled, decimals, unit)| unit.label(scaled, decimals)).collect()
}

/// A value on a scale: `0.05`, `1.5`, `200`, `20k`, `3M`, `1e-6`.
pub fn label(value: f64) -> String {
    labels(&[value]).concat()
}

/// Unit of the labels of an axis.
struct AxisUnit {
    size: f64,
    symbol: String,
}

impl AxisUnit {
    /// The unit for a size: a prefix, or a power of ten where the size is smaller or larger than all of them.
    fn of(size: f64) -> AxisUnit {
        let (size, symbol) = match size {
            0.0 | 1e-3..1e4 => (1.0, ""),
            1e4..1e6 => (1e3, "k"),
            1e6..1e9 => (1e6, "M"),
            1e9..1e12 => (1e9, "G"),
            1e12..1e15 => (1e12, "T"),
            _ => {
                let power = exponent(size);
                return AxisUnit { size: 10_f64.powi(power), symbol: format!("e{power}") };
            }
        };
        AxisUnit { size, symbol: symbol.into() }
    }

    fn label(&self, scaled: f64, decimals: usize) -> String {
        if scaled == 0.0 {
            return "0".into();
        }
        format!("{scaled:.decimals$}{}", self.symbol)
    }
}

/// The power of ten of a value, as scientific notation writes it.
fn exponent(value: f64) -> i32 {
    let text = format!("{value:.9e}");
    text.rsplit_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0)
}

/// The fewest decimals of a value whose label may differ from it by `error_max`.
fn decimals(value: f64, error_max: f64) -> usize {
    let error_max = error_max.min(0.5 * 10_f64.powi(exponent(value) - 2));
    let exact = error_max.min(ROUNDING * value.abs());
    let error = |decimals: usize| {
        let text = format!("{value:.decimals$}");
        text.parse().map_or(f64::INFINITY, |rounded: f64| (rounded - value).abs())
    };
    let suffices = |decimals: &usize| {
        error(*decimals) <= if *decimals < EXACT_DECIMALS { exact } else { error_max }
    };
    (0..DECIMALS_MAX).find(suffices).unwrap_or(DECIMALS_MAX)
}

/// The [`label`] of a value with three significant digits.
pub fn rounded(value: f64) -> String {
    label(format!("{value:.2e}").parse().unwrap_or(value))
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
    fn extreme_values_have_few_ticks() {
        let extremes = [5e-324, 1e-300, 5.0, 1e20, 1e300, 1e308, f64::MAX];
        let values = || extremes.into_iter().flat_map(|value| [value, -value]).chain([0.0]);
        for (a, b) in values().flat_map(|a| values().map(move |b| (a, b))) {
            let of = || [a, b].into_iter();
            let scales = [
                Scale::over(of(), false),
                Scale::over(of(), true),
                Scale::linear(of()),
                Scale::logarithmic(of(), 2.0),
            ];
            for scale in scales.into_iter().flatten().flat_map(|scale| [scale, scale.padded(0.06)])
            {
                let ticks = scale.labelled_ticks();
                assert!(ticks.len() <= 14, "{a} {b} {scale:?}");
                assert!(ticks.iter().all(|(tick, _)| tick.is_finite()), "{a} {b} {ticks:?}");
                assert!(scale.position(a).is_finite(), "{a} {b} {scale:?}");
            }
        }
    }

    #[test]
    fn padding_keeps_the_scale() {
        let padded = scale_over(&[1.0, 100.0], false).padded(0.1);
        assert!(padded.position(1.0) > 0.0 && padded.position(100.0) < 1.0);
        assert!((padded.position(10.0) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn three_digits_are_significant() {
        for (value, text) in [
            (252.6, "253"),
            (5.671, "5.67"),
            (0.0456, "0.0456"),
            (0.007_754, "0.00775"),
            (0.018_16, "0.0182"),
            (41_234.0, "41.2k"),
        ] {
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
            (&[0.0, 500_000.0, 1_000_000.0], "0 0.5M 1M"),
        ] {
            assert_eq!(labels(values).join(" "), expected);
        }
    }

    #[test]
    fn labels_distinguish_their_values() {
        for (values, expected) in [
            (&[1e-6, 1.5e-6, 2e-6][..], "1e-6 1.5e-6 2e-6"),
            (&[6.1e-4, 6.3e-4, 6.5e-4], "6.1e-4 6.3e-4 6.5e-4"),
            (&[2.71, 2.7102, 2.7104], "2.71 2.7102 2.7104"),
            (&[1e6, 1_000_002.0, 1_000_004.0], "1,000,000 1,000,002 1,000,004"),
            (&[1.1e-24, 1.2e-24, 1.3e-24], "1.1e-24 1.2e-24 1.3e-24"),
            (&[-2e-5, 0.0, 2e-5], "-2e-5 0 2e-5"),
            (&[1e-9, 1e-3, 1.0], "1e-9 0.001 1"),
            (&[1e24, 1.1e24], "1e24 1.1e24"),
        ] {
            assert_eq!(labels(values).join(" "), expected);
        }
        arbtest::arbtest(|u| {
            let first = f64::from(u.int_in_range(-1000..=1000)?);
            let width = 10_f64.powi(u.int_in_range(-9..=9)?);
            let scale = Scale::linear([first, first + width].into_iter()).expect("values");
            let ticks = scale.labelled_ticks();
            for pair in ticks.windows(2) {
                assert_ne!(pair[0].1, pair[1].1, "{ticks:?}");
            }
            Ok(())
        })
        .budget_ms(200);
    }

    #[test]
    fn labels_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.05, "0.05"),
            (512.0, "512"),
            (32_768.0, "32,768"),
            (3e6, "3M"),
            (1e-6, "1e-6"),
        ] {
            assert_eq!(label(value), text);
        }
    }
}
