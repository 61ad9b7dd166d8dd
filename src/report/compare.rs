//! The report of a comparison of plans.

use narrows_cost_model::TrainingRunEstimate;
use narrows_plan::{Plan, Seconds};
use narrows_planner::Prediction;
use narrows_runtime::RunError;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::page::{Align, Cell, Page};
use super::prediction::PredictionReport;
use super::search::SearchSummary;
use super::{Report, finite_limit, training_run};
use crate::args::Detail;
use crate::compare::{
    ComparedDecision, ComparedPlan, DecisionDifference, PLANS_MAX, PartDifference,
    SegmentDifference, communication_parts, memory_parts, plan_differences, ranking,
    segment_differences, spread, time_parts, virtual_stage_blocks,
};
use crate::op_decisions::OpDecision;
use crate::plot::{Figure, PlotKind, step_time_picture};
use crate::text::{half_width, percent, plural, schedule, thousands, zero_stage};
use crate::unit::Unit;

/// Place of the unit in the heading of a table.
const QUANTITY: &str = "{unit}";

/// Names of the plans in tables.
const LABELS: [&str; PLANS_MAX] = ["A", "B", "C", "D", "E"];

/// Relative difference of step times below which plans are called equally fast.
const EQUAL: f64 = 5e-4;

/// Ratio of speeds from which on the faster plan is a number of times as fast.
const TIMES_MIN: f64 = 2.0;

/// Most parts of the step named in the verdict.
const VERDICT_PARTS: usize = 3;

/// Least part named in the verdict, relative to the largest one.
const VERDICT_SHARE: f64 = 0.1;

/// Answer of `narrows compare`. Lists of values have one for each plan, in the order of `plans`.
#[derive(Serialize, JsonSchema)]
#[schemars(title = "Narrows compare answer")]
pub struct CompareReport<'a> {
    /// The plans.
    plans: Vec<PlanEntry<'a>>,
    /// Label of the plan with the highest throughput.
    fastest: &'static str,
    /// Decisions for the whole plan that differ.
    decisions: Vec<DecisionDifference>,
    /// Segments and ranges of blocks whose decisions differ.
    segments: Vec<SegmentDifference>,
    /// Seconds of a step by category, the largest difference first.
    step_time_s: Vec<PartDifference>,
    /// Bytes of a device of the stage that needs the most memory, by contents, the largest difference first.
    memory_bytes: Vec<PartDifference>,
    /// Bytes that a device sends in a step, by axis and kind, the largest difference first.
    sent_bytes: Vec<PartDifference>,
    #[serde(skip)]
    tokens: Vec<u64>,
    /// Plans in descending order of throughput.
    #[serde(skip)]
    ranking: Vec<usize>,
}

/// One of the plans.
#[derive(Serialize, JsonSchema)]
struct PlanEntry<'a> {
    /// Label in text: `A`, `B`, ….
    label: &'static str,
    /// Name of the file, or `search`.
    name: &'a str,
    /// The plan, as `schema plan` describes it.
    decisions: &'a Plan,
    /// Prediction of the plan.
    prediction: PredictionReport<'a>,
    /// Status and effort of the search; absent for plan files.
    #[serde(skip_serializing_if = "Option::is_none")]
    search: Option<SearchSummary>,
    /// The training run, if one is estimated.
    #[serde(rename = "run", skip_serializing_if = "Option::is_none")]
    training_run: Option<TrainingRunEstimate>,
}

