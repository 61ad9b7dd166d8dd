//! Training has the same loss curve under every plan.
//!
//! Every curve is compared with that of the reference interpreter in f64, over 50 steps of AdamW with
//! warm-up, cosine decay and clipping. Plans of all strategies run on tensor axes of 1, 2 and 4,
//! pipelines of 1 and 2, and data axes of 1 and 2, the data axis with and without ZeRO-1.

use std::sync::OnceLock;

use narrows_plan::model::Model;
use narrows_plan::strategy::{Baseline, Rules, Strategy, WeightRule};
use narrows_plan::{Mesh, Plan, Zero};
use narrows_planner::Request;
use narrows_reference::{Parameters, Reference};
use narrows_runtime::Optimizer;
use narrows_runtime::session::{StepInput, TensorKind};

use super::small_models::{self, Tokens, max_relative_error, mesh, request};

const STEPS: u64 = 50;
const SEED: u64 = 3;

/// Relative tolerance of the loss at every step.
const LOSS_TOLERANCE: f64 = 1e-4;
/// Relative tolerance of each weight tensor at the end, in norm.
const WEIGHT_TOLERANCE: f64 = 1e-4;

/// An optimizer that clips some steps of both models, but not all.
fn optimizer(model: &Model) -> Optimizer {
    let clip_norm = if model.is_low_rank() { 2.3 } else { 1.5 };
    Optimizer { clip_norm, ..Optimizer::new(3e-3, 5, STEPS) }
}

/// The training of the reference interpreter.
struct ReferenceRun {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Parameters<f64>,
}

fn reference_run(model: &Model) -> ReferenceRun {
    let initial = Parameters::<f64>::initial(model, SEED);
    let mut reference = Reference::new(model, initial).expect("initial weights fit");
    let (mut losses, mut norms) = (vec![], vec![]);
    for index in 0..STEPS {
        let tokens = Tokens::of_step(index);
        let step = reference.step(&optimizer(model), &[tokens.batch()]).expect("a step");
        losses.push(step.loss);
        norms.push(step.gradient_norm);
    }
    ReferenceRun { losses, norms, weights: reference.parameters().clone() }
}

/// Largest errors of a plan's training.
#[derive(Debug)]
struct TrainingErrors {
    loss: f64,
    weights: (f64, String),
}

fn train(model: &Model, plan: &Plan, expected: &ReferenceRun, case: &str) -> TrainingErrors {
    let mut session = small_models::session(plan, model, SEED);
    let mut loss = 0.0_f64;
    for step in 0..STEPS {
        let tokens = Tokens::of_step(step);
        let input = StepInput { tokens: &tokens.inputs, targets: &tokens.targets };
        let trained = session
            .step(&optimizer(model), input)
            .unwrap_or_else(|error| panic!("{case}: {error}"));
        let reference_loss = expected.losses[step as usize];
        let error = (trained.loss - reference_loss).abs() / reference_loss;
        assert!(
            error < LOSS_TOLERANCE,
            "{case}, step {step}: loss {} for {reference_loss}",
            trained.loss
        );
        let norm = expected.norms[step as usize];
        let norm_error = (trained.gradient_norm - norm).abs() / norm;
        assert!(
            norm_error < 10.0 * LOSS_TOLERANCE,
            "{case}, step {step}: norm {}",
            trained.gradient_norm
        );
        loss = loss.max(error);
    }
    let weights =
        max_relative_error(&session.local_tensors(TensorKind::Weights).unwrap(), &expected.weights);
    assert!(weights.0 < WEIGHT_TOLERANCE, "{case}: {} is off by {:e}", weights.1, weights.0);
    TrainingErrors { loss, weights }
}

/// Baselines with the rule for their weights.
type Strategies = &'static [(Baseline, WeightRule)];

/// Numbers of devices on the pipeline and on the data axis.
type OuterAxes = &'static [(u64, u64)];

const STAGES_OR_REPLICAS: OuterAxes = &[(1, 2), (2, 1)];
const NEITHER_OR_BOTH: OuterAxes = &[(1, 1), (2, 2)];
const ALL_OUTER_AXES: OuterAxes = &[(1, 1), (1, 2), (2, 1), (2, 2)];

/// Trains under every strategy on meshes with this many devices on the tensor axis.
fn check_training(
    model: &Model,
    expected: &ReferenceRun,
    strategies: Strategies,
    tensor: u64,
    outer_axes: OuterAxes,
) {
    check_reference(expected, optimizer(model).clip_norm);
    for &(pipeline, data) in outer_axes {
        let mesh = mesh(tensor, pipeline, data);
        for &(baseline, weights) in strategies {
            let case = format!("{} {} weights {weights:?}, {mesh}", model.name, baseline.name());
            let plan = small_models::plan(&plan_request(model, mesh, baseline, weights))
                .unwrap_or_else(|| panic!("no plan for {case}"));
            if tensor > 1 {
                check_strategy(&plan, baseline);
            }
            let errors = train(model, &plan, expected, &case);
            println!(
                "{case}: loss error {:.1e}, {} {:.1e}",
                errors.loss, errors.weights.1, errors.weights.0
            );
        }
    }
}

