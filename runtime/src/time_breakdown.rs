//! Breakdown of the measured time of a step by category.
//!
//! The categories are those of a predicted step, and the instruction decides the category. The whole
//! time of an instruction counts, so that of a collective includes the wait for its other members. Of a collective beside computation,
//! the time counts that the device waits for it.
//! Besides instructions, two categories include:
//!
//! | category | includes |
//! |---|---|
//! | `bubble` | waiting for the transfer of another stage, and for the last device at the end of a step |
//! | `other` | transfers, reading tokens, starting and ending a step |

use std::time::Duration;

use narrows_plan::kernel::FusedKind;
use narrows_plan::program::{Action, Instr};
use narrows_plan::{Axis, Kernel};
use serde::ser::{Serialize, SerializeMap, Serializer};

/// A category of a step's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeCategory {
    /// Matrix multiplications.
    Gemm,
    /// Attention.
    Attention,
    /// Element-wise and row-wise fused ops.
    Elementwise,
    /// Collectives, and waiting for those beside computation.
    CollectiveExposed,
    /// Waiting for other stages.
    Bubble,
    /// Gradient norm and AdamW updates.
    Optimizer,
    /// Transfers between stages, and everything outside of instructions.
    Other,
}

/// The time of a step by category. It is serialised as seconds by category name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeBreakdown([Duration; TimeCategory::ALL.len()]);

/// Start and end of an instruction, measured from the start of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionSpan {
    /// Start of the instruction.
    pub start: Duration,
    /// End of the instruction.
    pub end: Duration,
}

impl TimeCategory {
    /// All categories, in the order of reports.
    pub const ALL: [TimeCategory; 7] = [
        TimeCategory::Gemm,
        TimeCategory::Attention,
        TimeCategory::Elementwise,
        TimeCategory::CollectiveExposed,
        TimeCategory::Bubble,
        TimeCategory::Optimizer,
        TimeCategory::Other,
    ];

    /// Key in metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            TimeCategory::Gemm => "gemm",
            TimeCategory::Attention => "attention",
            TimeCategory::Elementwise => "elementwise",
            TimeCategory::CollectiveExposed => "collective_exposed",
            TimeCategory::Bubble => "bubble",
            TimeCategory::Optimizer => "optimizer",
            TimeCategory::Other => "other",
        }
    }

    /// Category of an instruction.
    pub fn of_instruction(instr: &Instr) -> TimeCategory {
        match (instr.kernel(), &instr.action) {
            (Kernel::Gemm(_), _) => TimeCategory::Gemm,
            (Kernel::Attention(_), _) => TimeCategory::Attention,
            (Kernel::Fused(fused), _) if fused.kind == FusedKind::Optimizer => {
                TimeCategory::Optimizer
            }
            (Kernel::Fused(_), _) => TimeCategory::Elementwise,
            (Kernel::Transfer(_), _) => TimeCategory::Other,
            // Along the pipeline only the gradient norm and tied gradients are reduced.
            (Kernel::Collective(_), Action::Collective(collective))
                if collective.axis == Axis::Pipeline =>
            {
                TimeCategory::Optimizer
            }
            (Kernel::Collective(_), _) => TimeCategory::CollectiveExposed,
        }
    }
}

impl TimeBreakdown {
    /// The time of a category.
    pub fn get(&self, category: TimeCategory) -> Duration {
        self.0[category as usize]
    }

    /// Sum over all categories.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// Adds to the time of a category.
    pub fn add(&mut self, category: TimeCategory, time: Duration) {
        self.0[category as usize] += time;
    }

    /// Adds the times of another breakdown.
    pub fn add_all(&mut self, other: &TimeBreakdown) {
        for category in TimeCategory::ALL {
            self.add(category, other.get(category));
        }
    }

    /// The mean over devices of a breakdown that was summed over them.
    pub fn mean_over(self, devices: usize) -> TimeBreakdown {
        let devices = u32::try_from(devices).unwrap_or(u32::MAX).max(1);
        TimeBreakdown(self.0.map(|time| time / devices))
    }
}

impl Serialize for TimeBreakdown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(TimeCategory::ALL.len()))?;
        for category in TimeCategory::ALL {
            map.serialize_entry(category.name(), &self.get(category).as_secs_f64())?;
        }
        map.end()
    }
}
