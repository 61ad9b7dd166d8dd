//! Joint bounds of divisions, against simulations of partitions.

use narrows_plan::{Bytes, Context};

use crate::context_space::contexts;
use crate::deadline::Deadline;
use crate::pipeline::joint_bound::JointBounds;
use crate::pipeline::joint_times::JointMinima;
use crate::pipeline::path_mean::PathMean;
use crate::pipeline::roles::ROLES;
use crate::pipeline::{
    EmbeddingAndHead, Partition, PipelineOverheads, StageBlocks, StagePartitioner, StepSchedule,
    simulate_partition,
};
use crate::segment::SegmentSolver;
use crate::slower_links;

#[test]
fn every_role_has_its_index() {
    for (index, role) in ROLES.into_iter().enumerate() {
        assert_eq!(role.index(), index, "{role:?}");
    }
}

/// The joint bound of a division.
fn bound(bounds: &JointBounds, counts: &[usize], step: StepSchedule) -> f64 {
    let (mut end, mut bound) = (bounds.first_stage(&(0..counts[0])), 0.0_f64);
    let mut first_block = 0;
    for (stage, count) in counts.iter().enumerate() {
        let run = first_block..first_block + count;
        bound = bound.max(bounds.of_stage(stage, &run, end, step));
        if stage > 0 {
            end = bounds.step_end_cost_after(stage, &run, end, step);
        }
        first_block = run.end;
    }
    bound
}

/// A bound on the step of a context, from the segments without rules, the overheads and the numbers of blocks.
type Bound = fn(&SegmentSolver, &Context, &PipelineOverheads, &[usize]) -> f64;

/// Compares a bound with simulated steps, whichever rules and weights of the step phase choose the decisions of each stage, with
/// fast and with slow links between nodes. Returns the number of steps, and the least ratio to the bound without and with
/// overlapped gradient reductions.
fn compare(has_bound: fn(&Context) -> bool, interval: usize, bound: Bound) -> (usize, [f64; 2]) {
    let (mut checked, mut tightest) = (0, [f64::INFINITY; 2]);
    for (name, slower) in [("llama-350m", 1.0), ("cola-350m", 8.0), ("lax-130m", 2.0)] {
        let request = slower_links::request(name, [1.0, slower], [16, 32, 512]);
        let requests = slower_links::with_sharded_weights(request);
        let all = requests.each_ref().map(|request| SegmentSolver::new(request, Deadline::none()));
        for context in contexts(&requests[0]).into_iter().filter(has_bound).step_by(interval) {
            let stages = context.mesh.pipeline as usize;
            for (request, segments) in requests.iter().zip(&all) {
                for ends in EmbeddingAndHead::fastest_per_layout(request, segments, &context) {
                    let overheads = PipelineOverheads::new(request, segments, &context, &ends);
                    let budgets = vec![Bytes(u64::MAX); stages];
                    let partitioner =
                        StagePartitioner::new(segments, &context, ends.boundary, budgets);
                    let blocks = segments.layer_shapes().len();
                    let counts: Vec<usize> =
                        (0..stages).map(|stage| (blocks + stage) / stages).collect();
                    let microbatches = context.workload.microbatches(&context.mesh);
                    let weights = [1, microbatches, 8 * microbatches];
                    let bound = bound(&all[0], &context, &overheads, &counts);
                    for other in 0..weights.len() {
                        let assignment = |blocks: StageBlocks| {
                            let weight = weights[(blocks.stage + other) % weights.len()];
                            partitioner.weighted_assignment(blocks, weight)
                        };
                        let partition = Partition::with_counts(counts.clone(), &assignment);
                        let partition = partition.expect("no memory limit");
                        let time = simulate_partition(&context, &partition, &overheads).0;
                        assert!(
                            bound <= time * (1.0 + 1e-9),
                            "{name}: {bound} {time}, {context:?}"
                        );
                        let waits = usize::from(context.overlap_grad_reduce);
                        tightest[waits] = tightest[waits].min(time / bound);
                        checked += 1;
                    }
                }
            }
        }
    }
    (checked, tightest)
}

