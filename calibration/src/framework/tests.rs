//! Prices of GPT steps and their intervals.

use narrows_cost_model::profile::{Profile, preset};
use narrows_plan::kernel::{CollectiveKind, Kernel};
use narrows_plan::strategy::{Baseline, NormRule, WeightRule};
use narrows_plan::{Mesh, Workload, Zero};

use super::interval::built_in_interval_model;
use super::operators::{MicrobatchShape, OperatorList, ResidualStream};
use super::{FITTED_FRAMEWORK, step_time_s};
use crate::measurements::{GptModel, StepRecompute, TrainedModel, TrainingStep};

/// Tests that need the rows of the fit, which are not part of the repository.
mod needs_rows;

/// A step of global batch, sequence length and microbatch `batch`.
fn gpt_step(gpt: GptModel, batch: [u64; 3], recompute: StepRecompute) -> TrainingStep {
    let [global_batch, sequence_length, micro_batch] = batch;
    TrainingStep {
        model: TrainedModel::Gpt(gpt),
        workload: Workload { global_batch, sequence_length, micro_batch },
        strategy: Baseline::FullrankTp,
        recompute,
        framework: None,
        interleaving: 1,
        norm: NormRule::Auto,
        weights: WeightRule::Any,
        zero: Zero::Off,
        overlap_tensor_collectives: false,
    }
}

/// The same step with sequence parallelism.
fn sequence_parallel(step: &TrainingStep) -> TrainingStep {
    let mut strategies = Baseline::ALL.into_iter();
    let strategy = strategies
        .find(|other| other.is_for_dense_models() && *other != Baseline::FullrankTp)
        .unwrap();
    let step = TrainingStep { strategy, ..step.clone() };
    assert!(step.shards_tokens());
    step
}

fn time_s(step: &TrainingStep, mesh: Mesh, profile: &Profile) -> f64 {
    step_time_s(step, mesh, profile, &FITTED_FRAMEWORK).unwrap()
}

/// A GPT of 16 heads.
fn gpt(layers: u64, hidden: u64) -> GptModel {
    GptModel { layers, hidden, heads: 16, vocabulary: 51_200 }
}

/// Width of the shipped interval of a step, as ln(high / low).
fn interval_width(step: &TrainingStep, mesh: Mesh, profile: &Profile) -> f64 {
    let intervals = built_in_interval_model().unwrap();
    let [low, high] = intervals.interval_s(step, mesh, profile, &FITTED_FRAMEWORK).unwrap();
    (high / low).ln()
}

#[test]
fn intervals_are_deterministic_and_contain_the_prediction() {
    let intervals = built_in_interval_model().unwrap();
    let profile = preset("a100-80gb-8-4nic").unwrap();
    let mut widths = vec![];
    for (tensor, data, hidden, recompute) in [
        (2, 1, 2048, StepRecompute::None),
        (2, 1, 32_768, StepRecompute::None),
        (8, 8, 2048, StepRecompute::Block),
    ] {
        let mesh = Mesh { tensor, pipeline: 1, data, context: 1 };
        let step = gpt_step(gpt(24, hidden), [64, 2048, 1], recompute);
        let time = step_time_s(&step, mesh, &profile, &FITTED_FRAMEWORK).unwrap();
        let interval = || intervals.interval_s(&step, mesh, &profile, &FITTED_FRAMEWORK).unwrap();
        let [low, high] = interval();
        assert_eq!(interval(), [low, high]);
        assert!(low < time && time < high, "{low} {time} {high}");
        widths.push((high / low).ln());
    }
    // 16× wider than the widest measured model, and across nodes.
    assert!(widths[1] > 1.5 * widths[0] && widths[2] > widths[0], "{widths:?}");
}

#[test]
fn intervals_of_unmeasured_models_and_hardware_are_wider() {
    let width = |profile: &Profile, layers: u64| {
        let step = gpt_step(gpt(layers, 2048), [16, 1024, 2], StepRecompute::None);
        interval_width(&step, Mesh { tensor: 2, pipeline: 1, data: 1, context: 1 }, profile)
    };
    let a100 = preset("a100-80gb-8").unwrap();
    let own = width(&a100, 20);
    assert!(width(&a100, 21) > 1.02 * own, "{own} {}", width(&a100, 21));
    let (mut other_name, mut other_bandwidth) = (a100.file().clone(), a100.file().clone());
    other_name.name = "a100-elsewhere".into();
    other_bandwidth.device.memory_bandwidth_bytes_per_s *= 1.5;
    let profiles = [other_name, other_bandwidth].map(|file| file.resolve().unwrap());
    for other in profiles.into_iter().chain([preset("h100-sxm").unwrap()]) {
        let other = width(&other, 20);
        assert!(other > 1.3 * own, "{own} {other}");
    }
}

