//! Prices of parameters in a context: the step phase with its gradient reductions and updates, and the collectives
//! that ZeRO-2 and ZeRO-3 add to the passes.

use narrows_plan::emit::{reduce_owned_gradient, update_parameter};
use narrows_plan::graph::OpId;
use narrows_plan::strategy::{OpParameters, SegmentChoice, SegmentSpace, Strategy};
use narrows_plan::{Bytes, Context, Seconds};

use crate::memory::SegmentBytes;
use crate::price::StreamPrices;
use crate::segment_time::{SegmentTime, sum};
use crate::sharding::{ShardingMin, ShardingPrices, ShardingTime};

/// The step phase of an op under one strategy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpStep {
    /// Gradient reductions and updates.
    pub time: Seconds,
    /// The updates.
    pub update: Seconds,
    /// Gradient reductions during the last backward pass, of which `time` has the least that they add to a step.
    pub overlapped: Seconds,
    /// Bytes of the parameters with their gradients and optimizer states.
    pub resident: Bytes,
    /// The least that a sharded parameter adds to the passes of one microbatch.
    pub passes: ShardingTime,
}

/// The step phases of a segment's ops in one context, by strategy. They depend on neither the boundary layout nor the
/// workload.
#[derive(Clone, Debug)]
pub struct StepPhases {
    ops: Vec<Vec<(Strategy, OpStep)>>,
    sharding_min: ShardingMin,
}

impl StepPhases {
    /// Prices the step phases of all ops of `space` in a context with the same tensor axis, with the least that
    /// reductions during the last backward pass add to a step.
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
        let mut ops: Vec<_> = space.segment.op_ids().map(of_op).collect();
        let sharding_min = match context.shards_gradients() {
            true => add_sharding_times(space, context, prices, &mut ops),
            false => ShardingMin::default(),
        };
        StepPhases { ops, sharding_min }
    }

    pub(crate) fn of(&self, id: OpId, strategy: Strategy) -> OpStep {
        let step = self.ops[id.0 as usize].iter().find(|(known, _)| *known == strategy);
        step.map(|(_, step)| *step).unwrap_or_default()
    }

    /// Adds the step phase, the least that sharded parameters add to the passes, and the resident bytes of a choice.
    pub fn add_to(&self, choice: &SegmentChoice, time: &mut SegmentTime, bytes: &mut SegmentBytes) {
        for (op, option) in choice.ops.iter().enumerate() {
            let step = self.of(OpId(op as u32), option.choice.strategy);
            time.step_phase += step.time;
            time.update += step.update;
            time.overlapped += step.overlapped;
            time.forward += step.passes.forward;
            time.backward += step.passes.backward;
            bytes.resident += step.resident;
        }
    }

    /// Lower bounds on the time that sharded parameters add to the passes of one microbatch.
    pub fn sharding_min(&self) -> ShardingMin {
        self.sharding_min
    }

    /// Lower bound on the segment's reductions during the last backward pass.
    pub fn overlapped_min(&self) -> Seconds {
        let least = |steps: &Vec<(Strategy, OpStep)>| {
            Seconds(steps.iter().map(|(_, step)| step.overlapped.0).reduce(f64::min).unwrap_or(0.0))
        };
        self.ops.iter().map(least).sum()
    }

    /// Lower and upper bound of the segment's time in the step phase: sums of each op's least and largest time.
    pub fn bounds(&self) -> [Seconds; 2] {
        let mut range = [Seconds(0.0); 2];
        for steps in &self.ops {
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
    let overlappable = sum(&reductions.overlapped, price);
    let reduce = sum(&reductions.rest, price);
    let update = sum(&update_parameter(&parameter, context), price);
    let (hidden_cost, overlapped) = match slowdown {
        Some(slowdown) => (overlappable * slowdown.hidden_cost(), overlappable),
        None => (overlappable, Seconds(0.0)),
    };
    let passes = ShardingTime::default();
    OpStep { time: reduce + update + hidden_cost, update, overlapped, resident, passes }
}

/// Adds the times of the collectives of sharded parameters, by strategy of each op. Returns lower bounds.
fn add_sharding_times(
    space: &SegmentSpace,
    context: &Context,
    prices: StreamPrices,
    steps: &mut [Vec<(Strategy, OpStep)>],
) -> ShardingMin {
    let parameters = |op: usize, strategy| space.parameters(OpId(op as u32), strategy, context);
    let of_ops: Vec<Vec<OpParameters>> = steps
        .iter()
        .enumerate()
        .map(|(op, steps)| steps.iter().filter_map(|(of, _)| parameters(op, *of)).collect())
        .collect();
    let sharding = ShardingPrices::new(&of_ops, context, prices);
    for (op, steps) in steps.iter_mut().enumerate() {
        for (strategy, step) in steps {
            if let Some(parameters) = parameters(op, *strategy) {
                let node = space.segment.op(OpId(op as u32));
                step.passes = sharding.of(&node.op, &parameters);
            }
        }
    }
    sharding.least
}
