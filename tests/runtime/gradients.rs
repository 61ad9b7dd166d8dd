//! Loss and gradients of one step under every rule of a request, compared with the reference interpreter.

use std::collections::BTreeMap;

use narrows_plan::model::Model;
use narrows_plan::strategy::{NormRule, Recompute, Rules, WeightRule};
use narrows_plan::{Mesh, Zero};
use narrows_planner::{GroupingRule, Request};
use narrows_reference::{Parameters, Reference};
use narrows_runtime::session::{StepInput, TensorKind};

use super::small_models::{self, Tokens, max_relative_error, mesh, model, request};

const SEED: u64 = 5;

/// Relative tolerance of the loss, and of each gradient in norm.
const TOLERANCE: f64 = 1e-5;

/// Largest errors over several plans.
#[derive(Default)]
struct LargestErrors {
    plans: usize,
    loss: f64,
    gradient: f64,
}

/// A step of a model by the reference interpreter, in f64.
struct ReferenceGradients {
    model: Model,
    tokens: Tokens,
    loss: f64,
    gradients: Parameters<f64>,
}

impl ReferenceGradients {
    fn new(model: Model) -> ReferenceGradients {
        let tokens = Tokens::of_step(1);
        let initial = Parameters::<f64>::initial(&model, SEED);
        let reference = Reference::new(&model, initial).expect("initial weights fit");
        let (loss, gradients) = reference.loss_and_gradients(&[tokens.batch()]).expect("a step");
        ReferenceGradients { model, tokens, loss, gradients }
    }

    /// Runs the fastest plan of a request and compares it. `false` without a plan.
    fn check(&self, request: &Request, case: &str, largest: &mut LargestErrors) -> bool {
        let Some(plan) = small_models::plan(request) else { return false };
        let mut session = small_models::session(&plan, &self.model, SEED);
        let input = StepInput { tokens: &self.tokens.inputs, targets: &self.tokens.targets };
        let result =
            session.compute_gradients(input).unwrap_or_else(|error| panic!("{case}: {error}"));
        let loss = (result.loss - self.loss).abs() / self.loss;
        assert!(loss < TOLERANCE, "{case}: loss {} for {}", result.loss, self.loss);
        let (gradient, name) = max_relative_error(
            &session.local_tensors(TensorKind::Gradients).unwrap(),
            &self.gradients,
        );
        assert!(gradient < TOLERANCE, "{case}: gradient of {name} has error {gradient:e}");
        largest.plans += 1;
        largest.loss = largest.loss.max(loss);
        largest.gradient = largest.gradient.max(gradient);
        true
    }
}

fn models() -> Vec<Model> {
    let blocks = |product: &str, activation: &str, crossing: &str| {
        format!(
            r#"{{"product": "{product}",
            "all": {{"rank": 16, "activation": "{activation}"{crossing}}}}}"#
        )
    };
    let released = r#", "crossing": {"form": "released", "gate": {"tensor": {"a": 4, "b": 4}}}"#;
    let paper = r#", "crossing": {"form": "paper", "gate": "dense"}"#;
    vec![
        small_models::cola(),
        model("svd", false, 4, 3, &blocks("swiglu", "identity", "")),
        model("shared-kv", false, 2, 3, &blocks("plain", "silu", "")),
        model("lax-released", true, 8, 3, &blocks("plain", "silu", released)),
        model("lax-paper", false, 8, 3, &blocks("plain", "silu", paper)),
        small_models::dense(),
    ]
}

/// The models that differ most.
fn distinct_models() -> Vec<Model> {
    let names = ["tiny-llama", "shared-kv", "lax-released"];
    models().into_iter().filter(|model| names.contains(&model.name.as_str())).collect()
}

/// The default rules, and each norm, grouping and recompute rule by itself.
fn variations() -> Vec<(String, Rules, GroupingRule)> {
    let auto = (Rules::ALL, GroupingRule::Auto);
    let mut variations = vec![("no rule".to_owned(), auto.0, auto.1)];
    for norm in [NormRule::Sync, NormRule::Online] {
        variations.push((format!("norm {norm:?}"), Rules { norm, ..auto.0 }, auto.1));
    }
    for grouping in [GroupingRule::On, GroupingRule::Off] {
        variations.push((format!("grouping {grouping:?}"), auto.0, grouping));
    }
    for recompute in [Recompute::None, Recompute::Latents, Recompute::Block] {
        variations.push((
            format!("recompute {recompute:?}"),
            Rules { recompute, ..auto.0 },
            auto.1,
        ));
    }
    variations
}

/// Checks the plans of all variations on a mesh.
fn check_mesh(models: Vec<Model>, mesh: Mesh, micro_batch: u64, weights: WeightRule) {
    check_variations(models, &variations(), mesh, micro_batch, weights);
}

fn check_variations(
    models: Vec<Model>,
    variations: &[(String, Rules, GroupingRule)],
    mesh: Mesh,
    micro_batch: u64,
    weights: WeightRule,
) {
    let mut unplanned: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut largest = LargestErrors::default();
    for model in models {
        let step = ReferenceGradients::new(model);
        for baseline in small_models::baselines(&step.model) {
            for (name, rules, grouping) in variations {
                let case = format!("{} {} {name}, {mesh}", step.model.name, baseline.name());
                let request = Request {
                    rules: Rules { baseline, weights, ..*rules },
                    grouping: *grouping,
                    micro_batch: Some(micro_batch),
                    zero: Some(if mesh.data > 1 { Zero::One } else { Zero::Off }),
                    ..request(&step.model, mesh)
                };
                if !step.check(&request, &case, &mut largest) {
                    unplanned.entry(baseline.name().into()).or_default().push(case);
                }
            }
        }
    }
    let LargestErrors { plans, loss, gradient } = largest;
    println!("{mesh}: {plans} plans, largest errors: loss {loss:.1e}, gradients {gradient:.1e}");
    assert!(unplanned.is_empty(), "no plans for {unplanned:#?}");
}

#[test]
fn every_rule_on_two_devices() {
    check_mesh(distinct_models(), mesh(2, 1, 1), 4, WeightRule::Any);
}

#[test]
fn every_model_on_two_devices() {
    check_variations(models(), &variations()[..1], mesh(2, 1, 1), 4, WeightRule::Any);
}

#[test]
#[ignore = "second level: every rule for every model"]
fn every_rule_for_every_model_on_two_devices() {
    check_mesh(models(), mesh(2, 1, 1), 4, WeightRule::Any);
}

/// The model with the most ops.
fn largest_model() -> Vec<Model> {
    models().into_iter().filter(|model| model.name == "lax-released").collect()
}

#[test]
fn every_rule_in_two_stages() {
    check_mesh(largest_model(), mesh(2, 2, 1), 2, WeightRule::Sharded);
}

#[test]
#[ignore = "second level: eight devices"]
fn every_rule_on_four_in_two_stages() {
    check_mesh(distinct_models(), mesh(4, 2, 1), 2, WeightRule::Sharded);
}

#[test]
fn every_rule_on_two_replicas_of_two() {
    check_mesh(largest_model(), mesh(2, 1, 2), 2, WeightRule::Sharded);
}

#[test]
#[ignore = "second level: three models"]
fn every_rule_for_distinct_models_on_two_replicas_of_two() {
    check_mesh(distinct_models(), mesh(2, 1, 2), 2, WeightRule::Sharded);
}
