//! The bound on a 1F1B pipeline is one, and equal stages attain it.

use std::sync::Arc;

use narrows_cost_model::simulate::{StageTime, run_schedule};
use narrows_plan::Seconds;
use narrows_plan::program::{Turn, one_forward_one_backward};
use narrows_planner::stages::{Allotment, Extra, Partition};

fn partition(times: &[StageTime]) -> Partition {
    let stages = times
        .iter()
        .map(|time| {
            let (forward, backward, step) = (time.forward, time.backward, time.step);
            Arc::new(Allotment { forward, backward, step, ..Allotment::default() })
        })
        .collect();
    Partition { bound: Seconds(0.0), counts: vec![1; times.len()], stages }
}

fn simulated(times: &[StageTime], microbatches: u64) -> f64 {
    let stages = times.len() as u64;
    let schedules: Vec<Vec<Turn>> =
        (0..stages).map(|stage| one_forward_one_backward(stage, stages, microbatches)).collect();
    let schedules: Vec<&[Turn]> = schedules.iter().map(Vec::as_slice).collect();
    run_schedule(times, &schedules).0.0
}

fn bound(times: &[StageTime], microbatches: u64) -> f64 {
    partition(times).bound_of(&vec![Extra::default(); times.len()], microbatches)
}

#[test]
fn no_simulated_step_is_shorter_than_its_bound() {
    arbtest::arbtest(|u| {
        let stages = u.int_in_range(1..=8)?;
        let microbatches = u.int_in_range(1..=20)?;
        let mut times = vec![];
        for _ in 0..stages {
            let mut time = || Ok(Seconds(f64::from(u.int_in_range(1..=1000)?) / 100.0));
            times.push(StageTime { forward: time()?, backward: time()?, step: time()? });
        }
        let (bound, simulated) = (bound(&times, microbatches), simulated(&times, microbatches));
        assert!(bound <= simulated * (1.0 + 1e-12), "{bound} > {simulated}: {times:?}");
        Ok(())
    });
}

#[test]
fn equal_stages_attain_it() {
    for stages in 1..=8 {
        for microbatches in [stages as u64 + 1, 3 * stages as u64] {
            let time =
                StageTime { forward: Seconds(1.0), backward: Seconds(2.0), step: Seconds(0.5) };
            let times = vec![time; stages];
            let (bound, simulated) = (bound(&times, microbatches), simulated(&times, microbatches));
            assert!((bound - simulated).abs() < 1e-9, "{stages} {microbatches}");
        }
    }
}
