//! The time of a step by kind of work.

use narrows_plan::kernel::FusedKind;
use narrows_plan::program::{Action, Instr};
use narrows_plan::{Axis, Kernel, Seconds};
use schemars::JsonSchema;
use serde::Serialize;

use crate::price::{KernelPrice, ring_computation};

/// The time of a step by kind of work, in seconds. The parts add up to the step time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Breakdown {
    /// GEMMs.
    pub gemm: f64,
    /// Attention; of ring attention the computation.
    pub attention: f64,
    /// Fused ops, the optimizer's excluded.
    pub elementwise: f64,
    /// Collectives that no computation hides, and the time by which hidden ones slow the computation.
    pub collective_exposed: f64,
    /// Idle time: stages that wait for others, devices that wait for the launches of their host, and the time of a step
    /// beyond its kernels.
    pub bubble: f64,
    /// Gradient norm across stages, and AdamW.
    pub optimizer: f64,
    /// P2P transfers between stages.
    pub other: f64,
}

impl Breakdown {
    /// The sum of all parts.
    pub fn total(&self) -> f64 {
        self.gemm
            + self.attention
            + self.elementwise
            + self.collective_exposed
            + self.bubble
            + self.optimizer
            + self.other
    }

    /// Every part times `factor`.
    pub fn scaled(&self, factor: f64) -> Breakdown {
        let mut all = Breakdown::default();
        all.add(self, factor);
        all
    }

    /// The sum of both, part by part.
    pub fn plus(&self, other: &Breakdown) -> Breakdown {
        let mut sum = *self;
        sum.add(other, 1.0);
        sum
    }

    pub(crate) fn add(&mut self, other: &Breakdown, times: f64) {
        self.gemm += other.gemm * times;
        self.attention += other.attention * times;
        self.elementwise += other.elementwise * times;
        self.collective_exposed += other.collective_exposed * times;
        self.bubble += other.bubble * times;
        self.optimizer += other.optimizer * times;
        self.other += other.other * times;
    }

    /// Adds the time of an instruction, with these prices of kernels.
    pub(crate) fn add_instr(&mut self, instr: &Instr, time: Seconds, price: KernelPrice) {
        match ring_computation(&instr.kernel(), price) {
            Some(computation) => {
                self.attention += computation.0;
                self.collective_exposed += (time - computation).0;
            }
            None => *self.part_mut(instr) += time.0,
        }
    }

    fn part_mut(&mut self, instr: &Instr) -> &mut f64 {
        match (instr.kernel(), &instr.action) {
            (Kernel::Gemm(_), _) => &mut self.gemm,
            (Kernel::Attention(_), _) => &mut self.attention,
            (Kernel::Fused(op), _) if op.kind == FusedKind::Optimizer => &mut self.optimizer,
            (Kernel::Fused(_), _) => &mut self.elementwise,
            (Kernel::Transfer(_), _) => &mut self.other,
            // Collectives over stages sum squared gradients for the optimizer.
            (Kernel::Collective(_), Action::Collective(c)) if c.axis == Axis::Pipeline => {
                &mut self.optimizer
            }
            (Kernel::Collective(_), _) => &mut self.collective_exposed,
        }
    }
}
