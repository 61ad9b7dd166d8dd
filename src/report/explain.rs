//! The explanation of a plan: its bottlenecks, and the costs of the alternatives.

use narrows_plan::{Bytes, ContextAttention, Mesh, Seconds};
use narrows_planner::{
    Bottleneck, ContextOutcome, Explanation, Infeasible, MemoryBinding, MemoryEvidence, MeshRow,
    Objective, Prediction, Request, Resource, SearchReport,
};
use serde::Serialize;

use super::page::{Align, Cell, Page};
use super::prediction::{PredictionReport, assumed, exceeded_memory};
use super::search::SearchSummary;
use super::step_cost::{self, short};
use super::{Report, finite_limit};
use crate::args::Detail;
use crate::plot::{Figure, PlotKind, step_time_picture};
use crate::step_cost::StepCost;
use crate::text::{attention_mark, plural, plural_with, zero_stage};

/// A plan file with its prediction, to compare with the plan that the search finds.
pub struct PricedFile {
    /// The name of the file.
    pub name: String,
    /// The prediction of the plan.
    pub prediction: Prediction,
    /// Memory that a device may use; `Bytes(u64::MAX)` without a limit.
    pub memory_limit: Bytes,
}

/// Output of `explain`.
#[derive(Serialize)]
pub struct ExplainReport<'a> {
    #[serde(flatten)]
    explanation: &'a Explanation,
    /// The plan file, if one was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    given: Option<ComparedFile<'a>>,
    search: SearchSummary,
    /// Cost of a step of the chosen plan, if it was minimised.
    #[serde(rename = "cost", skip_serializing_if = "Option::is_none")]
    step_cost: Option<StepCost>,
    /// Model, devices and hardware.
    #[serde(skip)]
    title: String,
    #[serde(skip)]
    objective: Objective,
}

#[derive(Serialize)]
struct ComparedFile<'a> {
    name: &'a str,
    prediction: PredictionReport<'a>,
    /// Step time of the file over that of the chosen plan.
    ratio: Option<f64>,
    /// Clause about its memory, if it exceeds the limit.
    #[serde(skip)]
    exceeded_memory: Option<String>,
}

impl<'a> ExplainReport<'a> {
    /// The report on a search for this objective, its explanation, and the plan file to compare. The request is that of the plans.
    pub fn new(
        (request, objective): (&Request, Objective),
        explanation: &'a Explanation,
        given: Option<&'a PricedFile>,
        report: &SearchReport,
    ) -> ExplainReport<'a> {
        let best = explanation.chosen.as_ref().and_then(|chosen| chosen.prediction.as_ref());
        let given = given.map(|file| ComparedFile {
            name: &file.name,
            prediction: PredictionReport {
                prediction: &file.prediction,
                memory_limit_bytes: finite_limit(file.memory_limit),
            },
            exceeded_memory: exceeded_memory(&file.name, &file.prediction, file.memory_limit),
            ratio: best.map(|best| file.prediction.step_time_s / best.step_time_s),
        });
        let search = match explanation.chosen {
            Some(_) => SearchSummary::new(report),
            None => SearchSummary::without_plan(report),
        };
        let devices = plural(request.devices, "device");
        let title = format!("{} on {devices} of {}", request.model.name, request.profile.name());
        ExplainReport { explanation, given, search, step_cost: None, title, objective }
    }

    /// Adds the cost of a step of the chosen plan.
    pub fn with_step_cost(self, step_cost: Option<StepCost>) -> ExplainReport<'a> {
        ExplainReport { step_cost, ..self }
    }
}

impl Report for ExplainReport<'_> {
    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        page.heading(&self.title);
        let mut fields = vec![("search", self.search.verdict())];
        if let Some(chosen) = &self.explanation.chosen {
            fields.insert(0, ("chosen plan", chosen.summary.clone()));
            let step_time = chosen.prediction.as_ref().map(|best| Seconds(best.step_time_s));
            fields.extend(step_time.map(|time| ("step time", time.to_string())));
        }
        if let Some(cost) = &self.step_cost {
            fields.push(("cost", step_cost::phrase(cost)));
            fields.push(("devices", step_cost::devices_phrase(cost)));
        }
        page.fields(&fields);
        if !self.explanation.bottlenecks.is_empty() {
            page.heading("What limits the step");
            bottlenecks(&mut page, &self.explanation.bottlenecks, detail);
        }
        self.alternatives(&mut page, detail);
        meshes(&mut page, self.explanation, self.objective, detail);
        page.heading("Search");
        page.line(self.search.effort());
        page
    }
}

