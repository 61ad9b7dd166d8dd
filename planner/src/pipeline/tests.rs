//! The lower bound on the step of a 1F1B pipeline is below every simulation, and equal stages attain it.

use std::sync::Arc;

use narrows_cost_model::{SimulatedStep, StageTime, StepPart, SyncedStages, simulate_schedules};
use narrows_plan::Seconds;
use narrows_plan::program::{MicrobatchPass, one_forward_one_backward};

use super::partition::{StageBlocks, division_bound};
use super::{Partition, PruningCutoff, StageAssignment, StageOverhead, undominated_partitions};

fn partition(times: &[StageTime]) -> Partition {
    let stages = times
        .iter()
        .map(|time| {
            let (forward, backward) = (time.forward, time.backward);
            let step = time.step_phase.iter().map(|part| part.time()).sum();
            Arc::new(StageAssignment {
                forward,
                backward,
                step_phase: step,
                ..StageAssignment::default()
            })
        })
        .collect();
    Partition { bound: Seconds(0.0), counts: vec![1; times.len()], stages }
}

fn simulate_1f1b(times: &[StageTime], microbatches: u64) -> SimulatedStep {
    let stages = times.len() as u64;
    let schedules: Vec<Vec<MicrobatchPass>> =
        (0..stages).map(|stage| one_forward_one_backward(stage, stages, microbatches)).collect();
    let schedules: Vec<&[MicrobatchPass]> = schedules.iter().map(Vec::as_slice).collect();
    simulate_schedules(times, &schedules)
}

fn simulated(times: &[StageTime], microbatches: u64) -> f64 {
    simulate_1f1b(times, microbatches).time.0
}

/// Reduction, norm over all stages, update.
fn step_phase(stages: usize, [reduce, norm, update]: [f64; 3]) -> Vec<StepPart> {
    vec![
        StepPart::Local(Seconds(reduce)),
        StepPart::Synchronized(SyncedStages::all(stages), Seconds(norm)),
        StepPart::Local(Seconds(update)),
    ]
}

fn bound(times: &[StageTime], microbatches: u64) -> f64 {
    partition(times).step_bound(&vec![StageOverhead::default(); times.len()], microbatches)
}

#[test]
fn no_simulated_step_is_shorter_than_its_bound() {
    arbtest::arbtest(|u| {
        let stages = u.int_in_range(1..=8)?;
        let microbatches = u.int_in_range(1..=20)?;
        let mut times = vec![];
        for _ in 0..stages {
            let mut time = || Ok(f64::from(u.int_in_range(1..=1000)?) / 100.0);
            let (forward, backward) = (Seconds(time()?), Seconds(time()?));
            let step = step_phase(stages, [time()?, 0.25, time()?]);
            times.push(StageTime { forward, backward, step_phase: step, overlap: None });
        }
        let (bound, simulated) = (bound(&times, microbatches), simulated(&times, microbatches));
        assert!(bound <= simulated * (1.0 + 1e-12), "{bound} > {simulated}: {times:?}");
        Ok(())
    });
}

#[test]
fn equal_stages_attain_the_bound() {
    for stages in 1..=8 {
        for microbatches in [stages as u64 + 1, 3 * stages as u64] {
            let step = step_phase(stages, [0.25, 0.125, 0.125]);
            let time = StageTime {
                forward: Seconds(1.0),
                backward: Seconds(2.0),
                step_phase: step,
                overlap: None,
            };
            let times = vec![time; stages];
            let (bound, simulated) = (bound(&times, microbatches), simulated(&times, microbatches));
            assert!((bound - simulated).abs() < 1e-9, "{stages} {microbatches}");
        }
    }
}

