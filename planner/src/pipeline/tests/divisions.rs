//! The best divisions of blocks, and bounds of divisions over all solutions of their blocks.

use std::sync::Arc;

use narrows_cost_model::{
    PassTimes, PassTimesMin, SegmentTime, StageTime, profile, simulate_schedules,
};
use narrows_plan::PipelineSchedule::{Interleaved, ZeroBubble};
use narrows_plan::Seconds;
use narrows_plan::model::presets;
use narrows_plan::program::{MicrobatchPass, StageSchedule};

use super::super::interleaved::{ChunkMin, WeightedCostMin, mean_bound};
use super::super::partition::StageBlocks;
use super::super::undominated::{DivisionSearch, division_bound};
use super::super::{EmbeddingAndHead, PruningCutoff, StageAssignment, StageOverhead};
use super::{schedules_of_one_chunk, simulate, step_phase, step_schedule};
use crate::context_space::contexts;
use crate::deadline::Deadline;
use crate::request::Request;
use crate::segment::SegmentSolver;

/// Every division of `blocks` among these stages: at least one block on each, and none on empty ones.
fn divisions(blocks: usize, stages: &[StageOverhead]) -> Vec<Vec<usize>> {
    let Some((first, later)) = stages.split_first() else {
        return if blocks == 0 { vec![vec![]] } else { vec![] };
    };
    let counts = if first.is_empty { 0..=0 } else { 1..=blocks };
    let of_count = |count: usize| {
        let later = divisions(blocks - count, later).into_iter();
        later.map(move |rest| std::iter::once(count).chain(rest).collect())
    };
    counts.flat_map(of_count).collect()
}

#[test]
fn the_best_partition_equals_the_best_by_enumeration() {
    arbtest::arbtest(|u| {
        let stages: usize = u.int_in_range(1..=4)?;
        let blocks: usize = u.int_in_range(stages..=9)?;
        let schedule = *u.choose(&schedules_of_one_chunk())?;
        let step_schedule = step_schedule(schedule, u.int_in_range(1..=12)?);
        let mut time = |most: u32| Ok(Seconds(f64::from(u.int_in_range(0..=most)?) / 8.0));
        let mut times = vec![];
        for _ in 0..blocks {
            times.push((time(99)?, time(99)?, time(9)?));
        }
        let mut overheads = vec![];
        for _ in 0..stages {
            let (forward, backward, step) = (time(99)?, time(99)?, time(9)?);
            overheads.push(StageOverhead {
                forward,
                backward,
                step_phase: step,
                step_phase_min: step,
                ..StageOverhead::default()
            });
        }
        if stages > 1 {
            overheads[0].is_empty = u.arbitrary()?;
            overheads[stages - 1].is_empty =
                (stages > 2 || !overheads[0].is_empty) && u.arbitrary()?;
        }
        let choice = |blocks: StageBlocks| {
            let StageBlocks { first, count, .. } = blocks;
            let run = &times[first..first + count];
            Some(Arc::new(StageAssignment {
                forward: run.iter().map(|time| time.0).sum(),
                backward: run.iter().map(|time| time.1).sum(),
                step_phase: run.iter().map(|time| time.2).sum(),
                microbatch_time_min: run.iter().map(|time| time.0 + time.1).sum(),
                single_microbatch_step_min: run.iter().map(|time| time.0 + time.1 + time.2).sum(),
                ..StageAssignment::default()
            }))
        };
        let microbatch_times = times.iter().map(|time| (time.0 + time.1).0).collect();
        let steps = times.iter().map(|time| time.2.0).collect();
        let steps_min = times.iter().map(|time| (time.0 + time.1 + time.2).0).collect();
        let weights = [2, 4].map(|part| step_schedule.microbatches / part);
        let weighted = times
            .iter()
            .map(|time| weights.map(|weight| (time.0 + time.1).0 * weight as f64 + time.2.0));
        let passes = times.iter().map(|time| PassTimesMin {
            forward: time.0.0,
            backward: time.1.0,
            without_weight_gradients: time.0.0 + time.1.0 / 2.0,
        });
        let cutoff = PruningCutoff {
            microbatch_times_min: microbatch_times,
            passes_min: passes.collect(),
            uncounted_reductions_min: vec![0.0; blocks],
            step_phase_times_min: steps,
            single_microbatch_steps_min: steps_min,
            first_stage_weights: weights,
            weighted_steps_min: weighted.collect(),
            joint: None,
            step_time: f64::INFINITY,
        };
        let search = DivisionSearch {
            overheads: &overheads,
            step: step_schedule,
            cutoff: &cutoff,
            is_interrupted: &|| false,
        };
        let (partitions, _) = search.undominated_partitions(&choice, None);
        let least = divisions(blocks, &overheads)
            .into_iter()
            .filter_map(|counts| {
                division_bound(&counts, &overheads, step_schedule, &cutoff, &choice)
            })
            .fold(f64::INFINITY, f64::min);
        let best = partitions.first().map_or(f64::INFINITY, |partition| partition.bound.0);
        assert!((best - least).abs() <= 1e-9 * least.max(1.0), "{best} is not {least}");
        Ok(())
    });
}

