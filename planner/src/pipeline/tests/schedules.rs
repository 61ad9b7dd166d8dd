//! Bounds of schedules are below every simulation, and equal stages attain them or leave the published idle time.

use narrows_cost_model::{PassTimes, StageTime, StepPart, SyncedStages, simulate_schedules};
use narrows_plan::PipelineSchedule::{Interleaved, OneForwardOneBackward, ZeroBubble};
use narrows_plan::Seconds;
use narrows_plan::program::{MicrobatchPass, StageSchedule};

use super::super::interleaved::passes_bound;
use super::{bound, schedules_of_one_chunk, simulate, step_phase, step_schedule};

#[test]
fn no_simulated_step_is_shorter_than_its_bound() {
    arbtest::arbtest(|u| {
        let stages = u.int_in_range(1..=8)?;
        let schedule = *u.choose(&schedules_of_one_chunk())?;
        let step = step_schedule(schedule, u.int_in_range(1..=20)?);
        let mut times = vec![];
        for stage in 0..stages {
            // The last stage may have no block, and then no weight-gradient passes.
            let is_empty = stage + 1 == stages && u.arbitrary()?;
            let mut time = || Ok(f64::from(u.int_in_range(1..=1000)?) / 100.0);
            let is_deferred = schedule.defers_weight_gradients() && stage > 0 && !is_empty;
            let passes = PassTimes {
                forward: Seconds(time()?),
                backward: Seconds(time()?),
                weight_gradient: Seconds(if is_deferred { time()? } else { 0.0 }),
            };
            times.push(StageTime {
                chunks: vec![passes],
                step_phase: step_phase(stages, [time()?, 0.25, time()?]),
                overlap: None,
            });
        }
        let (bound, simulated) = (bound(&times, step), simulate(&times, step).time.0);
        assert!(bound <= simulated * (1.0 + 1e-12), "{bound} > {simulated}: {times:?}");
        Ok(())
    });
}

/// The passes of an interleaved pipeline, without a step phase.
fn simulate_interleaved(chunks: &[Vec<PassTimes>], microbatches: u64) -> f64 {
    let stages = chunks.len() as u64;
    let of_stage = |stage| StageSchedule {
        schedule: Interleaved,
        stage,
        stages,
        chunks: chunks[0].len() as u64,
        microbatches,
    };
    let schedules: Vec<Vec<MicrobatchPass>> =
        (0..stages).map(|stage| of_stage(stage).passes(false)).collect();
    let schedules: Vec<&[MicrobatchPass]> = schedules.iter().map(Vec::as_slice).collect();
    let time = |chunks: &Vec<PassTimes>| StageTime { chunks: chunks.clone(), ..Default::default() };
    let times: Vec<StageTime> = chunks.iter().map(time).collect();
    simulate_schedules(&times, &schedules).time.0
}

/// The bound on the passes through these chunks, which are listed by stage.
fn interleaved_bound(chunks: &[Vec<PassTimes>], microbatches: u64) -> f64 {
    let time = |passes: &PassTimes| (passes.forward + passes.backward).0;
    let of_chunk = |chunk: usize| chunks.iter().map(move |stage| time(&stage[chunk]));
    let times: Vec<f64> = (0..chunks[0].len()).flat_map(of_chunk).collect();
    passes_bound(&times, chunks.len(), microbatches, |_| 0.0)
}

#[test]
fn no_interleaved_pipeline_is_shorter_than_its_bound() {
    arbtest::arbtest(|u| {
        let (stages, chunks) = (u.int_in_range(2..=6)?, u.int_in_range(2..=4)?);
        let microbatches = stages as u64 * u.int_in_range(1..=4)?;
        let mut times = vec![vec![PassTimes::default(); chunks]; stages];
        for passes in times.iter_mut().flatten() {
            let mut time = || Ok(Seconds(f64::from(u.int_in_range(1..=1000)?) / 100.0));
            *passes = PassTimes { forward: time()?, backward: time()?, ..*passes };
        }
        let bound = interleaved_bound(&times, microbatches);
        let simulated = simulate_interleaved(&times, microbatches);
        assert!(bound <= simulated * (1.0 + 1e-12), "{bound} > {simulated}: {times:?}");
        Ok(())
    });
}

