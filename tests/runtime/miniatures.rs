//! Miniatures of plans for presets of every family, under every strategy.

use narrows_cost_model::profile;
use narrows_plan::model::presets;
use narrows_plan::strategy::{Baseline, Rules, WeightRule};
use narrows_planner::{MemoryLimit, Request};
use narrows_reference::Miniature;

use super::small_models;

#[test]
fn miniatures_of_preset_plans_agree_with_the_reference() {
    let profile = profile::preset("a100-80gb").unwrap();
    let (mut plans, mut worst) = (0, 0.0_f64);
    for name in ["llama-60m", "cola-60m", "svd-60m", "lax-60m"] {
        let model = presets::find(name).unwrap();
        for [tensor, pipeline, data] in [[1, 1, 1], [8, 1, 1], [4, 2, 1], [2, 2, 2]] {
            for baseline in small_models::baselines(&model) {
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
                let case = format!("{name} {} {tensor}×{pipeline}×{data}", baseline.name());
                let plan =
                    small_models::plan(&request).unwrap_or_else(|| panic!("no plan for {case}"));
                let miniature = Miniature::new(&plan, &model).unwrap();
                let comparison = miniature.compare(&small_models::open, 1).unwrap();
                assert!(comparison.agrees(), "{case}: {:?}", comparison.gradient_errors.first());
                plans += 1;
                for (id, error) in &comparison.gradient_errors {
                    worst = worst.max(error / comparison.tolerance(*id));
                }
            }
        }
    }
    println!("{plans} miniatures, largest gradient error {worst:.2} of its tolerance");
}