/// Times of a block in one of its solutions, in seconds.
#[derive(Clone, Copy)]
struct BlockTimes {
    forward: f64,
    /// Backward pass with all weight gradients.
    backward: f64,
    weight_gradient: f64,
    step_phase: f64,
}

impl BlockTimes {
    /// One to three solutions of a block.
    fn solutions(
        u: &mut arbtest::arbitrary::Unstructured,
    ) -> arbtest::arbitrary::Result<Vec<BlockTimes>> {
        (0..u.int_in_range(1..=3)?)
            .map(|_| {
                let mut time = || Ok(f64::from(u.int_in_range(1..=100)?) / 8.0);
                let (forward, weight_gradient) = (time()?, time()?);
                let backward = weight_gradient + time()?;
                // Step phases of the order of a few microbatches.
                let step_phase = 8.0 * time()?;
                Ok(BlockTimes { forward, backward, weight_gradient, step_phase })
            })
            .collect()
    }

    fn step(&self, microbatches: u64) -> f64 {
        microbatches as f64 * (self.forward + self.backward) + self.step_phase
    }

    fn least(solutions: &[BlockTimes], time: impl Fn(&BlockTimes) -> f64) -> f64 {
        solutions.iter().map(time).fold(f64::INFINITY, f64::min)
    }
}

/// Bounds of divisions hold for every choice of solutions, whose passes, weight gradients and step phases are traded for each other.
#[test]
fn no_choice_of_solutions_is_faster_than_the_bound_of_its_division() {
    arbtest::arbtest(|u| {
        let counts: Vec<usize> =
            (0..u.int_in_range(1..=5)?).map(|_| u.int_in_range(1..=2)).collect::<Result<_, _>>()?;
        let schedule = *u.choose(&schedules_of_one_chunk())?;
        let step = step_schedule(schedule, u.int_in_range(1..=16)?);
        let microbatches = step.microbatches;
        let blocks: Vec<Vec<BlockTimes>> = (0..counts.iter().sum::<usize>())
            .map(|_| BlockTimes::solutions(u))
            .collect::<Result<_, _>>()?;
        let (mut overheads, mut times, mut first) = (vec![], vec![], 0);
        for (stage, count) in counts.iter().enumerate() {
            let mut time = || Ok(Seconds(f64::from(u.int_in_range(0..=99)?) / 8.0));
            let [forward, backward, step_phase] = [time()?, time()?, time()?];
            overheads.push(StageOverhead {
                forward,
                backward,
                step_phase,
                step_phase_min: step_phase,
                ..StageOverhead::default()
            });
            let mut passes = PassTimes { forward, backward, weight_gradient: Seconds(0.0) };
            let mut reduce = step_phase.0;
            for solutions in &blocks[first..first + count] {
                let chosen = u.choose(solutions)?;
                let is_deferred = schedule.defers_weight_gradients() && stage > 0;
                let deferred = if is_deferred { chosen.weight_gradient } else { 0.0 };
                passes.forward += Seconds(chosen.forward);
                passes.backward += Seconds(chosen.backward - deferred);
                passes.weight_gradient += Seconds(deferred);
                reduce += chosen.step_phase;
            }
            first += count;
            let step_phase = self::step_phase(counts.len(), [reduce, 0.0, 0.0]);
            times.push(StageTime { chunks: vec![passes], step_phase, overlap: None });
        }
        let choice = |run: StageBlocks| {
            let run = &blocks[run.first..run.first + run.count];
            let least = |time: &dyn Fn(&BlockTimes) -> f64| -> Seconds {
                run.iter().map(|block| Seconds(BlockTimes::least(block, time))).sum()
            };
            let fastest = |time: &dyn Fn(&BlockTimes) -> f64| -> Seconds {
                let fastest = |block: &Vec<BlockTimes>| {
                    let step = |solution: &&BlockTimes| solution.step(microbatches);
                    let fastest = block.iter().min_by(|a, b| step(a).total_cmp(&step(b)));
                    Seconds(fastest.map_or(0.0, time))
                };
                run.iter().map(fastest).sum()
            };
            Some(Arc::new(StageAssignment {
                forward: fastest(&|block| block.forward),
                backward: fastest(&|block| block.backward),
                step_phase: fastest(&|block| block.step_phase),
                microbatch_time_min: least(&|block| block.forward + block.backward),
                single_microbatch_step_min: least(&|block| block.step(1)),
                ..StageAssignment::default()
            }))
        };
        let of_blocks = |time: &dyn Fn(&BlockTimes) -> f64| -> Vec<f64> {
            blocks.iter().map(|block| BlockTimes::least(block, time)).collect()
        };
        let first_stage_weights = [2, 4].map(|part| microbatches / part);
        let passes = |block: &Vec<BlockTimes>| PassTimesMin {
            forward: BlockTimes::least(block, |block| block.forward),
            backward: BlockTimes::least(block, |block| block.backward),
            without_weight_gradients: BlockTimes::least(block, |block| {
                block.forward + block.backward - block.weight_gradient
            }),
        };
        let weighted = |block: &Vec<BlockTimes>| {
            first_stage_weights.map(|weight| BlockTimes::least(block, |block| block.step(weight)))
        };
        let cutoff = PruningCutoff {
            microbatch_times_min: of_blocks(&|block| block.forward + block.backward),
            passes_min: blocks.iter().map(passes).collect(),
            uncounted_reductions_min: vec![0.0; blocks.len()],
            step_phase_times_min: of_blocks(&|block| block.step_phase),
            single_microbatch_steps_min: of_blocks(&|block| block.step(1)),
            first_stage_weights,
            weighted_steps_min: blocks.iter().map(weighted).collect(),
            joint: None,
            step_time: f64::INFINITY,
        };
        let bound = division_bound(&counts, &overheads, step, &cutoff, &choice).unwrap_or(0.0);
        let simulated = simulate(&times, step).time.0;
        assert!(bound <= simulated * (1.0 + 1e-9), "{bound} > {simulated}: {step:?}, {times:?}");
        Ok(())
    });
}