impl ExplainReport<'_> {
    /// The step times of the plans, if there are any.
    pub fn figures(&self) -> Vec<Figure> {
        let plans = self.plans().into_iter().map(|(name, prediction, _)| (name, prediction));
        let plans: Vec<(&str, &Prediction)> = plans.collect();
        let picture = step_time_picture(&format!("{}: step time by part", self.title), &plans);
        let mut caption =
            "Parts of the step time of the chosen plan and of its alternatives.".to_owned();
        if let Some(clause) = self.exceeded_memory() {
            caption.push_str(&format!(" {clause}."));
        }
        Figure::of(PlotKind::StepTime, picture, &caption).into_iter().collect()
    }

    /// Clause about the memory of the plan file, if it exceeds the limit.
    fn exceeded_memory(&self) -> Option<&str> {
        self.given.as_ref()?.exceeded_memory.as_deref()
    }

    /// The plans: name, prediction, and step time over that of the chosen plan.
    fn plans(&self) -> Vec<(&str, &Prediction, Option<f64>)> {
        let Some(chosen) = &self.explanation.chosen else { return vec![] };
        let chosen_plan = chosen.prediction.iter().map(|best| (&*chosen.name, best, None));
        let given =
            self.given.iter().map(|file| (file.name, file.prediction.prediction, file.ratio));
        let alternatives = self.explanation.alternatives.iter().filter_map(|alternative| {
            Some((&*alternative.name, alternative.prediction.as_ref()?, alternative.ratio))
        });
        chosen_plan.chain(given).chain(alternatives).collect()
    }

    fn alternatives(&self, page: &mut Page, detail: Detail) {
        let plans = self.plans();
        if plans.is_empty() {
            return;
        }
        page.heading("Alternatives");
        let columns = [
            ("plan", Align::Left),
            ("step time", Align::Right),
            ("vs. chosen", Align::Right),
            ("memory", Align::Right),
        ];
        let row = |(name, prediction, ratio): &(&str, &Prediction, Option<f64>)| {
            let peak = prediction.peak_memory();
            let ratio = ratio.map_or(String::new(), |ratio| format!("{ratio:.3} ×"));
            let time = Seconds(prediction.step_time_s);
            vec![(*name).to_owned().into(), time.into(), ratio.into(), peak.into()]
        };
        page.table(&columns, &plans.iter().map(row).collect::<Vec<Vec<Cell>>>());
        if let Some(clause) = self.exceeded_memory() {
            page.paragraph(&format!("{clause}."));
        }
        for alternative in &self.explanation.alternatives {
            if let Some(reason) = &alternative.rejection_reason {
                page.paragraph(&format!("{}: {reason}", alternative.name));
            }
        }
        if !self.explanation.is_complete {
            page.line("Interrupted: other alternatives were not planned.");
        }
        if detail == Detail::Full {
            breakdowns(page, &plans);
        }
    }
}

/// The time breakdown of each plan.
fn breakdowns(page: &mut Page, plans: &[(&str, &Prediction, Option<f64>)]) {
    page.heading("Time breakdown of each plan");
    let columns = [
        ("plan", Align::Left),
        ("GEMMs", Align::Right),
        ("attention", Align::Right),
        ("fused ops", Align::Right),
        ("communication", Align::Right),
        ("bubble", Align::Right),
    ];
    let row = |(name, prediction, _): &(&str, &Prediction, Option<f64>)| {
        let parts = &prediction.breakdown_s;
        let time = |seconds: f64| match seconds > 0.0 {
            true => Cell::from(Seconds(seconds)),
            false => String::new().into(),
        };
        vec![
            (*name).to_owned().into(),
            time(parts.gemm),
            time(parts.attention),
            time(parts.elementwise + parts.optimizer),
            time(parts.collective_exposed),
            time(parts.bubble),
        ]
    };
    page.table(&columns, &plans.iter().map(row).collect::<Vec<_>>());
    page.line("Fused ops include the optimizer. Communication: exposed collectives.");
}

fn bottlenecks(page: &mut Page, bottlenecks: &[Bottleneck], detail: Detail) {
    for bottleneck in bottlenecks {
        match bottleneck {
            Bottleneck::Resource { resource, percent } => {
                let name = match resource {
                    Resource::Compute => "compute: GEMMs and attention",
                    Resource::MemoryBandwidth => "memory bandwidth: fused ops and the optimizer",
                    Resource::Links => "communication: collectives and transfers",
                    Resource::Pipeline => "the pipeline bubble",
                    Resource::Hosts => "hosts: exact steps of LORO",
                };
                page.line(format!("{percent:3.0} % {name}"));
            }
            Bottleneck::Memory(binding) => page.paragraph(&memory(binding)),
            Bottleneck::Assumed(paths) => assumed(page, paths, detail),
        }
    }
}

