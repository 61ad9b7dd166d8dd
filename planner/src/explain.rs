//! Explains a plan: its alternatives with their predictions, and its bottlenecks.
//!
//! Every alternative is planned and priced like the plan itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use narrows_plan::{ContextAttention, Mesh, PipelineSchedule, Seconds, Zero};
use serde::{Serialize, Serializer};

use crate::alternatives::alternative_requests;
use crate::bottlenecks::{Bottleneck, bottlenecks};
use crate::diagnosis::{Diagnosis, diagnose};
use crate::feasible_plan::FeasiblePlan;
use crate::predict::{Prediction, predict};
use crate::report::{ContextOutcome, ContextReport};
use crate::request::Request;
use crate::search::search_until_stopped;
use crate::search_cache::SearchCache;
use crate::search_result::SearchResult;

/// The explanation of a search's result.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The plan; absent when none exists.
    pub chosen: Option<Alternative>,
    /// Other plans, each with its prediction or the reason why it cannot run.
    pub alternatives: Vec<Alternative>,
    /// Meshes that were searched, in the order of their bounds, with that of the fastest plan.
    pub meshes: Vec<MeshRow>,
    /// Number of further meshes that were searched.
    pub meshes_not_listed: usize,
    /// The bottlenecks of the plan, serialized as sentences.
    #[serde(rename = "binds")]
    pub bottlenecks: Vec<Bottleneck>,
    /// Whether all alternatives were planned and the bottlenecks are known.
    pub is_complete: bool,
    /// Reasons why no plan was found, and changes to try; empty when one was, and after an interruption.
    #[serde(flatten)]
    pub diagnosis: Diagnosis,
}

/// The chosen plan, or an alternative to it.
#[derive(Clone, Debug, Serialize)]
pub struct Alternative {
    /// Name of the alternative.
    pub name: String,
    /// Mesh, microbatch, layouts.
    pub summary: String,
    /// Prediction of the plan; absent when it cannot run.
    pub prediction: Option<Prediction>,
    /// Step time of the plan divided by that of the chosen plan.
    pub ratio: Option<f64>,
    /// Status of its search; absent for the chosen plan.
    pub status: Option<&'static str>,
    /// Relative gap between its step time and the bound of its search.
    pub gap: Option<f64>,
    /// Reason why it cannot run.
    #[serde(rename = "refusal")]
    pub rejection_reason: Option<String>,
}

/// A mesh that was searched.
#[derive(Clone, Debug, Serialize)]
pub struct MeshRow {
    /// The mesh.
    pub mesh: Mesh,
    /// The collectives around attention on the context axis; absent for `exchange`.
    #[serde(skip_serializing_if = "ContextAttention::is_default")]
    pub context_attention: ContextAttention,
    /// Sequences in a microbatch.
    pub micro_batch: u64,
    /// Sharding over replicas.
    pub zero: Zero,
    /// Replicas of a shard group; absent where these are all replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard_size: Option<u64>,
    /// The order of passes.
    pub schedule: PipelineSchedule,
    /// Chunks of the model on each stage; absent for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<u64>,
    /// Whether gradients are reduced during the last backward pass.
    pub overlap_grad_reduce: bool,
    /// Whether updated weights are gathered during the next forward pass.
    pub overlap_param_gather: bool,
    /// Whether tensor-axis collectives of activation gradients overlap with weight-gradient GEMMs.
    pub overlap_tensor_collectives: bool,
    /// Whether collectives of activations overlap with the computation of another microbatch. Absent where they do not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub overlap_microbatch_pairs: bool,
    /// Lower bound on the step time of its plans, in seconds. With the objective `memory`, of those that need no more memory than
    /// the chosen plan.
    pub bound_s: Option<f64>,
    /// Step time of its best plan in seconds, when it was solved.
    pub step_time_s: Option<f64>,
    /// Outcome of its search, serialized as a sentence.
    #[serde(rename = "fate", serialize_with = "outcome_sentence")]
    pub outcome: ContextOutcome,
}