/// Equal chunks are idle for (S − 1)·(f + b)/v of an interleaved step, as published, and attain the bound.
#[test]
fn equal_chunks_leave_the_published_idle_time() {
    for (stages, chunks) in (2..=8_usize).flat_map(|stages| (2..=4).map(move |c| (stages, c))) {
        for microbatches in [stages as u64, 3 * stages as u64] {
            let (forward, backward) = (Seconds(1.0 / chunks as f64), Seconds(2.0 / chunks as f64));
            let passes = PassTimes { forward, backward, weight_gradient: Seconds(0.0) };
            let times = vec![vec![passes; chunks]; stages];
            let simulated = simulate_interleaved(&times, microbatches);
            let idle = simulated - 3.0 * microbatches as f64;
            let published = 3.0 * (stages - 1) as f64 / chunks as f64;
            assert!((idle - published).abs() < 1e-9, "{stages} {chunks} {microbatches}: {idle}");
            let bound = interleaved_bound(&times, microbatches);
            assert!((bound - simulated).abs() < 1e-9, "{stages} {chunks} {microbatches}");
        }
    }
}

#[test]
fn equal_stages_attain_the_bound() {
    for stages in 1..=8 {
        for microbatches in [stages as u64 + 1, 3 * stages as u64] {
            let passes = PassTimes {
                forward: Seconds(1.0),
                backward: Seconds(2.0),
                weight_gradient: Seconds(0.0),
            };
            let time = StageTime {
                chunks: vec![passes],
                step_phase: step_phase(stages, [0.25, 0.125, 0.125]),
                overlap: None,
            };
            let times = vec![time; stages];
            let step = step_schedule(OneForwardOneBackward, microbatches);
            let (bound, simulated) = (bound(&times, step), simulate(&times, step).time.0);
            assert!((bound - simulated).abs() < 1e-9, "{stages} {microbatches}");
        }
    }
}

/// Equal stages are idle for (S − 1)·(f + b − w) of a zero-bubble step, as published.
#[test]
fn equal_zero_bubble_stages_leave_the_published_idle_time() {
    for stages in 2..=8_usize {
        for microbatches in [stages as u64, 3 * stages as u64] {
            let of_stage = |stage: usize| {
                let passes = PassTimes {
                    forward: Seconds(1.0),
                    backward: Seconds(if stage == 0 { 2.25 } else { 1.5 }),
                    weight_gradient: Seconds(if stage == 0 { 0.0 } else { 0.75 }),
                };
                StageTime { chunks: vec![passes], ..StageTime::default() }
            };
            let times: Vec<StageTime> = (0..stages).map(of_stage).collect();
            let step = step_schedule(ZeroBubble, microbatches);
            let simulated = simulate(&times, step).time.0;
            let idle = simulated - microbatches as f64 * 3.25;
            assert!((idle - (stages - 1) as f64 * 1.75).abs() < 1e-9, "{stages} {microbatches}");
            let (bound, short) = (bound(&times, step), (stages - 1) as f64 * 0.25);
            assert!(bound >= simulated - short - 1e-9, "{bound} is far below {simulated}");
        }
    }
}

/// One microbatch through three stages with passes of zero time: no stage updates before the slowest stage has
/// reduced, and the middle stage does not wait for the tied weight of the first and last stages.
#[test]
fn stages_synchronise_in_the_step_phase() {
    let phase = |before: f64, tied: bool, reduce: f64, update: f64| {
        let mut step = vec![StepPart::Local(Seconds(before))];
        step.extend(
            tied.then_some(StepPart::Synchronised(SyncedStages::first_and_last(3), Seconds(2.0))),
        );
        step.extend(step_phase(3, [reduce, 1.0, update]));
        let chunks = vec![PassTimes::default()];
        StageTime { chunks, step_phase: step, overlap: None }
    };
    // First and last: until 4, then together until 6. Reductions: until 9, 3 and 7; then until 10.
    let times =
        [phase(4.0, true, 3.0, 5.0), phase(1.0, false, 2.0, 8.0), phase(1.0, true, 1.0, 2.0)];
    let step = step_schedule(OneForwardOneBackward, 1);
    let simulated = simulate(&times, step);
    assert_eq!(simulated.time, Seconds(18.0));
    let syncs_of_stage = |stage: usize| -> Vec<(f64, f64)> {
        let syncs = simulated.stage_syncs.iter().filter(|sync| sync.stage == stage);
        syncs.map(|sync| (sync.arrival.0, sync.end.0)).collect()
    };
    assert_eq!(syncs_of_stage(0), [(4.0, 6.0), (9.0, 10.0)]);
    assert_eq!(syncs_of_stage(1), [(3.0, 10.0)]);
    assert_eq!(syncs_of_stage(2), [(1.0, 6.0), (7.0, 10.0)]);
}