#[test]
fn no_step_is_faster_than_its_joint_bound() {
    let has_bound = |context: &Context| context.mesh.pipeline > 1 && context.chunks == 1;
    let (checked, tightest) = compare(has_bound, 7, |segments, context, overheads, counts| {
        let minima = JointMinima::new(segments, context, overheads.layouts());
        let minima = minima.expect("several stages of one chunk");
        let bounds = JointBounds::new(&minima, overheads.of(counts));
        bound(&bounds, counts, StepSchedule::of(context))
    });
    assert!(checked > 300, "{checked}");
    assert!(tightest.iter().all(|ratio| *ratio < 1.01), "{tightest:?}");
}

/// Bounds from means of paths, without a memory limit.
fn means<'a>(
    segments: &'a SegmentSolver,
    context: &'a Context,
    overheads: &PipelineOverheads,
) -> PathMean<'a> {
    let budgets = vec![Bytes(u64::MAX); context.mesh.pipeline as usize];
    let means = PathMean::new(segments, context, overheads.layouts(), budgets, None);
    means.expect("several stages")
}

/// The bound from means of paths, without a memory limit.
fn mean_of_paths(
    segments: &SegmentSolver,
    context: &Context,
    overheads: &PipelineOverheads,
    counts: &[usize],
) -> f64 {
    let mut means = means(segments, context, overheads);
    means.bound(overheads.of(counts), f64::INFINITY, &|| false)
}

/// Whichever decisions the stages have, no step takes less than the mean of its paths; some take hardly more.
#[test]
fn no_step_is_faster_than_a_mean_of_its_paths() {
    let has_bound =
        |context: &Context| (2..=8).contains(&context.mesh.pipeline) && context.chunks == 1;
    let (checked, tightest) = compare(has_bound, 7, mean_of_paths);
    assert!(checked > 200, "{checked}");
    assert!(tightest.iter().all(|ratio| *ratio < 1.015), "{tightest:?}");
}

#[test]
fn no_interleaved_step_is_faster_than_a_mean_of_its_paths() {
    let (checked, tightest) = compare(|context| context.chunks > 1, 3, mean_of_paths);
    assert!(checked > 300, "{checked}");
    assert!(tightest.iter().all(|ratio| *ratio < 1.01), "{tightest:?}");
}

/// Blocks at the ends of longer collectives count in full if the numbers of blocks are known.
#[test]
fn no_step_is_faster_than_a_mean_of_the_paths_of_its_division() {
    let has_bound = |context: &Context| {
        (2..=4).contains(&context.mesh.pipeline)
            && context.chunks == 1
            && context.overlap_grad_reduce
    };
    let (checked, [_, tightest]) =
        compare(has_bound, 11, |segments, context, overheads, counts| {
            means(segments, context, overheads).bound_of_division(overheads.of(counts), counts)
        });
    assert!(checked > 100 && tightest < 1.01, "{checked} {tightest}");
}

/// The bound from branching on numbers of blocks, of which a little more than the time of the even partition is enough.
fn branched(
    segments: &SegmentSolver,
    context: &Context,
    overheads: &PipelineOverheads,
    counts: &[usize],
) -> f64 {
    let budgets = vec![Bytes(u64::MAX); counts.len()];
    let boundary = overheads.layouts().0;
    let partitioner = StagePartitioner::new(segments, context, boundary, budgets);
    let even = partitioner.even_partition(overheads, f64::INFINITY).expect("no memory limit");
    let enough = 1.1 * simulate_partition(context, &even, overheads).0;
    let mut means = means(segments, context, overheads);
    let all = overheads.choices().collect();
    let (bound, divisions) = means.branched(all, (enough, enough), &|| false);
    for division in divisions {
        let time = |partition: &Partition| simulate_partition(context, partition, overheads).0;
        let near = partitioner.fastest_near(&division, &|_| 0.0, &time);
        let (partition, near) = near.expect("no memory limit");
        assert_eq!(near, time(&partition));
        assert!(bound <= near * (1.0 + 1e-9), "{bound} {near}, {context:?}");
    }
    bound
}

/// Whatever their divisions and decisions, no steps take less than the bound from branching.
#[test]
fn no_step_is_faster_than_its_branched_bound() {
    let has_bound =
        |context: &Context| (2..=4).contains(&context.mesh.pipeline) && context.chunks == 1;
    let (checked, tightest) = compare(has_bound, 37, branched);
    assert!(checked > 50, "{checked}");
    assert!(tightest.iter().all(|ratio| *ratio < 1.02), "{tightest:?}");
}
