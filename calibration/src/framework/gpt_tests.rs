//! Prices of GPTs under the tables of Megatron-LM and Megatron-DeepSpeed, and their intervals.

use narrows_cost_model::profile::{Profile, preset};
use narrows_plan::Mesh;
use narrows_plan::kernel::{CollectiveKind, Kernel};
use narrows_plan::strategy::Baseline;

use super::operator::Operator;
use super::shape::DecoderShape;
use super::tests::full_rank_step;
use super::{FrameworkTable, decoder_step_time_s};
use crate::measurements::{GptModel, StepRecompute, TrainedModel, TrainingStep};

/// A GPT of 16 heads.
fn gpt(layers: u64, hidden: u64) -> GptModel {
    GptModel { layers, hidden, heads: 16, vocabulary: 51_200 }
}

/// A step of global batch, sequence length and microbatch `batch`.
pub(super) fn gpt_step(gpt: GptModel, batch: [u64; 3], recompute: StepRecompute) -> TrainingStep {
    full_rank_step(TrainedModel::Gpt(gpt), batch, recompute)
}

/// The same step with sequence parallelism.
fn sequence_parallel(step: &TrainingStep) -> TrainingStep {
    TrainingStep { strategy: Baseline::of_dense_model(true), ..step.clone() }
}

fn time_s(step: &TrainingStep, mesh: Mesh, profile: &Profile) -> f64 {
    let (model, framework) = step.decoder().unwrap();
    let table = FrameworkTable::built_in(framework).unwrap();
    decoder_step_time_s(&table, model, step, mesh, profile)
}

/// Width of the shipped interval of a step, as ln(high / low).
fn interval_width(step: &TrainingStep, mesh: Mesh, profile: &Profile) -> f64 {
    let table = FrameworkTable::built_in(step.decoder().unwrap().1).unwrap();
    let [low, high] = table.errors.of(step, mesh, profile).1;
    assert!(low < 1.0 && high > 1.0, "{low} {high}");
    (high / low).ln()
}

fn tensor_axis(tensor: u64) -> Mesh {
    Mesh { tensor, pipeline: 1, data: 1, context: 1 }
}

/// No row within a node crosses the network, and none of the fit has sequence parallelism or interleaved stages.
#[test]
fn intervals_of_other_hardware_and_execution_are_wider() {
    let a100 = preset("a100-80gb-8").unwrap();
    let step = gpt_step(gpt(20, 2048), [16, 1024, 2], StepRecompute::None);
    let mesh = Mesh { tensor: 2, pipeline: 2, data: 1, context: 1 };
    let own = interval_width(&step, mesh, &a100);
    let mut other_bandwidth = a100.file().clone();
    other_bandwidth.device.memory_bandwidth_bytes_per_s *= 1.5;
    let other_hardware = other_bandwidth.resolve().unwrap();
    let across = Mesh { data: 8, ..mesh };
    for wider in [
        interval_width(&step, mesh, &other_hardware),
        interval_width(&step, across, &a100),
        interval_width(&sequence_parallel(&step), mesh, &a100),
        interval_width(&TrainingStep { interleaving: 2, ..step.clone() }, mesh, &a100),
    ] {
        assert!(wider > 1.3 * own, "{own} {wider}");
    }
}

#[test]
fn sequence_parallelism_needs_a_tensor_axis() {
    let profile = preset("a100-80gb-8").unwrap();
    let step = gpt_step(gpt(24, 2048), [16, 2048, 4], StepRecompute::Block);
    let times = |tensor| {
        let mesh = Mesh { pipeline: 2, ..tensor_axis(tensor) };
        [&step, &sequence_parallel(&step)].map(|step| time_s(step, mesh, &profile))
    };
    let [replicated, sharded] = times(1);
    assert_eq!(replicated, sharded);
    let [replicated, sharded] = times(4);
    assert!(sharded < 0.97 * replicated, "{sharded} {replicated}");
}

/// Bytes of passes over memory, and bytes that collectives send by rings of `devices` devices.
fn traffic(operators: &[Operator], devices: u64) -> [u64; 2] {
    let (mut memory, mut sent) = (0, 0);
    for operator in operators {
        match operator {
            Operator::Kernel(Kernel::Fused(fused)) => memory += fused.traffic.0,
            Operator::Kernel(Kernel::Collective(collective))
            | Operator::Beside { collective, .. } => {
                let rounds = if collective.kind == CollectiveKind::AllReduce { 2 } else { 1 };
                sent += rounds * collective.payload.0 / devices * (devices - 1);
            }
            Operator::Kernel(_) => {}
        }
    }
    [memory, sent]
}

