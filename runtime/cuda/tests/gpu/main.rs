//! Sessions on GPUs, through CUDA's own interfaces: against libraries that stand in for CUDA's and do whatever
//! it leaves open in the least convenient order; with `NARROWS_TEST_GPU=1`, on this machine's GPUs.

mod devices;
mod failures;
mod measure;
mod support;
mod walk;

use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::Model;
use narrows_plan::strategy::{Context, Zero};
use narrows_plan::{Plan, Precision};
use narrows_runtime::session::NamedTensors;
use narrows_test_support::plans::{TestRng, draw_plan, drawable_models, to_json};
use support::{Trained, folder, on_gpus, program, train};

/// Seeds of the stand-ins: one for each habit of theirs.
const SEEDS: u32 = 4;

/// Plans on a mesh, of models small enough to be run by the stand-ins.
fn plans(mesh: Mesh, precision: Precision, seed: u64, count: usize) -> Vec<(Model, Plan)> {
    let models: Vec<Model> =
        drawable_models().into_iter().filter(|model| model.hidden == 256).collect();
    let mut dice = TestRng(seed);
    let mut made = vec![];
    for _ in 0..50 * count {
        let model = dice.pick(&models).unwrap().clone();
        let global_batch = 4 * mesh.data;
        let workload = Workload { global_batch, sequence_length: 8, micro_batch: 2 };
        let zero = [Zero::Off, Zero::One][dice.below(2)];
        let context = Context { mesh, workload, precision, zero };
        if let Some(plan) = draw_plan(&mut dice, &model, context) {
            made.push((model, plan));
        }
        if made.len() == count {
            break;
        }
    }
    assert_eq!(made.len(), count, "plans on {mesh}");
    made
}

/// How far tensors are from others, at most: the norm of the difference over the norm.
fn furthest(found: &NamedTensors, wanted: &NamedTensors) -> (f64, String) {
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let of = |(name, wanted): (&String, &Vec<f32>)| {
        let pairs = found[name].iter().zip(wanted);
        let off = norm(&mut pairs.map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let whole = norm(&mut wanted.iter().map(|v| f64::from(*v)));
        let error = off / whole.max(1e-12);
        (if error.is_nan() { f64::INFINITY } else { error }, name.clone())
    };
    wanted.iter().map(of).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

/// On a mesh, for each seed: what GPUs compute in f32 is what processors do, and graphs give the bits
/// that single launches do.
fn agree(test: &str, mesh: (u64, u64, u64), count: usize) {
    let (tensor, pipeline, data) = mesh;
    let mesh = Mesh { tensor, pipeline, data };
    devices::seeded(test, SEEDS, mesh.devices(), |seed| {
        let folder = folder();
        for (model, plan) in plans(mesh, Precision::Full32, 100 + seed, count) {
            let what = to_json(&plan);
            let mut cpu = narrows_cpu::session(&model, program(&plan, &model), 1).unwrap();
            let wanted = train(&mut cpu, &model, &plan);
            let graphs = on_gpus(&model, &plan, false, &folder);
            let eager = on_gpus(&model, &plan, true, &folder);
            for ((graphs, eager), rank) in graphs.iter().zip(&eager).zip(0..) {
                assert_eq!(
                    graphs.losses, eager.losses,
                    "graphs and single launches, device {rank}"
                );
                assert_eq!(graphs.reports, eager.reports, "graphs and single launches");
                assert_eq!(graphs, eager, "graphs and single launches on device {rank} of\n{what}");
                for (found, wanted) in graphs.losses.iter().zip(&wanted.losses) {
                    let off = (found / wanted - 1.0).abs();
                    assert!(off < 1e-5, "loss {found}, not {wanted}, of\n{what}");
                }
                assert_eq!(graphs.reports, wanted.reports, "what was done, of\n{what}");
            }
            for (found, wanted) in graphs[0].tensors.iter().zip(&wanted.tensors) {
                let (error, name) = furthest(found, wanted);
                assert!(error < 2e-4, "{name} is {error:.1e} off, of\n{what}");
            }
        }
    });
}

#[test]
fn one_gpu() {
    agree("one_gpu", (1, 1, 1), 2);
}

#[test]
fn along_the_tensor_axis() {
    agree("along_the_tensor_axis", (2, 1, 1), 2);
}

#[test]
fn along_the_data_axis() {
    agree("along_the_data_axis", (1, 1, 2), 1);
}

#[test]
fn along_the_pipeline() {
    agree("along_the_pipeline", (1, 3, 1), 1);
}

#[test]
fn along_all_axes() {
    agree("along_all_axes", (2, 2, 2), 1);
}

/// In mixed precision losses stay near those of f32, and graphs give the bits that single launches do.
#[test]
fn in_mixed_precision() {
    let test = "in_mixed_precision";
    devices::seeded(test, SEEDS, 2, |seed| {
        let folder = folder();
        for (tensor, data) in [(2, 1), (1, 2)] {
            let mesh = Mesh { tensor, pipeline: 1, data };
            for (model, plan) in plans(mesh, Precision::MixedBf16, 7 + seed, 1) {
                let what = to_json(&plan);
                let exact = Plan { precision: Precision::Full32, ..plan.clone() };
                let mut cpu = narrows_cpu::session(&model, program(&exact, &model), 1).unwrap();
                let wanted = train(&mut cpu, &model, &exact);
                let graphs: Vec<Trained> = on_gpus(&model, &plan, false, &folder);
                assert_eq!(graphs, on_gpus(&model, &plan, true, &folder), "of\n{what}");
                for (found, wanted) in graphs[0].losses.iter().zip(&wanted.losses) {
                    let off = (found / wanted - 1.0).abs();
                    // bf16 has 8 bits: a rounding is up to 0.4 %.
                    assert!(off < 4e-3, "loss {found}, not {wanted}, of\n{what}");
                }
            }
        }
    });
}
