//! Prices of GPT steps and their intervals.

use narrows_cost_model::profile::{Profile, preset};
use narrows_plan::strategy::{Baseline, NormRule, WeightRule};
use narrows_plan::{Mesh, Workload, Zero};

use super::interval::built_in_interval_model;
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
        interleaving: 1,
        norm: NormRule::Auto,
        weights: WeightRule::Any,
        zero: Zero::Off,
        overlap_tensor_collectives: false,
    }
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
    for (tensor, data, hidden) in [(2, 1, 2048), (2, 1, 32_768), (8, 8, 2048)] {
        let mesh = Mesh { tensor, pipeline: 1, data };
        let step = gpt_step(gpt(24, hidden), [64, 2048, 1], StepRecompute::Block);
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
        interval_width(&step, Mesh { tensor: 2, pipeline: 1, data: 1 }, profile)
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
        interval_width(&step, Mesh { tensor: 8, pipeline: 1, data: 8 }, &profile)
    };
    // The model of 3.6 B parameters was measured across nodes, that of width 2048 within a node only.
    let (measured, within_a_node, unmeasured) =
        (width(30, 3072, 32), width(24, 2048, 16), width(29, 3072, 32));
    assert!(
        unmeasured > 1.02 * measured && within_a_node > 1.02 * measured,
        "{measured} {within_a_node} {unmeasured}"
    );
}

/// No row within a node recomputes.
#[test]
fn intervals_of_unmeasured_recomputation_are_wider() {
    let profile = preset("a100-80gb-8").unwrap();
    let width = |recompute| {
        let step = gpt_step(gpt(20, 2048), [16, 1024, 2], recompute);
        interval_width(&step, Mesh { tensor: 2, pipeline: 1, data: 1 }, &profile)
    };
    let (measured, unmeasured) = (width(StepRecompute::None), width(StepRecompute::Block));
    assert!(unmeasured > 1.1 * measured, "{measured} {unmeasured}");
}