/// One microbatch through three stages with passes of zero time: no stage updates before the slowest stage has
/// reduced, and the middle stage does not wait for the tied weight of the first and last stages.
#[test]
fn stages_synchronize_in_the_step_phase() {
    let phase = |before: f64, tied: bool, reduce: f64, update: f64| {
        let mut step = vec![StepPart::Local(Seconds(before))];
        step.extend(
            tied.then_some(StepPart::Synchronized(SyncedStages::first_and_last(3), Seconds(2.0))),
        );
        step.extend(step_phase(3, [reduce, 1.0, update]));
        StageTime { step_phase: step, ..StageTime::default() }
    };
    // First and last: until 4, then together until 6. Reductions: until 9, 3 and 7; then until 10.
    let times =
        [phase(4.0, true, 3.0, 5.0), phase(1.0, false, 2.0, 8.0), phase(1.0, true, 1.0, 2.0)];
    let simulated = simulate_1f1b(&times, 1);
    assert_eq!(simulated.time, Seconds(18.0));
    let syncs_of_stage = |stage: usize| -> Vec<(f64, f64)> {
        let syncs = simulated.stage_syncs.iter().filter(|sync| sync.stage == stage);
        syncs.map(|sync| (sync.arrival.0, sync.end.0)).collect()
    };
    assert_eq!(syncs_of_stage(0), [(4.0, 6.0), (9.0, 10.0)]);
    assert_eq!(syncs_of_stage(1), [(3.0, 10.0)]);
    assert_eq!(syncs_of_stage(2), [(1.0, 6.0), (7.0, 10.0)]);
}

/// Every way of writing `blocks` as a sum of `stages` counts.
fn compositions(blocks: usize, stages: usize) -> Vec<Vec<usize>> {
    if stages == 1 {
        return vec![vec![blocks]];
    }
    let first = 1..=blocks + 1 - stages;
    first
        .flat_map(|count| {
            compositions(blocks - count, stages - 1)
                .into_iter()
                .map(move |rest| std::iter::once(count).chain(rest).collect())
        })
        .collect()
}

#[test]
fn the_best_partition_equals_the_best_by_enumeration() {
    arbtest::arbtest(|u| {
        let stages: usize = u.int_in_range(1..=4)?;
        let blocks: usize = u.int_in_range(stages..=9)?;
        let microbatches = u.int_in_range(1..=12)?;
        let mut time = |most: u32| Ok(Seconds(f64::from(u.int_in_range(0..=most)?) / 8.0));
        let mut times = vec![];
        for _ in 0..blocks {
            times.push((time(99)?, time(99)?, time(9)?));
        }
        let mut overheads = vec![];
        for _ in 0..stages {
            let (forward, backward, step) = (time(99)?, time(99)?, time(9)?);
            overheads.push(StageOverhead {
                forward,
                backward,
                step_phase: step,
                step_phase_min: step,
                ..StageOverhead::default()
            });
        }
        let choice = |blocks: StageBlocks| {
            let StageBlocks { first, count, .. } = blocks;
            let run = &times[first..first + count];
            Some(Arc::new(StageAssignment {
                forward: run.iter().map(|time| time.0).sum(),
                backward: run.iter().map(|time| time.1).sum(),
                step_phase: run.iter().map(|time| time.2).sum(),
                microbatch_time_min: run.iter().map(|time| time.0 + time.1).sum(),
                single_microbatch_step_min: run.iter().map(|time| time.0 + time.1 + time.2).sum(),
                ..StageAssignment::default()
            }))
        };
        let microbatch_times = times.iter().map(|time| (time.0 + time.1).0).collect();
        let steps = times.iter().map(|time| time.2.0).collect();
        let cutoff = PruningCutoff {
            microbatch_times_min: microbatch_times,
            step_phase_times_min: steps,
            step_time: f64::INFINITY,
        };
        let (partitions, _) =
            undominated_partitions(&overheads, microbatches, &cutoff, &choice, None);
        let least = compositions(blocks, stages)
            .into_iter()
            .filter_map(|counts| {
                division_bound(&counts, &overheads, microbatches, &cutoff, &choice)
            })
            .fold(f64::INFINITY, f64::min);
        let best = partitions.first().map_or(f64::INFINITY, |partition| partition.bound.0);
        assert!((best - least).abs() <= 1e-9 * least.max(1.0), "{best} is not {least}");
        Ok(())
    });
}