/// Measurements within a node do not include the network. The residuals by model include every row.
#[test]
fn intervals_of_models_not_measured_across_nodes_are_wider() {
    let intervals = built_in_interval_model().unwrap();
    assert_eq!(
        [&intervals.by_row, &intervals.by_model].map(|fit| fit.across_nodes.len()),
        [30, 30]
    );
    let profile = preset("a100-80gb-8-4nic").unwrap();
    let width = |layers: u64, hidden: u64, heads: u64| {
        let gpt = GptModel { heads, ..gpt(layers, hidden) };
        let step = gpt_step(gpt, [64, 2048, 1], StepRecompute::Block);
        interval_width(&step, Mesh { tensor: 8, pipeline: 1, data: 8, context: 1 }, &profile)
    };
    // The model of 3.6 B parameters was measured across nodes, that of width 2048 within a node only.
    let (measured, within_a_node, unmeasured) =
        (width(30, 3072, 32), width(24, 2048, 16), width(29, 3072, 32));
    assert!(
        unmeasured > 1.02 * measured && within_a_node > 1.02 * measured,
        "{measured} {within_a_node} {unmeasured}"
    );
}

/// No row within a node recomputes, and none of the fit has sequence parallelism or interleaved stages.
#[test]
fn intervals_of_unmeasured_execution_are_wider() {
    let profile = preset("a100-80gb-8").unwrap();
    let step = |recompute| gpt_step(gpt(20, 2048), [16, 1024, 2], recompute);
    let mesh = Mesh { tensor: 2, pipeline: 2, data: 1, context: 1 };
    let width = |step: &TrainingStep| interval_width(step, mesh, &profile);
    let measured = step(StepRecompute::None);
    for unmeasured in [
        step(StepRecompute::Block),
        step(StepRecompute::Selective),
        sequence_parallel(&measured),
        TrainingStep { interleaving: 2, ..measured.clone() },
    ] {
        let (measured, wider) = (width(&measured), width(&unmeasured));
        assert!(wider > 1.1 * measured, "{unmeasured:?}: {measured} {wider}");
    }
}

#[test]
fn sequence_parallelism_needs_a_tensor_axis() {
    let profile = preset("a100-80gb-8").unwrap();
    let step = gpt_step(gpt(24, 2048), [16, 2048, 4], StepRecompute::Block);
    let times = |tensor| {
        let mesh = Mesh { tensor, pipeline: 2, data: 1, context: 1 };
        [&step, &sequence_parallel(&step)].map(|step| time_s(step, mesh, &profile))
    };
    let [replicated, sharded] = times(1);
    assert_eq!(replicated, sharded);
    let [replicated, sharded] = times(4);
    assert!(sharded < 0.97 * replicated, "{sharded} {replicated}");
}

/// Bytes of element-wise operators, and bytes that collectives send by rings of `devices` devices.
fn traffic(operators: &OperatorList, devices: u64) -> [u64; 2] {
    let (mut elementwise, mut sent) = (0, 0);
    let overlapped = operators.overlapped.iter().map(|overlapped| &overlapped.collective);
    for kernel in operators.kernels.iter().chain(overlapped) {
        match kernel {
            Kernel::Fused(fused) => elementwise += fused.traffic.0,
            Kernel::Collective(collective) => {
                let rounds = if collective.kind == CollectiveKind::AllReduce { 2 } else { 1 };
                sent += rounds * collective.payload.0 / devices * (devices - 1);
            }
            _ => {}
        }
    }
    [elementwise, sent]
}

