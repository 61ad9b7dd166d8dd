//! Units of the fields of requests, models and hardware profiles.

use std::fmt;

use narrows_plan::{Bytes, Seconds};

use crate::text::{thousands, thousands_with_decimals};

/// Unit of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// None: counts, factors and sizes of the model.
    One,
    /// A share of a peak, in (0, 1].
    Efficiency,
    /// Elements of a matrix.
    Elements,
    /// Sequences of a batch.
    Sequences,
    /// Tokens.
    Tokens,
    /// Bytes.
    Bytes,
    /// 2³⁰ bytes.
    Gibibytes,
    /// Bytes per second.
    BytesPerSecond,
    /// 10⁹ bytes per second.
    GigabytesPerSecond,
    /// Floating-point operations per second.
    FlopsPerSecond,
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Milliseconds,
    /// Microseconds.
    Microseconds,
    /// Nanoseconds.
    Nanoseconds,
    /// Hours.
    Hours,
    /// Days; below two days they are written in hours, below two hours in minutes, and below two minutes in seconds.
    Days,
    /// Watts.
    Watts,
}

impl Unit {
    /// Symbol after a number; empty for numbers without a unit.
    pub fn symbol(self) -> &'static str {
        match self {
            Unit::One | Unit::Efficiency => "",
            Unit::Elements => "elements",
            Unit::Sequences => "sequences",
            Unit::Tokens => "tokens",
            Unit::Bytes => "bytes",
            Unit::Gibibytes => "GiB",
            Unit::BytesPerSecond => "bytes/s",
            Unit::GigabytesPerSecond => "GB/s",
            Unit::FlopsPerSecond => "FLOP/s",
            Unit::Seconds => "s",
            Unit::Milliseconds => "ms",
            Unit::Microseconds => "µs",
            Unit::Nanoseconds => "ns",
            Unit::Hours => "hours",
            Unit::Days => "days",
            Unit::Watts => "watts",
        }
    }

    /// The unit that files have for the same quantity, and this unit in it.
    pub fn in_files(self) -> (Unit, f64) {
        match self {
            Unit::Gibibytes => (Unit::Bytes, GIB),
            Unit::GigabytesPerSecond => (Unit::BytesPerSecond, 1e9),
            Unit::Milliseconds => (Unit::Seconds, 1e-3),
            Unit::Microseconds => (Unit::Seconds, 1e-6),
            Unit::Nanoseconds => (Unit::Seconds, 1e-9),
            unit => (unit, 1.0),
        }
    }

    /// A value as in files, with a prefix that suits it.
    pub fn format(self, value: f64) -> String {
        match self {
            Unit::FlopsPerSecond => format!("{} TFLOP/s", Rounded(value / 1e12)),
            Unit::BytesPerSecond => format!("{} GB/s", Rounded(value / 1e9)),
            Unit::Bytes => Bytes(value.round() as u64).to_string(),
            Unit::Seconds => Seconds(value).to_string(),
            Unit::Days => match value.abs() {
                ..DAYS_MIN => duration_of(value * DAY_S),
                ..1000.0 => format!("{value:.1} days"),
                _ => format!("{} days", thousands(value.round() as u64)),
            },
            _ => Rounded(value).to_string(),
        }
    }

    /// As [`format`](Unit::format), a range where the two values differ.
    pub fn format_range(self, [low, high]: [f64; 2]) -> String {
        match low == high {
            true => self.format(low),
            false => format!("{}–{}", self.format(low), self.format(high)),
        }
    }
}

/// Decimals of values whose prefix suits only the largest of them, for the number of that.
fn mixed_decimals(largest: f64) -> usize {
    match largest {
        ..10.0 => 3,
        ..1000.0 => 2,
        _ => 1,
    }
}

/// Seconds in minutes from two minutes on, and in hours from two hours on.
pub fn duration_of(seconds: f64) -> String {
    match seconds.abs() {
        ..120.0 => Seconds(seconds).to_string(),
        ..7200.0 => format!("{:.1} minutes", seconds / 60.0),
        _ => format!("{:.1} hours", seconds / 3600.0),
    }
}

/// Days below which a time is written in hours.
const DAYS_MIN: f64 = 2.0;

/// Days below which a time is written in minutes: two hours.
const HOURS_MIN: f64 = 2.0 / 24.0;

/// Days below which a time is written in seconds: two minutes.
const MINUTES_MIN: f64 = 2.0 / (24.0 * 60.0);

/// Seconds of a day.
const DAY_S: f64 = 86_400.0;

