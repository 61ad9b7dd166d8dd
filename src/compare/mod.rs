//! Comparison of plans of one model: what differs in decisions, time, memory and communication.
//!
//! | file | contents |
//! |---|---|
//! | `decisions.rs` | decisions that differ: of the plan, of ranges of blocks, of single ops |
//! | `parts.rs` | parts of step time, memory and communication, the largest difference first |

mod decisions;
mod parts;

use narrows_cost_model::TrainingRunEstimate;
use narrows_plan::Bytes;
use narrows_planner::SearchReport;

use crate::priced_plan::PricedPlan;

pub use decisions::{ComparedDecision, DecisionDifference, OpDifference, SegmentDifference};
pub use decisions::{plan_differences, segment_differences, virtual_stage_blocks};
pub use parts::{PartDifference, communication_parts, memory_parts, spread, time_parts};

/// Most plans of a comparison: more columns do not fit a page.
pub const PLANS_MAX: usize = 5;

/// One of the compared plans.
#[derive(Debug)]
pub struct ComparedPlan {
    /// Name of the file, or `search`.
    pub name: String,
    /// The plan with its prediction.
    pub priced: PricedPlan,
    /// Memory that a device may use; `Bytes(u64::MAX)` without a limit.
    pub memory_limit: Bytes,
    /// Report of the search of the plan; `None` for plan files.
    pub search: Option<SearchReport>,
    /// The training run under the plan, if one is estimated.
    pub training_run: Option<TrainingRunEstimate>,
}

impl ComparedPlan {
    /// Tokens of a step.
    pub fn tokens(&self) -> u64 {
        self.priced.tokens_per_step()
    }

    /// Seconds for one token of a step.
    pub fn seconds_per_token(&self) -> f64 {
        self.priced.prediction.step_time_s / self.tokens() as f64
    }
}

/// Indices of the plans in descending order of throughput; equal ones keep their order.
pub fn ranking(plans: &[ComparedPlan]) -> Vec<usize> {
    let time = |index: &usize| plans[*index].seconds_per_token();
    let mut order: Vec<usize> = (0..plans.len()).collect();
    order.sort_by(|a, b| time(a).total_cmp(&time(b)));
    order
}
