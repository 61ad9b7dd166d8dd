//! Solutions for the blocks of one stage, within the memory of that stage.

use std::sync::Arc;

use narrows_cost_model::InFlight;
use narrows_plan::{Bytes, Seconds};

use super::overhead::StageOverhead;
use crate::segment::{SegmentSpec, SolvedSegment};

/// The method that assigned the blocks of a stage; later methods compare greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum AssignmentMethod {
    /// Every block has its fastest solution: memory does not bind.
    #[default]
    Elimination,
    /// Blocks mix vertices of their hulls: the integer programs led to no faster plan that fits, or the library failed.
    Hull,
    /// An integer program chose the solutions.
    IntegerProgram,
}

/// A block of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockInFlight {
    /// The block's segment.
    pub spec: SegmentSpec,
    /// Microbatches whose activations the block stores at once.
    pub in_flight: InFlight,
}

impl BlockInFlight {
    /// Whether, of equal blocks, later ones keep more. With one microbatch in flight, the peak of a stage is at the backward
    /// pass of a block: what the blocks up to this one keep, and what it recomputes. Blocks that keep more recompute less.
    pub(super) fn keeps_more_last(&self) -> bool {
        self.in_flight.kept == 1
    }

    /// Bytes of the block with a solution.
    pub(super) fn bytes(&self, solved: &SolvedSegment) -> Bytes {
        solved.bytes.total(self.in_flight)
    }
}

/// One solution for each block of a stage, with their total cost.
#[derive(Clone, Debug, Default)]
pub struct StageAssignment {
    /// The solution of each block, in model order.
    pub blocks: Vec<Arc<SolvedSegment>>,
    /// Forward pass of one microbatch.
    pub forward: Seconds,
    /// Backward pass of one microbatch.
    pub backward: Seconds,
    /// The part of `backward` that a zero-bubble schedule runs in weight-gradient passes.
    pub weight_gradient: Seconds,
    /// Step phase.
    pub step_phase: Seconds,
    /// The part of the step phase that waits for the gradient norm over all stages.
    pub update: Seconds,
    /// Bytes with the stage's microbatches in flight.
    pub bytes: Bytes,
    /// The method that assigned the blocks.
    pub method: AssignmentMethod,
    /// Time of a step minus its linear relaxation: no assignment within the same bytes is faster by
    /// more.
    pub integrality_slack: Seconds,
    /// Lower bound on forward plus backward time of one microbatch within the same bytes, for any step phase.
    pub microbatch_time_min: Seconds,
    /// Lower bound on forward plus backward time of one microbatch plus the step phase within the same bytes; zero where
    /// unknown.
    pub single_microbatch_step_min: Seconds,
}

impl StageAssignment {
    /// The assignment of these solutions, each with the microbatches in flight of its block.
    pub fn new(
        blocks: Vec<Arc<SolvedSegment>>,
        in_flight: impl IntoIterator<Item = InFlight>,
    ) -> StageAssignment {
        let mut total = StageAssignment::default();
        for (block, in_flight) in blocks.iter().zip(in_flight) {
            total.forward += block.time.forward;
            total.backward += block.time.backward;
            total.weight_gradient += block.time.weight_gradient;
            total.step_phase += block.time.step_phase;
            total.update += block.time.update;
            total.bytes += block.bytes.total(in_flight);
        }
        total.microbatch_time_min = total.forward + total.backward;
        StageAssignment { blocks, ..total }
    }

    /// The assignment of these solutions to blocks.
    pub(super) fn of_blocks(
        blocks: &[BlockInFlight],
        solutions: Vec<Arc<SolvedSegment>>,
    ) -> StageAssignment {
        StageAssignment::new(solutions, blocks.iter().map(|block| block.in_flight))
    }

    /// The solutions of each of this many equal chunks.
    pub(super) fn chunks(&self, chunks: usize) -> impl Iterator<Item = &[Arc<SolvedSegment>]> {
        let count = self.blocks.len() / chunks;
        (0..chunks).map(move |chunk| &self.blocks[chunk * count..(chunk + 1) * count])
    }

    /// Forward plus backward time of one microbatch, in seconds.
    pub(crate) fn microbatch_time(&self, overhead: &StageOverhead) -> f64 {
        (self.forward + overhead.forward + self.backward + overhead.backward).0
    }
}

/// The fastest assignment of hull vertices to blocks within a budget, up to one block's step along its
/// hull; `None` when even the smallest vertices exceed the budget. `hulls` holds the vertices of each
/// of `blocks`, from the fastest to the smallest.
///
/// Greedy solution of the linear relaxation: starting from the smallest vertices, hull edges are climbed in
/// descending order of time saved per byte. The relaxation climbs a part of the first edge that does not fit;
/// the time saved by this part is the assignment's integrality slack.
pub(super) fn assign_points(
    hulls: &[Vec<Arc<SolvedSegment>>],
    blocks: &[BlockInFlight],
    microbatches: u64,
    budget: Bytes,
) -> Option<StageAssignment> {
    let bytes = |block: usize, vertex: usize| blocks[block].bytes(&hulls[block][vertex]);
    let time = |solved: &SolvedSegment| solved.time.total(microbatches).0;
    let mut level: Vec<usize> = vec![];
    let mut used = Bytes(0);
    // (seconds saved per byte, block, vertex at the faster end of the edge)
    let mut edges: Vec<(f64, usize, usize)> = vec![];
    for (block, hull) in hulls.iter().enumerate() {
        let smallest = hull.len().checked_sub(1)?;
        level.push(smallest);
        used += bytes(block, smallest);
        for to in 0..smallest {
            let (faster, slower) = (&hull[to], &hull[to + 1]);
            let more = (bytes(block, to) - bytes(block, to + 1)).as_f64();
            edges.push(((time(slower) - time(faster)) / more, block, to));
        }
    }
    if used > budget {
        return None;
    }
    let position = |block: usize| match blocks[block].keeps_more_last() {
        true => -(block as i64),
        false => block as i64,
    };
    edges.sort_by(|a, b| {
        b.0.total_cmp(&a.0).then(position(a.1).cmp(&position(b.1))).then(b.2.cmp(&a.2))
    });
    let mut slack = None;
    for (rate, block, to) in edges {
        let more = bytes(block, to) - bytes(block, to + 1);
        if level[block] == to + 1 && used + more <= budget {
            level[block] = to;
            used += more;
        } else {
            slack.get_or_insert(rate * (budget - used).as_f64());
        }
    }
    let solutions = hulls.iter().zip(&level).map(|(hull, level)| hull[*level].clone()).collect();
    let integrality_slack = Seconds(slack.unwrap_or(0.0));
    let method = AssignmentMethod::Hull;
    let assignment = StageAssignment::of_blocks(blocks, solutions);
    Some(StageAssignment { integrality_slack, method, ..assignment })
}
