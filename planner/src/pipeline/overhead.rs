//! Times of a stage besides its blocks.

use narrows_plan::emit::{
    InstrTemplate, StageBoundary, clear_square_sum, reduce_square_sum, reduce_tied_gradient,
    stage_transfers,
};
use narrows_plan::program::Extent;
use narrows_plan::strategy::op_parameters;
use narrows_plan::{Context, Seconds};

use super::embedding_and_head::EmbeddingAndHead;
use crate::request::Request;
use crate::segment::{SegmentSolver, SolvedSegment};

/// Times of a stage besides its blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageOverhead {
    /// Forward pass of one microbatch: embedding, head, transfers.
    pub forward: Seconds,
    /// Backward pass of one microbatch.
    pub backward: Seconds,
    /// Step phase.
    pub step_phase: Seconds,
    /// Lower bound on the step phase under other solutions of embedding and head.
    pub step_phase_min: Seconds,
    /// The parts of the step phase around synchronisations of stages.
    pub(crate) syncs: StepSyncs,
}

/// The parts of a stage's step phase at which stages wait for each other, all counted in [`StageOverhead::step_phase`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepSyncs {
    /// Work before the first synchronisation.
    pub begin: Seconds,
    /// All-reduce of a tied weight's gradient between the first and the last stage.
    pub tied: Option<Seconds>,
    /// All-reduce of the squared gradient norm over all stages; `None` on one stage.
    pub norm: Option<Seconds>,
    /// Optimizer updates of embedding and head, which follow the norm.
    pub update: Seconds,
}

impl StageOverhead {
    /// The overheads of all stages.
    pub(crate) fn of_stages(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
    ) -> Vec<StageOverhead> {
        let prices = segments.prices();
        let price = |template: &InstrTemplate| prices.kernel_time(&template.kernel());
        let stages = context.mesh.pipeline;
        let once: Seconds =
            reduce_square_sum(context).iter().chain([&clear_square_sum()]).map(price).sum();
        // The reduction over the stages is the last one.
        let norm = reduce_square_sum(context).last().filter(|_| stages > 1).map(price);
        let syncs = StepSyncs { begin: price(&clear_square_sum()), norm, ..StepSyncs::default() };
        (0..stages)
            .map(|stage| {
                let boundary = StageBoundary {
                    tensors: segments.narrowest_carried(),
                    layout: embedding_and_head.boundary,
                };
                let (forward, backward) = stage_transfers(&boundary, &boundary, stage, context);
                let mut overhead = StageOverhead {
                    forward: forward.iter().map(price).sum(),
                    backward: backward.iter().map(price).sum(),
                    step_phase: once,
                    syncs,
                    ..StageOverhead::default()
                };
                if stage == 0 {
                    overhead.add(&embedding_and_head.embedding);
                }
                if stage + 1 == stages {
                    overhead.add(&embedding_and_head.head);
                }
                if request.model.tied && stages > 1 && (stage == 0 || stage + 1 == stages) {
                    let tied = tied_gradient(&embedding_and_head.head, context);
                    overhead.syncs.tied =
                        tied.map(|extent| price(&reduce_tied_gradient(extent, context)));
                    overhead.step_phase += overhead.syncs.tied.unwrap_or_default();
                }
                overhead.step_phase_min = overhead.step_phase;
                overhead
            })
            .collect()
    }

    fn add(&mut self, solved: &SolvedSegment) {
        self.forward += solved.time.forward;
        self.backward += solved.time.backward;
        self.step_phase += solved.time.step_phase;
        self.syncs.update += solved.time.update;
    }
}

/// The gradient of the weight that the first and the last stage share.
fn tied_gradient(head: &SolvedSegment, context: &Context) -> Option<Extent> {
    let op = head.segment.vocabulary_op()?;
    let strategy = head.choice.ops[op.0 as usize].choice.strategy;
    let parameters = op_parameters(head.segment.op(op), strategy, context)?;
    Some(parameters.gradient_extent(context))
}
