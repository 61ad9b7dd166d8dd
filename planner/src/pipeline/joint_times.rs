//! Least times of segments on the paths of a pipeline that a step waits for, without a memory limit.

use narrows_cost_model::StepWeights;
use narrows_plan::Context;
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};

use super::overhead::StageOverhead;
use super::roles::{CASES, ForwardGathers, Longer, ROLES, Role};
use crate::segment::{SegmentSolver, SegmentSpec};

/// Lower bounds on the times of one segment or stage by role, in seconds. Each pass bears the share 1 / (m + P − 1) of the updates,
/// for m microbatches and P stages.
pub(super) type JointTimes = [f64; ROLES.len()];

pub(super) fn plus(a: JointTimes, b: JointTimes) -> JointTimes {
    std::array::from_fn(|role| a[role] + b[role])
}

/// Weights of the times of a segment in a role, and of those of a stage besides its segments.
pub(super) struct RoleWeights {
    pub of_segment: StepWeights,
    /// Forward pass, backward pass, step phase, and of the latter what only the first gather and the first block add.
    besides_segments: [f64; 5],
}

/// The least joint times of the segments of a model in a pipeline.
#[derive(Clone, Debug)]
pub struct JointMinima {
    /// The times of each block.
    pub(super) blocks: Vec<JointTimes>,
    embedding: JointTimes,
    head: JointTimes,
    /// The weights of times besides segments, by role.
    besides_segments: [[f64; 5]; ROLES.len()],
}

/// Joint times of the segments of a context.
pub(super) struct JointPricing<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    microbatches: f64,
    stages: f64,
    /// Least time that a hidden collective adds to a step, over its time alone.
    hidden: f64,
    /// The part of overlapped computation that a longer collective hides.
    hidden_computation: f64,
    /// Collectives that may take longer than the passes of a stage.
    possible: Longer,
}

