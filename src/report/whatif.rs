//! The report of a sweep: one row per point.

use indexmap::IndexMap;
use narrows_plan::{Mesh, Plan, Seconds, Zero};
use narrows_runtime::TimeCategory;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::breakdown::predicted_s;
use super::infeasible::InfeasibleReport;
use super::page::{Align, TextPage};
use super::prediction::PredictionReport;
use super::search::SearchSummary;
use super::{Report, finite_limit};
use crate::args::Detail;
use crate::errors::Problem;
use crate::text::{half_width, percent, plural, thousands};
use crate::whatif::{Point, PointOutcome, SweepAxis, text_of};

/// Answer of `narrows whatif`.
#[derive(Serialize, JsonSchema)]
#[schemars(title = "Narrows whatif answer")]
pub struct WhatIfReport<'a> {
    /// Whether every point was planned; `false` after Ctrl-C.
    is_complete: bool,
    /// The points that were planned, in the order of the sweep.
    points: Vec<PointReport<'a>>,
}

/// One point: its settings, and its plan or the reason why it has none.
#[derive(Serialize, JsonSchema)]
struct PointReport<'a> {
    /// Values of the swept fields, by their names.
    settings: IndexMap<String, &'a Value>,
    #[serde(flatten)]
    result: PointResult<'a>,
}

#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum PointResult<'a> {
    /// The fastest plan.
    Planned {
        /// The plan, as `schema plan` describes it.
        decisions: &'a Plan,
        /// Its prediction.
        prediction: PredictionReport<'a>,
        /// How the search ended.
        search: SearchSummary,
    },
    /// No plan.
    Failed {
        /// Why there is none.
        error: PointError,
        /// How the search ended; absent if the values of the point do not fit each other.
        #[serde(skip_serializing_if = "Option::is_none")]
        search: Option<SearchSummary>,
    },
}

/// Why a point has no plan.
#[derive(Serialize, JsonSchema)]
struct PointError {
    /// What is wrong.
    message: String,
    /// Causes, each a clause that begins with its own conjunction.
    causes: Vec<String>,
    /// Corrections to try.
    hints: Vec<String>,
}

impl From<Vec<Problem>> for PointError {
    fn from(problems: Vec<Problem>) -> PointError {
        let message = |problem: &Problem| match problem.location.as_str() {
            "" => problem.message.clone(),
            location => format!("{location}: {}", problem.message),
        };
        PointError {
            message: problems.iter().map(message).collect::<Vec<_>>().join("; "),
            causes: problems.iter().flat_map(|problem| problem.causes.clone()).collect(),
            hints: problems.into_iter().flat_map(|problem| problem.hints).collect(),
        }
    }
}

