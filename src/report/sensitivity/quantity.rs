//! Values and ratios of numbers as text, with the units of their names.

use std::fmt;

use narrows_plan::{Bytes, Seconds};

use crate::text::percent;

/// An elasticity with its sign; `0.00` has none.
pub fn signed(elasticity: f64) -> String {
    let rounded = (elasticity * 100.0).round() / 100.0;
    if rounded == 0.0 { "0.00".into() } else { format!("{rounded:+.2}") }
}

/// A share in percent, without the sign of a zero.
pub fn share(value: f64) -> String {
    percent((value * 1e3).round() / 1e3 + 0.0)
}

/// Values in the unit of their name, as a range where they differ.
pub fn quantities(name: &str, [low, high]: [f64; 2]) -> String {
    match low == high {
        true => quantity(name, low),
        false => format!("{}–{}", quantity(name, low), quantity(name, high)),
    }
}

/// A ratio to the present value: `×1.4`, `÷1.4`.
pub fn times(factor: f64) -> String {
    if factor < 1.0 { format!("÷{:.2}", 1.0 / factor) } else { format!("×{factor:.2}") }
}

/// A value in the unit of its name.
pub fn quantity(name: &str, value: f64) -> String {
    if name.contains("flops_per_s") {
        format!("{} TFLOP/s", Rounded(value / 1e12))
    } else if name.ends_with("_bytes_per_s") {
        format!("{} GB/s", Rounded(value / 1e9))
    } else if name.ends_with("bytes") {
        Bytes(value as u64).to_string()
    } else if name.ends_with("_s") {
        Seconds(value).to_string()
    } else {
        Rounded(value).to_string()
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
    use crate::sensitivity::short_name;

    #[test]
    fn names_and_values_are_short() {
        for (name, value, expected) in [
            (
                "hardware.links.intra_node.bandwidth_bytes_per_s",
                3e11,
                "links.intra_node.bandwidth 300 GB/s",
            ),
            (
                "hardware.device.peak_flops_per_s.bf16",
                3.12e14,
                "device.peak_flops.bf16 312 TFLOP/s",
            ),
            ("hardware.gemm.start_s", 5.8e-6, "gemm.start 5.8 µs"),
            ("hardware.gemm.efficiency_max", 0.914, "gemm.efficiency_max 0.914"),
            ("model.hidden", 4096.0, "hidden 4096"),
            ("rank", 1024.0, "rank 1024"),
        ] {
            assert_eq!(format!("{} {}", short_name(name), quantity(name, value)), expected);
        }
    }
}