fn outcome_sentence<S: Serializer>(
    outcome: &ContextOutcome,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match outcome {
        ContextOutcome::Solved(_) => serializer.serialize_str("solved"),
        ContextOutcome::Pruned => {
            serializer.serialize_str("pruned: its lower bound is no better than the plan")
        }
        ContextOutcome::NoImprovement => {
            serializer.serialize_str("searched: no faster plan was found")
        }
        ContextOutcome::NotReached => serializer.serialize_str("not reached"),
        ContextOutcome::Infeasible(infeasible) => serializer.collect_str(infeasible),
    }
}

/// Largest number of meshes in an explanation.
const MESHES_MAX: usize = 12;

/// Explains the result of a search, with the cache that it used. Ends soon after `stop` is set, without the alternatives that
/// are left or unproven.
pub fn explain(
    request: &Request,
    searched: &SearchResult,
    cache: &SearchCache,
    stop: &Arc<AtomicBool>,
) -> Explanation {
    let contexts = &searched.report.contexts;
    let listed = listed_contexts(contexts);
    let meshes = listed.iter().map(|context| mesh_row(context)).collect();
    let meshes_not_listed = contexts.len() - listed.len();
    let Some(best) = &searched.best else {
        return Explanation {
            chosen: None,
            alternatives: vec![],
            meshes,
            meshes_not_listed,
            bottlenecks: vec![],
            is_complete: !stop.load(Ordering::Relaxed),
            diagnosis: match searched.report.is_interrupted {
                true => Diagnosis::default(),
                false => diagnose(request, &searched.report, cache),
            },
        };
    };
    let chosen = alternative("chosen plan", request, best, None);
    let time = best.average_time();
    let alternatives = alternative_requests(request, best)
        .into_iter()
        .take_while(|_| !stop.load(Ordering::Relaxed))
        .map_while(|(name, other)| plan_alternative(name, &other, time, cache, stop))
        .collect();
    let prediction = chosen.prediction.as_ref();
    let bottlenecks =
        prediction.map_or(vec![], |prediction| bottlenecks(request, best, prediction, cache, stop));
    Explanation {
        chosen: Some(chosen),
        alternatives,
        meshes,
        meshes_not_listed,
        bottlenecks,
        is_complete: !stop.load(Ordering::Relaxed),
        diagnosis: Diagnosis::default(),
    }
}

/// Plans an alternative; `None` if `stop` is set before its plan is proven.
fn plan_alternative(
    name: String,
    other: &Request,
    time: Seconds,
    cache: &SearchCache,
    stop: &Arc<AtomicBool>,
) -> Option<Alternative> {
    let searched = search_until_stopped(other, cache, stop);
    if searched.report.is_interrupted {
        return None;
    }
    let alternative = match &searched.best {
        Some(plan) => Alternative {
            status: Some(searched.report.status.name()),
            gap: Some(searched.report.gap),
            ..alternative(&name, other, plan, Some(time))
        },
        None => Alternative {
            status: Some(searched.report.status.name()),
            gap: None,
            name,
            summary: String::new(),
            prediction: None,
            ratio: None,
            rejection_reason: Some(diagnose(other, &searched.report, cache).clauses().join("; ")),
        },
    };
    Some(alternative)
}

fn alternative(
    name: &str,
    request: &Request,
    plan: &FeasiblePlan,
    reference_time: Option<Seconds>,
) -> Alternative {
    let prediction = predict(&request.model, &request.profile, request.executor, &plan.plan).ok();
    Alternative {
        name: name.into(),
        summary: summary(plan),
        prediction: prediction.map(|(prediction, _)| prediction),
        ratio: reference_time.map(|time| plan.average_time().0 / time.0),
        status: None,
        gap: None,
        rejection_reason: None,
    }
}

