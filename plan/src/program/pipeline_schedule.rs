//! Pipeline schedules: the order in which a stage runs the passes of its microbatches.
//!
//! Programs state the passes of every stage, and engines, the check and the simulation run these passes. Bounds on the step
//! time of a schedule are derived in `planner/src/pipeline/step_bound.rs`.
//!
//! - *1F1B*: stage s of S runs min(m, S − s − 1) forward passes, then one forward and one backward pass in turn, then
//!   the remaining backward passes.
//! - *Zero-bubble* (ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241): the same order of forward
//!   and backward passes, but the weight gradients of stage s > 0 are computed in passes of their own, s microbatches
//!   after the backward pass. So the previous stage gets its gradient earlier, and weight gradients fill the time in
//!   which a stage would wait. With equal stages of forward time f, backward time b and weight-gradient time w, the idle
//!   time of a step falls from (S − 1)·(f + b + w) to (S − 1)·(f + b − w), where m ≥ S.
//! - *Interleaved 1F1B* (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
//!   Megatron-LM", arXiv 2104.04473): every stage has v chunks of the model, and runs S microbatches through each of them
//!   in turn. Microbatches are a multiple of S. Stage s runs min(m·v, 2·(S − s − 1) + (v − 1)·S) forward passes first. With
//!   equal chunks, the idle time of a step falls from (S − 1)·(f + b) to (S − 1)·(f + b)/v, for more transfers and more
//!   microbatches in flight.

use super::{ChunkPhase, MicrobatchPass, Phase, StageProgram};
use crate::{Context, PipelineSchedule};

/// A stage of a pipeline, with the parameters of its schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StageSchedule {
    /// The order of passes.
    pub schedule: PipelineSchedule,
    /// Index of the stage.
    pub stage: u64,
    /// Number of stages.
    pub stages: u64,
    /// Chunks of each stage; 1 unless the schedule is interleaved.
    pub chunks: u64,
    /// Microbatches of a step, or pairs of them where passes run two.
    pub microbatches: u64,
}

impl StageSchedule {
    /// The schedule of a stage of a context.
    pub fn of(context: &Context, stage: u64) -> StageSchedule {
        StageSchedule {
            schedule: context.schedule,
            stage,
            stages: context.mesh.pipeline,
            chunks: context.chunks,
            microbatches: context.passes(),
        }
    }

    /// Whether weight gradients of blocks may have passes of their own. No stage waits for a gradient of the first.
    pub fn defers_weight_gradients(&self) -> bool {
        self.schedule.defers_weight_gradients() && self.stage > 0
    }

    /// Number of microbatches that have run forward through a chunk and not backward, at most.
    pub fn microbatches_in_flight(&self, chunk: u64) -> u64 {
        match self.schedule {
            PipelineSchedule::Interleaved => {
                // The first passes fill fewer than two groups of microbatches; then as many end as begin.
                let microbatches = self.microbatches.min(4 * self.stages);
                let first = StageSchedule { microbatches, ..*self };
                let of_chunk = |pass: &MicrobatchPass| pass.chunk as u64 == chunk;
                most_between(
                    first.interleaved_passes().filter(of_chunk),
                    [Phase::Forward, Phase::Backward],
                )
            }
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::ZeroBubble => {
                (self.stages - self.stage).min(self.microbatches)
            }
        }
    }

    /// Number of microbatches that have begun their forward pass and not ended that for weight gradients, at most, beyond those
    /// [in flight](StageSchedule::microbatches_in_flight); 0 where backward passes compute all weight gradients.
    pub fn microbatches_deferred(&self) -> u64 {
        match self.defers_weight_gradients() {
            // As many microbatches as there are stages have begun and not ended.
            true => self.stages.min(self.microbatches) - self.microbatches_in_flight(0),
            false => 0,
        }
    }

    /// Number of microbatches that have begun their backward pass and not ended that for weight gradients, at most; 0 where the one
    /// follows the other at once, and where backward passes compute all weight gradients.
    pub fn weight_gradients_waiting(&self) -> u64 {
        match self.defers_weight_gradients() && self.microbatches > 1 {
            true => (self.stage + 1).min(self.microbatches),
            false => 0,
        }
    }

    /// The passes of the stage, in order, with or without weight-gradient passes.
    pub fn passes(&self, has_weight_gradient_passes: bool) -> Vec<MicrobatchPass> {
        match self.schedule {
            PipelineSchedule::Interleaved => self.interleaved_passes().collect(),
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::ZeroBubble => {
                self.passes_of_one_chunk(has_weight_gradient_passes)
            }
        }
    }

    fn passes_of_one_chunk(&self, has_weight_gradient_passes: bool) -> Vec<MicrobatchPass> {
        let microbatches = self.microbatches;
        let pass = |phase, microbatch| MicrobatchPass { phase, chunk: 0, microbatch };
        let warm_up = (self.stages - self.stage - 1).min(microbatches);
        let deferred = has_weight_gradient_passes.then(|| self.stage.min(microbatches));
        let mut passes: Vec<MicrobatchPass> =
            (0..warm_up).map(|microbatch| pass(Phase::Forward, microbatch)).collect();
        for backward in 0..microbatches {
            let forward = backward + warm_up;
            passes.extend((forward < microbatches).then(|| pass(Phase::Forward, forward)));
            passes.push(pass(Phase::Backward, backward));
            let ready = deferred.and_then(|deferred| backward.checked_sub(deferred));
            passes.extend(ready.map(|microbatch| pass(Phase::WeightGradient, microbatch)));
        }
        let last = deferred.map_or(microbatches, |deferred| microbatches - deferred)..microbatches;
        passes.extend(last.map(|microbatch| pass(Phase::WeightGradient, microbatch)));
        passes
    }