/// Checks that a plan has the strategies that distinguish its baseline, so that the compared plans differ.
fn check_strategy(plan: &Plan, baseline: Baseline) {
    use Strategy::{Column, Feature, Heads, Replicate, Row, Token};
    let distinctive: &[(&str, Strategy)] = match baseline {
        Baseline::Auto => &[],
        Baseline::FullrankTp => &[("attention", Heads), ("o", Row), ("product", Feature)],
        Baseline::MegatronSp => &[("attention", Heads), ("o", Row), ("add1", Token)],
        Baseline::VanillaTp => &[("attention", Heads), ("down.a", Column), ("product", Feature)],
        Baseline::VanillaTpPublished => {
            &[("attention", Replicate), ("down.a", Column), ("product", Replicate)]
        }
        Baseline::Btp => &[("attention", Heads), ("down.a", Row), ("add1", Feature)],
    };
    for block in plan.blocks.values() {
        for (op, strategy) in distinctive {
            assert_eq!(block.ops.get(*op), Some(strategy), "{op} of {}", baseline.name());
        }
    }
}

fn plan_request(model: &Model, mesh: Mesh, baseline: Baseline, weights: WeightRule) -> Request {
    Request {
        rules: Rules { baseline, weights, ..Rules::ALL },
        // Several microbatches per stage, so that 1F1B alternates passes.
        micro_batch: (mesh.pipeline > 1).then_some(2),
        zero: Some(if mesh.data > 1 && mesh.pipeline == 1 { Zero::One } else { Zero::Off }),
        ..request(model, mesh)
    }
}

/// Checks that the reference run covers both cases of clipping, and that its loss falls.
fn check_reference(expected: &ReferenceRun, clip_norm: f64) {
    let (first, last) = (expected.losses[0], expected.losses[STEPS as usize - 1]);
    assert!(last < 0.8 * first, "from {first} to {last}");
    let clipped = expected.norms.iter().filter(|norm| **norm > clip_norm).count();
    assert!((5..STEPS as usize - 5).contains(&clipped), "{clipped} steps are clipped");
    println!("loss {first} to {last}, {clipped} steps clipped");
}

const LOW_RANK: Strategies = &[
    (Baseline::VanillaTp, WeightRule::Any),
    (Baseline::VanillaTpPublished, WeightRule::Any),
    (Baseline::Btp, WeightRule::Any),
    (Baseline::Auto, WeightRule::Any),
    (Baseline::Auto, WeightRule::Sharded),
];

const DENSE: Strategies = &[
    (Baseline::FullrankTp, WeightRule::Any),
    (Baseline::MegatronSp, WeightRule::Any),
    (Baseline::Auto, WeightRule::Any),
    (Baseline::Auto, WeightRule::Sharded),
];

fn low_rank(tensor: u64, outer_axes: OuterAxes) {
    static REFERENCE: OnceLock<ReferenceRun> = OnceLock::new();
    let model = small_models::cola();
    let expected = REFERENCE.get_or_init(|| reference_run(&model));
    check_training(&model, expected, LOW_RANK, tensor, outer_axes);
}

fn dense(tensor: u64, outer_axes: OuterAxes) {
    static REFERENCE: OnceLock<ReferenceRun> = OnceLock::new();
    let model = small_models::dense();
    let expected = REFERENCE.get_or_init(|| reference_run(&model));
    check_training(&model, expected, DENSE, tensor, outer_axes);
}

#[test]
fn low_rank_plans_without_a_tensor_axis() {
    low_rank(1, STAGES_OR_REPLICAS);
}

#[test]
fn low_rank_plans_on_a_tensor_axis_of_two() {
    low_rank(2, STAGES_OR_REPLICAS);
}

#[test]
#[ignore = "second level: one device, and stages with replicas"]
fn low_rank_plans_on_other_meshes() {
    low_rank(1, NEITHER_OR_BOTH);
    low_rank(2, NEITHER_OR_BOTH);
}

#[test]
#[ignore = "second level: up to 16 devices"]
fn low_rank_plans_on_a_tensor_axis_of_four() {
    low_rank(4, ALL_OUTER_AXES);
}

#[test]
fn dense_plans_without_a_tensor_axis() {
    dense(1, STAGES_OR_REPLICAS);
}

#[test]
fn dense_plans_on_a_tensor_axis_of_two() {
    dense(2, STAGES_OR_REPLICAS);
}

#[test]
#[ignore = "second level: one device, and stages with replicas"]
fn dense_plans_on_other_meshes() {
    dense(1, NEITHER_OR_BOTH);
    dense(2, NEITHER_OR_BOTH);
}

#[test]
#[ignore = "second level: up to 16 devices"]
fn dense_plans_on_a_tensor_axis_of_four() {
    dense(4, ALL_OUTER_AXES);
}
