//! Comparison of predictions with measurements.

mod cells;
mod closed_loop;
mod compare;
mod errors;
mod leave_one_out;
mod preset_coverage;
mod published_program;
mod summary;

pub use cells::{ErrorCell, MendingTerm, worst_cells};
pub use closed_loop::{ClosedLoop, ClosedLoopPlan, MeasuredPlan, StepInterval, closed_loop};
pub use compare::{ComparedMeasurement, compare};
pub use errors::{ErrorSummary, IntervalCoverage, Orderings};
pub use leave_one_out::{LeftOutMeasurement, leave_one_out};
pub use preset_coverage::{PresetCoverage, preset_coverage};
pub use summary::{MeasurementSummary, overall, summarise_by_source, summarise_by_table};
