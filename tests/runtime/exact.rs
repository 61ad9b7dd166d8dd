//! One step under every rule the planner can be given: loss and every gradient are the reference's.

use std::collections::BTreeMap;

use narrows_plan::Mesh;
use narrows_plan::model::Model;
use narrows_plan::{
    Zero,
    strategy::{NormRule, Recompute, Rules, WeightRule},
};
use narrows_planner::{GroupingRule, Request};
use narrows_reference::{Parameters, Reference};
use narrows_runtime::session::{StepInput, TensorKind};

use super::subject::{self, Tokens, furthest, mesh, model, request};

const SEED: u64 = 5;

/// What loss and gradients may be off by, relatively and in norm.
const TOLERANCE: f64 = 1e-5;

/// The worst of several plans.
#[derive(Default)]
struct Worst {
    plans: usize,
    loss: f64,
    gradient: f64,
}

/// What a model's step is, in f64.
struct Subject {
    model: Model,
    tokens: Tokens,
    loss: f64,
    gradients: Parameters<f64>,
}

impl Subject {
    fn new(model: Model) -> Subject {
        let tokens = Tokens::of_step(1);
        let initial = Parameters::<f64>::initial(&model, SEED);
        let reference = Reference::new(&model, initial).expect("initial weights fit");
        let (loss, gradients) = reference.loss_and_gradients(&[tokens.batch()]).expect("a step");
        Subject { model, tokens, loss, gradients }
    }

    /// Runs the fastest plan under these rules. `false` when there is none.
    fn hold(&self, request: &Request, what: &str, worst: &mut Worst) -> bool {
        let Some(plan) = subject::plan(request) else { return false };
        let mut session = subject::session(&plan, &self.model, SEED);
        let input = StepInput { tokens: &self.tokens.inputs, targets: &self.tokens.targets };
        let done =
            session.compute_gradients(input).unwrap_or_else(|error| panic!("{what}: {error}"));
        let loss = (done.loss - self.loss).abs() / self.loss;
        assert!(loss < TOLERANCE, "{what}: loss {} for {}", done.loss, self.loss);
        let (gradient, name) =
            furthest(&session.local_tensors(TensorKind::Gradients).unwrap(), &self.gradients);
        assert!(gradient < TOLERANCE, "{what}: gradient of {name} is off by {gradient:e}");
        worst.plans += 1;
        worst.loss = worst.loss.max(loss);
        worst.gradient = worst.gradient.max(gradient);
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
        subject::cola(),
        model("svd", false, 4, 3, &blocks("swiglu", "identity", "")),
        model("shared-kv", false, 2, 3, &blocks("plain", "silu", "")),
        model("lax-released", true, 8, 3, &blocks("plain", "silu", released)),
        model("lax-paper", false, 8, 3, &blocks("plain", "silu", paper)),
        subject::dense(),
    ]
}

/// Those that are most unlike each other.
fn unlike() -> Vec<Model> {
    let few = ["tiny-llama", "shared-kv", "lax-released"];
    models().into_iter().filter(|model| few.contains(&model.name.as_str())).collect()
}

/// Every norm, grouping and recompute rule, one at a time beside the defaults.
fn variations() -> Vec<(String, Rules, GroupingRule)> {
    let auto = (Rules::ALL, GroupingRule::Auto);
    let mut made = vec![("no rule".to_owned(), auto.0, auto.1)];
    for norm in [NormRule::Sync, NormRule::Online] {
        made.push((format!("norm {norm:?}"), Rules { norm, ..auto.0 }, auto.1));
    }
    for grouping in [GroupingRule::On, GroupingRule::Off] {
        made.push((format!("grouping {grouping:?}"), auto.0, grouping));
    }
    for recompute in [Recompute::None, Recompute::Latents, Recompute::Block] {
        made.push((format!("recompute {recompute:?}"), Rules { recompute, ..auto.0 }, auto.1));
    }
    made
}

/// Plans every rule for a mesh and runs what there is.
fn hold_on(models: Vec<Model>, mesh: Mesh, micro_batch: u64, weights: WeightRule) {
    let mut none: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut worst = Worst::default();
    for model in models {
        let subject = Subject::new(model);
        for baseline in super::subject::baselines(&subject.model) {
            for (name, rules, grouping) in variations() {
                let what = format!("{} {} {name}, {mesh}", subject.model.name, baseline.name());
                let request = Request {
                    rules: Rules { baseline, weights, ..rules },
                    grouping,
                    micro_batch: Some(micro_batch),
                    zero: Some(if mesh.data > 1 { Zero::One } else { Zero::Off }),
                    ..request(&subject.model, mesh)
                };
                if !subject.hold(&request, &what, &mut worst) {
                    none.entry(baseline.name().into()).or_default().push(what);
                }
            }
        }
    }
    let Worst { plans, loss, gradient } = worst;
    println!("{mesh}: {plans} plans, loss off by {loss:.1e}, gradients by {gradient:.1e}");
    assert!(none.is_empty(), "nothing to run for {none:#?}");
}

#[test]
fn every_rule_on_two() {
    hold_on(models(), mesh(2, 1, 1), 4, WeightRule::Any);
}

#[test]
fn every_rule_on_four_in_two_stages() {
    hold_on(unlike(), mesh(4, 2, 1), 2, WeightRule::Sharded);
}

#[test]
fn every_rule_on_two_replicas_of_two() {
    hold_on(unlike(), mesh(2, 1, 2), 2, WeightRule::Sharded);
}
