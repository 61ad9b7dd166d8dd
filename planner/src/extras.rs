//! What each stage runs besides its blocks, and a step of it all played against the clock.

use narrows_cost_model::Prices;
use narrows_cost_model::simulate::{StageTime, StepPart, SyncedStages, schedule_time};
use narrows_plan::Seconds;
use narrows_plan::emit::{
    StageBoundary, gradient_extent, hops, op_parameters, step_begin, step_norm, tied_reduce,
};
use narrows_plan::program::{Extent, MicrobatchPass, one_forward_one_backward};
use narrows_plan::strategy::Context;

use crate::ends::EmbeddingAndHead;
use crate::fit::ContextSolver;
use crate::segments::SolvedSegment;
use crate::stages::{Partition, StageAssignment};

/// What a stage has besides its blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageOverhead {
    /// Forward pass of a microbatch: embedding, head, transfers.
    pub forward: Seconds,
    /// Backward pass of a microbatch.
    pub backward: Seconds,
    /// Once a step.
    pub step: Seconds,
    /// What is spent once a step at least, were the ends decided otherwise.
    pub step_least: Seconds,
    /// Of the step, where stages wait for each other.
    pub meets: StepSyncs,
}

/// Where stages wait for each other in the step phase. All of it is part of [`StageOverhead::step`].
#[derive(Clone, Copy, Debug, Default)]
pub struct StepSyncs {
    /// What comes before the first meeting.
    pub begin: Seconds,
    /// The first and the last stage add up the gradients of a tied weight.
    pub tied: Option<Seconds>,
    /// All stages add up the squares of their gradients; there is nothing to add on one stage.
    pub norm: Option<Seconds>,
    /// What waits for that: the updates of the ends.
    pub update: Seconds,
}

impl ContextSolver<'_> {
    /// What each stage runs besides its blocks.
    pub(crate) fn extras(&self, context: &Context, ends: &EmbeddingAndHead) -> Vec<StageOverhead> {
        let prices = Prices::new(&self.request.profile, self.request.executor, &context.mesh);
        let price =
            |template: &narrows_plan::emit::InstrTemplate| prices.kernel(&template.kernel());
        let stages = context.mesh.pipeline;
        let once: Seconds = step_norm(context).iter().chain([&step_begin()]).map(price).sum();
        // The reduction over the stages comes last.
        let norm = step_norm(context).last().filter(|_| stages > 1).map(price);
        let meets = StepSyncs { begin: price(&step_begin()), norm, ..StepSyncs::default() };
        (0..stages)
            .map(|stage| {
                let crossing =
                    StageBoundary { carried: self.segments.carried(), border: ends.border };
                let (forward, backward) = hops(&crossing, &crossing, stage, context);
                let mut extra = StageOverhead {
                    forward: forward.iter().map(price).sum(),
                    backward: backward.iter().map(price).sum(),
                    step: once,
                    meets,
                    ..StageOverhead::default()
                };
                if stage == 0 {
                    extra.add(&ends.embedding);
                }
                if stage + 1 == stages {
                    extra.add(&ends.head);
                }
                if self.request.model.tied && stages > 1 && (stage == 0 || stage + 1 == stages) {
                    let tied = tied_gradient(&ends.head, context);
                    extra.meets.tied = tied.map(|extent| price(&tied_reduce(extent, context)));
                    extra.step += extra.meets.tied.unwrap_or_default();
                }
                extra.step_least = extra.step;
                extra
            })
            .collect()
    }
}

impl StageOverhead {
    /// The step phase of a stage with these blocks, as it is lowered.
    fn phase(&self, blocks: &StageAssignment, stages: usize) -> Vec<StepPart> {
        let StepSyncs { begin, tied, norm, update } = self.meets;
        let update = update + blocks.update;
        let meetings = begin + tied.unwrap_or_default() + norm.unwrap_or_default();
        let reduce = self.step + blocks.step - update - meetings;
        let mut parts = vec![StepPart::Alone(begin)];
        parts.extend(tied.map(|time| StepPart::Together(SyncedStages::ends(stages), time)));
        parts.push(StepPart::Alone(reduce));
        parts.extend(norm.map(|time| StepPart::Together(SyncedStages::all(stages), time)));
        parts.push(StepPart::Alone(update));
        parts
    }
}

/// The gradient of the weight that both ends of a pipeline hold.
fn tied_gradient(head: &SolvedSegment, context: &Context) -> Option<Extent> {
    let op = head.segment.op_ids().find(|id| head.segment.op(*id).name == "head")?;
    let strategy = head.choice.ops[op.0 as usize].choice.strategy;
    let parameter = op_parameters(head.segment.op(op), strategy, context)?;
    gradient_extent(&parameter, context)
}

impl StageOverhead {
    fn add(&mut self, solved: &SolvedSegment) {
        self.forward += solved.time.forward;
        self.backward += solved.time.backward;
        self.step += solved.time.step;
        self.meets.update += solved.time.update;
    }
}

/// Plays a partition's schedule with the times it was divided by: what simulating the lowered
/// program gives, without lowering it.
pub(crate) fn play(context: &Context, partition: &Partition, extras: &[StageOverhead]) -> Seconds {
    let stages = context.mesh.pipeline;
    let microbatches = context.workload.microbatches(&context.mesh);
    let times: Vec<StageTime> = partition
        .stages
        .iter()
        .zip(extras)
        .map(|(stage, extra)| StageTime {
            forward: stage.forward + extra.forward,
            backward: stage.backward + extra.backward,
            step: extra.phase(stage, stages as usize),
        })
        .collect();
    let schedules: Vec<Vec<MicrobatchPass>> =
        (0..stages).map(|stage| one_forward_one_backward(stage, stages, microbatches)).collect();
    let schedules: Vec<&[MicrobatchPass]> = schedules.iter().map(Vec::as_slice).collect();
    schedule_time(&times, &schedules)
}