impl<'a> JointPricing<'a> {
    /// `None` for interleaved pipelines, and for one stage.
    pub(super) fn new(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        layouts: (BoundaryLayout, Option<TiedWeightLayout>),
    ) -> Option<JointPricing<'a>> {
        let stages = context.mesh.pipeline;
        if context.chunks > 1 || stages == 1 || context.pass_microbatches() > 1 {
            return None;
        }
        let slowdown = segments.prices(context).overlap_slowdown();
        let mut pricing = JointPricing {
            segments,
            context,
            microbatches: context.workload.microbatches(&context.mesh) as f64,
            stages: stages as f64,
            hidden: slowdown.map_or(0.0, |slowdown| slowdown.hidden_cost()),
            hidden_computation: slowdown
                .map_or(0.0, |slowdown| 1.0 - slowdown.hidden_computation_cost()),
            possible: Longer::default(),
        };
        pricing.possible = pricing.possible_cases(layouts);
        Some(pricing)
    }

    /// The collectives that may take longer than the passes of a stage with blocks.
    fn possible_cases(
        &self,
        (boundary, tied_weight): (BoundaryLayout, Option<TiedWeightLayout>),
    ) -> Longer {
        let beyond = |collectives: f64, pass: f64| {
            (1.0 - self.hidden) * collectives - self.hidden_computation * pass
        };
        let least = |spec| self.segments.min_pass_times(spec, self.context);
        let gathers = |spec| {
            let gathers = self.segments.gathered_max(spec, self.context);
            beyond(gathers, least(spec).forward)
        };
        let reductions = |spec: SegmentSpec| {
            let [_, reductions] = self.segments.overlapped_range(spec, self.context);
            let is_head = spec.kind == SegmentKind::Head;
            beyond(reductions, if is_head { 0.0 } else { least(spec).backward })
        };
        let largest = |beyond: &dyn Fn(SegmentSpec) -> f64| {
            let shapes = 0..self.segments.shape_count();
            let of_blocks = shapes.map(|shape| beyond(SegmentSpec::block(shape, boundary)));
            of_blocks.fold(f64::NEG_INFINITY, f64::max)
        };
        let of_end = |kind, beyond: &dyn Fn(SegmentSpec) -> f64| {
            beyond(SegmentSpec::embedding_or_head(kind, boundary, tied_weight)).max(0.0)
        };
        let [embedding, head] =
            [SegmentKind::Embedding, SegmentKind::Head].map(|kind| of_end(kind, &reductions));
        Longer {
            gathers: largest(&gathers) + of_end(SegmentKind::Embedding, &gathers) > 0.0,
            reductions: largest(&reductions) + embedding.max(head) > 0.0,
        }
    }

    /// Collectives that may take longer than the passes of a stage.
    pub(super) fn possible(&self) -> Longer {
        self.possible
    }

    /// Weights of a role for a segment of this kind.
    pub(super) fn weights(&self, role: Role, kind: SegmentKind) -> RoleWeights {
        let of_case = |case: usize| {
            let Longer { gathers, reductions } = CASES[case];
            Longer {
                gathers: gathers && self.possible.gathers,
                reductions: reductions && self.possible.reductions,
            }
        };
        let step = |longer, ends_with_weight_gradients| {
            self.passes_and_step_phase(self.microbatches, longer, ends_with_weight_gradients, kind)
        };
        let end = |passes, case| self.passes_and_step_phase(passes, of_case(case), false, kind);
        let reductions = Longer { gathers: false, reductions: self.context.overlap_grad_reduce };
        match role {
            Role::Forward(ForwardGathers::Longer) if !self.possible.gathers => {
                self.first_forward(ForwardGathers::Hidden)
            }
            Role::Forward(gathers) => self.first_forward(gathers),
            Role::Passes => self.passes(false),
            Role::RoundTrip => self.passes(kind == SegmentKind::Block),
            Role::LastReturn(case) => end(1.0, case),
            Role::LastReturnWithWeightGradients => {
                self.passes_and_step_phase(1.0, reductions, true, kind)
            }
            Role::AfterWarmUp(case) => end((self.microbatches - self.stages + 1.0).max(1.0), case),
            Role::Step(case) => step(of_case(case), false),
            Role::StepWithWeightGradients => step(reductions, true),
            Role::Waited(ending) => {
                let mut weights = self.weights(ending.step(), kind);
                if self.context.schedule.defers_weight_gradients() {
                    let earlier = self.microbatches.min(self.stages - 1.0) - 1.0;
                    weights.of_segment.forward -= earlier;
                    weights.of_segment.sharded_gathers -= self.hidden * earlier;
                    weights.besides_segments[0] -= earlier;
                }
                weights
            }
        }
    }

    /// Both passes of one microbatch. Those of a zero-bubble pipeline may leave weight gradients to passes of their own, and then
    /// also the reductions of sharded gradients.
    fn passes(&self, leave_weight_gradients: bool) -> RoleWeights {
        let defers = self.context.schedule.defers_weight_gradients();
        let left = f64::from(leave_weight_gradients && defers);
        RoleWeights {
            of_segment: StepWeights {
                forward: 1.0,
                backward: 1.0,
                weight_gradient: -left,
                update: self.share(),
                sharded_gathers: self.hidden * (2.0 - left),
                sharded_reductions: self.hidden * (1.0 - left),
                ..StepWeights::default()
            },
            besides_segments: [1.0, 1.0, 0.0, 0.0, 0.0],
        }
    }

    /// Passes of this many microbatches, and the step phase.
    fn passes_and_step_phase(
        &self,
        passes: f64,
        longer: Longer,
        ends_with_weight_gradients: bool,
        kind: SegmentKind,
    ) -> RoleWeights {
        let hidden_if = |is_hidden: bool| if is_hidden { self.hidden_computation } else { 0.0 };
        // The reductions of the head follow its last backward pass.
        let in_reductions = hidden_if(longer.reductions && kind != SegmentKind::Head);
        let [of_backward, of_weight_gradients] = match ends_with_weight_gradients {
            true => [0.0, in_reductions],
            false => [in_reductions, 0.0],
        };
        let beyond_hidden = |is_longer: bool| if is_longer { 1.0 - self.hidden } else { 0.0 };
        let unless = |is_longer: bool| if is_longer { 0.0 } else { 1.0 };
        // Whether sharded gradients are reduced after the last backward pass is left open.
        let reduced = (passes - 1.0).max(0.0);
        // The last transfer of a gradient may overlap with reductions.
        let transferred = match longer.reductions && !ends_with_weight_gradients {
            true => reduced,
            false => passes,
        };
        RoleWeights {
            of_segment: StepWeights {
                forward: passes - hidden_if(longer.gathers),
                backward: passes - of_backward,
                weight_gradient: -of_weight_gradients,
                step_phase: 1.0,
                update: passes * self.share() - 1.0,
                gathered: beyond_hidden(longer.gathers),
                overlapped: beyond_hidden(longer.reductions),
                sharded_gathers: self.hidden * (passes + reduced),
                sharded_reductions: self.hidden * reduced,
                ..StepWeights::default()
            },
            besides_segments: [
                passes,
                transferred,
                1.0,
                unless(longer.gathers),
                unless(longer.reductions),
            ],
        }
    }

    /// The first forward pass, less the gathers of a later stage that it hides.
    fn first_forward(&self, gathers: ForwardGathers) -> RoleWeights {
        let hidden = if self.context.gathers_in_forward() { self.hidden } else { 0.0 };
        let [pass, gathered] = match gathers {
            ForwardGathers::Uncounted => [1.0, 0.0],
            ForwardGathers::Hidden => [1.0, hidden],
            ForwardGathers::Longer => [1.0 - self.hidden_computation, 1.0],
        };
        RoleWeights {
            of_segment: StepWeights {
                forward: pass * (1.0 - hidden),
                update: self.share(),
                gathered: gathered * (1.0 - hidden),
                ..StepWeights::default()
            },
            besides_segments: [1.0 - hidden, 0.0, 0.0, 0.0, 0.0],
        }
    }

    /// Share of the updates that one pass bears.
    fn share(&self) -> f64 {
        1.0 / (self.microbatches + self.stages - 1.0)
    }

    /// The least times of a segment; `None` without legal decisions.
    fn times(&self, spec: SegmentSpec) -> Option<JointTimes> {
        let least =
            |weights: &StepWeights| self.segments.min_weighted_time(spec, self.context, weights);
        self.by_role(spec.kind, least)
    }

    /// The times of a segment of this kind in all roles. Those with equal weights are found once.
    fn by_role(
        &self,
        kind: SegmentKind,
        time: impl Fn(&StepWeights) -> Option<f64>,
    ) -> Option<JointTimes> {
        let mut known: Vec<(StepWeights, f64)> = vec![];
        let mut times = [0.0; ROLES.len()];
        for (role, of_role) in ROLES.into_iter().zip(&mut times) {
            let weights = self.weights(role, kind).of_segment;
            *of_role = match known.iter().find(|(other, _)| *other == weights) {
                Some((_, time)) => *time,
                None => {
                    let time = time(&weights)?;
                    known.push((weights, time));
                    time
                }
            };
        }
        Some(times)
    }

    fn weights_besides_segments(&self) -> [[f64; 5]; ROLES.len()] {
        ROLES.map(|role| self.weights(role, SegmentKind::Block).besides_segments)
    }
}

