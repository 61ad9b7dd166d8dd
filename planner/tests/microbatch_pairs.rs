//! Searches of passes of two microbatches, whose cost tables are bounds.

use narrows_cost_model::profile;
use narrows_plan::Zero;
use narrows_plan::model::presets;
use narrows_plan::strategy::{Baseline, WeightRule};
use narrows_planner::{Request, search};

/// Plans of baselines, and with weights that are all sharded, are plans of the whole space. Collectives are long here.
#[test]
fn no_restriction_to_a_baseline_or_to_sharded_weights_beats_the_whole_space() {
    let cases = [
        ("cola-1b", "a100-80gb", 4, 8, 32, Baseline::Btp),
        ("llama-1b", "a100-80gb-8", 8, 16, 64, Baseline::FullrankTp),
    ];
    for (model, hardware, tensor, devices, batch, baseline) in cases {
        let model = presets::find(model).unwrap();
        let profile = profile::preset(hardware).unwrap();
        let mut request = Request::new(model, profile, devices, batch, 4096);
        (request.tensor, request.data) = (Some(tensor), Some(2));
        (request.micro_batch, request.zero) = (Some(8), Some(Zero::Off));
        let fastest = |request: &Request| search(request).best.expect("a plan");
        let whole = fastest(&request);
        assert!(whole.plan.overlap_microbatch_pairs, "{}", request.model.name);
        let mut sharded = request.clone();
        sharded.rules.weights = WeightRule::Sharded;
        for rules in [&request, &sharded] {
            let of_all = fastest(rules);
            let mut restricted = (*rules).clone();
            restricted.rules.baseline = baseline;
            let restricted = fastest(&restricted);
            let case = format!("{} of {}", baseline.name(), request.model.name);
            assert!(whole.time <= of_all.time, "{case}: {} and {}", of_all.time, whole.time);
            assert!(
                of_all.time <= restricted.time,
                "{case}: {} and {}",
                restricted.time,
                of_all.time
            );
        }
    }
}