/// The format of a column of values: with one prefix for all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CommonUnit {
    /// The unit, where values have no prefix.
    unit: Unit,
    prefix: Option<Prefix>,
    /// Whether [`format`](Unit::format) would choose other prefixes for some of the values.
    is_mixed: bool,
}

/// A prefixed unit.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Prefix {
    /// Smallest value for which the unit is chosen.
    from: f64,
    symbol: &'static str,
    /// Size in the unit without a prefix.
    size: f64,
    /// Decimals of a column.
    decimals: usize,
}

impl Prefix {
    const fn new(from: f64, symbol: &'static str, size: f64, decimals: usize) -> Prefix {
        Prefix { from, symbol, size, decimals }
    }
}

/// Prefixed units of times, of sizes in bytes, and of days, the largest first.
const SECONDS: [Prefix; 3] = [
    Prefix::new(1.0, "s", 1.0, 2),
    Prefix::new(1e-3, "ms", 1e-3, 1),
    Prefix::new(0.0, "µs", 1e-6, 1),
];
const GIB: f64 = 1_073_741_824.0;
const MIB: f64 = 1_048_576.0;
const BYTES: [Prefix; 4] = [
    Prefix::new(GIB, "GiB", GIB, 1),
    Prefix::new(MIB, "MiB", MIB, 1),
    Prefix::new(1024.0, "KiB", 1024.0, 1),
    Prefix::new(0.0, "B", 1.0, 0),
];
const DAYS: [Prefix; 6] = [
    Prefix::new(DAYS_MIN, "days", 1.0, 1),
    Prefix::new(HOURS_MIN, "hours", 1.0 / 24.0, 1),
    Prefix::new(MINUTES_MIN, "minutes", 1.0 / (24.0 * 60.0), 1),
    Prefix::new(1.0 / DAY_S, "s", 1.0 / DAY_S, 2),
    Prefix::new(1e-3 / DAY_S, "ms", 1e-3 / DAY_S, 1),
    Prefix::new(0.0, "µs", 1e-6 / DAY_S, 1),
];

impl Unit {
    /// The format of these values in one column. Where [`format`](Unit::format) would mix prefixes, all values get the prefix of
    /// the largest one.
    pub fn common(self, values: impl IntoIterator<Item = f64>) -> CommonUnit {
        let prefixes: &[Prefix] = match self {
            Unit::Seconds => &SECONDS,
            Unit::Bytes => &BYTES,
            Unit::Days => &DAYS,
            _ => &[],
        };
        let prefix = |value: f64| prefixes.iter().position(|prefix| value.abs() >= prefix.from);
        let sizes = values.into_iter().map(f64::abs);
        let sizes: Vec<f64> = sizes.filter(|size| *size != 0.0 && size.is_finite()).collect();
        let used = sizes.iter().filter_map(|size| prefix(*size));
        let is_mixed = used.clone().min() != used.clone().max();
        let prefix = used.min().map(|largest| prefixes[largest]);
        let prefix = prefix.map(|prefix| match is_mixed {
            true => {
                let largest = sizes.iter().copied().fold(0.0, f64::max) / prefix.size;
                Prefix { decimals: mixed_decimals(largest), ..prefix }
            }
            false => prefix,
        });
        CommonUnit { unit: self, prefix, is_mixed }
    }
}

impl Unit {
    /// The unit of an axis with these values: bytes have a prefix, other values are as they were typed.
    pub fn of_axis(self, values: impl IntoIterator<Item = f64>) -> CommonUnit {
        match self {
            Unit::Bytes => self.common(values),
            _ => self.common([]),
        }
    }
}

impl CommonUnit {
    /// A value in this format; `<0.001 s` where it is too small for it.
    pub fn format(self, value: f64) -> String {
        match self.prefix.filter(|_| self.is_mixed) {
            Some(prefix) => format!("{} {}", self.number(value), prefix.symbol),
            None => self.unit.format(value),
        }
    }

    /// As [`format`](CommonUnit::format), without the unit.
    pub fn number(self, value: f64) -> String {
        let Some(Prefix { size, decimals, .. }) = self.prefix else {
            return match value {
                0.0 => "0".into(),
                _ => self.unit.format(value),
            };
        };
        let text = thousands_with_decimals(value / size, decimals);
        let is_zero = text.bytes().all(|byte| matches!(byte, b'0' | b'.' | b'-'));
        match is_zero && value != 0.0 {
            true => format!("<{:.decimals$}", 10_f64.powi(-(decimals as i32))),
            false => text,
        }
    }

