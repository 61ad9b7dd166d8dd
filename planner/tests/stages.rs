//! Stages of a pipeline have decisions of their own.

use narrows_cost_model::profile;
use narrows_plan::model::presets;
use narrows_plan::{BlockRun, PipelineSchedule, Plan, Zero};
use narrows_planner::{MemoryLimit, Request, predict, search};

fn request(model: &str, hardware: &str, [tensor, pipeline]: [u64; 2], batch: u64) -> Request {
    let model = presets::find(model).unwrap();
    let profile = profile::preset(hardware).unwrap();
    Request {
        tensor: Some(tensor),
        pipeline: Some(pipeline),
        micro_batch: Some(2),
        // With overlap or another schedule, the same decisions are the best for all stages of these pipelines.
        schedule: Some(PipelineSchedule::OneForwardOneBackward),
        overlap_tensor_collectives: false,
        ..Request::new(model, profile, tensor * pipeline, batch, 1024)
    }
}

/// With one microbatch, the passes of all stages follow each other and their step phases lie side by side: a stage
/// weighs its step phase less than the stage that ends last.
#[test]
fn stages_weigh_their_step_phases_apart() {
    let mut own_decisions = 0;
    for (model, hardware, mesh, batch) in [
        ("llama-60m", "a100-80gb-8", [4, 4], 2),
        ("llama-60m", "a100-80gb-8", [2, 4], 4),
        ("cola-60m", "a100-80gb", [2, 2], 2),
        ("cola-1b", "a100-80gb", [4, 2], 4),
    ] {
        let request = request(model, hardware, mesh, batch);
        let result = search(&request);
        let best = result.best.expect("a plan");
        let case = format!("{model}, mesh {mesh:?}, batch {batch}");
        if (model, batch) == ("llama-60m", 2) {
            assert!(result.report.gap < 0.1, "{case}: gap {}", result.report.gap);
        }
        let names: Vec<&String> = best.plan.blocks.keys().collect();
        own_decisions += usize::from(names.len() > 1);
        let price = |plan: &Plan| {
            let (prediction, _) =
                predict(&request.model, &request.profile, request.executor, plan).unwrap();
            prediction.step_time_s
        };
        let time = price(&best.plan);
        for stage in 0..best.plan.stages.len() {
            for name in &names {
                let mut edited = best.plan.clone();
                for run in &mut edited.stages[stage].runs {
                    run.decisions.clone_from(name);
                }
                let used = |name: &String| {
                    let mut runs = edited.stages.iter().flat_map(|stage| &stage.runs);
                    runs.any(|run| run.decisions == *name)
                };
                let unused: Vec<&&String> = names.iter().filter(|name| !used(name)).collect();
                let mut plan = edited.clone();
                unused.iter().for_each(|name| {
                    plan.blocks.shift_remove(**name);
                });
                let edited_time = price(&plan);
                assert!(
                    edited_time >= time * (1.0 - 1e-9),
                    "{case}: stage {stage} is faster with `{name}`: {edited_time} < {time}"
                );
            }
        }
    }
    assert!(own_decisions > 0, "no plan has decisions of its own for a stage");
}

/// Every division of this many blocks among stages, of which the first and the last may have none.
fn divisions(blocks: u64, stages: usize) -> Vec<Vec<u64>> {
    let mut divisions: Vec<Vec<u64>> = vec![vec![]];
    for stage in 0..stages {
        let least = u64::from(0 < stage && stage + 1 < stages);
        let with_next = |counts: Vec<u64>| {
            let left = blocks - counts.iter().sum::<u64>();
            let next = if stage + 1 == stages { left..=left } else { least..=left };
            next.filter(move |count| *count >= least)
                .map(move |count| counts.iter().copied().chain([count]).collect())
        };
        divisions = divisions.into_iter().flat_map(with_next).collect();
    }
    divisions
}

/// The plan with its blocks divided like this. Blocks keep their decisions unless all have `decisions`.
fn divided(plan: &Plan, counts: &[u64], decisions: Option<&String>) -> Plan {
    let runs = plan.stages.iter().flat_map(|stage| &stage.runs);
    let mut of_blocks =
        runs.flat_map(|run| (0..run.count).map(|at| (run.first + at, &run.decisions)));
    let mut edited = plan.clone();
    for (stage, count) in edited.stages.iter_mut().zip(counts) {
        let of_stage = of_blocks.by_ref().take(*count as usize);
        let run = |(first, own): (u64, &String)| {
            let decisions = decisions.unwrap_or(own).clone();
            BlockRun { first, count: 1, decisions }
        };
        stage.runs = of_stage.map(run).collect();
    }
    edited.blocks.retain(|name, _| decisions.is_none_or(|decisions| name == decisions));
    edited
}

