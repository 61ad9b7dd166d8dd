//! Units of the fields of requests, models and hardware profiles.

use std::fmt;

use narrows_plan::{Bytes, Seconds};

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
            Unit::Watts => "watts",
        }
    }

    /// The unit that files have for the same quantity, and this unit in it.
    pub fn in_files(self) -> (Unit, f64) {
        match self {
            Unit::Gibibytes => (Unit::Bytes, 1_073_741_824.0),
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
