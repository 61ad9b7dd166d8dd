//! What each stage runs besides its blocks, and a step of it all played against the clock.

use narrows_cost_model::Prices;
use narrows_cost_model::simulate::{Members, StageTime, StepPart, schedule_time};
use narrows_plan::Seconds;
use narrows_plan::emit::{
    Crossing, gradient_extent, hops, op_parameters, step_begin, step_norm, tied_reduce,
};
use narrows_plan::program::{Extent, Turn, one_forward_one_backward};
use narrows_plan::strategy::Context;

use crate::ends::Ends;
use crate::fit::Fitter;
use crate::segments::Solved;
use crate::stages::{Allotment, Partition};

/// What a stage has besides its blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extra {
    /// Forward pass of a microbatch: embedding, head, transfers.
    pub forward: Seconds,
    /// Backward pass of a microbatch.
    pub backward: Seconds,
    /// Once a step.
    pub step: Seconds,
    /// What is spent once a step at least, were the ends decided otherwise.
    pub step_least: Seconds,
    /// Of the step, where stages wait for each other.
    pub meets: Meets,
}

/// Where stages wait for each other in the step phase. All of it is part of [`Extra::step`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Meets {
    /// What comes before the first meeting.
    pub begin: Seconds,
    /// The first and the last stage add up the gradients of a tied weight.
    pub tied: Option<Seconds>,
    /// All stages add up the squares of their gradients; there is nothing to add on one stage.
    pub norm: Option<Seconds>,
    /// What waits for that: the updates of the ends.
    pub update: Seconds,
}

impl Fitter<'_> {
    /// What each stage runs besides its blocks.
    pub(crate) fn extras(&self, context: &Context, ends: &Ends) -> Vec<Extra> {
        let prices = Prices::new(&self.request.profile, self.request.executor, &context.mesh);
        let price = |template: &narrows_plan::emit::Template| prices.kernel(&template.kernel());
        let stages = context.mesh.pipeline;
        let once: Seconds = step_norm(context).iter().chain([&step_begin()]).map(price).sum();
        // The reduction over the stages comes last.
        let norm = step_norm(context).last().filter(|_| stages > 1).map(price);
        let meets = Meets { begin: price(&step_begin()), norm, ..Meets::default() };
        (0..stages)
            .map(|stage| {
                let crossing = Crossing { carried: self.segments.carried(), border: ends.border };
                let (forward, backward) = hops(&crossing, &crossing, stage, context);
                let mut extra = Extra {
                    forward: forward.iter().map(price).sum(),
                    backward: backward.iter().map(price).sum(),
                    step: once,
                    meets,
                    ..Extra::default()
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

impl Extra {
    /// The step phase of a stage with these blocks, as it is lowered.
    fn phase(&self, blocks: &Allotment, stages: usize) -> Vec<StepPart> {
        let Meets { begin, tied, norm, update } = self.meets;
        let update = update + blocks.update;
        let meetings = begin + tied.unwrap_or_default() + norm.unwrap_or_default();
        let reduce = self.step + blocks.step - update - meetings;
        let mut parts = vec![StepPart::Alone(begin)];
        parts.extend(tied.map(|time| StepPart::Together(Members::ends(stages), time)));
        parts.push(StepPart::Alone(reduce));
        parts.extend(norm.map(|time| StepPart::Together(Members::all(stages), time)));
        parts.push(StepPart::Alone(update));
        parts
    }
}

/// The gradient of the weight that both ends of a pipeline hold.
fn tied_gradient(head: &Solved, context: &Context) -> Option<Extent> {
    let op = head.segment.op_ids().find(|id| head.segment.op(*id).name == "head")?;
    let strategy = head.choice.ops[op.0 as usize].choice.strategy;
    let parameter = op_parameters(head.segment.op(op), strategy, context)?;
    gradient_extent(&parameter, context)
}

impl Extra {
    fn add(&mut self, solved: &Solved) {
        self.forward += solved.time.forward;
        self.backward += solved.time.backward;
        self.step += solved.time.step;
        self.meets.update += solved.time.update;
    }
}

/// Plays a partition's schedule with the times it was divided by: what simulating the lowered
/// program gives, without lowering it.
pub(crate) fn play(context: &Context, partition: &Partition, extras: &[Extra]) -> Seconds {
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
    let schedules: Vec<Vec<Turn>> =
        (0..stages).map(|stage| one_forward_one_backward(stage, stages, microbatches)).collect();
    let schedules: Vec<&[Turn]> = schedules.iter().map(Vec::as_slice).collect();
    schedule_time(&times, &schedules)
}
