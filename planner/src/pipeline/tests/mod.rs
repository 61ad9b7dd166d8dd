//! Lower bounds on pipelines, against simulations.

mod divisions;
mod joint_bound;
mod schedules;

use std::sync::Arc;

use narrows_cost_model::{
    PassTimes, SimulatedStep, StageTime, StepPart, SyncedStages, simulate_schedules,
};
use narrows_plan::program::{MicrobatchPass, StageSchedule};
use narrows_plan::{PipelineSchedule, Seconds};

use super::stage_position::StepSchedule;
use super::{Partition, StageAssignment, StageOverhead};

fn partition(times: &[StageTime]) -> Partition {
    let stages = times
        .iter()
        .map(|time| {
            let PassTimes { forward, backward, weight_gradient } = time.chunks[0];
            let backward = backward + weight_gradient;
            let step = time.step_phase.iter().map(|part| part.time()).sum();
            Arc::new(StageAssignment {
                forward,
                backward,
                weight_gradient,
                step_phase: step,
                ..StageAssignment::default()
            })
        })
        .collect();
    Partition { bound: Seconds(0.0), counts: vec![1; times.len()], stages }
}

/// The schedules with one chunk on each stage.
fn schedules_of_one_chunk() -> Vec<PipelineSchedule> {
    PipelineSchedule::ALL.into_iter().filter(|schedule| !schedule.has_chunks()).collect()
}

fn step_schedule(schedule: PipelineSchedule, microbatches: u64) -> StepSchedule {
    let has_weight_gradient_passes = schedule.defers_weight_gradients();
    StepSchedule { schedule, microbatches, has_weight_gradient_passes }
}

fn simulate(times: &[StageTime], step: StepSchedule) -> SimulatedStep {
    let StepSchedule { schedule, microbatches, .. } = step;
    let stages = times.len() as u64;
    let of_stage = |(stage, time): (u64, &StageTime)| {
        let has_weight_gradients = time.chunks[0].weight_gradient > Seconds(0.0);
        let stage = StageSchedule { schedule, stage, stages, chunks: 1, microbatches };
        stage.passes(stage.defers_weight_gradients() && has_weight_gradients)
    };
    let schedules: Vec<Vec<MicrobatchPass>> = (0..stages).zip(times).map(of_stage).collect();
    let schedules: Vec<&[MicrobatchPass]> = schedules.iter().map(Vec::as_slice).collect();
    simulate_schedules(times, &schedules)
}

/// Reduction, norm over all stages, update.
fn step_phase(stages: usize, [reduce, norm, update]: [f64; 3]) -> Vec<StepPart> {
    vec![
        StepPart::Local(Seconds(reduce)),
        StepPart::Synchronised(SyncedStages::all(stages), Seconds(norm)),
        StepPart::Local(Seconds(update)),
    ]
}

fn bound(times: &[StageTime], step: StepSchedule) -> f64 {
    partition(times).step_bound(&vec![StageOverhead::default(); times.len()], step)
}
