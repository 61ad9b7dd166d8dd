//! Explains why no plan was found, and suggests changes of the request.

use std::collections::HashSet;

use narrows_plan::counts::plural;
use narrows_plan::strategy::{Baseline, Recompute, WeightRule};
use narrows_plan::{Bytes, Context, Mesh, PipelineSchedule, Zero};
use rayon::prelude::*;
use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::context_solvers::ContextSolvers;
use crate::context_space::{CHUNKS, contexts, may_need_least_memory};
use crate::deadline::Deadline;
use crate::infeasible::{Infeasible, MemoryEvidence};
use crate::objective::Objective;
use crate::report::{ContextOutcome, ContextReport, SearchReport, SearchStatus};
use crate::request::Request;
use crate::search_cache::SearchCache;
use crate::segment::SegmentSolver;

/// Reasons why no plan was found, and changes to try. Serialized as `causes`, which are all
/// [clauses](Diagnosis::clauses), and `hints`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnosis {
    /// Causes, each a clause that begins with its own conjunction: "because …", "and because …".
    pub causes: Vec<String>,
    /// Conclusion from the causes: "no plan fits", for example.
    pub conclusion: Option<&'static str>,
    /// Restriction of the conclusion: "though …".
    pub caveat: Option<String>,
    /// Changes of the request to try.
    pub hints: Vec<String>,
}

impl Diagnosis {
    /// The sentence by its clauses: causes, conclusion, caveat.
    pub fn clauses(&self) -> Vec<String> {
        let conclusion = self.conclusion.map(String::from);
        self.causes.iter().cloned().chain(conclusion).chain(self.caveat.clone()).collect()
    }
}

impl Serialize for Diagnosis {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Diagnosis", 2)?;
        fields.serialize_field("causes", &self.clauses())?;
        fields.serialize_field("hints", &self.hints)?;
        fields.end()
    }
}

/// Diagnoses a search without a plan, with the tables of the cache that the search used.
pub fn diagnose(request: &Request, report: &SearchReport, cache: &SearchCache) -> Diagnosis {
    let mut causes = vec![];
    let mut conclusion = None;
    let mut caveat = None;
    let mut hints = vec![];
    if report.contexts.is_empty() {
        let (cause, hint) = reason_of_empty_space(request);
        return Diagnosis { causes: vec![cause], conclusion, caveat, hints: vec![hint] };
    }
    let smallest = report
        .contexts
        .iter()
        .filter_map(|context| match &context.outcome {
            ContextOutcome::Infeasible(Infeasible::Memory { needed, evidence, .. }) => {
                Some((*needed, *evidence, context))
            }
            _ => None,
        })
        // What a plan needs says more than the bound of a context, of which plans may need more.
        .min_by_key(|(needed, evidence, _)| (*evidence == MemoryEvidence::AllPlans, *needed));
    if let Some((needed, evidence, context)) = smallest {
        let limit = request.arena_limit();
        let [needed_text, limit_text] = needed.distinct(limit);
        let needs = match evidence {
            // Other plans may need more than the bound and less than this plan.
            MemoryEvidence::OnePlan => {
                format!("the smallest plan that was found needs {needed_text} per device")
            }
            MemoryEvidence::TriedPlans => {
                format!("every plan that was tried needs more than {limit_text} per device")
            }
            MemoryEvidence::AllPlans if needed > limit => format!(
                "weights, optimizer states and kept activations need at least {needed_text} per device"
            ),
            MemoryEvidence::AllPlans => {
                format!("every plan needs more than {limit_text} per device")
            }
        };
        causes.push(format!(
            "because {needs} on the mesh that needs the least memory ({}, microbatch {})",
            context.context.mesh, context.context.workload.micro_batch
        ));
        causes.push(format!("and because a device may use {limit_text}"));
        let is_proof = report.status == SearchStatus::Infeasible;
        conclusion = Some(if is_proof { "no plan fits" } else { "no plan was found that fits" });
        if let Some((sufficient_limit, mesh)) = sufficient_memory(request, report, cache) {
            let hint = format!(
                "--memory-limit {} is enough, if the devices have it: {mesh}",
                sufficient_limit.0
            );
            hints.push(hint);
        }
        hints.push(memory_hint(request));
    } else if report.contexts.iter().any(|c| matches!(c.outcome, ContextOutcome::Infeasible(_))) {
        causes.extend(ops_without_strategy(request, report, cache));
        causes.push(format!(
            "because on every mesh some op has no legal strategy under `--strategy {}`{}",
            request.rules.baseline.name(),
            match request.rules.weights {
                WeightRule::Sharded => " with every weight sharded",
                WeightRule::Any => "",
            }
        ));
        let is_proof = report.status == SearchStatus::Infeasible;
        conclusion = Some(if is_proof { "no plan exists" } else { "no plan was found" });
        let mut hint = "a tensor axis that divides heads, ranks and widths".to_string();
        if request.rules.weights == WeightRule::Sharded {
            hint.push_str(", or --weights any");
        }
        if request.rules.baseline != Baseline::Auto {
            hint.push_str(", or --strategy auto");
        }
        hints.push(hint);
    }
    if report.contexts.iter().any(|context| matches!(context.outcome, ContextOutcome::NotReached)) {
        caveat = Some("though some meshes were not reached in time".into());
        hints.push("a longer --time-limit".into());
    }
    Diagnosis { causes, conclusion, caveat, hints }
}

