//! Elasticities, shares and ratios as text.

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

/// A ratio to the present value: `×1.4`, `÷1.4`.
pub fn times(factor: f64) -> String {
    if factor < 1.0 { format!("÷{:.2}", 1.0 / factor) } else { format!("×{factor:.2}") }
}