impl<'a> WhatIfReport<'a> {
    /// The report of all points that were reached.
    pub fn new(
        axes: &[SweepAxis],
        points: &'a [Point],
        outcomes: &'a [PointOutcome],
    ) -> WhatIfReport<'a> {
        let names: Vec<String> = axes.iter().map(|axis| axis.field.name()).collect();
        let report = |(point, outcome): (&'a Point, &'a PointOutcome)| {
            let settings = names.iter().cloned().zip(&point.values).collect();
            Some(PointReport { settings, result: PointResult::new(point, outcome)? })
        };
        WhatIfReport {
            is_complete: !outcomes.iter().any(|o| matches!(o, PointOutcome::NotReached)),
            points: points.iter().zip(outcomes).filter_map(report).collect(),
        }
    }

    /// Whether any point has a plan.
    pub fn has_plan(&self) -> bool {
        self.planned().next().is_some()
    }

    /// The points that have a plan, with plan and prediction.
    fn planned(&self) -> impl Iterator<Item = (&PointReport<'a>, &'a Plan, &PredictionReport<'a>)> {
        self.points.iter().filter_map(|point| match &point.result {
            PointResult::Planned { decisions, prediction, .. } => {
                Some((point, *decisions, prediction))
            }
            PointResult::Failed { .. } => None,
        })
    }

    /// The rows as CSV (RFC 4180): the settings, then results in the units of their names.
    pub fn csv(&self) -> String {
        let settings = self.points.first().map(|point| point.settings.keys().cloned());
        let categories = TimeCategory::ALL.iter().map(|category| format!("{}_s", category.name()));
        let header = settings.into_iter().flatten().chain(CSV_RESULTS.map(str::to_owned));
        let header = header.chain(categories).chain(["error".to_owned()]);
        let rows = self.points.iter().map(|point| {
            let settings = point.settings.values().map(|value| text_of(value));
            settings.chain(point.result.csv()).collect::<Vec<_>>()
        });
        let line = |cells: Vec<String>| {
            cells.iter().map(|cell| csv_cell(cell)).collect::<Vec<_>>().join(",") + "\n"
        };
        std::iter::once(header.collect()).chain(rows).map(line).collect()
    }

    /// The best point in words, and how many have a plan.
    fn verdict(&self) -> String {
        let total = self.points.len();
        let throughput = |prediction: &PredictionReport| prediction.prediction.tokens_per_s;
        let best =
            self.planned().max_by(|(_, _, a), (_, _, b)| throughput(a).total_cmp(&throughput(b)));
        let Some((best, _, prediction)) = best else {
            return format!("None of {} has a plan.", plural(total as u64, "point"));
        };
        let settings: Vec<String> = best
            .settings
            .iter()
            .map(|(name, value)| format!("{name} {}", text_of(value)))
            .collect();
        let rate = thousands(throughput(prediction).round() as u64);
        let have = self.planned().count();
        let all = if have == total { "all of them" } else { "of them" };
        let have = if have == total { String::new() } else { format!("{have} ") };
        format!(
            "{}, {have}{all} with a plan. Highest throughput: {rate} tokens/s, at {}.",
            plural(total as u64, "point"),
            settings.join(", ")
        )
    }
}

/// Columns of the CSV between the settings and the parts of the step.
const CSV_RESULTS: [&str; 13] = [
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "tokens_per_s",
    "mfu",
    "peak_memory_bytes",
    "tensor",
    "pipeline",
    "data",
    "micro_batch",
    "zero",
    "status",
    "gap",
];

