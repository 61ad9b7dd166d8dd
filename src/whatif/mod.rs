//! What-if analysis: one request, planned anew for every combination of swept values.
//!
//! | file | contents |
//! |---|---|
//! | `alternative.rs` | alternatives that break-even questions compare |
//! | `break_even.rs` | values at which one alternative overtakes the other |
//! | `values.rs` | lists and ranges of values as they are typed |
//! | `field.rs` | the fields that can be swept, and their names |
//! | `document.rs` | model and hardware as JSON documents, in which fields are set |
//! | `point.rs` | swept fields and the combinations of their values |
//! | `scenario.rs` | the base request, and the request of one point |
//! | `solve.rs` | the smallest or largest value that satisfies a condition |
//! | `sweep.rs` | the points of a sweep, and their plans |

mod alternative;
mod break_even;
mod document;
mod field;
mod point;
mod scenario;
mod solve;
mod sweep;
mod values;

pub use alternative::BreakEvenAlternative;
pub use break_even::{
    BreakEvenRegion, BreakEvenValues, FasterAlternative, parse_range, regions, sorted_numbers,
};
pub use document::{Document, ScalarField};
pub use field::{SweepField, is_swept};
pub use point::{Point, SweepAxis};
pub use scenario::{Scenario, text_of};
pub use solve::{Condition, Extreme, Method, solve};
pub use sweep::{PlannedPoint, PointOutcome, Sweep, plan_points};
pub use values::{gap_phrase, geometric_mean, number, parse_values, scalar, short};
