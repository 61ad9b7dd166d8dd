//! What the time of a step is spent on, as measured.
//!
//! The same parts as those of a predicted step, told apart the same way: by the instruction. What an
//! instruction takes counts as a whole, so a collective's part holds the time that a device waits
//! in it for the others of its group. What is spent outside of instructions, and what only waiting is:
//!
//! | part | besides instructions |
//! |---|---|
//! | `bubble` | waiting for another stage's transfer, and for the last device at the end of a step |
//! | `other` | transfers themselves, reading tokens, starting and ending a step |

use std::time::Duration;

use narrows_plan::Kernel;
use narrows_plan::kernel::FusedKind;
use narrows_plan::mesh::Axis;
use narrows_plan::program::{Action, Instr};
use serde::ser::{Serialize, SerializeMap, Serializer};

/// A part of a step's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeCategory {
    /// Products.
    Gemm,
    /// Attention.
    Attention,
    /// Fused passes.
    Elementwise,
    /// Collectives: nothing hides them here.
    CollectiveExposed,
    /// Waiting for other stages.
    Bubble,
    /// Gradient norm and AdamW.
    Optimizer,
    /// Transfers between stages, and what is no instruction.
    Other,
}

/// The time of a step by part. It is written as seconds by the parts' names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeBreakdown([Duration; TimeCategory::ALL.len()]);

/// When an instruction was executed, from the beginning of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionSpan {
    /// When it began.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
}

impl TimeCategory {
    /// All of them, in the order in which they are told.
    pub const ALL: [TimeCategory; 7] = [
        TimeCategory::Gemm,
        TimeCategory::Attention,
        TimeCategory::Elementwise,
        TimeCategory::CollectiveExposed,
        TimeCategory::Bubble,
        TimeCategory::Optimizer,
        TimeCategory::Other,
    ];

    /// The key it is written under.
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

    /// What an instruction's time is spent on.
    pub fn of_instruction(instr: &Instr) -> TimeCategory {
        match (instr.kernel(), &instr.action) {
            (Kernel::Gemm(_), _) => TimeCategory::Gemm,
            (Kernel::Attention(_), _) => TimeCategory::Attention,
            (Kernel::Fused(pass), _) if pass.kind == FusedKind::Optimizer => {
                TimeCategory::Optimizer
            }
            (Kernel::Fused(_), _) => TimeCategory::Elementwise,
            (Kernel::Transfer(_), _) => TimeCategory::Other,
            // The square sum's collectives belong to the optimizer.
            (Kernel::Collective(_), Action::Collective(exchange))
                if exchange.axis == Axis::Pipeline =>
            {
                TimeCategory::Optimizer
            }
            (Kernel::Collective(_), _) => TimeCategory::CollectiveExposed,
        }
    }
}

impl TimeBreakdown {
    /// The time of a part.
    pub fn get(&self, part: TimeCategory) -> Duration {
        self.0[part as usize]
    }

    /// All parts together.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// Adds to a part.
    pub fn add(&mut self, part: TimeCategory, time: Duration) {
        self.0[part as usize] += time;
    }

    /// Adds another's parts.
    pub fn add_all(&mut self, other: &TimeBreakdown) {
        TimeCategory::ALL.iter().for_each(|part| self.add(*part, other.get(*part)));
    }

    /// Means, of what was added up over so many devices.
    pub fn mean_over(self, devices: usize) -> TimeBreakdown {
        let devices = u32::try_from(devices).unwrap_or(u32::MAX).max(1);
        TimeBreakdown(self.0.map(|time| time / devices))
    }
}

impl Serialize for TimeBreakdown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(TimeCategory::ALL.len()))?;
        for part in TimeCategory::ALL {
            map.serialize_entry(part.name(), &self.get(part).as_secs_f64())?;
        }
        map.end()
    }
}