impl JointMinima {
    /// The times of a context with these layouts; `None` for interleaved pipelines, and without legal decisions.
    pub(super) fn new(
        segments: &SegmentSolver,
        context: &Context,
        layouts: (BoundaryLayout, Option<TiedWeightLayout>),
    ) -> Option<JointMinima> {
        let pricing = JointPricing::new(segments, context, layouts)?;
        let (boundary, tied_weight) = layouts;
        let blocks = segments.of_layers(|shape| pricing.times(SegmentSpec::block(shape, boundary)));
        let blocks: Option<Vec<JointTimes>> = blocks.into_iter().collect();
        let end = |kind| pricing.times(SegmentSpec::embedding_or_head(kind, boundary, tied_weight));
        let besides_segments = pricing.weights_besides_segments();
        Some(JointMinima {
            blocks: blocks?,
            embedding: end(SegmentKind::Embedding)?,
            head: end(SegmentKind::Head)?,
            besides_segments,
        })
    }

    /// The times of a stage besides its blocks.
    pub(super) fn of_overhead(
        &self,
        overhead: &StageOverhead,
        stage: usize,
        stages: usize,
    ) -> JointTimes {
        let mut times = of_stage_besides_segments(&self.besides_segments, overhead);
        if stage == 0 {
            times = plus(times, self.embedding);
        }
        if stage + 1 == stages {
            times = plus(times, self.head);
        }
        times
    }
}

/// The times by role of a stage besides its segments, with these weights.
fn of_stage_besides_segments(
    weights: &[[f64; 5]; ROLES.len()],
    overhead: &StageOverhead,
) -> JointTimes {
    let [forward, backward, step_phase] = overhead.besides_ends.map(|time| time.0);
    let (gather, block) = (overhead.first_gather_min.0, overhead.first_block_min.0);
    let all = [forward, backward, step_phase - gather - block, gather, block];
    std::array::from_fn(|role| {
        weights[role].iter().zip(all).map(|(weight, time)| weight * time).sum()
    })
}
