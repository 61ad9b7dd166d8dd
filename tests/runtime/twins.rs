//! The twins of plans for every family of presets, under every strategy.

use narrows_cost_model::profile;
use narrows_plan::model::presets;
use narrows_plan::strategy::{Baseline, Rules, WeightRule};
use narrows_planner::{MemoryLimit, Request};
use narrows_reference::Miniature;

use super::subject;

#[test]
fn twins_of_presets_compute_their_models() {
    let profile = profile::preset("a100-80gb").unwrap();
    let (mut plans, mut worst) = (0, 0.0_f64);
    for name in ["llama-60m", "cola-60m", "svd-60m", "lax-60m"] {
        let model = presets::find(name).unwrap();
        for [tensor, pipeline, data] in [[1, 1, 1], [8, 1, 1], [4, 2, 1], [2, 2, 2]] {
            for baseline in subject::baselines(&model) {
                let rules = Rules { baseline, weights: WeightRule::Sharded, ..Rules::ALL };
                let devices = tensor * pipeline * data;
                let request = Request {
                    tensor: Some(tensor),
                    pipeline: Some(pipeline),
                    data: Some(data),
                    micro_batch: Some(if baseline == Baseline::Auto { 2 } else { 1 }),
                    rules,
                    memory_limit: MemoryLimit::None,
                    ..Request::new(model.clone(), profile.clone(), devices, 8 * data, 1024)
                };
                let what = format!("{name} {} {tensor}×{pipeline}×{data}", baseline.name());
                let plan = subject::plan(&request).unwrap_or_else(|| panic!("no plan for {what}"));
                let twin = Miniature::new(&plan, &model).unwrap();
                let found = twin.compare(&subject::open, 1).unwrap();
                assert!(found.agrees(), "{what}: {:?}", found.gradient_errors.first());
                plans += 1;
                for (name, off) in &found.gradient_errors {
                    worst = worst.max(off / found.tolerance(name));
                }
            }
        }
    }
    println!("{plans} twins, gradients off by {worst:.2} of what they may be");
}