/// Mesh, microbatch, layout of the hidden state, and strategies of the linears of the middle block.
pub(crate) fn summary(plan: &FeasiblePlan) -> String {
    let context = &plan.decisions.context;
    let mut parts = vec![
        context.mesh.to_string(),
        format!("microbatch {}", context.workload.micro_batch),
        format!("hidden {}", plan.decisions.boundary.hidden.forward),
    ];
    if let Some(layout) = plan.plan.crossing_layout {
        parts.push(format!("crossing latents {}", layout.edge().forward));
    }
    parts.extend(context.zero.label(context.partial_shard_size()));
    if context.rounds_gradients() {
        parts.push("gradients reduced in bf16".into());
    }
    if context.gathers_keys() {
        parts.push("gathered keys and values".into());
    }
    if context.rotates_keys() {
        parts.push("ring attention".into());
    }
    match context.schedule {
        PipelineSchedule::OneForwardOneBackward => {}
        PipelineSchedule::ZeroBubble => parts.push("zero-bubble schedule".into()),
        PipelineSchedule::Interleaved => {
            parts.push(format!("interleaved schedule with {} chunks per stage", context.chunks));
        }
    }
    if context.overlap_grad_reduce {
        let collectives = if context.shards_gradients() {
            "data-axis collectives"
        } else {
            "gradient reductions"
        };
        parts.push(format!("{collectives} overlapped"));
    }
    if context.gathers_in_forward() {
        parts.push("gathers of weights overlapped".into());
    }
    if context.overlap_tensor_collectives {
        let axis = context.activation_axis().name();
        parts.push(format!("{axis}-axis collectives overlapped"));
    }
    if context.overlap_microbatch_pairs {
        let axis = context.activation_axis().name();
        parts.push(format!("{axis}-axis collectives overlapped in pairs of microbatches"));
    }
    let blocks: Vec<_> = plan.decisions.stages.iter().flatten().collect();
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

/// The contexts with the least bounds, and that of the fastest plan, in the order of their bounds.
fn listed_contexts(contexts: &[ContextReport]) -> Vec<&ContextReport> {
    let solved =
        contexts.iter().enumerate().filter_map(|(at, context)| Some((at, step_time_s(context)?)));
    let fastest = solved.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(at, _)| at);
    let mut listed: Vec<&ContextReport> = contexts.iter().take(MESHES_MAX).collect();
    if let Some(fastest) = fastest.filter(|at| *at >= MESHES_MAX) {
        listed.pop();
        listed.push(&contexts[fastest]);
    }
    listed
}

/// Step time of the best plan of a context that was solved, in seconds.
fn step_time_s(report: &ContextReport) -> Option<f64> {
    match &report.outcome {
        ContextOutcome::Solved(time) => Some(time.0),
        _ => None,
    }
}

fn mesh_row(report: &ContextReport) -> MeshRow {
    MeshRow {
        mesh: report.context.mesh,
        context_attention: report.context.context_attention,
        micro_batch: report.context.workload.micro_batch,
        zero: report.context.zero,
        shard_size: report.context.partial_shard_size(),
        schedule: report.context.schedule,
        chunks: (report.context.chunks > 1).then_some(report.context.chunks),
        overlap_grad_reduce: report.context.overlap_grad_reduce,
        overlap_param_gather: report.context.overlap_param_gather,
        overlap_tensor_collectives: report.context.overlap_tensor_collectives,
        overlap_microbatch_pairs: report.context.overlap_microbatch_pairs,
        bound_s: report.bound.map(|bound| bound.0),
        step_time_s: step_time_s(report),
        outcome: report.outcome.clone(),
    }
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use super::*;
    use crate::search::search_with_cache;

    /// The plan is explained as far as it needs no further search.
    #[test]
    fn a_stopped_explanation_searches_no_alternatives() {
        let model = presets::find("cola-tiny").unwrap();
        let profile = profile::preset("a100-80gb").unwrap();
        let request = Request::new(model, profile, 2, 4, 128);
        let cache = SearchCache::default();
        let searched = search_with_cache(&request, &cache);
        let explain_until =
            |stop: bool| explain(&request, &searched, &cache, &Arc::new(AtomicBool::new(stop)));
        let (whole, stopped) = (explain_until(false), explain_until(true));
        assert!(!whole.alternatives.is_empty());
        assert!(stopped.alternatives.is_empty());
        assert!(stopped.chosen.is_some());
        assert_eq!(stopped.meshes.len(), whole.meshes.len());
    }
}
