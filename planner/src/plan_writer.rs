//! Writes decisions as a plan file.

use indexmap::IndexMap;
use narrows_plan::{
    BlockDecisions, BlockRun, EdgeLayout, PLAN_FORMAT, Plan, PlanLayout, PlanSource,
    SegmentDecisions, StagePlan,
};

use crate::feasible_plan::ModelDecisions;
use crate::request::Request;
use crate::segment::SolvedSegment;

/// The plan file of a model's decisions.
pub fn write_plan(request: &Request, decisions: &ModelDecisions) -> Plan {
    let mut blocks: IndexMap<String, BlockDecisions> = IndexMap::new();
    let mut first = 0;
    let mut stages = vec![];
    for stage in &decisions.stages {
        let mut runs: Vec<BlockRun> = vec![];
        for solved in stage {
            let block = BlockDecisions::new(solved.grouping, segment_decisions(solved));
            let name = name_of(&mut blocks, block);
            match runs.last_mut() {
                Some(run) if run.decisions == name => run.count += 1,
                _ => runs.push(BlockRun { first, count: 1, decisions: name }),
            }
            first += 1;
        }
        stages.push(StagePlan { runs });
    }
    let context = &decisions.context;
    Plan {
        format: PLAN_FORMAT.into(),
        model: PlanSource {
            name: request.model.name.clone(),
            fingerprint: request.model.fingerprint(),
        },
        hardware: PlanSource {
            name: request.profile.name().into(),
            fingerprint: request.profile.fingerprint().into(),
        },
        executor: request.executor,
        precision: context.precision,
        grad_reduce_dtype: context.grad_reduce_dtype,
        mesh: context.mesh,
        workload: context.workload,
        zero: context.zero,
        shard_size: context.partial_shard_size(),
        schedule: context.schedule,
        overlap_grad_reduce: context.overlap_grad_reduce,
        context_attention: context.context_attention,
        overlap_param_gather: context.overlap_param_gather,
        overlap_tensor_collectives: context.overlap_tensor_collectives,
        overlap_microbatch_pairs: context.overlap_microbatch_pairs,
        last_gradient_bucket: context.last_gradient_bucket,
        first_gather_bucket: context.first_gather_bucket,
        loro_every: context.loro_every,
        hidden_layout: plan_layout(decisions.boundary.hidden),
        crossing_layout: request
            .model
            .has_crossings()
            .then(|| plan_layout(decisions.boundary.latents)),
        stages,
        embedding: segment_decisions(&decisions.embedding),
        blocks,
        head: segment_decisions(&decisions.head),
    }
}

fn plan_layout(edge: EdgeLayout) -> PlanLayout {
    PlanLayout::from_edge(edge).unwrap_or(PlanLayout::Replicated)
}

fn segment_decisions(solved: &SolvedSegment) -> SegmentDecisions {
    SegmentDecisions::from_choice(&solved.segment, &solved.choice)
}

/// The name of a block's decisions, shared by equal ones: `block`, then `block-2`, `block-3`, …
fn name_of(blocks: &mut IndexMap<String, BlockDecisions>, decisions: BlockDecisions) -> String {
    if let Some((name, _)) = blocks.iter().find(|(_, known)| **known == decisions) {
        return name.clone();
    }
    let name = match blocks.len() {
        0 => "block".to_string(),
        known => format!("block-{}", known + 1),
    };
    blocks.insert(name.clone(), decisions);
    name
}
