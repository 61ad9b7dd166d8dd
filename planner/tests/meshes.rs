//! No fixed tensor axis beats the free search, also where it divides neither heads nor sequences.

use narrows_cost_model::profile;
use narrows_plan::Bytes;
use narrows_plan::model;
use narrows_planner::{MemoryLimit, Request, SearchStatus, search};

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
    let mut better_than_whole = 0;
    for (heads, devices, batch) in [(9, 4, 1), (9, 8, 1), (14, 4, 1), (14, 4, 2), (15, 8, 1)] {
        let free = request(heads, devices, batch);
        let found = search(&free);
        let time = found.best.as_ref().map_or(f64::INFINITY, |best| best.time.0);
        for tensor in [1, 2, 4, 8].into_iter().filter(|tensor| *tensor <= devices) {
            let fixed = search(&Request { tensor: Some(tensor), ..free.clone() });
            let Some(best) = fixed.best else { continue };
            let what = format!("{heads} heads, {devices} devices, tensor {tensor}");
            let least = found.report.bound.0 * (1.0 - 1e-9);
            assert!(best.time.0 >= least, "{what}: faster than the bound");
            if found.report.status == SearchStatus::Optimal {
                assert!(best.time.0 >= time * (1.0 - 1e-9), "{what}: faster than the optimum");
            }
            let divides = heads % tensor == 0;
            better_than_whole += usize::from(!divides && best.time.0 <= time * (1.0 + 1e-9));
        }
    }
    assert!(better_than_whole > 0, "no axis that divides no heads was ever the best");
}

#[test]
fn a_plan_that_only_such_an_axis_fits_is_found() {
    let limit = MemoryLimit::Bytes(Bytes(450 << 20));
    let free = Request { memory_limit: limit, ..request(9, 2, 1) };
    let fixed = search(&Request { tensor: Some(2), ..free.clone() });
    assert!(fixed.best.is_some(), "the case is no case any more");
    assert!(search(&free).best.is_some());
}
