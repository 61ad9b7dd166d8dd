//! Prices of the step phase: gradient reductions and updates.

use narrows_plan::emit::{reduce_owned_gradient, update_parameter};
use narrows_plan::graph::OpId;
use narrows_plan::strategy::{SegmentChoice, SegmentSpace, Strategy};
use narrows_plan::{Bytes, Context, Seconds};

use crate::memory::SegmentBytes;
use crate::price::StreamPrices;
use crate::segment_time::{SegmentTime, sum};

/// The step phase of an op under one strategy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpStep {
    /// Gradient reductions and updates.
    pub time: Seconds,
    /// The updates.
    pub update: Seconds,
    /// Gradient reductions beside the last backward pass, of which `time` has the least that they add to a step.
    pub overlapped: Seconds,
    /// Bytes of the parameters with their gradients and optimizer states.
    pub resident: Bytes,
}

/// The step phases of a segment's ops in one context, by strategy. They depend on neither the boundary layout nor the
/// workload.
#[derive(Clone, Debug)]
pub struct StepPhases(Vec<Vec<(Strategy, OpStep)>>);

impl StepPhases {
    /// Prices the step phases of all ops of `space` in a context with the same tensor axis, with the least that
    /// reductions beside the last backward pass add to a step.
    pub fn new(space: &SegmentSpace, context: &Context, prices: StreamPrices) -> StepPhases {
        let of_op = |id: OpId| {
            let mut steps: Vec<(Strategy, OpStep)> = vec![];
            for option in &space.ops[id.0 as usize] {
                let strategy = option.choice.strategy;
                if steps.iter().all(|(known, _)| *known != strategy) {
                    let step = op_step(space, (context, id, strategy), prices);
                    steps.push((strategy, step));
                }
            }
            steps
        };
        StepPhases(space.segment.op_ids().map(of_op).collect())
    }

    pub(crate) fn of(&self, id: OpId, strategy: Strategy) -> OpStep {
        let step = self.0[id.0 as usize].iter().find(|(known, _)| *known == strategy);
        step.map(|(_, step)| *step).unwrap_or_default()
    }

    /// Adds the step phase and the resident bytes of a choice.
    pub fn add_to(&self, choice: &SegmentChoice, time: &mut SegmentTime, bytes: &mut SegmentBytes) {
        for (op, option) in choice.ops.iter().enumerate() {
            let step = self.of(OpId(op as u32), option.choice.strategy);
            time.step_phase += step.time;
            time.update += step.update;
            time.overlapped += step.overlapped;
            bytes.resident += step.resident;
        }
    }

    /// Lower bound on the segment's reductions beside the last backward pass.
    pub fn overlapped_min(&self) -> Seconds {
        let least = |steps: &Vec<(Strategy, OpStep)>| {
            Seconds(steps.iter().map(|(_, step)| step.overlapped.0).reduce(f64::min).unwrap_or(0.0))
        };
        self.0.iter().map(least).sum()
    }

    /// Lower and upper bound of the segment's time in the step phase: sums of each op's least and largest time.
    pub fn bounds(&self) -> [Seconds; 2] {
        let mut range = [Seconds(0.0); 2];
        for steps in &self.0 {
            let extreme = |pick: fn(f64, f64) -> f64| {
                Seconds(steps.iter().map(|(_, step)| step.time.0).reduce(pick).unwrap_or(0.0))
            };
            range[0] += extreme(f64::min);
            range[1] += extreme(f64::max);
        }
        range
    }
}

/// The step phase of an op: the reductions of its gradients, and its updates.
fn op_step(
    space: &SegmentSpace,
    (context, id, strategy): (&Context, OpId, Strategy),
    StreamPrices { kernel: price, overlap: slowdown }: StreamPrices,
) -> OpStep {
    let Some(parameter) = space.parameters(id, strategy, context) else {
        return OpStep::default();
    };
    let resident = parameter.resident_bytes(context);
    let (kind, tied) = (space.segment.kind, space.tied);
    let reductions = reduce_owned_gradient(kind, &parameter, tied, context);
    let beside = reductions.overlapped.map_or(Seconds(0.0), |template| price(&template.kernel()));
    let reduce = sum(&reductions.rest, price);
    let update = sum(&update_parameter(&parameter, context), price);
    let (hidden_cost, overlapped) = match slowdown {
        Some(slowdown) => (beside * slowdown.hidden_cost(), beside),
        None => (beside, Seconds(0.0)),
    };
    OpStep { time: reduce + update + hidden_cost, update, overlapped, resident }
}
