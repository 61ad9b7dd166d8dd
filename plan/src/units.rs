//! Units of public interfaces: bytes, floating-point operations, seconds.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::counts::{plural, thousands_with_decimals};

/// A number of bytes.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A number of floating-point operations; a multiply and an add are two.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct Flops(pub f64);

/// A span of time in seconds.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct Seconds(pub f64);

impl Bytes {
    /// One mebibyte, the unit of the published volumes.
    pub const MIB: u64 = 1 << 20;
    /// One gibibyte.
    const GIB: u64 = 1 << 30;

    /// Bytes as a float, for dividing by a bandwidth.
    pub fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// `self` − `other`, zero when `other` is larger.
    pub fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// Prints two numbers as [`Display`](fmt::Display) does, with more decimals where different numbers would have one text: a
    /// need of `1.84 GiB` and a limit of `1.83 GiB`. Numbers that are equal to three decimals are printed in bytes.
    pub fn distinct(self, other: Bytes) -> [String; 2] {
        let texts = |decimals| [self, other].map(|bytes| bytes.with_decimals(decimals));
        let differ = |texts: &[String; 2]| self == other || texts[0] != texts[1];
        let found = (1..=3).map(texts).find(differ);
        found.unwrap_or_else(|| [self, other].map(|bytes| plural(bytes.0, "byte")))
    }

    /// The number with a binary unit and this many decimals.
    fn with_decimals(self, decimals: usize) -> String {
        let bytes = self.0 as f64;
        let (size, unit) = match self.0 {
            0..1024 => return format!("{} B", self.0),
            1024..1_048_576 => (1024.0, "KiB"),
            1_048_576..1_073_741_824 => (Self::MIB as f64, "MiB"),
            _ => (Self::GIB as f64, "GiB"),
        };
        format!("{:.decimals$} {unit}", bytes / size)
    }

    /// The middle of two numbers, rounded down.
    pub fn midpoint(self, other: Bytes) -> Bytes {
        Bytes(self.0.midpoint(other.0))
    }
}

impl fmt::Display for Bytes {
    /// Prints with a binary unit: `224.0 MiB`, `61.3 GiB`, `512 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with_decimals(1))
    }
}

/// Formats a number for a message, with an exponent below 1e-4 and from 1e9 on.
///
/// ```
/// use narrows_plan::short_number;
///
/// assert_eq!((short_number(0.25), short_number(1e300), short_number(-1e-9)), ("0.25".into(), "1e300".into(), "-1e-9".into()));
/// ```
pub fn short_number(value: f64) -> String {
    let in_full = (1e-4..1e9).contains(&value.abs()) || value == 0.0 || !value.is_finite();
    if in_full { value.to_string() } else { format!("{value:e}") }
}

impl fmt::Display for Seconds {
    /// Prints with a fitting unit: `33,195.09 s`, `455.0 ms`, `12.3 µs`; from ten million seconds on with an
    /// exponent.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0;
        if seconds.abs() >= 1e7 {
            write!(f, "{seconds:.2e} s")
        } else if seconds.abs() >= 1.0 {
            write!(f, "{} s", thousands_with_decimals(seconds, 2))
        } else if seconds.abs() >= 1e-3 || seconds == 0.0 {
            write!(f, "{:.1} ms", seconds * 1e3)
        } else {
            write!(f, "{:.1} µs", seconds * 1e6)
        }
    }
}

macro_rules! additive {
    ($unit:ident) => {
        impl Add for $unit {
            type Output = $unit;
            fn add(self, other: $unit) -> $unit {
                $unit(self.0 + other.0)
            }
        }
        impl AddAssign for $unit {
            fn add_assign(&mut self, other: $unit) {
                self.0 += other.0;
            }
        }
        impl Sub for $unit {
            type Output = $unit;
            fn sub(self, other: $unit) -> $unit {
                $unit(self.0 - other.0)
            }
        }
        impl Sum for $unit {
            fn sum<I: Iterator<Item = $unit>>(parts: I) -> $unit {
                parts.fold($unit::default(), |total, part| total + part)
            }
        }
    };
}
additive!(Bytes);
additive!(Flops);
additive!(Seconds);

impl Mul<u64> for Bytes {
    type Output = Bytes;
    fn mul(self, times: u64) -> Bytes {
        Bytes(self.0 * times)
    }
}

impl Div<u64> for Bytes {
    type Output = Bytes;
    fn div(self, parts: u64) -> Bytes {
        Bytes(self.0 / parts)
    }
}

impl Mul<f64> for Seconds {
    type Output = Seconds;
    fn mul(self, times: f64) -> Seconds {
        Seconds(self.0 * times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_with_binary_units() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(224 * Bytes::MIB).to_string(), "224.0 MiB");
        assert_eq!(Bytes(3 * Bytes::GIB / 2).to_string(), "1.5 GiB");
    }

    #[test]
    fn different_numbers_of_bytes_have_different_texts() {
        let limit = Bytes(9 * Bytes::GIB / 5);
        let distinct = |more: u64| limit.distinct(Bytes(limit.0 + more));
        assert_eq!(distinct(0), ["1.8 GiB", "1.8 GiB"]);
        assert_eq!(distinct(Bytes::GIB), ["1.8 GiB", "2.8 GiB"]);
        assert_eq!(distinct(16 * Bytes::MIB), ["1.80 GiB", "1.82 GiB"]);
        assert_eq!(distinct(2 * Bytes::MIB), ["1.800 GiB", "1.802 GiB"]);
        assert_eq!(distinct(4), ["1,932,735,283 bytes", "1,932,735,287 bytes"]);
    }

    #[test]
    fn seconds_print_with_a_fitting_unit() {
        assert_eq!(Seconds(0.0123).to_string(), "12.3 ms");
        assert_eq!(Seconds(4.5e-6).to_string(), "4.5 µs");
        assert_eq!(Seconds(2.0).to_string(), "2.00 s");
        assert_eq!(Seconds(33195.09).to_string(), "33,195.09 s");
    }
}
