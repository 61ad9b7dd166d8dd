//! The interval of a prediction contains it, is deterministic, and widens with fewer measurements.

use narrows_calibration::fit::{CpuMachine, fit_cpu_profile as measured_profile};
use narrows_cost_model::profile::{MeasuredPoint, ProfileFile, preset};
use narrows_cost_model::{Executor, Prices, Profile};
use narrows_plan::model::{Model, presets};
use narrows_plan::{Bytes, CheckedProgram, Kernel, Plan, lower};
use narrows_planner::{Prediction, Request, predict, search};

fn planned(model: &str, hardware: &str, devices: u64) -> (Model, Plan) {
    let model = presets::find(model).unwrap();
    let profile = preset(hardware).unwrap();
    let request = Request::new(model.clone(), profile, devices, devices, 1024);
    // The fastest plan without overlap has a tensor axis, and kernels of many shapes.
    let request = Request { overlap_grad_reduce: Some(false), ..request };
    (model, search(&request).best.expect("a plan").plan)
}

/// The prediction and the logarithm of its interval's width.
fn predicted(model: &Model, profile: &Profile, plan: &Plan) -> (Prediction, f64) {
    let once = || predict(model, profile, Executor::Captured, plan).unwrap().0;
    let prediction = once();
    assert_eq!(once(), prediction);
    let [low, high] = prediction.step_time_interval_s;
    assert!(0.0 < low && low <= prediction.step_time_s && prediction.step_time_s <= high);
    (prediction, (high / low).ln())
}

fn changed(profile: &Profile, change: impl FnOnce(&mut ProfileFile)) -> Profile {
    let mut file = profile.file().clone();
    change(&mut file);
    file.resolve().unwrap()
}

#[test]
fn published_measurements_narrow_the_interval_and_unmeasured_kernels_are_named() {
    let (model, plan) = planned("cola-1b", "a100-80gb", 4);
    let a100 = preset("a100-80gb").unwrap();
    let (all, narrow) = predicted(&model, &a100, &plan);
    assert!(all.shapes_measured && !all.unmeasured.is_empty());
    let shares: Vec<f64> = all.unmeasured.iter().map(|one| one.share).collect();
    assert!(shares.is_sorted_by(|a, b| a >= b) && shares.iter().sum::<f64>() <= 1.0 + 1e-9);
    // No measurement of attention is published, so every attention kernel is named.
    let attention = |one: &&_| matches!(one, Kernel::Attention(_));
    assert!(all.unmeasured.iter().map(|one| &one.kernel).any(|kernel| attention(&kernel)));
    // The same fit from one shape, and from none.
    let one = changed(&a100, |file| file.refits.as_mut().unwrap().kernels.truncate(1));
    let (fewer, wider) = predicted(&model, &one, &plan);
    assert!(fewer.unmeasured.len() > all.unmeasured.len());
    assert!(wider > 1.05 * narrow, "{wider} {narrow}");
    let (none, widest) = predicted(&model, &preset("h100-sxm").unwrap(), &plan);
    assert!(!none.shapes_measured && none.unmeasured.is_empty());
    assert!(widest > 1.05 * narrow, "{widest} {narrow}");
}

/// The profile of a machine with kernel times by a formula, from measurements of the kernels that `measured` selects.
fn machine(model: &Model, plan: &Plan, measured: impl Fn(usize) -> bool) -> Profile {
    let resolved = plan.resolve(model).unwrap();
    let program = CheckedProgram::check(lower(&resolved)).unwrap();
    let truth = preset("cpu-local").unwrap();
    let prices = Prices::new(&truth, Executor::Captured, &plan.mesh);
    let mut kernels: Vec<Kernel> = vec![];
    for stage in &program.program().stages {
        for instr in stage.all_instructions() {
            kernels.push(instr.kernel());
        }
    }
    kernels.sort_by_key(|kernel| format!("{kernel:?}"));
    kernels.dedup();
    // On one, two and four devices that share the machine.
    let on = |(index, kernel): (usize, Kernel)| {
        let noise = 1.0 + 0.02 * (index % 5) as f64;
        let alone_s = (prices.kernel_time(&kernel).0 * noise).max(1e-9);
        let link = matches!(kernel, Kernel::Collective(_) | Kernel::Transfer(_));
        [1, 2, 4].map(|devices| {
            let time_s = if link { alone_s } else { alone_s * devices as f64 };
            MeasuredPoint { kernel: kernel.clone(), devices, time_s, spread: 0.0 }
        })
    };
    let kept = kernels.into_iter().enumerate().filter(|(index, _)| measured(*index));
    let machine = CpuMachine {
        name: "invented".into(),
        title: "an invented processor".into(),
        description: "A machine whose kernel times follow a formula.".into(),
        memory: Bytes(1 << 36),
        threads: 2,
        source: "a test".into(),
        date: "2026-11-21".into(),
    };
    measured_profile(&machine, kept.flat_map(on).collect(), None).unwrap()
}

#[test]
fn fewer_measured_kernels_make_a_wider_interval() {
    let (model, plan) = planned("cola-tiny", "cpu-local", 2);
    let (whole, narrow) = predicted(&model, &machine(&model, &plan, |_| true), &plan);
    assert!(whole.shapes_measured && whole.unmeasured.is_empty(), "{:?}", whole.unmeasured);
    let (some, wider) = predicted(&model, &machine(&model, &plan, |index| index % 6 == 0), &plan);
    assert!(!some.unmeasured.is_empty());
    assert!(wider > narrow, "{wider} {narrow}");
    let (_, widest) = predicted(&model, &preset("cpu-local").unwrap(), &plan);
    assert!(widest > 1.5 * narrow, "{widest} {narrow}");
}