    /// The passes through chunks, with microbatches in groups of as many as there are stages.
    fn interleaved_passes(&self) -> impl Iterator<Item = MicrobatchPass> + use<> {
        let StageSchedule { stage, stages, chunks, microbatches, .. } = *self;
        let all = microbatches * chunks;
        let warm_up = (2 * (stages - stage - 1) + (chunks - 1) * stages).min(all);
        let pass = move |phase, at: u64| {
            let (group, within) = (at / (stages * chunks), at % (stages * chunks));
            let chunk = match phase {
                Phase::Forward => within / stages,
                _ => chunks - 1 - within / stages,
            };
            let microbatch = group * stages + within % stages;
            MicrobatchPass { phase, chunk: chunk as usize, microbatch }
        };
        let in_turn = (0..all).flat_map(move |at| {
            let forward = at + warm_up;
            let forward = (forward < all).then(|| pass(Phase::Forward, forward));
            forward.into_iter().chain([pass(Phase::Backward, at)])
        });
        (0..warm_up).map(move |at| pass(Phase::Forward, at)).chain(in_turn)
    }
}

/// The largest number of microbatches that have begun the first phase and not ended the last one.
fn most_between(passes: impl Iterator<Item = MicrobatchPass>, [first, last]: [Phase; 2]) -> u64 {
    let (mut between, mut most) = (0_u64, 0);
    for pass in passes {
        between += u64::from(pass.phase == first);
        most = most.max(between);
        between = between.saturating_sub(u64::from(pass.phase == last));
    }
    most
}

impl StageProgram {
    /// The passes through a chunk, in order.
    fn passes_through(&self, chunk: usize) -> impl Iterator<Item = MicrobatchPass> {
        self.schedule.iter().copied().filter(move |pass| pass.chunk == chunk)
    }

    /// The largest number of microbatches that have begun phase `from` of a chunk and not ended phase `to`.
    pub(crate) fn microbatches_between(&self, chunk: usize, from: Phase, to: Phase) -> u64 {
        most_between(self.passes_through(chunk), [from, to])
    }

    /// The largest number of microbatches that have begun their first pass through a chunk and not ended their last one.
    pub fn microbatches_in_flight(&self, chunk: usize) -> u64 {
        self.microbatches_between(chunk, Phase::Forward, self.chunks[chunk].last_phase())
    }

    /// Whether every pass of a phase directly follows the previous pass of its microbatch through the same chunk.
    pub(crate) fn follows_at_once(&self, at: ChunkPhase) -> bool {
        let previous = match at.phase {
            Phase::WeightGradient => Phase::Backward,
            _ => Phase::Forward,
        };
        let passes = self.schedule.iter().enumerate();
        passes.filter(|(_, pass)| pass.chunk_phase() == at).all(|(at, pass)| {
            let before = at.checked_sub(1).map(|before| self.schedule[before]);
            before == Some(MicrobatchPass { phase: previous, ..*pass })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(schedule: PipelineSchedule, stage: u64, microbatches: u64) -> String {
        let schedule = StageSchedule { schedule, stage, stages: 4, chunks: 1, microbatches };
        let pass = |pass: MicrobatchPass| match pass.phase {
            Phase::Forward => format!("F{}", pass.microbatch),
            Phase::Backward => format!("B{}", pass.microbatch),
            Phase::WeightGradient | Phase::Step => format!("W{}", pass.microbatch),
        };
        schedule
            .passes(schedule.defers_weight_gradients())
            .into_iter()
            .map(pass)
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn stages_run_their_passes_in_the_published_order() {
        let of = |stage| text(PipelineSchedule::OneForwardOneBackward, stage, 4);
        assert_eq!(of(0), "F0 F1 F2 F3 B0 B1 B2 B3");
        assert_eq!(of(2), "F0 F1 B0 F2 B1 F3 B2 B3");
        let of = |stage| text(PipelineSchedule::ZeroBubble, stage, 4);
        assert_eq!(of(0), "F0 F1 F2 F3 B0 B1 B2 B3");
        assert_eq!(of(1), "F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3");
        assert_eq!(of(3), "F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3");
        assert_eq!(text(PipelineSchedule::ZeroBubble, 3, 2), "F0 B0 F1 B1 W0 W1");
    }

    #[test]
    fn stages_interleave_the_passes_through_their_chunks() {
        let of = |stage, microbatches| {
            let schedule = PipelineSchedule::Interleaved;
            let schedule = StageSchedule { schedule, stage, stages: 2, chunks: 2, microbatches };
            let pass = |pass: MicrobatchPass| {
                let chunk = ["a", "b"][pass.chunk];
                let phase = if pass.phase == Phase::Forward { "F" } else { "B" };
                format!("{phase}{}{chunk}", pass.microbatch)
            };
            schedule.passes(false).into_iter().map(pass).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of(0, 2), "F0a F1a F0b F1b B0b B1b B0a B1a");
        assert_eq!(of(1, 2), "F0a F1a F0b B0b F1b B1b B0a B1a");
        assert_eq!(of(1, 4), "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a");
    }
}
