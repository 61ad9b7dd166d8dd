//! Improves the assignment of a stage where memory binds, by integer programs.
//!
//! An assignment of hull vertices leaves memory unused: less than one step along a hull. An integer program
//! chooses again among all vertices of the stage's blocks, under the stage's memory row. The bytes that its
//! choice leaves unused go to single blocks: the cost table of a block is solved exactly within the block's
//! bytes plus the unused ones, which yields solutions between the vertices. These become new columns, and the
//! integer program chooses once more.
//!
//! Refinement improves plans, not bounds: the bound remains that of the linear relaxation. When the library
//! fails, the assignment and the reported gap stay as they are, and the failure is counted.

use std::sync::Arc;

use narrows_plan::{Bytes, Context};

use super::assignment::{AssignmentMethod, BlockInFlight, StageAssignment};
use crate::segment::{SegmentSolver, SolvedSegment};
use crate::solve::{ColumnCounts, ColumnGroup, SolveLimits, choose_columns};

/// Smallest distance from the linear relaxation, relative to the step, at which columns are chosen again.
const SLACK_MIN: f64 = 1e-6;
/// Smallest relative distance at which new columns are computed, in tens to hundreds of milliseconds each.
const SLACK_MIN_FOR_COLUMNS: f64 = 1e-3;

/// Equal blocks of a stage, with the solutions to choose from.
struct BlockGroup {
    block: BlockInFlight,
    count: u64,
    columns: Vec<Arc<SolvedSegment>>,
    /// Number of blocks of each column.
    chosen: Vec<u64>,
}

impl BlockGroup {
    /// The columns that blocks take, with the number of blocks of each.
    fn chosen(&self) -> impl Iterator<Item = (&Arc<SolvedSegment>, u64)> {
        self.columns.iter().zip(self.chosen.iter().copied()).filter(|(_, count)| *count > 0)
    }
}

/// A stage whose assignment is refined.
pub(super) struct StageRefinement<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    budget: Bytes,
}