fn memory(binding: &MemoryBinding) -> String {
    match binding {
        MemoryBinding::Unlimited { peak } => format!("Memory is not limited: {peak} per device."),
        MemoryBinding::Slack { peak, limit } => {
            format!("Memory does not bind: {peak} of {limit} per device.")
        }
        MemoryBinding::Binding { peak, limit, unlimited_step_time, unlimited_peak } => format!(
            "Memory binds: {peak} of {limit} per device. Without a limit a step takes \
             {unlimited_step_time} with {unlimited_peak}."
        ),
    }
}

/// The meshes with a plan, and the numbers of other meshes by outcome; in full detail all meshes.
fn meshes(page: &mut Page, explanation: &Explanation, objective: Objective, detail: Detail) {
    let meshes = &explanation.meshes;
    if meshes.is_empty() {
        return;
    }
    page.heading("Configurations, by their lower bounds");
    let listed: Vec<&MeshRow> = meshes
        .iter()
        .filter(|row| detail == Detail::Full || !is_summarised(&row.outcome))
        .collect();
    let time = |seconds: Option<f64>, absent: &str| match seconds {
        Some(seconds) => Cell::from(Seconds(seconds)),
        None => absent.to_owned().into(),
    };
    let has_context_axis = listed.iter().any(|row| row.mesh.context > 1);
    let row = |row: &&MeshRow| {
        let Mesh { tensor, pipeline, data, context } = row.mesh;
        let mark = attention_mark(row.context_attention);
        let mesh = match has_context_axis {
            true => format!("{tensor} × {context}{mark} × {pipeline} × {data}"),
            false => format!("{tensor} × {pipeline} × {data}"),
        };
        let schedule = match row.chunks {
            _ if pipeline == 1 => String::new(),
            Some(chunks) => format!("{} ({chunks})", row.schedule.name()),
            None => row.schedule.name().into(),
        };
        vec![
            mesh.into(),
            row.micro_batch.to_string().into(),
            zero_stage(row.zero, row.shard_size).unwrap_or_default().into(),
            schedule.into(),
            overlap_words(row).into(),
            time(row.bound_s, ""),
            time(row.step_time_s, outcome(&row.outcome)),
        ]
    };
    let columns = [
        ("mesh", Align::Left),
        ("microbatch", Align::Right),
        ("ZeRO", Align::Right),
        ("schedule", Align::Left),
        ("overlap", Align::Left),
        ("bound", Align::Right),
        ("step time", Align::Right),
    ];
    if !listed.is_empty() {
        page.table(&columns, &listed.iter().map(row).collect::<Vec<_>>());
        page.paragraph(&mesh_legend(&listed));
    }
    without_plan(page, &listed);
    let summarised = |predicate: fn(&ContextOutcome) -> bool| {
        meshes.iter().filter(move |row| detail == Detail::Summary && predicate(&row.outcome))
    };
    let count = |predicate| summarised(predicate).count() as u64;
    let bounds = bound_range(summarised(is_pruned), objective);
    let [not_improved, larger_bounds] = match objective {
        Objective::StepTime => ["searched without finding a faster plan", "larger bounds"],
        Objective::Memory => {
            page.paragraph(
                "Bounds are those of plans that need no more memory than the chosen one, among which \
                 the search was for the fastest.",
            );
            ["searched without finding a faster plan of that memory", "larger bounds"]
        }
        Objective::Cost => {
            page.paragraph(
                "Bounds in the table are those of step times. Configurations are ruled out by their \
                 device-seconds.",
            );
            ["searched without finding a cheaper plan", "larger bounds of device-seconds"]
        }
    };
    for (meshes, reason) in [
        (count(is_pruned), format!("ruled out by {bounds}")),
        (count(is_not_improved), not_improved.into()),
        (count(is_not_reached), "not reached in time".into()),
        (explanation.meshes_not_listed as u64, format!("not listed, with {larger_bounds}")),
    ] {
        if meshes > 0 {
            page.line(format!(
                "{} {reason}.",
                plural_with(meshes, "configuration", "configurations")
            ));
        }
    }
}

/// The collectives of a configuration that overlap with computation.
fn overlap_words(row: &MeshRow) -> String {
    let data = row.overlap_grad_reduce;
    match (data, row.overlap_tensor_collectives, row.overlap_microbatch_pairs) {
        (true, false, true) => "data, pairs",
        (true, true, _) => "both",
        (true, false, false) => "data",
        (false, _, true) => "pairs",
        (false, true, false) => "tensor",
        (false, false, false) => "",
    }
    .to_owned()
}

