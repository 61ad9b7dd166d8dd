//! A plan that fits its devices, with its program and its simulated step.

use std::sync::Arc;

use narrows_plan::strategy::BoundaryLayout;
use narrows_plan::{Bytes, CheckedProgram, Context, Seconds};

use crate::pipeline::AssignmentMethod;
use crate::segment::SolvedSegment;

/// Solutions chosen for every segment of a model.
#[derive(Clone, Debug)]
pub struct ModelDecisions {
    /// Mesh, workload, number formats, ZeRO stage.
    pub context: Context,
    /// Layouts of the tensors between segments.
    pub boundary: BoundaryLayout,
    /// Solution of the embedding.
    pub embedding: Arc<SolvedSegment>,
    /// Solutions of the blocks of each stage, in model order.
    pub stages: Vec<Vec<Arc<SolvedSegment>>>,
    /// Solution of the head.
    pub head: Arc<SolvedSegment>,
}

/// A plan that was lowered and simulated.
#[derive(Clone, Debug)]
pub struct FeasiblePlan {
    /// The decisions.
    pub decisions: ModelDecisions,
    /// The decisions as a plan file.
    pub plan: narrows_plan::Plan,
    /// The lowered plan, checked.
    pub program: CheckedProgram,
    /// Simulated time of the program's step.
    pub time: Seconds,
    /// Time of a step beyond its kernels, divided by the executor's step factor as `time` is: that of the executor, and that
    /// which exact steps of LORO add on average.
    pub beyond_kernels: Seconds,
    /// Step time simulated from the stage times of the partition, before lowering.
    pub partition_time: Seconds,
    /// Lower bound of the partition; with one stage the solver's objective, equal to `time`.
    pub objective: Seconds,
    /// Latest method that assigned the blocks of a stage.
    pub method: AssignmentMethod,
}

impl FeasiblePlan {
    /// Time of a step on average: that of the program's step, and its time beyond kernels.
    pub fn average_time(&self) -> Seconds {
        self.time + self.beyond_kernels
    }

    /// Arena of the fullest stage.
    pub fn peak_arena(&self) -> Bytes {
        let stages = self.program.program().stages.iter();
        stages.map(|stage| stage.arena).max().unwrap_or_default()
    }
}
