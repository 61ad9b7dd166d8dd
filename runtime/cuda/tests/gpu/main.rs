//! Sessions on GPUs through CUDA's API: on the fake CUDA libraries, which execute in the least convenient order that
//! CUDA allows; with `NARROWS_TEST_GPU=1` on this machine's GPUs.

mod attention;
mod conformance;
mod device_choice;
mod failures;
mod long_sequences;
mod timings;
mod training;
mod tuning;

use narrows_plan::model::{Model, WeightId};
use narrows_plan::{Context, Mesh, PipelineSchedule, Plan, Precision, Workload, Zero};
use narrows_test_support::plans::{TestRng, draw_plan, interleaved, to_json};
use narrows_test_support::small_models::small_models;
use narrows_test_support::{max_relative_error, relative_error};
use training::{Trained, cache_folder, program, train, train_on_gpus};

/// Random plans on a mesh, for models small enough for the fake GPUs. With several chunks per stage, their schedule is
/// interleaved.
fn plans(
    mesh: Mesh,
    chunks: u64,
    precision: Precision,
    seed: u64,
    count: usize,
) -> Vec<(Model, Plan)> {
    let models = small_models();
    let mut rng = TestRng::new(seed);
    let mut plans = vec![];
    for _ in 0..50 * count {
        let mut model = rng.pick(&models).unwrap().clone();
        let blocks = model.blocks.len().max((mesh.pipeline * chunks) as usize);
        model.blocks = model.blocks.iter().cycle().take(blocks).cloned().collect();
        let global_batch = 4 * mesh.data;
        let workload = Workload { global_batch, sequence_length: 8, micro_batch: 2 };
        let zero = [Zero::Off, Zero::One][rng.below(2)];
        // Every other plan, the first one included.
        let overlaps = plans.len() % 2 == 0;
        let schedule = match overlaps {
            true => PipelineSchedule::ZeroBubble,
            false => PipelineSchedule::OneForwardOneBackward,
        };
        let context = Context {
            schedule,
            overlap_grad_reduce: overlaps,
            overlap_param_gather: overlaps,
            overlap_tensor_collectives: overlaps,
            ..Context::new(mesh, workload, precision, zero)
        };
        let context = if chunks > 1 { interleaved(context, chunks) } else { context };
        if let Some(plan) = draw_plan(&mut rng, &model, context) {
            plans.push((model, plan));
        }
        if plans.len() == count {
            break;
        }
    }
    assert_eq!(plans.len(), count, "plans on {mesh}");
    plans
}

/// For each seed: f32 training on GPUs matches the CPU, and captured graphs give the bits of single launches.
fn match_the_cpu(
    test: &str,
    seeds: impl IntoIterator<Item = u32>,
    (tensor, pipeline, data): (u64, u64, u64),
    (chunks, count): (u64, usize),
) {
    let mesh = Mesh { tensor, pipeline, data, context: 1 };
    device_choice::under_seeds(test, seeds, mesh.devices(), |seed| {
        let folder = cache_folder();
        for (model, plan) in plans(mesh, chunks, Precision::Fp32, 100 + seed, count) {
            let description = to_json(&plan);
            let mut cpu = narrows_cpu::session(&model, program(&plan, &model), 1).unwrap();
            let expected = train(&mut cpu, &model, &plan);
            let graphs = train_on_gpus(&model, &plan, false, &folder);
            let eager = train_on_gpus(&model, &plan, true, &folder);
            for ((graphs, eager), device) in graphs.iter().zip(&eager).zip(0..) {
                let pair =
                    format!("graphs and single launches on device {device} of\n{description}");
                assert_eq!(graphs.losses, eager.losses, "{pair}");
                assert_eq!(graphs.reports, eager.reports, "{pair}");
                assert!(graphs == eager, "tensors of {pair}");
                for (loss, expected) in graphs.losses.iter().zip(&expected.losses) {
                    let error = relative_error(*loss, *expected);
                    assert!(error < 1e-5, "loss {loss}, expected {expected}, of\n{description}");
                }
                assert_eq!(graphs.reports, expected.reports, "reports of\n{description}");
            }
            for (actual, expected) in graphs[0].tensors.iter().zip(&expected.tensors) {
                assert_eq!(actual.len(), expected.len(), "tensors of\n{description}");
                let expected = expected.iter();
                let expected = expected
                    .map(|(id, tensor)| (*id, tensor.iter().copied().map(f64::from).collect()));
                // Biases start at zero, so that what is compared is their change, of which rounding decides a larger part.
                let (biases, others): (Vec<_>, Vec<_>) =
                    expected.partition(|(id, _)| matches!(id.weight, WeightId::Bias(_)));
                for (tensors, limit) in [(others, 2e-4), (biases, 1e-2)] {
                    let (error, name) = max_relative_error(actual, tensors);
                    assert!(error < limit, "{name} differs by {error:.1e}, of\n{description}");
                }
            }
        }
    });
}