    /// As [`number`](CommonUnit::number), with a sign, which zero and values that are too small do not have.
    pub fn signed_number(self, value: f64) -> String {
        let text = self.number(value.abs());
        let sign = match value {
            0.0 => "",
            _ if text.starts_with('<') => "",
            ..0.0 => "-",
            _ => "+",
        };
        format!("{sign}{text}")
    }

    /// A value in this unit, for the axis of a picture.
    pub fn scaled(self, value: f64) -> f64 {
        self.prefix.map_or(value, |prefix| value / prefix.size)
    }

    /// Whether this is a format of values in `unit`.
    pub fn is_of(self, unit: Unit) -> bool {
        self.unit == unit
    }

    /// Symbol of the unit.
    pub fn symbol(self) -> &'static str {
        self.prefix.map_or_else(|| self.unit.symbol(), |prefix| prefix.symbol)
    }
}

/// A number with at most three significant decimals, without trailing zeros.
struct Rounded(f64);

impl fmt::Display for Rounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimals = match self.0.abs() {
            1000.0.. => 0,
            100.0.. => 1,
            10.0.. => 2,
            _ => 3,
        };
        let text = format!("{:.decimals$}", self.0);
        let is_fraction = text.contains('.');
        f.write_str(if is_fraction {
            text.trim_end_matches('0').trim_end_matches('.')
        } else {
            &text
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_hours_where_they_are_few() {
        for (days, text) in [
            (1.5, "36.0 hours"),
            (12.34, "12.3 days"),
            (4567.8, "4,568 days"),
            (0.05, "72.0 minutes"),
            (0.001, "86.40 s"),
            (1e-9, "86.4 µs"),
            (0.0, "0.0 ms"),
        ] {
            assert_eq!(Unit::Days.format(days), text);
            assert_eq!(Unit::Days.common([days]).format(days), text);
        }
    }

    #[test]
    fn a_column_has_one_unit() {
        let mib = MIB;
        for (unit, values, expected) in [
            (Unit::Seconds, vec![1.69, 0.0179, 0.0], ["1.690 s", "0.018 s", "0.000 s"]),
            (Unit::Seconds, vec![0.4338, 0.0179, 0.0], ["433.8 ms", "17.9 ms", "0.0 ms"]),
            (Unit::Seconds, vec![12.0, 3.456, -1.0], ["12.00 s", "3.46 s", "-1.00 s"]),
            (Unit::Seconds, vec![2e-3, 4e-6, -1e-3], ["2.000 ms", "0.004 ms", "-1.000 ms"]),
            (Unit::Seconds, vec![2.0, 4e-6, -4e-6], ["2.000 s", "<0.001 s", "<0.001 s"]),
            (
                Unit::Bytes,
                vec![2048.0 * mib, 256.0 * mib, 0.0],
                ["2.000 GiB", "0.250 GiB", "0.000 GiB"],
            ),
            (Unit::Bytes, vec![512.0, 100.0, 1.0], ["512 B", "100 B", "1 B"]),
            (Unit::Days, vec![12.34, 1.5, 0.0], ["12.34 days", "1.50 days", "0.00 days"]),
            (Unit::Days, vec![4567.8, 12.34, 2.0], ["4,568 days", "12.3 days", "2.0 days"]),
            (Unit::Days, vec![0.09, 0.08, 0.07], ["2.160 hours", "1.920 hours", "1.680 hours"]),
            (Unit::Seconds, vec![33195.09, 0.1, 2.0], ["33,195.1 s", "0.1 s", "2.0 s"]),
            (Unit::Watts, vec![700.0, 0.5, 0.0], ["700", "0.5", "0"]),
        ] {
            let common = unit.common(values.iter().copied());
            let texts: Vec<String> = values.iter().map(|value| common.format(*value)).collect();
            assert_eq!(texts, expected);
        }
        let common = Unit::Seconds.common([1.5, 0.5]);
        let signed = [1.5, -0.5, 0.0, -4e-6].map(|value| common.signed_number(value));
        assert_eq!(
            (signed, common.symbol()),
            (["+1.500", "-0.500", "0.000", "<0.001"].map(str::to_owned), "s")
        );
        let common = Unit::Bytes.common([3.0 * 1024.0 * mib, 0.0]);
        assert_eq!((common.number(-1024.0 * mib), common.symbol()), ("-1.0".into(), "GiB"));
        assert_eq!(common.scaled(512.0 * mib), 0.5);
    }
}
