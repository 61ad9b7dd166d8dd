//! Why this plan: what else there was, what each part of it costs, and what binds.
//!
//! Every figure comes from planning and pricing the alternative itself; none is a template.

use std::fmt;

use narrows_plan::graph::Op;
use narrows_plan::model::WeightId;
use narrows_plan::strategy::{Baseline, Strategy, WeightRule, Zero};
use narrows_plan::{Bytes, Mesh, Seconds};
use serde::{Serialize, Serializer};

use crate::diagnosis::causes;
use crate::feasible_plan::FeasiblePlan;
use crate::predict::{Prediction, predict};
use crate::report::{ContextOutcome, ContextReport};
use crate::request::{MemoryLimit, Request};
use crate::search::{SearchResult, search};

/// The explanation of a search's result.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The plan in one sentence, and its prediction; absent when none exists.
    pub chosen: Option<Alternative>,
    /// What was not chosen, with its price or the reason it has none.
    pub alternatives: Vec<Alternative>,
    /// Meshes that were searched, best first.
    pub meshes: Vec<MeshRow>,
    /// How many more were searched that are not listed.
    pub meshes_not_listed: usize,
    /// What limits the plan, serialized as sentences.
    pub binds: Vec<Bottleneck>,
    /// Why no plan exists, as a chain; empty when one does.
    pub causes: Vec<String>,
    /// What to try when no plan exists.
    pub hints: Vec<String>,
}

/// A plan that could have been chosen.
#[derive(Clone, Debug, Serialize)]
pub struct Alternative {
    /// What it is.
    pub name: String,
    /// Mesh, microbatch, layouts.
    pub summary: String,
    /// Its prediction, when it can run.
    pub prediction: Option<Prediction>,
    /// Its step time over the chosen plan's.
    pub ratio: Option<f64>,
    /// How the search for it ended, where there was one.
    pub status: Option<&'static str>,
    /// How much faster a plan of its kind could be.
    pub gap: Option<f64>,
    /// Why it cannot run.
    pub refusal: Option<String>,
}

/// A mesh of the search.
#[derive(Clone, Debug, Serialize)]
pub struct MeshRow {
    /// The mesh.
    pub mesh: Mesh,
    /// Sequences a microbatch.
    pub micro_batch: u64,
    /// Optimizer sharding.
    pub zero: Zero,
    /// No plan on it is faster.
    pub bound_s: Option<f64>,
    /// The step time of its best plan, when it was solved.
    pub step_time_s: Option<f64>,
    /// How the search of it ended, serialized as a sentence.
    #[serde(rename = "fate", serialize_with = "outcome_sentence")]
    pub outcome: ContextOutcome,
}

/// One statement about what limits a plan. Its `Display` form is the sentence in JSON.
#[derive(Clone, Debug, PartialEq)]
pub enum Bottleneck {
    /// A resource that takes more than a twentieth of the step time.
    Resource {
        /// The resource.
        resource: Resource,
        /// Its share of the step time in percent.
        percent: f64,
    },
    /// Whether the memory limit changes the plan.
    Memory(MemoryBinding),
    /// Parts of the profile that are assumed, as paths in its file.
    Assumed(Vec<String>),
}

/// A resource on which a step spends time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// GEMMs and attention.
    Compute,
    /// Fused ops and the optimizer.
    MemoryBandwidth,
    /// Collectives and transfers.
    Links,
    /// The pipeline bubble.
    Pipeline,
}

/// How the memory limit affects a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryBinding {
    /// There is no limit.
    Unlimited {
        /// Peak memory of the fullest device.
        peak: Bytes,
    },
    /// No plan without a limit is faster.
    Slack {
        /// Peak memory of the fullest device.
        peak: Bytes,
        /// Memory that a device may use.
        limit: Bytes,
    },
    /// A plan without a limit is faster.
    Binding {
        /// Peak memory of the fullest device.
        peak: Bytes,
        /// Memory that a device may use.
        limit: Bytes,
        /// Step time without a limit.
        unlimited_step_time: Seconds,
        /// Peak memory without a limit.
        unlimited_peak: Bytes,
    },
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bottleneck::Resource { resource, percent } => {
                let name = match resource {
                    Resource::Compute => "compute (products and attention)",
                    Resource::MemoryBandwidth => {
                        "memory bandwidth (fused passes and the optimizer)"
                    }
                    Resource::Links => "links (collectives and transfers)",
                    Resource::Pipeline => "the pipeline (bubble)",
                };
                write!(f, "{percent:.0} % of the step is {name}")
            }
            Bottleneck::Memory(MemoryBinding::Unlimited { peak }) => {
                write!(f, "memory is not limited; the plan uses {peak}")
            }
            Bottleneck::Memory(MemoryBinding::Slack { peak, limit }) => {
                write!(f, "memory does not bind: {peak} of {limit}")
            }
            Bottleneck::Memory(MemoryBinding::Binding {
                peak,
                limit,
                unlimited_step_time,
                unlimited_peak,
            }) => write!(
                f,
                "memory binds: {peak} of {limit}; without a limit a step takes \
                 {unlimited_step_time} with {unlimited_peak}"
            ),
            Bottleneck::Assumed(paths) => {
                write!(f, "nobody measured these parts of the profile: {}", paths.join(", "))
            }
        }
    }
}