impl<'a> StageRefinement<'a> {
    /// The blocks of a stage may use `budget` bytes.
    pub(super) fn new(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        budget: Bytes,
    ) -> StageRefinement<'a> {
        StageRefinement { segments, context, budget }
    }

    /// An assignment for these blocks that is faster than `assignment` and within the budget, if one is
    /// found.
    pub(super) fn refine(
        &self,
        blocks: &[BlockInFlight],
        assignment: &StageAssignment,
    ) -> Option<StageAssignment> {
        let time = self.blocks_step_time_s(&assignment.blocks);
        if assignment.integrality_slack.0 <= SLACK_MIN * time {
            return None;
        }
        let bound = time - assignment.integrality_slack.0;
        let mut groups = self.groups(blocks, assignment);
        self.choose(&mut groups);
        let chosen: f64 = groups
            .iter()
            .flat_map(BlockGroup::chosen)
            .map(|(c, n)| self.step_time_s(c) * n as f64)
            .sum();
        let is_close = chosen - bound <= SLACK_MIN_FOR_COLUMNS * time;
        if !is_close && !self.segments.out_of_time() && self.add_columns(&mut groups) {
            self.choose(&mut groups);
        }
        let solutions = solutions_in_order(blocks, &groups);
        let refined = StageAssignment::of_blocks(blocks, solutions);
        let is_faster = self.blocks_step_time_s(&refined.blocks) < time * (1.0 - 1e-12);
        (is_faster && refined.bytes <= self.budget).then_some(StageAssignment {
            integrality_slack: assignment.integrality_slack,
            microbatch_time_min: assignment.microbatch_time_min,
            method: AssignmentMethod::IntegerProgram,
            ..refined
        })
    }

    /// Time of the blocks in one step, in seconds.
    fn blocks_step_time_s(&self, blocks: &[Arc<SolvedSegment>]) -> f64 {
        blocks.iter().map(|solved| self.step_time_s(solved)).sum()
    }

    fn step_time_s(&self, solved: &SolvedSegment) -> f64 {
        let microbatches = self.context.workload.microbatches(&self.context.mesh);
        solved.time.total(microbatches).0
    }

    /// The groups of a stage's blocks, with all vertices of their hulls and the current choice.
    fn groups(&self, blocks: &[BlockInFlight], assignment: &StageAssignment) -> Vec<BlockGroup> {
        let mut groups: Vec<BlockGroup> = vec![];
        for (block, solved) in blocks.iter().zip(&assignment.blocks) {
            let index =
                groups.iter().position(|group| group.block == *block).unwrap_or_else(|| {
                    let BlockInFlight { spec, in_flight } = *block;
                    let columns = self.segments.hull(spec, self.context, in_flight, None);
                    let chosen = vec![0; columns.len()];
                    groups.push(BlockGroup { block: *block, count: 0, columns, chosen });
                    groups.len() - 1
                });
            let group = &mut groups[index];
            group.count += 1;
            match group.columns.iter().position(|column| Arc::ptr_eq(column, solved)) {
                Some(column) => group.chosen[column] += 1,
                None => {
                    group.columns.push(solved.clone());
                    group.chosen.push(1);
                }
            }
        }
        groups
    }

    /// Chooses columns for all blocks by an integer program. When the library fails, which is counted, or runs out
    /// of time, the choice stays as it is.
    fn choose(&self, groups: &mut [BlockGroup]) {
        let column_groups: Vec<ColumnGroup> = groups
            .iter()
            .map(|group| ColumnGroup {
                count: group.count,
                columns: group
                    .columns
                    .iter()
                    .map(|c| (self.step_time_s(c), group.block.bytes(c).0))
                    .collect(),
            })
            .collect();
        let start: ColumnCounts = groups.iter().map(|group| group.chosen.clone()).collect();
        let limits = SolveLimits { time: self.segments.deadline().remaining(), gap: 0.0 };
        match choose_columns(&column_groups, self.budget.0, &start, &limits) {
            Ok(Some(counts)) => {
                groups.iter_mut().zip(counts).for_each(|(group, counts)| group.chosen = counts);
            }
            Ok(None) => {}
            Err(_) => self.segments.count_failed_solve(),
        }
    }

    /// Adds columns that use the unused bytes. Returns whether any was added.
    fn add_columns(&self, groups: &mut [BlockGroup]) -> bool {
        let used = |group: &BlockGroup| -> Bytes {
            group.chosen().map(|(column, count)| group.block.bytes(column) * count).sum()
        };
        let used: Bytes = groups.iter().map(used).sum();
        let unused = self.budget.saturating_sub(used);
        let mut any = false;
        for group in groups {
            let block = group.block;
            let chosen: Vec<_> = group.chosen().map(|(column, _)| column.clone()).collect();
            for column in chosen {
                let limit = block.bytes(&column) + unused;
                let faster = self.segments.fastest_within(
                    block.spec,
                    self.context,
                    block.in_flight,
                    column.grouping,
                    limit,
                );
                let Some(faster) = faster else { continue };
                let is_dominated = group.columns.iter().any(|known| {
                    block.bytes(known) <= block.bytes(&faster)
                        && self.step_time_s(known) <= self.step_time_s(&faster)
                });
                if self.step_time_s(&faster) < self.step_time_s(&column) && !is_dominated {
                    group.columns.push(faster);
                    group.chosen.push(0);
                    any = true;
                }
            }
        }
        any
    }
}

/// The chosen solutions in the order of the blocks: of each group, those that keep more come last or first.
fn solutions_in_order(blocks: &[BlockInFlight], groups: &[BlockGroup]) -> Vec<Arc<SolvedSegment>> {
    let mut queues: Vec<(BlockInFlight, Vec<Arc<SolvedSegment>>)> = groups
        .iter()
        .map(|group| {
            let mut queue: Vec<Arc<SolvedSegment>> = group
                .chosen()
                .flat_map(|(column, count)| std::iter::repeat_n(column.clone(), count as usize))
                .collect();
            // Blocks pop from the end.
            let time = |s: &SolvedSegment| (s.time.forward + s.time.backward).0;
            queue.sort_by(|a, b| match group.block.keeps_more_last() {
                true => time(a).total_cmp(&time(b)),
                false => time(b).total_cmp(&time(a)),
            });
            (group.block, queue)
        })
        .collect();
    let mut next = |block: &BlockInFlight| {
        queues.iter_mut().find(|(known, _)| known == block).and_then(|(_, queue)| queue.pop())
    };
    blocks.iter().filter_map(&mut next).collect()
}
