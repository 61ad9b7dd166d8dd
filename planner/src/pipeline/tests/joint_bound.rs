//! Joint bounds of divisions, against simulations of partitions.

use narrows_plan::{Bytes, Context};

use crate::context_space::contexts;
use crate::deadline::Deadline;
use crate::pipeline::joint_bound::JointBounds;
use crate::pipeline::joint_times::{JointMinima, ROLES};
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
    let mut first_block = 0;
    let runs = counts.iter().map(|count| {
        first_block += count;
        first_block - count..first_block
    });
    let first = bounds.first_stage(&(0..counts[0]));
    let of_stages = runs.enumerate().map(|(stage, run)| bounds.of_stage(stage, &run, first, step));
    of_stages.fold(0.0, f64::max)
}

/// No step of a pipeline is faster than its bound, whichever rules and weights of the step phase choose the decisions of
/// each stage, with fast and with slow links between nodes, and some are hardly slower.
#[test]
fn no_step_is_faster_than_its_joint_bound() {
    let (mut checked, mut tightest) = (0, [f64::INFINITY; 2]);
    for (name, slower) in [("llama-350m", 1.0), ("cola-350m", 8.0), ("lax-130m", 2.0)] {
        let request = slower_links::request(name, [1.0, slower], [16, 32, 512]);
        let requests = slower_links::with_sharded_weights(request);
        let all = requests.each_ref().map(|request| SegmentSolver::new(request, Deadline::none()));
        let has_bound = |context: &Context| context.mesh.pipeline > 1 && context.chunks == 1;
        for context in contexts(&requests[0]).into_iter().filter(has_bound).step_by(7) {
            let stages = context.mesh.pipeline as usize;
            for (request, segments) in requests.iter().zip(&all) {
                for ends in EmbeddingAndHead::fastest_per_layout(request, segments, &context) {
                    let overheads = PipelineOverheads::new(request, segments, &context, &ends);
                    let minima = JointMinima::new(&all[0], &context, overheads.layouts())
                        .expect("several stages");
                    let budgets = vec![Bytes(u64::MAX); stages];
                    let partitioner =
                        StagePartitioner::new(segments, &context, ends.boundary, budgets);
                    let blocks = segments.layer_shapes().len();
                    let counts: Vec<usize> =
                        (0..stages).map(|stage| (blocks + stage) / stages).collect();
                    let microbatches = context.workload.microbatches(&context.mesh);
                    let weights = [1, microbatches, 8 * microbatches];
                    let bounds = JointBounds::new(&minima, overheads.of(&counts));
                    let bound = bound(&bounds, &counts, StepSchedule::of(&context));
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
    assert!(checked > 300, "{checked}");
    assert!(tightest.iter().all(|ratio| *ratio < 1.01), "{tightest:?}");
}