/// All-gathers and reduce-scatters send what the all-reduces send; operators of the residual stream have a t-th of the
/// bytes.
#[test]
fn sequence_parallelism_shards_the_residual_stream() {
    for tensor in [2, 8] {
        let shape = |residual| MicrobatchShape {
            gpt: gpt(24, 2048),
            mesh: Mesh { tensor, pipeline: 1, data: 1, context: 1 },
            sequences: 4,
            length: 1024,
            residual,
        };
        let [replicated, sharded] =
            [ResidualStream::Replicated, ResidualStream::Sharded].map(shape);
        let stream = 4 * 1024 * 2048;
        let saved = |bytes: u64| bytes * stream / tensor * (tensor - 1);
        // The backward pass gathers two inputs again for the gradients of weights.
        for (of_replicated, of_sharded, bytes, gathers) in [
            (replicated.block_forward(), sharded.block_forward(), 2 * (4 + 7), 0),
            (replicated.block_backward(), sharded.block_backward(), 2 * (10 + 7 + 6), 2),
        ] {
            let [elementwise, sent] = traffic(&of_replicated, tensor);
            let expected = [elementwise - saved(bytes), sent + gathers * saved(2)];
            assert_eq!(traffic(&of_sharded, tensor), expected);
        }
        assert_eq!(sharded.block_forward().overlapped.len(), 0);
        for (backward, overlapped) in
            [(replicated.block_backward(), 2), (sharded.block_backward(), 4)]
        {
            assert_eq!(backward.overlapped.len(), overlapped);
            for overlapped in &backward.overlapped {
                assert!(backward.kernels.contains(&overlapped.gemm), "{overlapped:?}");
            }
        }
    }
}

/// Over links so slow that collectives take all time, a block has 8 passes over a ring, or 10 with the all-gathers for
/// weight gradients. GEMMs hide these over the links of the preset.
#[test]
fn gathers_for_weight_gradients_cost_the_time_beyond_their_gemm() {
    let ratio = |profile: &Profile| {
        let step = gpt_step(gpt(96, 8192), [4, 2048, 4], StepRecompute::None);
        let mesh = Mesh { tensor: 8, pipeline: 1, data: 1, context: 1 };
        time_s(&sequence_parallel(&step), mesh, profile) / time_s(&step, mesh, profile)
    };
    let preset = preset("a100-80gb-8").unwrap();
    let mut slow = preset.file().clone();
    slow.name = "slow-links".into();
    slow.links.intra_node.bandwidth_bytes_per_s *= 1e-4;
    let (of_preset, of_slow) = (ratio(&preset), ratio(&slow.resolve().unwrap()));
    assert!(of_preset < 1.0, "{of_preset}");
    assert!((of_slow / 1.25 - 1.0).abs() < 0.02, "{of_slow}");
}

/// Attention's core costs less than a block, which contains it.
#[test]
fn selective_recomputation_costs_less_than_that_of_blocks() {
    let profile = preset("a100-80gb-8").unwrap();
    // In the second shape a device has 2 score matrices, for which there is no fused softmax.
    for (tensor, micro_batch) in [(4, 1), (8, 1), (2, 4)] {
        let mesh = Mesh { tensor, pipeline: 1, data: 1, context: 1 };
        let of = |recompute| gpt_step(gpt(24, 4096), [8, 2048, micro_batch], recompute);
        let steps = [StepRecompute::None, StepRecompute::Selective, StepRecompute::Block].map(of);
        for steps in [steps.each_ref().map(sequence_parallel), steps] {
            let [none, selective, block] =
                steps.each_ref().map(|step| time_s(step, mesh, &profile));
            assert!(
                1.02 * none < selective && 1.05 * selective < block,
                "{none} {selective} {block}"
            );
            assert!(block < 1.4 * none, "{none} {block}");
        }
    }
}

/// With S stages and v chunks, a step of S microbatches waits (S − 1)·(f + b)/v. Further microbatches take f + b each.
#[test]
fn interleaving_shortens_the_bubble() {
    let profile = preset("a100-80gb-8").unwrap();
    let mesh = Mesh { tensor: 2, pipeline: 4, data: 1, context: 1 };
    // A small vocabulary, so that the stages are equal.
    let model = GptModel { vocabulary: 512, ..gpt(96, 4096) };
    let time = |microbatches: u64, interleaving: u64| {
        let step = gpt_step(model, [4 * microbatches, 2048, 4], StepRecompute::None);
        time_s(&TrainingStep { interleaving, ..step }, mesh, &profile)
    };
    let bubble = |interleaving: u64| {
        let microbatch = (time(8, interleaving) - time(4, interleaving)) / 4.0;
        let bubble = time(4, interleaving) - FITTED_FRAMEWORK.fixed_s - 4.0 * microbatch;
        (bubble / microbatch, microbatch)
    };
    let (plain, microbatch) = bubble(1);
    assert!((plain / 3.0 - 1.0).abs() < 0.03, "{plain}");
    for chunks in [2, 3, 6] {
        let (interleaved, of_chunks) = bubble(chunks);
        assert!((plain / interleaved / chunks as f64 - 1.0).abs() < 0.05, "{plain} {interleaved}");
        // Each chunk has its transfers.
        assert!((1.0..1.05).contains(&(of_chunks / microbatch)), "{of_chunks} {microbatch}");
        assert!(time(4, chunks) < time(4, 1));
    }
}