impl<'a> CompareReport<'a> {
    /// The report on at least two plans.
    ///
    /// # Errors
    /// A program that does not execute, which a checked one does.
    pub fn new(plans: &'a [ComparedPlan]) -> Result<CompareReport<'a>, RunError> {
        let entry = |(plan, label): (&'a ComparedPlan, &'static str)| PlanEntry {
            label,
            name: &plan.name,
            decisions: &plan.priced.plan,
            prediction: PredictionReport {
                prediction: &plan.priced.prediction,
                memory_limit_bytes: finite_limit(plan.memory_limit),
            },
            search: plan.search.as_ref().map(SearchSummary::new),
            training_run: plan.training_run,
        };
        let ranking = ranking(plans);
        Ok(CompareReport {
            plans: plans.iter().zip(LABELS).map(entry).collect(),
            fastest: ranking.first().map_or(LABELS[0], |first| LABELS[*first]),
            decisions: plan_differences(plans),
            segments: segment_differences(plans),
            step_time_s: time_parts(plans),
            memory_bytes: memory_parts(plans),
            sent_bytes: communication_parts(plans)?,
            tokens: plans.iter().map(ComparedPlan::tokens).collect(),
            ranking,
        })
    }

    /// The step times of the plans by part.
    pub fn figures(&self) -> Vec<Figure> {
        let name = |entry: &PlanEntry| format!("{}: {}", entry.label, entry.name);
        let names: Vec<String> = self.plans.iter().map(name).collect();
        let predictions = self.plans.iter().map(|entry| entry.prediction.prediction);
        let plans: Vec<(&str, &Prediction)> =
            names.iter().map(String::as_str).zip(predictions).collect();
        let title = format!("{}: step time by part", self.plans[0].decisions.model.name);
        let caption = match self.same_tokens() {
            true => "Parts of the step time of each plan; whiskers are 90 % intervals.",
            false => {
                "Parts of the step time of each plan, whose steps have different numbers of tokens; whiskers are 90 % \
                 intervals."
            }
        };
        let picture = step_time_picture(&title, &plans);
        Figure::of(PlotKind::StepTime, picture, caption).into_iter().collect()
    }

    /// Whether all plans have steps of one size, so that step times compare.
    fn same_tokens(&self) -> bool {
        self.tokens.iter().all(|tokens| *tokens == self.tokens[0])
    }

    /// The number that compares a plan with others, and its unit: the step time, or tokens per second where steps have
    /// different sizes.
    fn speed(&self, index: usize) -> (String, &'static str) {
        let prediction = self.plans[index].prediction.prediction;
        match self.same_tokens() {
            true => (Seconds(prediction.step_time_s).to_string(), "a step"),
            false => (thousands(prediction.tokens_per_s.round() as u64), "tokens/s"),
        }
    }

    /// The throughput of a device, for plans on different numbers of devices.
    fn per_device_phrase(&self) -> Option<String> {
        let devices = |plan: &PlanEntry| plan.decisions.mesh.devices();
        if self.plans.iter().all(|plan| devices(plan) == devices(&self.plans[0])) {
            return None;
        }
        let of = |plan: &PlanEntry| {
            let rate = plan.prediction.prediction.tokens_per_s / devices(plan) as f64;
            format!(
                "{} on {}: {}",
                plan.label,
                plural(devices(plan), "device"),
                thousands(rate.round() as u64)
            )
        };
        let each: Vec<String> = self.plans.iter().map(of).collect();
        Some(format!("Tokens/s of one device: {}.", each.join("; ")))
    }

    /// The fastest plan, by how much, and where the difference to the next one lies.
    fn verdict(&self) -> String {
        let order = &self.ranking;
        let (first, second) = (order[0], order[1]);
        let rate = |index: usize| self.plans[index].prediction.prediction.tokens_per_s;
        let ratio = |index: usize| rate(first) / rate(index);
        let label = |index: usize| LABELS[index];
        let (speed, unit) = self.speed(first);
        let parts = self.largest_parts(first, second);
        if order.len() == 2 {
            let head = if self.same_tokens() { "" } else { "For a million tokens: " };
            let parts = sentence(head, &parts);
            if ratio(second) < 1.0 + EQUAL {
                return format!("A and B are equally fast: {speed} {unit}.{parts}");
            }
            return format!(
                "{} is {}: {speed} {unit} instead of {}.{parts}",
                label(first),
                faster_than(ratio(second), label(second)),
                self.speed(second).0,
            );
        }
        let others: Vec<String> =
            order[1..].iter().map(|index| faster_than(ratio(*index), label(*index))).collect();
        let others = others.join(", ");
        let head = format!("{} is the fastest, {speed} {unit}: {others}.", label(first));
        let tokens = if self.same_tokens() { "" } else { " and for a million tokens" };
        let against = format!("Compared with {}{tokens}: ", label(second));
        format!("{head}{}", sentence(&against, &parts))
    }

    /// The largest differences of one plan's step time to that of another one, in words.
    fn largest_parts(&self, first: usize, second: usize) -> Vec<String> {
        let (parts, _) = self.comparable_times();
        let difference = |part: &PartDifference| part.values[first] - part.values[second];
        let mut parts: Vec<(f64, String)> =
            parts.iter().map(|part| (difference(part), part.part.phrase())).collect();
        parts.sort_by(|a, b| b.0.abs().total_cmp(&a.0.abs()));
        let largest = parts.first().map_or(0.0, |(seconds, _)| seconds.abs());
        let noted = |(seconds, _): &(f64, String)| {
            seconds.abs() > 0.0 && seconds.abs() >= largest * VERDICT_SHARE
        };
        let clause = |(seconds, name): (f64, String)| {
            let comparison = if seconds < 0.0 { "less" } else { "more" };
            format!("{} {comparison} in {name}", Seconds(seconds.abs()))
        };
        parts.into_iter().filter(noted).take(VERDICT_PARTS).map(clause).collect()
    }

    /// Parts of the step time with their heading; of a million tokens where steps have different sizes.
    fn comparable_times(&self) -> (Vec<PartDifference>, &'static str) {
        if self.same_tokens() {
            return (self.step_time_s.clone(), "Time of a step in {unit}");
        }
        let mut parts = self.step_time_s.clone();
        for part in &mut parts {
            for (value, tokens) in part.values.iter_mut().zip(&self.tokens) {
                *value *= 1e6 / *tokens as f64;
            }
        }
        parts.sort_by(|a, b| spread(&b.values).total_cmp(&spread(&a.values)));
        (parts, "Time of a million tokens in {unit}")
    }

    fn plans(&self, page: &mut Page) {
        let row = |entry: &PlanEntry| {
            let prediction = entry.prediction.prediction;
            let [low, high] = prediction.step_time_interval_s;
            let memory = prediction.peak_memory();
            vec![
                entry.label.to_owned().into(),
                entry.name.to_owned().into(),
                Seconds(prediction.step_time_s).into(),
                half_width((high - low) / 2.0 / prediction.step_time_s).into(),
                thousands(prediction.tokens_per_s.round() as u64).into(),
                percent(prediction.mfu).into(),
                memory.into(),
            ]
        };
        let columns = [
            ("", Align::Left),
            ("plan", Align::Left),
            ("step time", Align::Right),
            ("90 %", Align::Right),
            ("tokens/s", Align::Right),
            ("MFU", Align::Right),
            ("memory", Align::Right),
        ];
        page.heading("Plans");
        page.table(&columns, &self.plans.iter().map(row).collect::<Vec<Vec<Cell>>>());
    }

    /// Time, cost and energy of the training run under each plan.
    fn training_runs(&self, page: &mut Page) {
        let runs: Vec<&TrainingRunEstimate> =
            self.plans.iter().filter_map(|entry| entry.training_run.as_ref()).collect();
        training_run::table(page, &runs, &self.columns("", Align::Right));
    }

    fn decisions(&self, page: &mut Page, detail: Detail) {
        page.heading("Decisions that differ");
        let mut rows = self.plan_decisions();
        let row = |prefix: &str, difference: &DecisionDifference| {
            let name = format!("{prefix}{}", difference.decision.name());
            [name].into_iter().chain(difference.values.iter().map(text)).collect::<Vec<String>>()
        };
        for segment in &self.segments {
            let prefix = format!("{}: ", place(segment));
            rows.extend(segment.decisions.iter().map(|difference| row(&prefix, difference)));
        }
        if rows.is_empty() && self.segments.is_empty() {
            page.line("None: the plans are the same.");
            return;
        }
        if !rows.is_empty() {
            page.table(&self.columns("decision", Align::Right), &rows);
        }
        for segment in self.segments.iter().filter(|segment| !segment.ops.is_empty()) {
            let (count, place) = (segment.ops.len(), place(segment));
            page.line(format!(
                "{place}: {count} of {} ops have other strategies or layouts",
                segment.ops_total
            ));
            if detail == Detail::Full {
                let row = |op: &crate::compare::OpDifference| {
                    let decision = |value: &Option<OpDecision>| match value {
                        Some(decision) => decision.to_string(),
                        None => "–".into(),
                    };
                    let values = op.values.iter().map(decision);
                    std::iter::once(op.op.clone()).chain(values).collect::<Vec<String>>()
                };
                let rows: Vec<Vec<String>> = segment.ops.iter().map(row).collect();
                page.table(&self.columns("op", Align::Left), &rows);
            }
        }
        if detail == Detail::Summary && self.segments.iter().any(|segment| !segment.ops.is_empty())
        {
            page.line("--details lists the ops.");
        }
    }

    /// Rows of the decisions for the whole plan. A schedule names its chunks, and blocks are grouped by stage.
    fn plan_decisions(&self) -> Vec<Vec<String>> {
        let of_plans = |cell: fn(&Plan) -> String| {
            self.plans.iter().map(|entry| cell(entry.decisions)).collect::<Vec<String>>()
        };
        let cells = |difference: &DecisionDifference| match difference.decision {
            ComparedDecision::Schedule => {
                of_plans(|plan| schedule(plan).unwrap_or_else(|| "–".into()))
            }
            ComparedDecision::StageBlocks => of_plans(stage_blocks),
            ComparedDecision::Zero => {
                of_plans(|plan| zero_stage(plan.zero, None).unwrap_or_else(|| "off".into()))
            }
            _ => difference.values.iter().map(text).collect(),
        };
        let differs =
            |decision| self.decisions.iter().any(|difference| difference.decision == decision);
        let names_chunks = differs(ComparedDecision::Schedule);
        self.decisions
            .iter()
            .filter(|difference| difference.decision != ComparedDecision::Chunks || !names_chunks)
            .map(|difference| {
                let name = difference.decision.name().to_owned();
                std::iter::once(name).chain(cells(difference)).collect()
            })
            .collect()
    }

    fn columns(&self, first: &'static str, align: Align) -> Vec<(&'static str, Align)> {
        let plans = self.plans.iter().map(|entry| (entry.label, align));
        std::iter::once((first, Align::Left)).chain(plans).collect()
    }

    /// A table of parts with their differences: of two plans with its sign, of more from the smallest to the largest value.
    fn parts(&self, page: &mut Page, heading: &str, parts: &[PartDifference], unit: Unit) {
        if parts.is_empty() {
            return;
        }
        let mut columns = self.columns("", Align::Right);
        columns.push((if self.plans.len() == 2 { "B − A" } else { "range" }, Align::Right));
        let total = |index: usize| parts.iter().map(|part| part.values[index]).sum();
        let totals: Vec<f64> = (0..self.plans.len()).map(total).collect();
        // Differences too have the unit of the values.
        let differences = parts.iter().map(|part| spread(&part.values));
        let values = parts.iter().flat_map(|part| &part.values).chain(&totals).copied();
        let unit = unit.common(values.chain(differences));
        page.heading(heading.replacen(QUANTITY, unit.symbol(), 1));
        let row = |name: String, values: &[f64]| {
            let difference = match values {
                [a, b] => unit.signed_number(b - a),
                _ => unit.number(spread(values)),
            };
            let values = values.iter().map(|value| unit.number(*value));
            std::iter::once(name).chain(values).chain([difference]).collect::<Vec<_>>()
        };
        let mut rows: Vec<Vec<String>> =
            parts.iter().map(|part| row(part.part.title(), &part.values)).collect();
        rows.push(row("total".to_owned(), &totals));
        page.table(&columns, &rows);
    }
}

/// The advantage of a plan over the one with this label in words, from the ratio of their speeds.
fn faster_than(ratio: f64, label: &str) -> String {
    match ratio {
        _ if ratio < 1.0 + EQUAL => format!("as fast as {label}"),
        ..TIMES_MIN => format!("{} faster than {label}", percent(ratio - 1.0)),
        _ => format!("{ratio:.1} times as fast as {label}"),
    }
}

/// A sentence with a blank before it, if there is anything to list.
fn sentence(head: &str, parts: &[String]) -> String {
    if parts.is_empty() { String::new() } else { format!(" {head}{}.", parts.join(", ")) }
}

fn place(segment: &SegmentDifference) -> String {
    match segment.blocks {
        None => segment.segment.to_owned(),
        Some([first, last]) if first == last => format!("block {first}"),
        Some([first, last]) => format!("blocks {first}–{last}"),
    }
}

/// Numbers of blocks of the stages, of equal ones as a product: `5 + 3`, `4 × 2`. Those of an interleaved pipeline by their
/// chunks: `(2 + 1) + (1 + 2)`, `4 × (1 + 1)`.
fn stage_blocks(plan: &Plan) -> String {
    let blocks = virtual_stage_blocks(plan);
    let (stages, chunks) = (plan.mesh.pipeline as usize, plan.chunks());
    let stage = |stage: usize| {
        let of_chunks = blocks.iter().skip(stage).step_by(stages).map(u64::to_string);
        let sum = of_chunks.collect::<Vec<_>>().join(" + ");
        if chunks > 1 { format!("({sum})") } else { sum }
    };
    let of_stages: Vec<String> = (0..stages).map(stage).collect();
    match of_stages.iter().all(|blocks| *blocks == of_stages[0]) && stages > 1 {
        true => format!("{stages} × {}", of_stages[0]),
        false => of_stages.join(" + "),
    }
}

/// A value of a decision in text; of lists their elements.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "–".into(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(" + "),
        _ => value.to_string(),
    }
}

impl Report for CompareReport<'_> {
    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        page.heading(format!("{}: {} plans", self.plans[0].decisions.model.name, self.plans.len()));
        page.paragraph(&self.verdict());
        if let Some(phrase) = self.per_device_phrase() {
            page.paragraph(&phrase);
        }
        self.plans(&mut page);
        self.training_runs(&mut page);
        self.decisions(&mut page, detail);
        let (times, heading) = self.comparable_times();
        self.parts(&mut page, heading, &times, Unit::Seconds);
        let heading = "Memory per device in {unit}, on the stage that needs the most";
        self.parts(&mut page, heading, &self.memory_bytes, Unit::Bytes);
        let heading = "Sent per device and step in {unit}, by the stage that sends the most";
        self.parts(&mut page, heading, &self.sent_bytes, Unit::Bytes);
        page
    }
}
