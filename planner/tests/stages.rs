//! Stages of a pipeline have decisions of their own.

use narrows_cost_model::profile;
use narrows_plan::model::presets;
use narrows_plan::{PipelineSchedule, Plan};
use narrows_planner::{Request, predict, search};

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
