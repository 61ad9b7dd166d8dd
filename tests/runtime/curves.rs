//! Training under any plan is the same training.
//!
//! Every curve is held against that of the reference interpreter in f64, 50 steps of AdamW with
//! warm-up, cosine decay and clipping. Plans of all strategies are run over tensor axis 1, 2, 4,
//! pipeline 1, 2 and data axis 1, 2, the data axis with and without ZeRO-1.

use std::sync::OnceLock;

use narrows_plan::Mesh;
use narrows_plan::Plan;
use narrows_plan::model::Model;
use narrows_plan::{
    Zero,
    strategy::{Baseline, Rules, Strategy, WeightRule},
};
use narrows_planner::Request;
use narrows_reference::{Parameters, Reference};
use narrows_runtime::Optimizer;
use narrows_runtime::session::{StepInput, TensorKind};

use super::subject::{self, Tokens, furthest, mesh, request};

const STEPS: u64 = 50;
const SEED: u64 = 3;

/// What the curves may be apart by, relatively, at every step.
const LOSS: f64 = 1e-4;
/// What a weight may be apart by at the end, in norm.
const WEIGHTS: f64 = 1e-4;

/// Clips some steps of both models, and leaves others.
fn optimizer(model: &Model) -> Optimizer {
    let clip_norm = if model.is_low_rank() { 2.3 } else { 1.5 };
    Optimizer { clip_norm, ..Optimizer::new(3e-3, 5, STEPS) }
}

/// What the reference did.
struct Expected {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Parameters<f64>,
}

fn expected(model: &Model) -> Expected {
    let initial = Parameters::<f64>::initial(model, SEED);
    let mut reference = Reference::new(model, initial).expect("initial weights fit");
    let (mut losses, mut norms) = (vec![], vec![]);
    for step in 0..STEPS {
        let tokens = Tokens::of_step(step);
        let done = reference.step(&optimizer(model), &[tokens.batch()]).expect("a step");
        losses.push(done.loss);
        norms.push(done.gradient_norm);
    }
    Expected { losses, norms, weights: reference.parameters().clone() }
}

/// How far a plan's training is from what was expected.
#[derive(Debug)]
struct Apart {
    loss: f64,
    weights: (f64, String),
}

fn train(model: &Model, plan: &Plan, expected: &Expected, what: &str) -> Apart {
    let mut session = subject::session(plan, model, SEED);
    let mut loss = 0.0_f64;
    for step in 0..STEPS {
        let tokens = Tokens::of_step(step);
        let input = StepInput { tokens: &tokens.inputs, targets: &tokens.targets };
        let done = session
            .step(&optimizer(model), input)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let wanted = expected.losses[step as usize];
        let off = (done.loss - wanted).abs() / wanted;
        assert!(off < LOSS, "{what}, step {step}: loss {} for {wanted}", done.loss);
        let norm = expected.norms[step as usize];
        let off_norm = (done.gradient_norm - norm).abs() / norm;
        assert!(off_norm < 10.0 * LOSS, "{what}, step {step}: norm {}", done.gradient_norm);
        loss = loss.max(off);
    }
    let weights = furthest(&session.local_tensors(TensorKind::Weights).unwrap(), &expected.weights);
    assert!(weights.0 < WEIGHTS, "{what}: {} is off by {:e}", weights.1, weights.0);
    Apart { loss, weights }
}

/// Strategy, and which weights must be sharded.
type Strategies = &'static [(Baseline, WeightRule)];

/// Trains under every strategy on every mesh with this many devices on the tensor axis.
fn hold(model: &Model, expected: &Expected, strategies: Strategies, tensor: u64) {
    learns(expected, optimizer(model).clip_norm);
    for (pipeline, data) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        let mesh = mesh(tensor, pipeline, data);
        for &(baseline, weights) in strategies {
            let what = format!("{} {} weights {weights:?}, {mesh}", model.name, baseline.name());
            let plan = subject::plan(&asked(model, mesh, baseline, weights))
                .unwrap_or_else(|| panic!("no plan for {what}"));
            if tensor > 1 {
                is_itself(&plan, baseline);
            }
            let apart = train(model, &plan, expected, &what);
            println!(
                "{what}: loss off by {:.1e}, {} by {:.1e}",
                apart.loss, apart.weights.1, apart.weights.0
            );
        }
    }
}

/// Curves that are equal because their plans are would prove nothing: this is what tells a baseline
/// from the others.
fn is_itself(plan: &Plan, baseline: Baseline) {
    use Strategy::{Column, Feature, Heads, Replicate, Row};
    let marks: &[(&str, Strategy)] = match baseline {
        Baseline::Auto => &[],
        Baseline::FullrankTp => &[("attention", Heads), ("o", Row), ("product", Feature)],
        Baseline::VanillaTp => &[("attention", Heads), ("down.a", Column), ("product", Feature)],
        Baseline::VanillaTpPublished => {
            &[("attention", Replicate), ("down.a", Column), ("product", Replicate)]
        }
        Baseline::Btp => &[("attention", Heads), ("down.a", Row), ("add1", Feature)],
    };
    for block in plan.blocks.values() {
        for (op, strategy) in marks {
            assert_eq!(block.ops.get(*op), Some(strategy), "{op} of {}", baseline.name());
        }
    }
}

fn asked(model: &Model, mesh: Mesh, baseline: Baseline, weights: WeightRule) -> Request {
    Request {
        rules: Rules { baseline, weights, ..Rules::ALL },
        // Several microbatches for each stage, so that 1F1B has something to alternate.
        micro_batch: (mesh.pipeline > 1).then_some(2),
        zero: Some(if mesh.data > 1 && mesh.pipeline == 1 { Zero::One } else { Zero::Off }),
        ..request(model, mesh)
    }
}

/// A curve that proves something: the loss falls, and only some steps are clipped.
fn learns(expected: &Expected, clip_norm: f64) {
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
    (Baseline::Auto, WeightRule::Any),
    (Baseline::Auto, WeightRule::Sharded),
];

fn low_rank(strategies: Strategies, tensor: u64) {
    static EXPECTED: OnceLock<Expected> = OnceLock::new();
    let model = subject::cola();
    hold(&model, EXPECTED.get_or_init(|| expected(&model)), strategies, tensor);
}

fn dense(strategies: Strategies, tensor: u64) {
    static EXPECTED: OnceLock<Expected> = OnceLock::new();
    let model = subject::dense();
    hold(&model, EXPECTED.get_or_init(|| expected(&model)), strategies, tensor);
}

#[test]
fn low_rank_without_a_tensor_axis() {
    low_rank(LOW_RANK, 1);
}

#[test]
fn low_rank_on_two() {
    low_rank(LOW_RANK, 2);
}

#[test]
fn low_rank_on_four() {
    low_rank(LOW_RANK, 4);
}

#[test]
fn dense_without_a_tensor_axis() {
    dense(DENSE, 1);
}

#[test]
fn dense_on_two() {
    dense(DENSE, 2);
}

#[test]
fn dense_on_four() {
    dense(DENSE, 4);
}
