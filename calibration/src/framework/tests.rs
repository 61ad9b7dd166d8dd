//! Prices of decoders under the built-in tables.

use narrows_cost_model::profile::preset;
use narrows_plan::strategy::{Baseline, NormRule, WeightRule};
use narrows_plan::{Mesh, Workload, Zero};

use super::{FrameworkTable, decoder_step_time_s, decoder_term_shares};
use crate::measurements::{
    DecoderModel, EmbeddingKind, MlpKind, StepLinears, StepRecompute, TrainedModel, TrainingStep,
};

const MODEL: DecoderModel = DecoderModel {
    layers: 24,
    hidden: 2048,
    heads: 16,
    kv_heads: 16,
    d_ff: 5504,
    mlp: MlpKind::Gated,
    vocabulary: 50_304,
    embedding: EmbeddingKind::Tied,
};
const ONE_NODE: Mesh = Mesh { tensor: 1, pipeline: 1, data: 8, context: 1 };

/// A step of global batch, sequence length and microbatch `batch`, without ZeRO.
pub(super) fn full_rank_step(
    model: TrainedModel,
    batch: [u64; 3],
    recompute: StepRecompute,
) -> TrainingStep {
    let [global_batch, sequence_length, micro_batch] = batch;
    TrainingStep {
        model,
        workload: Workload { global_batch, sequence_length, micro_batch },
        strategy: Baseline::FullrankTp,
        recompute,
        framework: None,
        interleaving: 1,
        norm: NormRule::Auto,
        weights: WeightRule::Any,
        zero: Zero::Off,
        overlap_tensor_collectives: false,
        linears: StepLinears::Any,
        accumulate_grad_in_fp32: None,
    }
}

fn step(recompute: StepRecompute, micro_batch: u64) -> TrainingStep {
    let model = TrainedModel::Decoder(MODEL);
    TrainingStep { zero: Zero::Three, ..full_rank_step(model, [64, 2048, micro_batch], recompute) }
}

fn time_s(table: &str, model: DecoderModel, step: &TrainingStep, mesh: Mesh) -> f64 {
    let table = FrameworkTable::built_in(table).unwrap();
    decoder_step_time_s(&table, model, step, mesh, &preset("a100-80gb-8").unwrap())
}

#[test]
fn every_table_has_the_name_of_its_file() {
    for name in FrameworkTable::names() {
        assert_eq!(FrameworkTable::built_in(name).unwrap().name, name);
    }
    let unknown = FrameworkTable::built_in("fspd").unwrap_err().to_string();
    assert!(unknown.contains("fspd") && unknown.contains("torchtitan"), "{unknown}");
}

#[test]
fn recomputation_costs_what_it_repeats() {
    for table in FrameworkTable::names() {
        let time = |recompute| time_s(table, MODEL, &step(recompute, 8), ONE_NODE);
        let none = time(StepRecompute::None);
        let partial = [StepRecompute::SelectiveOps, StepRecompute::SelectiveLayers].map(time);
        let block = time(StepRecompute::Block);
        for partial in partial {
            assert!(1.03 * none < partial && partial < block, "{table}: {none} {partial} {block}");
        }
        assert!(block < 1.4 * none, "{table}: {none} {block}");
    }
}

#[test]
fn fused_passes_and_aligned_vocabularies_are_faster() {
    let step = step(StepRecompute::None, 8);
    let [eager, compiled] =
        ["torchtitan", "torchtitan-compiled"].map(|table| time_s(table, MODEL, &step, ONE_NODE));
    assert!(compiled < 0.98 * eager, "{compiled} {eager}");
    let unaligned = DecoderModel { vocabulary: 50_303, ..MODEL };
    let [aligned, unaligned] =
        [MODEL, unaligned].map(|model| time_s("nanotron", model, &step, ONE_NODE));
    assert!(aligned < 0.9 * unaligned, "{aligned} {unaligned}");
}

/// Microbatches that are too small for the device are bound by the host.
#[test]
fn the_host_bounds_small_microbatches() {
    let small = DecoderModel { hidden: 256, heads: 4, kv_heads: 4, d_ff: 688, ..MODEL };
    let times = [1, 2].map(|micro_batch| {
        let mut step = step(StepRecompute::None, micro_batch);
        step.workload.sequence_length = 128;
        time_s("fsdp", small, &step, ONE_NODE)
    });
    assert!(times[0] > 1.8 * times[1], "{times:?}");
}

#[test]
fn gathers_of_weights_are_hidden_where_computation_is_long() {
    let time = |micro_batch, zero| {
        let step = TrainingStep { zero, ..step(StepRecompute::None, micro_batch) };
        time_s("fsdp", MODEL, &step, ONE_NODE)
    };
    let added = |micro_batch| time(micro_batch, Zero::Three) / time(micro_batch, Zero::Two) - 1.0;
    assert!(added(8) < 0.02 && added(1) > added(8), "{} {}", added(8), added(1));
}

#[test]
fn stages_divide_the_work_and_wait_for_each_other() {
    let mut step = step(StepRecompute::None, 1);
    step.zero = Zero::One;
    let whole = Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 };
    let stages = Mesh { pipeline: 4, ..whole };
    let [whole, stages] = [whole, stages].map(|mesh| time_s("nanotron", MODEL, &step, mesh));
    assert!(stages > whole / 4.0 && stages < whole / 2.5, "{stages} {whole}");
}

#[test]
fn the_shares_of_terms_add_up_where_the_device_is_busy() {
    let profile = preset("a100-80gb-8").unwrap();
    let table = FrameworkTable::built_in("fsdp").unwrap();
    let shares =
        decoder_term_shares(&table, MODEL, &step(StepRecompute::None, 8), ONE_NODE, &profile);
    let sum: f64 = shares.iter().map(|(_, share)| share).sum();
    assert!((sum - 1.0).abs() < 0.03, "{shares:?}");
}
