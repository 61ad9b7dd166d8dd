//! Why this plan: what else there was, what each part of it costs, and what binds.
//!
//! Every figure comes from planning and pricing the alternative itself; none is a template.

use std::fmt;

use narrows_plan::strategy::{Baseline, Strategy, WeightRule, Zero};
use narrows_plan::{Bytes, Mesh, Seconds};
use serde::Serialize;

use crate::fit::{Fitted, Fitter, Refusal};
use crate::predict::{Prediction, predict};
use crate::request::{MemoryLimit, Request};
use crate::search::{ContextReport, Fate, SearchReport, SearchStatus, Searched, search};
use crate::segments::Segments;

/// The explanation of a search's result.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The plan in one sentence, and its prediction; absent when none exists.
    pub chosen: Option<Alternative>,
    /// What was not chosen, with its price or the reason it has none.
    pub alternatives: Vec<Alternative>,
    /// Meshes that were searched, best first.
    pub meshes: Vec<MeshRow>,
    /// What limits the plan.
    pub binds: Vec<String>,
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
    /// `solved`, `pruned`, `not reached`, or why nothing runs.
    pub fate: String,
}

/// The most meshes that are listed.
const MESHES_MAX: usize = 12;

/// Explains what a search found.
pub fn explain(request: &Request, searched: &Searched) -> Explanation {
    let meshes = searched.report.contexts.iter().take(MESHES_MAX).map(mesh_row).collect();
    let Some(best) = &searched.best else {
        let (causes, hints) = causes(request, &searched.report);
        return Explanation {
            chosen: None,
            alternatives: vec![],
            meshes,
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
    Explanation { chosen: Some(chosen), alternatives, meshes, binds, causes: vec![], hints: vec![] }
}

/// The most devices of a node that a tensor axis can have and leave no device over.
fn within_a_node(request: &Request) -> u64 {
    let node = request.profile.devices_per_node().min(request.devices);
    (1..=node).rev().find(|size| request.devices.is_multiple_of(*size)).unwrap_or(1)
}

/// What the plan is compared with: the published baselines on a tensor-parallel mesh, the dense
/// twin, weights all sharded, the other sizes of the tensor axis.
fn rivals(request: &Request, best: &Fitted) -> Vec<(String, Request)> {
    let mesh = best.decided.context.mesh;
    let tensor = match mesh.tensor {
        1 => within_a_node(request),
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
        twin.model = twin.model.dense_twin();
        rivals.push((name(&format!("fullrank-tp of {}", twin.model.name)), twin));
    } else if tensor > 1 && request.rules.baseline != Baseline::FullrankTp {
        rivals.push((name("fullrank-tp"), on_mesh(Baseline::FullrankTp)));
    }
    if tensor > 1 && request.rules.weights == WeightRule::Any {
        let mut sharded = on_mesh(request.rules.baseline);
        sharded.rules.weights = WeightRule::Sharded;
        rivals.push((name("every weight sharded"), sharded));
    }
    for size in [1, 2, 4, 8] {
        let free = request.tensor.is_none();
        if free && size != mesh.tensor && request.devices.is_multiple_of(size) {
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
    fitted: &Fitted,
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
pub fn summary(fitted: &Fitted) -> String {
    let context = &fitted.decided.context;
    let mut parts = vec![
        context.mesh.to_string(),
        format!("microbatch {}", context.workload.micro_batch),
        format!("hidden {}", fitted.decided.border.hidden.forward),
    ];
    if let Some(layout) = fitted.plan.crossing_layout {
        parts.push(format!("crossing latents {}", layout.edge().forward));
    }
    if context.zero == Zero::One {
        parts.push("ZeRO-1".into());
    }
    let blocks: Vec<_> = fitted.decided.stages.iter().flatten().collect();
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
    let (step_time_s, fate) = match &report.fate {
        Fate::Solved(time) => (Some(time.0), "solved".to_string()),
        Fate::Pruned => (None, "pruned: its bound is no better than the plan".into()),
        Fate::Unbeaten => (None, "searched: nothing faster than the plan was found".into()),
        Fate::NotReached => (None, "not reached".into()),
        Fate::Refused(refusal) => (None, refusal.to_string()),
    };
    MeshRow {
        mesh: report.context.mesh,
        micro_batch: report.context.workload.micro_batch,
        zero: report.context.zero,
        bound_s: report.bound.map(|bound| bound.0),
        step_time_s,
        fate,
    }
}

/// What limits the plan: where its time goes, and whether memory shaped it.
fn binds(request: &Request, best: &Fitted, chosen: &Alternative) -> Vec<String> {
    let Some(prediction) = &chosen.prediction else { return vec![] };
    let parts = &prediction.breakdown_s;
    let step = prediction.step_time_s;
    let mut shares = [
        ("compute (products and attention)", parts.gemm + parts.attention),
        ("memory bandwidth (fused passes and the optimizer)", parts.elementwise + parts.optimizer),
        ("links (collectives and transfers)", parts.collective_exposed + parts.other),
        ("the pipeline (bubble)", parts.bubble),
    ];
    shares.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut sentences: Vec<String> = shares
        .iter()
        .filter(|(_, time)| *time > 0.05 * step)
        .map(|(what, time)| format!("{:.0} % of the step is {what}", 100.0 * time / step))
        .collect();
    sentences.push(memory_sentence(request, best));
    let assumed = prediction.assumed.join(", ");
    if !assumed.is_empty() {
        sentences.push(format!("nobody measured these parts of the profile: {assumed}"));
    }
    sentences
}

fn memory_sentence(request: &Request, best: &Fitted) -> String {
    let limit = request.memory_bytes();
    let peak = best.peak();
    if request.memory_limit == MemoryLimit::None {
        return format!("memory is not limited; the plan uses {peak}");
    }
    let free = search(&Request { memory_limit: MemoryLimit::None, ..request.clone() });
    match free.best.filter(|free| free.time.0 < best.time.0 * (1.0 - 1e-9)) {
        Some(free) => format!(
            "memory binds: {peak} of {limit}; without a limit a step takes {} with {}",
            free.time * request.profile.launching(request.executor).step_factor,
            free.peak()
        ),
        None => format!("memory does not bind: {peak} of {limit}"),
    }
}

/// Why no plan exists, as a chain of causes, and what to try.
pub fn causes(request: &Request, report: &SearchReport) -> (Vec<String>, Vec<String>) {
    let mut causes = vec![];
    let mut hints = vec![];
    if report.contexts.is_empty() {
        let devices = match request.devices {
            1 => "1 device".into(),
            devices => format!("{devices} devices"),
        };
        causes.push(format!(
            "because no mesh of {devices} with these axes divides {} sequences into microbatches",
            request.global_batch
        ));
        hints.push("another --global-batch or --micro-batch, or fewer fixed axes".into());
        return (causes, hints);
    }
    let smallest = report
        .contexts
        .iter()
        .filter_map(|context| match &context.fate {
            Fate::Refused(Refusal::Memory { needed, lowered, .. }) => {
                Some((*needed, *lowered, context))
            }
            _ => None,
        })
        .min_by_key(|(needed, ..)| *needed);
    if let Some((needed, lowered, context)) = smallest {
        let limit = request.memory_bytes();
        let needs = match (lowered, needed > limit) {
            // Between what bytes allow and what an arena of some plan was, there may be others.
            (true, _) => format!("the smallest plan that was found needs {needed} a device"),
            (false, true) => format!(
                "weights, optimizer states and kept activations need at least {needed} a device"
            ),
            (false, false) => format!("every plan needs more than {limit} a device"),
        };
        causes.push(format!(
            "because {needs} on the most economical mesh ({}, microbatch {})",
            context.context.mesh, context.context.workload.micro_batch
        ));
        causes.push(format!("and because a device may hold {limit}"));
        let proved = report.status == SearchStatus::Infeasible;
        causes.push(if proved { "no plan fits" } else { "no plan was found that fits" }.into());
        if let Some((enough, mesh)) = enough_memory(request, report) {
            let hint =
                format!("--memory-limit {} is enough, if the devices have it: {mesh}", enough.0);
            hints.push(hint);
        }
        hints.push("more devices, a smaller --micro-batch, or --recompute auto".into());
    } else if report.contexts.iter().any(|c| matches!(c.fate, Fate::Refused(_))) {
        causes.extend(without_strategy(request, report));
        causes.push(format!(
            "because on every mesh some op has no legal strategy under `--strategy {}`{}",
            request.rules.baseline.name(),
            match request.rules.weights {
                WeightRule::Sharded => " with every weight sharded",
                WeightRule::Any => "",
            }
        ));
        causes.push("no plan exists".into());
        hints.push(match request.rules.weights {
            WeightRule::Sharded => {
                "a tensor axis that divides heads, ranks and widths, or --weights any".into()
            }
            WeightRule::Any => "a tensor axis that divides heads, ranks and widths".into(),
        });
    }
    if report.contexts.iter().any(|context| matches!(context.fate, Fate::NotReached)) {
        causes.push("though some meshes were not reached in time".into());
        hints.push("a longer --time-limit".into());
    }
    (causes, hints)
}

/// How many ops are named that have no strategy.
const NAMED_MAX: usize = 4;

/// Which ops of the first mesh have no strategy.
fn without_strategy(request: &Request, report: &SearchReport) -> Option<String> {
    let refused =
        |report: &&ContextReport| matches!(report.fate, Fate::Refused(Refusal::NoStrategy));
    let context = report.contexts.iter().find(refused)?.context;
    let names = Segments::new(request, None).without_strategy(&context);
    if names.is_empty() {
        return None;
    }
    let more = names.len().saturating_sub(NAMED_MAX);
    let named = names.into_iter().take(NAMED_MAX).collect::<Vec<_>>().join("`, `");
    let more = if more > 0 { format!(" and {more} others") } else { String::new() };
    let tensor = context.mesh.tensor;
    Some(format!("because `{named}`{more} cannot be split as asked over {tensor} devices"))
}

/// How many of the most economical meshes are lowered to learn what would be enough.
const LOWERED_MAX: usize = 6;

/// The memory that a plan needs which exists, and its mesh.
fn enough_memory(request: &Request, report: &SearchReport) -> Option<(Bytes, Mesh)> {
    let segments = Segments::new(request, None);
    let fitter = Fitter::new(request, &segments);
    let mut refused: Vec<_> = report
        .contexts
        .iter()
        .filter_map(|context| match &context.fate {
            Fate::Refused(Refusal::Memory { needed, .. }) => Some((*needed, context.context)),
            _ => None,
        })
        .collect();
    refused.sort_by_key(|(needed, _)| *needed);
    let smallest = refused.iter().take(LOWERED_MAX).filter_map(|(_, context)| {
        let fitted = fitter.smallest(context)?;
        Some((fitted.peak(), *context))
    });
    let (peak, context) = smallest.min_by_key(|(peak, _)| *peak)?;
    let narrower = fitter.smallest_of_narrower(&context).map(|fitted| fitted.peak());
    Some((narrower.map_or(peak, |narrower| narrower.min(peak)), context.mesh))
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NoStrategy => write!(f, "some op has no legal strategy"),
            Refusal::Memory { stage: Some(stage), needed, limit, .. } => {
                write!(f, "stage {stage} needs {needed}, a device may hold {limit}")
            }
            Refusal::Memory { stage: None, needed, limit, .. } => {
                write!(f, "needs {}, a device may hold {limit}", at_least(*needed))
            }
        }
    }
}

fn at_least(bytes: Bytes) -> String {
    format!("at least {bytes}")
}

/// Whether a plan's linears follow BTP's placement: first factors split on their input, second
/// factors on their output.
pub fn is_btp_placement(fitted: &Fitted) -> bool {
    fitted.decided.stages.iter().flatten().all(|block| {
        block.segment.ops.iter().zip(&block.choice.ops).all(|(node, option)| {
            let strategy = option.choice.strategy;
            match node.name.rsplit_once('.') {
                Some((_, "a")) => matches!(strategy, Strategy::Row | Strategy::OwedRow),
                Some((_, "b")) => strategy == Strategy::Column,
                _ => true,
            }
        })
    })
}