impl<'a> PointResult<'a> {
    fn new(point: &Point, outcome: &'a PointOutcome) -> Option<PointResult<'a>> {
        Some(match outcome {
            PointOutcome::NotReached => return None,
            PointOutcome::Planned(planned) => PointResult::Planned {
                decisions: &planned.plan,
                prediction: PredictionReport {
                    prediction: &planned.prediction,
                    memory_limit_bytes: finite_limit(planned.memory_limit),
                },
                search: SearchSummary::new(&planned.search),
            },
            PointOutcome::Infeasible(search) => {
                let failure = InfeasibleReport::new(&point.request, search).into_failure();
                let search = Some(SearchSummary::without_plan(search));
                PointResult::Failed { error: failure.problems.into(), search }
            }
            PointOutcome::Invalid(problems) => {
                PointResult::Failed { error: problems.clone().into(), search: None }
            }
        })
    }

    /// Cells of a row of the CSV after the settings.
    fn csv(&self) -> Vec<String> {
        let PointResult::Planned { decisions, prediction, search } = self else {
            let PointResult::Failed { error, .. } = self else { return vec![] };
            let mut cells = vec![String::new(); CSV_RESULTS.len() + TimeCategory::ALL.len()];
            cells.push(error.message.clone());
            return cells;
        };
        let prediction = prediction.prediction;
        let Mesh { tensor, pipeline, data } = decisions.mesh;
        let [low, high] = prediction.step_time_interval_s;
        let memory = prediction.peak_memory_bytes.iter().max().copied().unwrap_or_default();
        let zero = match decisions.zero {
            Zero::Off => 0,
            Zero::One => 1,
        };
        let times = [prediction.step_time_s, low, high, prediction.tokens_per_s, prediction.mfu];
        let sizes = [memory, tensor, pipeline, data, decisions.workload.micro_batch, zero];
        let parts = TimeCategory::ALL.map(|c| predicted_s(&prediction.breakdown_s, c).to_string());
        times
            .map(|time| time.to_string())
            .into_iter()
            .chain(sizes.map(|size| size.to_string()))
            .chain([search.status().to_owned(), search.gap().unwrap_or_default().to_string()])
            .chain(parts)
            .chain([String::new()])
            .collect()
    }

    /// Cells of a row of the table after the settings.
    fn cells(&self) -> Vec<String> {
        let PointResult::Planned { decisions, prediction, .. } = self else {
            let PointResult::Failed { error, .. } = self else { return vec![] };
            let mut cells = vec![String::new(); 5];
            cells.push(error.message.clone());
            return cells;
        };
        let prediction = prediction.prediction;
        let [low, high] = prediction.step_time_interval_s;
        let width = (high - low) / 2.0 / prediction.step_time_s;
        let memory = prediction.peak_memory_bytes.iter().max().copied().unwrap_or_default();
        vec![
            Seconds(prediction.step_time_s).to_string(),
            half_width(width),
            thousands(prediction.tokens_per_s.round() as u64),
            percent(prediction.mfu),
            narrows_plan::Bytes(memory).to_string(),
            plan_phrase(decisions),
        ]
    }
}

/// Mesh axes longer than one, microbatch and ZeRO stage: `T4 D8 b2 Z1`.
fn plan_phrase(plan: &Plan) -> String {
    let Mesh { tensor, pipeline, data } = plan.mesh;
    let axes = [("T", tensor), ("P", pipeline), ("D", data)];
    let axes = axes.into_iter().filter(|(_, size)| *size > 1);
    let zero = (plan.zero == Zero::One).then_some(("Z", 1));
    let parts = axes.chain([("b", plan.workload.micro_batch)]).chain(zero);
    parts.map(|(name, size)| format!("{name}{size}")).collect::<Vec<_>>().join(" ")
}

/// A cell of a CSV file, quoted where needed.
fn csv_cell(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

impl Report for WhatIfReport<'_> {
    fn render(&self, _detail: Detail) -> String {
        let mut page = TextPage::default();
        page.heading("What if");
        page.paragraph(&self.verdict());
        if !self.is_complete {
            page.paragraph("The sweep was stopped; the points below are those that were planned.");
        }
        let Some(first) = self.points.first() else { return page.finish() };
        // The last part of a path tells the columns of a table apart well enough.
        let short = |name: &String| name.rsplit('.').next().unwrap_or(name).replace('_', " ");
        let titles: Vec<String> = first.settings.keys().map(short).collect();
        let settings = titles.iter().map(|title| (title.as_str(), Align::Right));
        let results = [
            ("step time", Align::Right),
            ("90 %", Align::Right),
            ("tokens/s", Align::Right),
            ("MFU", Align::Right),
            ("memory", Align::Right),
            ("plan", Align::Left),
        ];
        let columns: Vec<(&str, Align)> = settings.chain(results).collect();
        let rows: Vec<Vec<String>> = self
            .points
            .iter()
            .map(|point| {
                let settings = point.settings.values().map(|value| text_of(value));
                settings.chain(point.result.cells()).collect()
            })
            .collect();
        page.heading("Points");
        page.table(&columns, &rows);
        page.paragraph(
            "T, P, D: devices along the tensor, pipeline and data axes; b: sequences of a microbatch; Z1: ZeRO-1.",
        );
        page.finish()
    }
}

/// What `whatif --list` prints.
#[derive(Serialize)]
pub struct FieldListReport {
    fields: Vec<FieldReport>,
}

#[derive(Serialize)]
struct FieldReport {
    name: String,
    help: String,
}

impl FieldListReport {
    /// The report of fields with their help texts.
    pub fn new(fields: Vec<(String, String)>) -> FieldListReport {
        let field = |(name, help)| FieldReport { name, help };
        FieldListReport { fields: fields.into_iter().map(field).collect() }
    }
}

impl Report for FieldListReport {
    fn render(&self, _detail: Detail) -> String {
        let mut page = TextPage::default();
        let (of_files, flags): (Vec<&FieldReport>, Vec<&FieldReport>) =
            self.fields.iter().partition(|field| field.name.contains('.'));
        let groups = [("Flags", flags), ("Fields of the model and the profile", of_files)];
        for (heading, fields) in groups {
            page.heading(heading);
            let fields: Vec<(&str, String)> =
                fields.into_iter().map(|field| (field.name.as_str(), field.help.clone())).collect();
            page.fields(&fields);
        }
        page.paragraph(
            "Bandwidths may be given in GB/s (…_gbps instead of …_bytes_per_s), sizes in GiB (…_gib), times in \
             microseconds (…_us).",
        );
        page.finish()
    }
}