/// Cases of [`check_divisions`]: a model, the sizes of the axes `tensor`, `pipeline` and `data`, the stage of ZeRO, and
/// whether gradient reductions overlap.
type DivisionCase = (&'static str, [u64; 3], Zero, bool);

const DIVISION_CASES: [DivisionCase; 12] = [
    ("llama-60m", [1, 2, 1], Zero::Off, false),
    ("llama-60m", [1, 4, 2], Zero::One, true),
    ("cola-60m", [1, 4, 2], Zero::Three, false),
    ("lax-60m", [1, 4, 1], Zero::Off, false),
    ("cola-tiny", [1, 6, 1], Zero::Off, false),
    ("llama-60m", [1, 4, 1], Zero::Off, false),
    ("llama-60m", [1, 3, 2], Zero::Off, true),
    ("llama-60m", [1, 4, 2], Zero::Two, true),
    ("cola-60m", [1, 4, 2], Zero::Three, true),
    ("cola-60m", [2, 4, 1], Zero::Off, false),
    ("lax-60m", [1, 3, 2], Zero::One, true),
    ("cola-60m", [1, 8, 1], Zero::Off, false),
];

#[test]
fn no_division_of_the_blocks_is_faster() {
    check_divisions(&DIVISION_CASES[..5]);
}

#[test]
#[ignore = "second level: seven more cases"]
fn no_division_of_the_blocks_is_faster_in_more_cases() {
    check_divisions(&DIVISION_CASES[5..]);
}

/// No other division of the blocks is faster than the plan, nor than the bound of the search, also where the first or the
/// last stage has no block; and stages without blocks are found where they are the fastest.
fn check_divisions(cases: &[DivisionCase]) {
    use PipelineSchedule::{OneForwardOneBackward, ZeroBubble};
    let (mut empty_first, mut empty_last, mut priced) = (0, 0, 0);
    for &(model, [tensor, pipeline, data], zero, overlap) in cases {
        for schedule in [OneForwardOneBackward, ZeroBubble] {
            let request = Request {
                data: Some(data),
                zero: Some(zero),
                overlap_grad_reduce: Some(overlap),
                schedule: Some(schedule),
                memory_limit: MemoryLimit::None,
                devices: tensor * pipeline * data,
                ..request(model, "a100-80gb-8", [tensor, pipeline], 8 * data)
            };
            let searched = search(&request);
            let best = searched.best.expect("a plan");
            let (bound, time) = (searched.report.bound.0, best.time.0);
            let case =
                format!("{model}, {}, {schedule:?}, {zero:?}, overlap {overlap}", best.plan.mesh);
            assert!(bound <= time * (1.0 + 1e-9), "{case}: {bound} is more than {time}");
            let is_exact = matches!(zero, Zero::Off | Zero::One);
            if is_exact {
                let partition = best.partition_time.0;
                assert!(
                    ((partition - time) / time).abs() < 1e-9,
                    "{case}: {partition} is not {time}"
                );
            }
            empty_first += usize::from(best.plan.stages[0].runs.is_empty());
            empty_last += usize::from(best.plan.stages[pipeline as usize - 1].runs.is_empty());
            let blocks = request.model.blocks.len() as u64;
            for counts in divisions(blocks, pipeline as usize) {
                // The first block of a model with crossings has decisions of its own.
                let names = best.plan.blocks.keys().filter(|_| !request.model.has_crossings());
                for name in names.map(Some).chain([None]) {
                    let plan = divided(&best.plan, &counts, name);
                    let (prediction, _) =
                        predict(&request.model, &request.profile, request.executor, &plan).unwrap();
                    let edited = prediction.step_time_s;
                    let case = format!("{case}: {counts:?} with {name:?}");
                    assert!(edited >= bound * (1.0 - 1e-9), "{case}: {edited} is below {bound}");
                    if is_exact {
                        assert!(edited >= time * (1.0 - 1e-9), "{case}: {edited} < {time}");
                    }
                    priced += 1;
                }
            }
        }
    }
    assert!(empty_first > 0 && empty_last > 0, "{empty_first} and {empty_last} of {priced}");
}

/// Gathers of updated weights on a later stage take longer than its wait for the first microbatch and its first pass, which the
/// bounds count.
#[test]
fn gathers_of_later_stages_count() {
    use PipelineSchedule::{OneForwardOneBackward, ZeroBubble};
    for (schedule, gap_max) in [(OneForwardOneBackward, 0.08), (ZeroBubble, 0.045)] {
        let request = Request {
            devices: 128,
            micro_batch: Some(1),
            schedule: Some(schedule),
            ..request("svd-3b", "a100-40gb", [1, 4], 64)
        };
        let report = search(&request).report;
        assert!(report.gap < gap_max, "{schedule:?}: gap {}", report.gap);
    }
}