/// For each seed: losses in mixed precision are near those in f32, and captured graphs give the bits of single launches.
fn match_f32(test: &str, seeds: impl IntoIterator<Item = u32>, (tensor, data): (u64, u64)) {
    let mesh = Mesh { tensor, pipeline: 1, data, context: 1 };
    device_choice::under_seeds(test, seeds, mesh.devices(), |seed| {
        let folder = cache_folder();
        for (model, plan) in plans(mesh, 1, Precision::MixedBf16, 7 + seed, 1) {
            let description = to_json(&plan);
            let f32_plan = Plan { precision: Precision::Fp32, ..plan.clone() };
            let mut cpu = narrows_cpu::session(&model, program(&f32_plan, &model), 1).unwrap();
            let expected = train(&mut cpu, &model, &f32_plan);
            let graphs: Vec<Trained> = train_on_gpus(&model, &plan, false, &folder);
            let eager = train_on_gpus(&model, &plan, true, &folder);
            assert!(graphs == eager, "graphs and single launches of\n{description}");
            for (loss, expected) in graphs[0].losses.iter().zip(&expected.losses) {
                let error = relative_error(*loss, *expected);
                // bf16 has 8 bits: rounding errors are up to 0.4 %.
                assert!(error < 4e-3, "loss {loss}, expected {expected}, of\n{description}");
            }
        }
    });
}

/// For each seed: gathers beside the next step change no bit, although an evaluation, the next step and a reader of weights
/// directly follow steps.
fn gathers_change_no_bit(
    test: &str,
    seeds: impl IntoIterator<Item = u32>,
    (pipeline, data): (u64, u64),
    zero: Zero,
) {
    let mesh = Mesh { tensor: 1, pipeline, data, context: 1 };
    device_choice::under_seeds(test, seeds, mesh.devices(), |seed| {
        let folder = cache_folder();
        let model = small_models().swap_remove(1);
        let workload = Workload { global_batch: 4 * data, sequence_length: 8, micro_batch: 2 };
        let context = Context {
            overlap_grad_reduce: true,
            overlap_param_gather: true,
            ..Context::new(mesh, workload, Precision::MixedBf16, zero)
        };
        let mut rng = TestRng::new(seed);
        let plan = (0..50).find_map(|_| draw_plan(&mut rng, &model, context)).expect("a plan");
        let gathers = |plan: &Plan| {
            let stages = program(plan, &model).into_inner().stages;
            stages.iter().map(|stage| stage.gather_buckets.len()).sum::<usize>()
        };
        let in_order = Plan { overlap_param_gather: false, ..plan.clone() };
        assert!(gathers(&plan) > 1 && gathers(&in_order) == 0);
        let expected = train_on_gpus(&model, &in_order, false, &folder);
        let overlapped = train_on_gpus(&model, &plan, false, &folder);
        assert!(overlapped == expected, "gathers overlap in\n{}", to_json(&plan));
    });
}

/// Number of policies of the fake scheduler: a seed selects the policy by its remainder.
const POLICIES: u32 = 4;

/// Each test under one policy, and in the second level under all others.
macro_rules! under_policies {
    ($($name:ident, $under_others:ident: $check:ident, $policy:literal, $($argument:expr),+;)*) => {$(
        #[test]
        fn $name() {
            $check(stringify!($name), [$policy], $($argument),+);
        }

        #[test]
        #[ignore = "second level: three more policies of the fake scheduler"]
        fn $under_others() {
            let others = (0..POLICIES).filter(|policy| *policy != $policy);
            $check(stringify!($under_others), others, $($argument),+);
        }
    )*};
}

under_policies! {
    one_gpu_matches_the_cpu, one_gpu_matches_the_cpu_under_other_policies:
        match_the_cpu, 0, (1, 1, 1), (1, 2);
    tensor_parallel_gpus_match_the_cpu, tensor_parallel_gpus_match_the_cpu_under_other_policies:
        match_the_cpu, 1, (2, 1, 1), (1, 2);
    data_parallel_gpus_match_the_cpu, data_parallel_gpus_match_the_cpu_under_other_policies:
        match_the_cpu, 2, (1, 1, 2), (1, 1);
    pipeline_parallel_gpus_match_the_cpu, pipeline_parallel_gpus_match_the_cpu_under_other_policies:
        match_the_cpu, 3, (1, 3, 1), (1, 1);
    two_interleaved_stages_match_the_cpu, two_interleaved_stages_match_the_cpu_under_other_policies:
        match_the_cpu, 1, (1, 2, 1), (2, 1);
    three_interleaved_stages_match_the_cpu, three_interleaved_stages_match_the_cpu_under_other_policies:
        match_the_cpu, 2, (1, 3, 1), (2, 1);
    gpus_along_all_axes_match_the_cpu, gpus_along_all_axes_match_the_cpu_under_other_policies:
        match_the_cpu, 0, (2, 2, 2), (1, 1);
    tensor_parallel_mixed_precision_is_near_f32, tensor_parallel_mixed_precision_under_other_policies:
        match_f32, 1, (2, 1);
    zero_1_gathers_change_no_bit, zero_1_gathers_change_no_bit_under_other_policies:
        gathers_change_no_bit, 2, (1, 2), Zero::One;
    zero_2_gathers_change_no_bit, zero_2_gathers_change_no_bit_under_other_policies:
        gathers_change_no_bit, 1, (1, 2), Zero::Two;
    gathers_of_two_stages_change_no_bit, gathers_of_two_stages_change_no_bit_under_other_policies:
        gathers_change_no_bit, 3, (2, 2), Zero::One;
    data_parallel_mixed_precision_is_near_f32, data_parallel_mixed_precision_under_other_policies:
        match_f32, 2, (1, 2);
}