#[test]
fn no_choice_of_solutions_of_chunks_is_faster_than_the_mean_bound() {
    arbtest::arbtest(|u| {
        let (stages, chunks) = (u.int_in_range(2..=4)?, u.int_in_range(2..=3)?);
        let microbatches = stages as u64 * u.int_in_range(1..=3)?;
        let (mut times, mut least) = (vec![], vec![]);
        for _ in 0..stages {
            let (mut of_stage, mut of_chunks, mut reduce) = (vec![], vec![], 0.0);
            for _ in 0..chunks {
                let mut passes = PassTimes::default();
                let mut of_chunk = ChunkMin { costs: vec![], forward: 0.0, backward: 0.0 };
                for _ in 0..u.int_in_range(1..=2)? {
                    let solutions = BlockTimes::solutions(u)?;
                    let chosen = u.choose(&solutions)?;
                    passes.forward += Seconds(chosen.forward);
                    passes.backward += Seconds(chosen.backward);
                    reduce += chosen.step_phase;
                    of_chunk.costs.push(WeightedCostMin {
                        step_phase: BlockTimes::least(&solutions, |block| block.step_phase),
                        single_microbatch_step: BlockTimes::least(&solutions, |block| {
                            block.step(1)
                        }),
                        step: BlockTimes::least(&solutions, |block| block.step(microbatches)),
                        microbatch: BlockTimes::least(&solutions, |block| {
                            block.forward + block.backward
                        }),
                    });
                    of_chunk.forward += BlockTimes::least(&solutions, |block| block.forward);
                    of_chunk.backward += BlockTimes::least(&solutions, |block| block.backward);
                }
                of_stage.push(passes);
                of_chunks.push(of_chunk);
            }
            let step_phase = self::step_phase(stages, [reduce, 0.0, 0.0]);
            times.push(StageTime { chunks: of_stage, step_phase, overlap: None });
            least.push(of_chunks);
        }
        let schedule = |stage| StageSchedule {
            schedule: Interleaved,
            stage,
            stages: stages as u64,
            chunks: chunks as u64,
            microbatches,
        };
        let schedules: Vec<Vec<MicrobatchPass>> =
            (0..stages as u64).map(|stage| schedule(stage).passes(false)).collect();
        let schedules: Vec<&[MicrobatchPass]> = schedules.iter().map(Vec::as_slice).collect();
        let simulated = simulate_schedules(&times, &schedules).time.0;
        let bound = mean_bound(&least, microbatches);
        assert!(bound <= simulated * (1.0 + 1e-9), "{bound} > {simulated}: {times:?}");
        Ok(())
    });
}

/// The bound of a zero-bubble pipeline tells passes apart, so neither pass of the relaxed embedding and head may take longer
/// than that of a solution.
#[test]
fn relaxed_passes_are_no_longer_than_those_of_solutions() {
    let request = Request {
        pipeline: Some(2),
        schedule: Some(ZeroBubble),
        ..Request::new(
            presets::find("cola-60m").expect("a preset"),
            profile::preset("a100-80gb").expect("a preset"),
            8,
            8,
            512,
        )
    };
    let segments = SegmentSolver::new(&request, Deadline::none());
    let passes = |time: &SegmentTime| [time.forward, time.backward];
    let mut compared = 0;
    for context in contexts(&request) {
        for solved in EmbeddingAndHead::fastest_per_layout(&request, &segments, &context) {
            let relaxed = solved.relaxation(&segments, &context);
            for (relaxed, solved) in
                [(&relaxed.embedding, &solved.embedding), (&relaxed.head, &solved.head)]
            {
                for (relaxed, solved) in passes(&relaxed.time).into_iter().zip(passes(&solved.time))
                {
                    assert!(relaxed.0 <= solved.0 * (1.0 + 1e-9), "{relaxed} and {solved}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 100, "{compared}");
}