impl Serialize for Bottleneck {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn outcome_sentence<S: Serializer>(
    outcome: &ContextOutcome,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match outcome {
        ContextOutcome::Solved(_) => serializer.serialize_str("solved"),
        ContextOutcome::Pruned => {
            serializer.serialize_str("pruned: its bound is no better than the plan")
        }
        ContextOutcome::NotImproved => {
            serializer.serialize_str("searched: nothing faster than the plan was found")
        }
        ContextOutcome::NotReached => serializer.serialize_str("not reached"),
        ContextOutcome::Infeasible(infeasible) => serializer.collect_str(infeasible),
    }
}

/// The most meshes that are listed.
const MESHES_MAX: usize = 12;

/// Explains what a search found.
pub fn explain(request: &Request, searched: &SearchResult) -> Explanation {
    let contexts = &searched.report.contexts;
    let meshes = contexts.iter().take(MESHES_MAX).map(mesh_row).collect();
    let meshes_not_listed = contexts.len().saturating_sub(MESHES_MAX);
    let Some(best) = &searched.best else {
        let (causes, hints) = causes(request, &searched.report);
        return Explanation {
            chosen: None,
            alternatives: vec![],
            meshes,
            meshes_not_listed,
            binds: vec![],
            causes,
            hints,
        };
    };
    let chosen = alternative("chosen plan", request, best, None);
    let time = best.time;
    let alternatives =
        rivals(request, best).into_iter().map(|(name, rival)| priced(name, &rival, time)).collect();
    let binds = binds(request, best, &chosen);
    Explanation {
        chosen: Some(chosen),
        alternatives,
        meshes,
        meshes_not_listed,
        binds,
        causes: vec![],
        hints: vec![],
    }
}

/// The sizes of a tensor axis that a node has room for and that leave no device over.
fn sizes_within_a_node(request: &Request) -> impl DoubleEndedIterator<Item = u64> {
    let node = request.profile.devices_per_node().min(request.devices);
    (1..=node).filter(|size| request.devices.is_multiple_of(*size))
}

/// What the plan is compared with: the published baselines on a tensor-parallel mesh, the dense
/// twin, weights all sharded, the other sizes of the tensor axis.
fn rivals(request: &Request, best: &FeasiblePlan) -> Vec<(String, Request)> {
    let mesh = best.decisions.context.mesh;
    let tensor = match mesh.tensor {
        1 => sizes_within_a_node(request).next_back().unwrap_or(1),
        more => more,
    };
    let on_mesh = |baseline: Baseline| {
        let mut rival = request.clone();
        rival.rules.baseline = baseline;
        rival.tensor = Some(tensor);
        // The other axes are the rival's to choose, unless they are fixed for all.
        if mesh.tensor != tensor {
            (rival.pipeline, rival.data) = (None, None);
        }
        rival
    };
    let mut rivals = vec![];
    let name = |what: &str| format!("{what}, tensor axis {tensor}");
    if tensor > 1 && request.model.is_low_rank() {
        for baseline in [Baseline::Btp, Baseline::VanillaTp, Baseline::VanillaTpPublished] {
            if request.rules.baseline != baseline {
                rivals.push((name(baseline.name()), on_mesh(baseline)));
            }
        }
        let mut twin = on_mesh(Baseline::FullrankTp);
        twin.model = twin.model.dense_counterpart();
        rivals.push((name(&format!("fullrank-tp of {}", twin.model.name)), twin));
    } else if tensor > 1 && request.rules.baseline != Baseline::FullrankTp {
        rivals.push((name("fullrank-tp"), on_mesh(Baseline::FullrankTp)));
    }
    if tensor > 1 && request.rules.weights == WeightRule::Any {
        let mut sharded = on_mesh(request.rules.baseline);
        sharded.rules.weights = WeightRule::Sharded;
        rivals.push((name("every weight sharded"), sharded));
    }
    for size in sizes_within_a_node(request) {
        if request.tensor.is_none() && size != mesh.tensor {
            let mut other = request.clone();
            other.tensor = Some(size);
            rivals.push((format!("best plan with tensor axis {size}"), other));
        }
    }
    rivals
}

fn priced(name: String, rival: &Request, time: Seconds) -> Alternative {
    let searched = search(rival);
    match &searched.best {
        Some(fitted) => Alternative {
            status: Some(searched.report.status.name()),
            gap: Some(searched.report.gap),
            ..alternative(&name, rival, fitted, Some(time))
        },
        None => Alternative {
            status: Some(searched.report.status.name()),
            gap: None,
            name,
            summary: String::new(),
            prediction: None,
            ratio: None,
            refusal: Some(causes(rival, &searched.report).0.join("; ")),
        },
    }
}

fn alternative(
    name: &str,
    request: &Request,
    fitted: &FeasiblePlan,
    than: Option<Seconds>,
) -> Alternative {
    let prediction = predict(&request.model, &request.profile, request.executor, &fitted.plan).ok();
    Alternative {
        name: name.into(),
        summary: summary(fitted),
        prediction: prediction.map(|(prediction, _)| prediction),
        ratio: than.map(|time| fitted.time.0 / time.0),
        status: None,
        gap: None,
        refusal: None,
    }
}

/// Mesh, microbatch, hidden state and how the middle block's linears are split.
pub fn summary(fitted: &FeasiblePlan) -> String {
    let context = &fitted.decisions.context;
    let mut parts = vec![
        context.mesh.to_string(),
        format!("microbatch {}", context.workload.micro_batch),
        format!("hidden {}", fitted.decisions.boundary.hidden.forward),
    ];
    if let Some(layout) = fitted.plan.crossing_layout {
        parts.push(format!("crossing latents {}", layout.edge().forward));
    }
    if context.zero == Zero::One {
        parts.push("ZeRO-1".into());
    }
    let blocks: Vec<_> = fitted.decisions.stages.iter().flatten().collect();
    if let Some(block) = blocks.get(blocks.len() / 2)
        && context.mesh.tensor > 1
    {
        let named: Vec<String> = block
            .segment
            .ops
            .iter()
            .zip(&block.choice.ops)
            .filter(|(node, _)| matches!(node.op, narrows_plan::graph::Op::Linear(_)))
            .map(|(node, option)| format!("{} {}", node.name, option.choice.strategy.name()))
            .collect();
        parts.push(named.join(", "));
    }
    parts.join("; ")
}

fn mesh_row(report: &ContextReport) -> MeshRow {
    let step_time_s = match &report.outcome {
        ContextOutcome::Solved(time) => Some(time.0),
        _ => None,
    };
    MeshRow {
        mesh: report.context.mesh,
        micro_batch: report.context.workload.micro_batch,
        zero: report.context.zero,
        bound_s: report.bound.map(|bound| bound.0),
        step_time_s,
        outcome: report.outcome.clone(),
    }
}

/// What limits the plan: where its time goes, and whether the memory limit changes it.
fn binds(request: &Request, best: &FeasiblePlan, chosen: &Alternative) -> Vec<Bottleneck> {
    let Some(prediction) = &chosen.prediction else { return vec![] };
    let parts = &prediction.breakdown_s;
    let step = prediction.step_time_s;
    let mut shares = [
        (Resource::Compute, parts.gemm + parts.attention),
        (Resource::MemoryBandwidth, parts.elementwise + parts.optimizer),
        (Resource::Links, parts.collective_exposed + parts.other),
        (Resource::Pipeline, parts.bubble),
    ];
    shares.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut bottlenecks: Vec<Bottleneck> = shares
        .iter()
        .filter(|(_, time)| *time > 0.05 * step)
        .map(|&(resource, time)| Bottleneck::Resource { resource, percent: 100.0 * time / step })
        .collect();
    bottlenecks.push(Bottleneck::Memory(memory_binding(request, best)));
    if !prediction.assumed.is_empty() {
        bottlenecks.push(Bottleneck::Assumed(prediction.assumed.clone()));
    }
    bottlenecks
}

fn memory_binding(request: &Request, best: &FeasiblePlan) -> MemoryBinding {
    let limit = request.arena_limit();
    let peak = best.peak_arena();
    if request.memory_limit == MemoryLimit::None {
        return MemoryBinding::Unlimited { peak };
    }
    let free = search(&Request { memory_limit: MemoryLimit::None, ..request.clone() });
    match free.best.filter(|free| free.time.0 < best.time.0 * (1.0 - 1e-9)) {
        Some(free) => MemoryBinding::Binding {
            peak,
            limit,
            unlimited_step_time: free.time
                * request.profile.launch_costs(request.executor).step_factor,
            unlimited_peak: free.peak_arena(),
        },
        None => MemoryBinding::Slack { peak, limit },
    }
}

/// Whether a plan's linears follow BTP's placement: first factors split on their input, second
/// factors on their output.
pub fn is_btp_placement(fitted: &FeasiblePlan) -> bool {
    fitted.decisions.stages.iter().flatten().all(|block| {
        block.segment.ops.iter().zip(&block.choice.ops).all(|(node, option)| {
            let strategy = option.choice.strategy;
            let Op::Linear(linear) = &node.op else { return true };
            match linear.members[0].parameter {
                WeightId::FactorA(_) => matches!(strategy, Strategy::Row | Strategy::OwedRow),
                WeightId::FactorB(_) => strategy == Strategy::Column,
                _ => true,
            }
        })
    })
}
