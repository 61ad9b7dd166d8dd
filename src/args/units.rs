//! Values with units on the command line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use narrows_cost_model::profile::DOLLARS_PER_HOUR;
use narrows_plan::Bytes;
use narrows_planner::MemoryLimit;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Prefixes of units: each is 1024 or 1000 times the one before it.
const PREFIXES: [&str; 6] = ["", "k", "m", "g", "t", "p"];

/// Bytes of a unit in lower case, `None` for an unknown one. `gib` and the bare `g`, as in memory sizes, are binary, `gb` is
/// decimal; libraries read a bare letter as decimal.
fn unit_bytes(unit: &str) -> Option<u64> {
    let binary = unit.strip_suffix("ib").filter(|prefix| !prefix.is_empty());
    let (prefix, base): (&str, u64) = match (binary, unit.strip_suffix('b')) {
        (Some(prefix), _) => (prefix, 1024),
        (None, Some(prefix)) => (prefix, 1000),
        (None, None) => (unit, 1024),
    };
    let power = PREFIXES.iter().position(|known| *known == prefix)?;
    Some(base.pow(power as u32))
}

/// Parses `auto`, `none`, or a number of bytes such as `68719476736`, `64GiB` or `1.5 GB`.
pub fn memory_limit(text: &str) -> Result<MemoryLimit, String> {
    match text {
        "auto" => Ok(MemoryLimit::Auto),
        "none" => Ok(MemoryLimit::None),
        _ => bytes(text).map(MemoryLimit::Bytes),
    }
}

fn bytes(text: &str) -> Result<Bytes, String> {
    let invalid = || "expected `auto`, `none` or a number of bytes such as 64GiB".to_owned();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = unit_bytes(&unit.trim().to_ascii_lowercase()).ok_or_else(invalid)?;
    let too_large = || format!("{text} is more than 16 EiB");
    let bytes = match number.parse::<u64>() {
        Ok(number) => number.checked_mul(factor).ok_or_else(too_large)?,
        Err(_) => {
            let bytes = number.parse::<f64>().map_err(|_| invalid())? * factor as f64;
            if bytes >= u64::MAX as f64 {
                return Err(too_large());
            }
            bytes as u64
        }
    };
    if bytes == 0 { Err("expected more than 0 bytes".into()) } else { Ok(Bytes(bytes)) }
}

/// Defines a finite number of a range, for flags and for fields of files.
macro_rules! number_in_range {
    ($name:ident, $description:literal, $schema:tt, $accepts:expr) => {
        #[doc = concat!("A finite number: ", $description, ".")]
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(try_from = "f64")]
        #[schemars(extend $schema)]
        pub struct $name(pub f64);

        impl TryFrom<f64> for $name {
            type Error = &'static str;

            fn try_from(number: f64) -> Result<$name, Self::Error> {
                let accepts: fn(f64) -> bool = $accepts;
                let is_valid = number.is_finite() && accepts(number);
                is_valid.then_some($name(number)).ok_or(concat!("expected ", $description))
            }
        }

        impl FromStr for $name {
            type Err = &'static str;

            fn from_str(text: &str) -> Result<$name, Self::Err> {
                text.parse().unwrap_or(f64::NAN).try_into()
            }
        }
    };
}

number_in_range!(Positive, "a number above 0", ("exclusiveMinimum" = 0), |number| number > 0.0);
number_in_range!(NonNegative, "a non-negative number", ("minimum" = 0), |number| number >= 0.0);
number_in_range!(
    Share,
    "a number above 0, at most 1",
    ("exclusiveMinimum" = 0, "maximum" = 1),
    |number| number > 0.0 && number <= 1.0
);
number_in_range!(
    BelowOne,
    "a number from 0 to below 1",
    ("minimum" = 0, "exclusiveMaximum" = 1),
    |number| (0.0..1.0).contains(&number)
);

/// Parses a number above zero.
pub fn positive(text: &str) -> Result<f64, String> {
    finite(text).filter(|number| *number > 0.0).ok_or_else(|| "expected a number above 0".into())
}

/// Most tokens of a training run: more than all text of mankind.
const TOKENS_MAX: f64 = 1e18;

/// Parses a number of tokens of a training run.
pub fn tokens(text: &str) -> Result<f64, String> {
    finite(text)
        .filter(|number| *number > 0.0 && *number <= TOKENS_MAX)
        .ok_or_else(|| format!("expected a number above 0, at most {TOKENS_MAX:e}"))
}

/// Parses a price of a device for an hour, in dollars.
pub fn dollars_per_hour(text: &str) -> Result<f64, String> {
    let (low, high) = (DOLLARS_PER_HOUR.start(), DOLLARS_PER_HOUR.end());
    finite(text)
        .filter(|number| DOLLARS_PER_HOUR.contains(number))
        .ok_or_else(|| format!("expected a number from {low} to {high:e}"))
}

/// Parses zero or a number above it.
pub fn non_negative(text: &str) -> Result<f64, String> {
    finite(text)
        .filter(|number| *number >= 0.0)
        .ok_or_else(|| "expected a non-negative number".into())
}

fn finite(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite())
}

/// Longest time limit. The sum with any clock time does not overflow.
const SECONDS_MAX: f64 = 1e9;

/// Parses a time limit in seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    if (0.0..=SECONDS_MAX).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("expected between 0 and {SECONDS_MAX:e} seconds"))
    }
}

/// A timeout, on the command line a number of seconds above zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timeout(pub Duration);

impl FromStr for Timeout {
    type Err = String;

    fn from_str(text: &str) -> Result<Timeout, String> {
        seconds(text).and_then(|timeout| match timeout.is_zero() {
            true => Err("expected more than 0 seconds".into()),
            false => Ok(Timeout(timeout)),
        })
    }
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_parsed_with_units() {
        let read = |text| match memory_limit(text) {
            Ok(MemoryLimit::Bytes(bytes)) => bytes.0,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(read("68719476736"), 64 << 30);
        assert_eq!(read("64GiB"), 64 << 30);
        assert_eq!(read("64 gib"), 64 << 30);
        assert_eq!(read("64G"), 64 << 30);
        assert_eq!(read("80GB"), 80_000_000_000);
        assert_eq!([read("5"), read("5b"), read("5k"), read("5kB")], [5, 5, 5120, 5000]);
        assert_eq!([read("2t"), read("2TiB"), read("2pib")], [2 << 40, 2 << 40, 2 << 50]);
        assert_eq!(read("1.5KiB"), 1536);
        assert_eq!(memory_limit("auto"), Ok(MemoryLimit::Auto));
        assert_eq!(memory_limit("none"), Ok(MemoryLimit::None));
    }

    #[test]
    fn malformed_values_are_rejected() {
        let sizes =
            ["", "GiB", "-1", "1e9", "64 parsecs", "64ib", "1.2.3", "0", "99999999PiB", ".", "∞"];
        for text in sizes {
            assert!(memory_limit(text).is_err(), "{text}");
        }
        for text in ["", "soon", "-1", "inf", "NaN", "1e300"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
