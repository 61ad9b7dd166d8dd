//! Writes decisions down as a plan.

use std::sync::Arc;

use indexmap::IndexMap;
use narrows_plan::EdgeLayout;
use narrows_plan::decisions::{
    BlockDecisions, BlockRun, FORMAT, Plan, PlanLayout, PlanSource, SegmentDecisions, StagePlan,
};
use narrows_plan::strategy::{BoundaryLayout, Context};

use crate::request::Request;
use crate::segments::SolvedSegment;

/// What was decided for a whole model.
#[derive(Clone, Debug)]
pub struct ModelDecisions {
    /// Mesh, workload, formats.
    pub context: Context,
    /// Layouts of what segments hand on.
    pub border: BoundaryLayout,
    /// The embedding.
    pub embedding: Arc<SolvedSegment>,
    /// The blocks of each stage, in order.
    pub stages: Vec<Vec<Arc<SolvedSegment>>>,
    /// The head.
    pub head: Arc<SolvedSegment>,
}

/// The plan that says so.
pub fn assemble(request: &Request, decided: &ModelDecisions) -> Plan {
    let mut blocks: IndexMap<String, BlockDecisions> = IndexMap::new();
    let mut first = 0;
    let mut stages = vec![];
    for stage in &decided.stages {
        let mut runs: Vec<BlockRun> = vec![];
        for solved in stage {
            let decisions = BlockDecisions::new(solved.grouping, written(solved));
            let name = name_of(&mut blocks, decisions);
            match runs.last_mut() {
                Some(run) if run.decisions == name => run.count += 1,
                _ => runs.push(BlockRun { first, count: 1, decisions: name }),
            }
            first += 1;
        }
        stages.push(StagePlan { runs });
    }
    let context = &decided.context;
    Plan {
        format: FORMAT.into(),
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
        mesh: context.mesh,
        workload: context.workload,
        zero: context.zero,
        hidden_layout: layout(decided.border.hidden),
        crossing_layout: request.model.has_crossings().then(|| layout(decided.border.latents)),
        stages,
        embedding: written(&decided.embedding),
        blocks,
        head: written(&decided.head),
    }
}

fn layout(edge: EdgeLayout) -> PlanLayout {
    PlanLayout::of(edge).unwrap_or(PlanLayout::Replicated)
}

fn written(solved: &SolvedSegment) -> SegmentDecisions {
    SegmentDecisions::from_choice(&solved.segment, &solved.choice)
}

/// Equal decisions share a name: `block`, then `block-2`, `block-3`, …
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