/// The least and the largest bound of meshes in words, in the unit of the objective.
fn bound_range<'a>(meshes: impl Iterator<Item = &'a MeshRow>, objective: Objective) -> String {
    let bound = |row: &MeshRow| match objective {
        Objective::Cost => row.bound_s.map(|seconds| seconds * row.mesh.devices() as f64),
        Objective::StepTime | Objective::Memory => row.bound_s,
    };
    let mut bounds: Vec<f64> = meshes.filter_map(bound).collect();
    bounds.sort_by(f64::total_cmp);
    let text = |bound: f64| match objective {
        Objective::Cost => format!("{} device-seconds", short(bound)),
        Objective::StepTime | Objective::Memory => Seconds(bound).to_string(),
    };
    let [low, high] = [bounds.first(), bounds.last()].map(|bound| bound.map(|bound| text(*bound)));
    match (low, high) {
        (Some(low), Some(high)) if low != high => format!("bounds of {low} to {high}"),
        (Some(low), _) => format!("bounds of {low}"),
        (None, _) => "their bounds".into(),
    }
}

/// Legend of the meshes in the table.
fn mesh_legend(listed: &[&MeshRow]) -> String {
    let has_context_axis = listed.iter().any(|row| row.mesh.context > 1);
    let has_chunks = listed.iter().any(|row| row.chunks.is_some());
    let has = |attention| listed.iter().any(|row| row.context_attention == attention);
    let is_overlapped =
        listed.iter().any(|row| row.overlap_grad_reduce || row.overlap_tensor_collectives);
    let has_pairs = listed.iter().any(|row| row.overlap_microbatch_pairs);
    let parts = [
        Some(match has_context_axis {
            true => "Mesh: tensor × context × pipeline × data",
            false => "Mesh: tensor × pipeline × data",
        }),
        has(ContextAttention::Gather).then_some("g: gathered keys and values"),
        has(ContextAttention::Ring).then_some("r: ring attention"),
        has_chunks.then_some("in parentheses: model chunks per stage"),
        is_overlapped.then_some("overlap: collectives of the data axis, of activations, or both"),
        has_pairs.then_some("pairs: those of activations in pairs of microbatches"),
    ];
    format!("{}.", parts.into_iter().flatten().collect::<Vec<_>>().join("; "))
}

/// The reasons why meshes have no plan, with the numbers of meshes.
fn without_plan(page: &mut Page, listed: &[&MeshRow]) {
    let reasons = listed.iter().filter_map(|row| match &row.outcome {
        ContextOutcome::Infeasible(reason) => Some(reason),
        _ => None,
    });
    let without_strategy =
        reasons.clone().filter(|reason| matches!(reason, Infeasible::NoStrategy));
    let mut counted = vec![(without_strategy.count(), "some op has no legal strategy".to_owned())];
    for known in [MemoryEvidence::AllPlans, MemoryEvidence::OnePlan, MemoryEvidence::TriedPlans] {
        let of_evidence = reasons.clone().filter_map(|reason| match reason {
            Infeasible::Memory { needed, limit, evidence, .. } if *evidence == known => {
                Some((*needed, *limit))
            }
            _ => None,
        });
        let mut memory: Vec<(Bytes, Bytes)> = of_evidence.collect();
        memory.sort();
        let (Some((low, limit)), Some((high, _))) = (memory.first(), memory.last()) else {
            continue;
        };
        let [low_text, limit_text] = low.distinct(*limit);
        let range = if low == high { low_text } else { format!("{low_text} to {high}") };
        let reason = match known {
            MemoryEvidence::AllPlans => format!("every plan needs at least {range}"),
            MemoryEvidence::OnePlan => format!("the smallest plan that was found needs {range}"),
            MemoryEvidence::TriedPlans => "no plan that was tried fits".into(),
        };
        counted.push((memory.len(), format!("{reason}; the limit is {limit_text} per device")));
    }
    for (meshes, reason) in counted.into_iter().filter(|(meshes, _)| *meshes > 0) {
        let meshes = plural_with(meshes as u64, "configuration", "configurations");
        page.paragraph(&format!("{meshes} without a plan: {reason}."));
    }
}

fn is_pruned(outcome: &ContextOutcome) -> bool {
    matches!(outcome, ContextOutcome::Pruned)
}

fn is_not_improved(outcome: &ContextOutcome) -> bool {
    matches!(outcome, ContextOutcome::NoImprovement)
}

fn is_not_reached(outcome: &ContextOutcome) -> bool {
    matches!(outcome, ContextOutcome::NotReached)
}

/// Whether meshes with this outcome are only counted in a summary.
fn is_summarised(outcome: &ContextOutcome) -> bool {
    is_pruned(outcome) || is_not_improved(outcome) || is_not_reached(outcome)
}

/// The outcome of a mesh, in place of a step time.
fn outcome(outcome: &ContextOutcome) -> &'static str {
    match outcome {
        ContextOutcome::Solved(_) => "",
        ContextOutcome::Pruned => "pruned",
        ContextOutcome::NoImprovement => "not faster",
        ContextOutcome::NotReached => "not reached",
        ContextOutcome::Infeasible(_) => "no plan",
    }
}
