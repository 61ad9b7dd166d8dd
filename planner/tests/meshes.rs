//! No fixed tensor axis beats the free search, including axes that divide neither heads nor sequences.

use narrows_cost_model::profile;
use narrows_plan::{Bytes, model};
use narrows_planner::{MemoryLimit, Request, search};

fn request(heads: u64, devices: u64, global_batch: u64) -> Request {
    let hidden = heads * 64;
    let text = format!(
        r#"{{"format": "narrows-model/1", "hidden": {hidden}, "vocab": 49152, "heads": {heads},
            "d_ff": {}, "tied": true,
            "blocks": {{"count": 2, "default": {{"product": "swiglu", "all": "dense"}}}}}}"#,
        hidden * 8 / 3 / 64 * 64,
    );
    let model = model::read("odd.json", &text).unwrap();
    let profile = profile::preset("a100-80gb-8").unwrap();
    Request::new(model, profile, devices, global_batch, 1024)
}

#[test]
fn no_fixed_axis_beats_the_free_search() {
    let mut best_and_uneven = 0;
    for (heads, devices, batch) in [(9, 4, 1), (9, 8, 1), (14, 4, 1), (14, 4, 2), (15, 8, 1)] {
        let free = request(heads, devices, batch);
        let result = search(&free);
        let time = result.best.as_ref().map_or(f64::INFINITY, |best| best.time.0);
        for tensor in [1, 2, 4, 8].into_iter().filter(|tensor| *tensor <= devices) {
            let fixed = search(&Request { tensor: Some(tensor), ..free.clone() });
            let Some(best) = fixed.best else { continue };
            let case = format!("{heads} heads, {devices} devices, tensor {tensor}");
            let bound = result.report.bound.0 * (1.0 - 1e-9);
            assert!(best.time.0 >= bound, "{case}: faster than the bound");
            if result.report.is_proven_best() {
                assert!(best.time.0 >= time * (1.0 - 1e-9), "{case}: faster than the optimum");
            }
            let divides = heads % tensor == 0;
            best_and_uneven += usize::from(!divides && best.time.0 <= time * (1.0 + 1e-9));
        }
    }
    assert!(best_and_uneven > 0, "no best axis fails to divide the heads");
}

#[test]
fn a_plan_that_fits_only_with_an_uneven_axis_is_found() {
    let limit = MemoryLimit::Bytes(Bytes(450 << 20));
    let free = Request { memory_limit: limit, ..request(9, 2, 1) };
    let fixed = search(&Request { tensor: Some(2), ..free.clone() });
    assert!(fixed.best.is_some(), "no plan fits with tensor axis 2");
    assert!(search(&free).best.is_some());
}

/// The requests of `benches/plan.rs`, of up to 4,096 devices, are proven to 1 %.
#[test]
fn plans_of_large_clusters_are_proven() {
    for (name, devices) in [("cola-7b", 4), ("cola-30b", 512), ("cola-40b", 4096)] {
        let model = model::presets::find(name).unwrap();
        let profile = profile::preset("a100-80gb").unwrap();
        let report = search(&Request::new(model, profile, devices, devices, 4096)).report;
        assert!(report.gap <= 0.01, "{name} on {devices}: gap {}", report.gap);
    }
}