/// All-gathers and reduce-scatters send what the all-reduces send; passes over the residual stream have a t-th of the bytes.
#[test]
fn sequence_parallelism_shards_the_residual_stream() {
    for (name, tensor) in [("megatron", 2), ("megatron", 8), ("megatron-deepspeed", 4)] {
        let table = FrameworkTable::built_in(name).unwrap();
        let (model, _) = gpt_step(gpt(24, 2048), [4, 1024, 4], StepRecompute::None)
            .decoder()
            .map(|(model, name)| (model, name.to_owned()))
            .unwrap();
        let shape = |shards_tokens| DecoderShape {
            table: &table,
            model,
            mesh: tensor_axis(tensor),
            sequences: 4,
            length: 1024,
            shards_tokens,
        };
        let [replicated, sharded] = [false, true].map(shape);
        let stream = 4 * 1024 * 2048;
        let saved = |bytes: u64| bytes * stream / tensor * (tensor - 1);
        // The backward pass gathers two inputs again for the gradients of weights.
        for (of_replicated, of_sharded, bytes, gathers) in [
            (replicated.block_forward(), sharded.block_forward(), 2 * (4 + 7), 0),
            (replicated.block_backward(), sharded.block_backward(), 2 * (10 + 7 + 6), 2),
        ] {
            let [memory, sent] = traffic(&of_replicated, tensor);
            let expected = [memory - saved(bytes), sent + gathers * saved(2)];
            assert_eq!(traffic(&of_sharded, tensor), expected);
        }
        let beside = |operators: Vec<Operator>| {
            let gemms = operators.iter().filter_map(|operator| match operator {
                Operator::Beside { gemm, .. } => Some(Operator::Kernel(Kernel::Gemm(gemm.clone()))),
                Operator::Kernel(_) => None,
            });
            let gemms: Vec<Operator> = gemms.collect();
            assert!(gemms.iter().all(|gemm| operators.contains(gemm)), "{name}: {gemms:?}");
            gemms.len()
        };
        assert_eq!([sharded.block_forward(), replicated.block_backward()].map(beside), [0, 2]);
        assert_eq!(beside(sharded.block_backward()), 4);
    }
}

/// Over links so slow that collectives take all time, a block has 8 passes over a ring, or 10 with the all-gathers for
/// weight gradients. GEMMs hide these over the links of the preset.
#[test]
fn gathers_for_weight_gradients_cost_the_time_beyond_their_gemm() {
    let ratio = |profile: &Profile| {
        let step = gpt_step(gpt(96, 8192), [4, 2048, 4], StepRecompute::None);
        let mesh = tensor_axis(8);
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
        let mesh = tensor_axis(tensor);
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
    let mesh = Mesh { pipeline: 4, ..tensor_axis(2) };
    // A small vocabulary, so that the stages are equal.
    let model = GptModel { vocabulary: 512, ..gpt(96, 4096) };
    let step_s = FrameworkTable::built_in("megatron-deepspeed").unwrap().host.step_s;
    let time = |microbatches: u64, interleaving: u64| {
        let step = gpt_step(model, [4 * microbatches, 2048, 4], StepRecompute::None);
        time_s(&TrainingStep { interleaving, ..step }, mesh, &profile)
    };
    let bubble = |interleaving: u64| {
        let microbatch = (time(8, interleaving) - time(4, interleaving)) / 4.0;
        let bubble = time(4, interleaving) - step_s - 4.0 * microbatch;
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

/// Megatron-LM adds gradients of weights in their GEMMs, where Megatron-DeepSpeed has a pass over memory.
#[test]
fn accumulation_in_gemms_is_faster_than_a_pass() {
    let profile = preset("a100-80gb-8").unwrap();
    let step = gpt_step(gpt(24, 8192), [64, 2048, 1], StepRecompute::None);
    let lm = TrainingStep { framework: Some("megatron".into()), ..step.clone() };
    let [deepspeed, lm] = [step, lm].map(|step| time_s(&step, tensor_axis(8), &profile));
    assert!(lm < 0.98 * deepspeed, "{lm} {deepspeed}");
}