/// The reason why no mesh, microbatch, sharding and schedule fit together, and a change to try.
fn reason_of_empty_space(request: &Request) -> (String, String) {
    let has_contexts = |request: &Request| {
        request.by_devices().iter().any(|request| !contexts(request).is_empty())
    };
    if let Some(schedule) = request.schedule
        && has_contexts(&Request { schedule: None, ..request.clone() })
    {
        return reason_of_schedule(request, schedule);
    }
    let devices = match (request.devices, request.objective) {
        (1, _) => "1 device".into(),
        (devices, Objective::Cost) => format!("up to {devices} devices"),
        (devices, _) => format!("{devices} devices"),
    };
    let cause = format!(
        "because no mesh of {devices} with these axes divides {} into microbatches",
        plural(request.global_batch, "sequence")
    );
    (cause, "another --global-batch or --micro-batch, or fewer fixed axes".into())
}

/// The reason why no mesh allows the schedule that a request fixes, and a change to try.
fn reason_of_schedule(request: &Request, schedule: PipelineSchedule) -> (String, String) {
    let blocks = request.model.blocks.len();
    let gradients = match request.zero {
        Some(Zero::Two | Zero::Three) => ", and gradients that replicas do not shard",
        _ => "",
    };
    let needs = match schedule {
        PipelineSchedule::Interleaved => format!(
            "several stages that divide the number of microbatches, and {} to {} chunks per stage that divide the {blocks} \
             blocks equally{gradients}",
            CHUNKS.start(),
            CHUNKS.end()
        ),
        PipelineSchedule::OneForwardOneBackward | PipelineSchedule::ZeroBubble => {
            "several pipeline stages".into()
        }
    };
    let cause = format!(
        "because the {} schedule needs {needs}, which no mesh of this request has",
        schedule.name()
    );
    let hint = match request.pipeline {
        Some(1) => "--schedule auto, or more than one stage by --pipeline",
        _ => "--schedule auto, or fewer fixed axes",
    };
    (cause, hint.into())
}

/// Changes of the request that lead to smaller plans.
fn memory_hint(request: &Request) -> String {
    let mut changes = vec!["more devices"];
    if request.micro_batch.is_some_and(|size| size > 1) {
        changes.push("a smaller --micro-batch");
    }
    if request.rules.recompute != Recompute::Auto {
        changes.push("--recompute auto");
    }
    if request.zero.is_some_and(|zero| zero != Zero::Three) {
        changes.push("--zero auto");
    }
    if request.shard_size.is_some() {
        changes.push("a larger --shard-size");
    }
    match changes.split_last() {
        Some((last, [])) => (*last).into(),
        Some((last, first)) => format!("{} or {last}", first.join(", ")),
        None => String::new(),
    }
}

/// Largest number of ops without a strategy in a message.
const NAMED_MAX: usize = 4;

/// Names the ops of the first mesh that have no strategy.
fn ops_without_strategy(
    request: &Request,
    report: &SearchReport,
    cache: &SearchCache,
) -> Option<String> {
    let has_no_strategy = |report: &&ContextReport| {
        matches!(report.outcome, ContextOutcome::Infeasible(Infeasible::NoStrategy))
    };
    let context = report.contexts.iter().find(has_no_strategy)?.context;
    let request = request.on_devices(context.mesh.devices());
    let segments = SegmentSolver::with_cache(&request, Deadline::none(), cache.segments());
    let names = segments.ops_without_strategy(&context);
    if names.is_empty() {
        return None;
    }
    let more = names.len().saturating_sub(NAMED_MAX);
    let named = names.into_iter().take(NAMED_MAX).collect::<Vec<_>>().join("`, `");
    let more = if more > 0 { format!(" and {more} others") } else { String::new() };
    let tensor = context.mesh.tensor;
    Some(format!("because `{named}`{more} cannot be split over {tensor} devices under these rules"))
}

/// Meshes, by least memory, that are lowered to find a sufficient memory limit.
const LOWERED_MAX: usize = 8;

/// A memory limit under which a plan exists, and its mesh.
fn sufficient_memory(
    request: &Request,
    report: &SearchReport,
    cache: &SearchCache,
) -> Option<(Bytes, Mesh)> {
    let requests = request.by_devices();
    let segments = |request| SegmentSolver::with_cache(request, Deadline::none(), cache.segments());
    let segments: Vec<SegmentSolver> = requests.iter().map(segments).collect();
    let solvers = ContextSolvers::new(&requests, &segments);
    let mut contexts: Vec<_> = report
        .contexts
        .iter()
        .filter(|report| may_need_least_memory(request, &report.context))
        .filter_map(|context| match &context.outcome {
            ContextOutcome::Infeasible(Infeasible::Memory { needed, .. }) => {
                Some((*needed, context.context))
            }
            _ => None,
        })
        .collect();
    contexts.sort_by_key(|(needed, _)| *needed);
    // Contexts of one mesh need nearly the same memory, unless they shard different states.
    let mut meshes = HashSet::new();
    contexts.retain(|(_, context)| meshes.insert((context.mesh, context.shards_gradients())));
    contexts.truncate(LOWERED_MAX);
    let smallest = contexts
        .par_iter()
        .map(|(_, context)| Some((solvers.of(context).min_memory(context)?, *context)));
    let smallest: Vec<Option<(Bytes, Context)>> = smallest.collect();
    let (peak, context) = smallest.into_iter().flatten().min_by_key(|(peak, _)| *peak)?;
    let restricted = solvers.of(&context).min_memory_restricted(&context);
    Some((restricted.map_or(peak, |restricted| restricted.min(peak)), context.mesh))
}
