//! Attention by cuDNN and by own kernels, from the same weights on the same tokens. The fake cuDNN interprets the graph
//! of operations that it is given; on this machine's GPUs sequences are longer.

use std::collections::BTreeSet;
use std::{env, fs};

use narrows_cuda::{AttentionKernels, GpuOptions};
use narrows_plan::model::{self, Model};
use narrows_plan::{Context, Mesh, Plan, Precision, Workload, Zero};
use narrows_runtime::session::ModelTensors;
use narrows_test_support::plans::{TestRng, draw_plan};
use narrows_test_support::relative_error;

use super::training::{Trained, cache_folder, options, train, train_on_gpus};
use super::{device_choice, training};

const LOG: &str = "NARROWS_FAKE_CUDA_LOG";
const BY_CUDNN: &str = "attention by cuDNN";

/// Query heads, KV heads and head size: each with its own keys, shared keys, and the sizes of CoLA.
const HEADS: [(u64, u64, u64); 4] = [(2, 2, 8), (4, 2, 16), (2, 1, 64), (1, 1, 128)];

fn small_model((heads, kv_heads, head_dim): (u64, u64, u64)) -> Model {
    let text = format!(
        r#"{{"format": "narrows-model/1", "name": "attentive", "hidden": 16, "vocab": 32,
        "heads": {heads}, "kv_heads": {kv_heads}, "head_dim": {head_dim}, "d_ff": 24,
        "tied": false, "norm_epsilon": 1e-5, "rope_theta": 10000.0,
        "blocks": {{"count": 2, "default": {{"product": "swiglu", "all": "dense"}}, "overrides": {{}}}}}}"#
    );
    model::read("attentive", &text).unwrap()
}

fn plan(model: &Model, tensor: u64, seed: u64) -> Plan {
    let mesh = Mesh { tensor, pipeline: 1, data: 1, context: 1 };
    let sequence_length = if device_choice::uses_real_gpus() { 1024 } else { 13 };
    let workload = Workload { global_batch: 4, sequence_length, micro_batch: 2 };
    let context = Context::new(mesh, workload, Precision::MixedBf16, Zero::Off);
    let mut rng = TestRng::new(seed);
    (0..50).find_map(|_| draw_plan(&mut rng, model, context)).expect("a plan")
}

/// Trains and returns the result, with the lines of the log that name cuDNN, and the warnings.
fn run(model: &Model, plan: &Plan, attention: AttentionKernels) -> (Trained, usize, Vec<String>) {
    let log = || env::var(LOG).ok().and_then(|file| fs::read_to_string(file).ok());
    let by_cudnn = || log().unwrap_or_default().matches(BY_CUDNN).count();
    let (folder, before) = (cache_folder(), by_cudnn());
    let mut warnings = vec![];
    let options = GpuOptions { attention, ..options(&folder, device_choice::ordinal(0), false) };
    let mut warn = |warning: &str| warnings.push(warning.to_owned());
    let program = training::program(plan, model);
    let mut session = narrows_cuda::session(model, program, &options, None, &mut warn).unwrap();
    let trained = train(&mut session, model, plan);
    (trained, by_cudnn() - before, warnings)
}

/// Largest difference between tensors, relative to the largest value of each.
fn difference(left: &ModelTensors, right: &ModelTensors) -> f64 {
    let pairs = left.iter().zip(right.iter());
    let differences = pairs.map(|((id, left), (other, right))| {
        assert_eq!(id, other);
        let largest = right.iter().fold(f32::MIN_POSITIVE, |most, value| most.max(value.abs()));
        let pairs = left.iter().zip(right);
        let worst = pairs.fold(0.0_f32, |most, (left, right)| most.max((left - right).abs()));
        f64::from(worst / largest)
    });
    differences.fold(0.0, f64::max)
}

#[test]
fn cudnn_trains_as_own_kernels_do() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let test = "attention::cudnn_trains_as_own_kernels_do";
    let compare = || {
        for (heads, seed) in HEADS.into_iter().zip(0..) {
            let model = small_model(heads);
            let plan = plan(&model, 1, seed);
            let (fastest, by_cudnn, warnings) = run(&model, &plan, AttentionKernels::Fastest);
            let (own, none, _) = run(&model, &plan, AttentionKernels::Deterministic);
            if let Some(warning) = warnings.first().filter(|_| device_choice::uses_real_gpus()) {
                println!("skipped: {warning}");
                continue;
            }
            assert_eq!(warnings, [""; 0]);
            // Two blocks, two microbatches and three steps, the last of which replays graphs; forward and backward,
            // and forward again where attention is recomputed.
            let logged = by_cudnn >= 2 * 2 * 3 * 2 && none == 0;
            assert!(
                logged || device_choice::uses_real_gpus(),
                "{heads:?}: {by_cudnn} and {none} calls"
            );
            for (loss, expected) in fastest.losses.iter().zip(&own.losses) {
                let error = relative_error(*loss, *expected);
                assert!(error < 1e-3, "{heads:?}: loss {loss}, own kernels {expected}");
            }
            // The first moments are those of the gradients.
            let error = difference(&fastest.tensors[1], &own.tensors[1]);
            assert!(error < 3e-2, "{heads:?}: gradients differ by {error}");
            println!("{heads:?}: {by_cudnn} calls, gradients differ by {error:.1e}");
        }
    };
    match device_choice::uses_real_gpus() {
        true => device_choice::under_seeds(test, [0], 1, |_| compare()),
        false => device_choice::on_fake_gpus(test, &[(LOG, log.to_str().unwrap())], compare),
    }
}

/// Devices that compute the same attention must have the same bits, and cuDNN's query gradients have no fixed order.
#[test]
fn devices_of_a_tensor_axis_run_backward_on_own_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let test = "attention::devices_of_a_tensor_axis_run_backward_on_own_kernels";
    let variables = [(LOG, log.to_str().unwrap()), ("NARROWS_FAKE_CUDA_DEVICES", "2")];
    device_choice::on_fake_gpus(test, &variables, || {
        // Numbers of operations of the graphs: one forward, another backward.
        let graphs = |devices: u64| -> BTreeSet<String> {
            let model = small_model(HEADS[1]);
            let file = env::var(LOG).unwrap();
            let before = fs::read_to_string(&file).unwrap_or_default().len();
            train_on_gpus(&model, &plan(&model, devices, 2), false, &cache_folder());
            let log = fs::read_to_string(&file).unwrap()[before..].to_owned();
            let calls = log.lines().filter_map(|line| line.split_once(BY_CUDNN));
            calls.map(|(_, operations)| operations.to_owned()).collect()
        };
        let (one, two) = (graphs(1), graphs(2));
        assert_eq!((one.len(), two.len()), (2, 1), "{one:?} and {two:?}");
        assert!(two.is_subset(&one), "{one:?} and {two:?}");
    });
}

#[test]
fn an_old_cudnn_is_not_used_and_said_once() {
    let test = "attention::an_old_cudnn_is_not_used_and_said_once";
    device_choice::on_fake_gpus(test, &[("NARROWS_FAKE_CUDA_CUDNN", "90500")], || {
        let model = small_model(HEADS[1]);
        let plan = plan(&model, 1, 1);
        let (fallback, _, warnings) = run(&model, &plan, AttentionKernels::Fastest);
        let (own, _, _) = run(&model, &plan, AttentionKernels::Deterministic);
        assert!(fallback == own, "the same kernels, and the same bits");
        let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
        assert!(warning.contains("own kernels") && warning.contains("cuDNN 9.5.0"), "{warning}");
    });
}
