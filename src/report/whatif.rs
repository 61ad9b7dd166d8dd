//! The report of a sweep: one row per point.

use indexmap::{IndexMap, IndexSet};
use narrows_cost_model::TrainingRunEstimate;
use narrows_plan::{ContextAttention, Plan, Seconds};
use narrows_planner::Prediction;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::break_even::BreakEvenReport;
use super::infeasible::InfeasibleReport;
use super::page::{Align, Cell, Page, texts};
use super::prediction::{PredictionReport, assumed};
use super::search::{SearchSummary, gap_phrase};
use super::solution::SolutionReport;
use super::training_run::rounded;
use super::whatif_columns::{PlannedRow, ResultColumn};
use super::{Report, finite_limit};
use crate::args::Detail;
use crate::errors::Problem;
use crate::field_name::FieldName;
use crate::plot::PlotKind;
use crate::step_cost::StepCost;
use crate::text::{plan_phrase, plural, signed_percents, thousands};
use crate::unit::Unit;
use crate::whatif::{Point, PointOutcome, SweepAxis, text_of};

/// Answer of `narrows whatif`.
#[derive(Serialize, JsonSchema)]
#[schemars(title = "Narrows whatif answer")]
pub struct WhatIfReport<'a> {
    /// Whether every point was planned; `false` after Ctrl-C.
    is_complete: bool,
    /// The points that were planned, in the order of the sweep.
    pub(super) points: Vec<PointReport<'a>>,
    /// The answer of `--until`.
    #[serde(skip_serializing_if = "Option::is_none")]
    solution: Option<SolutionReport>,
    /// The answer of `--break-even`.
    #[serde(skip_serializing_if = "Option::is_none")]
    break_even: Option<BreakEvenReport>,
}

/// One point: its settings, and its plan or the reason why it has none.
#[derive(Serialize, JsonSchema)]
pub(super) struct PointReport<'a> {
    /// Values of the swept fields, by their names.
    pub(super) settings: IndexMap<String, &'a Value>,
    #[serde(flatten)]
    pub(super) result: PointResult<'a>,
}

#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum PointResult<'a> {
    /// The fastest plan.
    Planned {
        /// The plan, as `schema plan` describes it.
        decisions: &'a Plan,
        /// Prediction of the plan.
        prediction: PredictionReport<'a>,
        /// Status and effort of the search.
        search: SearchSummary,
        /// Cost of a step, if it is minimised or objectives are swept.
        #[serde(rename = "cost", skip_serializing_if = "Option::is_none")]
        step_cost: Option<&'a StepCost>,
        /// The training run, if one is estimated.
        #[serde(rename = "run", skip_serializing_if = "Option::is_none")]
        training_run: Option<TrainingRunEstimate>,
    },
    /// No plan.
    Failed {
        /// Reason why there is none.
        error: PointError,
        /// Status and effort of the search; absent if the values of the point do not fit each other.
        #[serde(skip_serializing_if = "Option::is_none")]
        search: Option<SearchSummary>,
    },
}

/// Reason why a point has no plan.
#[derive(Serialize, JsonSchema)]
pub(super) struct PointError {
    /// The problem, without a full stop.
    pub(super) message: String,
    /// Causes, each a clause that begins with its own conjunction.
    causes: Vec<String>,
    /// Corrections to try.
    hints: Vec<String>,
}

impl PointError {
    /// The problem with its causes, as one sentence without a full stop.
    pub(super) fn sentence(&self) -> String {
        format!("{} {}", self.message, self.causes.join(", ")).trim_end().to_owned()
    }
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
            solution: None,
            break_even: None,
        }
    }

    /// Adds the answer of `--break-even`.
    pub fn with_break_even(self, break_even: BreakEvenReport) -> WhatIfReport<'a> {
        WhatIfReport { break_even: Some(break_even), ..self }
    }

    /// Adds the answer of `--until`, for which not every point is planned.
    pub fn with_solution(self, solution: SolutionReport, is_complete: bool) -> WhatIfReport<'a> {
        WhatIfReport { solution: Some(solution), is_complete, ..self }
    }

    /// The distinct reasons why points have no plan, where they are too long for a row. Rows refer to them by number.
    fn reasons(&self) -> IndexSet<String> {
        let reason = |point: &PointReport| match self.break_even {
            Some(_) => point.result.reason(),
            None => point.result.causes(),
        };
        self.points.iter().filter_map(reason).collect()
    }

    /// The legend of the plans that the points have.
    fn plan_legend(&self, page: &mut Page) {
        let any_plan = |predicate: fn(&Plan) -> bool| {
            self.points.iter().any(|point| match &point.result {
                PointResult::Planned { decisions, .. } => predicate(decisions),
                PointResult::Failed { .. } => false,
            })
        };
        if !self.has_plan() {
            return;
        }
        page.paragraph(PLAN_LEGEND);
        if any_plan(|plan| plan.mesh.context > 1) {
            page.paragraph(CONTEXT_LEGEND);
        }
        if any_plan(|plan| plan.context_attention == ContextAttention::Gather) {
            page.paragraph(GATHER_LEGEND);
        }
        if any_plan(|plan| plan.context_attention == ContextAttention::Ring) {
            page.paragraph(RING_LEGEND);
        }
        if any_plan(|plan| plan.mesh.pipeline > 1) {
            page.paragraph(SCHEDULE_LEGEND);
        }
    }

    /// Whether any point has a plan.
    pub fn has_plan(&self) -> bool {
        self.planned().next().is_some()
    }

    /// The points that have a plan, with prediction and training run.
    fn planned(
        &self,
    ) -> impl Iterator<Item = (&PointReport<'a>, &'a Prediction, Option<&TrainingRunEstimate>)>
    {
        self.points.iter().filter_map(|point| match &point.result {
            PointResult::Planned { prediction, training_run, .. } => {
                Some((point, prediction.prediction, training_run.as_ref()))
            }
            PointResult::Failed { .. } => None,
        })
    }

    /// The rows of the points that have a plan; those of the others end with a message, which may be wrapped.
    fn rows_of_plans<'r>(&self, rows: &'r [Vec<String>]) -> Vec<&'r Vec<String>> {
        let rows = self.points.iter().zip(rows);
        let planned = rows.filter(|(point, _)| matches!(point.result, PointResult::Planned { .. }));
        planned.map(|(_, row)| row).collect()
    }

    /// Whether training runs are estimated.
    pub(super) fn has_runs(&self) -> bool {
        self.planned().any(|(_, _, run)| run.is_some())
    }

    /// Columns of the table after the settings.
    fn results(&self) -> Vec<ResultColumn> {
        match self.has_runs() {
            true => ResultColumn::of_training_runs(),
            false => ResultColumn::of_steps(self.has_costs()),
        }
    }

    /// Whether costs of steps are reported.
    pub(super) fn has_costs(&self) -> bool {
        let mut results = self.points.iter().map(|point| &point.result);
        results.any(|result| matches!(result, PointResult::Planned { step_cost: Some(_), .. }))
    }

    /// Paths of the parts of a profile that some prediction assumes.
    fn assumed_paths(&self) -> Vec<String> {
        let paths: IndexSet<&String> =
            self.planned().flat_map(|(_, prediction, _)| &prediction.assumed).collect();
        paths.into_iter().cloned().collect()
    }

    /// The gaps of the searches in words; `None` where all plans are proven the best.
    fn gap_phrase(&self) -> Option<String> {
        let searches = self.points.iter().filter_map(|point| match &point.result {
            PointResult::Planned { search, .. } => Some(search),
            PointResult::Failed { .. } => None,
        });
        gap_phrase(&searches.collect::<Vec<_>>())
    }

    /// The best point in words, and how many have a plan.
    fn verdict(&self) -> String {
        let total = self.points.len();
        let rate = |prediction: &Prediction| prediction.tokens_per_s;
        // The first of several that are equal.
        let best = self.planned().min_by(|(_, a, _), (_, b, _)| rate(b).total_cmp(&rate(a)));
        let Some((best, prediction, _)) = best else {
            return match total {
                1 => "The point has no plan.".to_owned(),
                _ => format!("None of {} has a plan.", plural(total as u64, "point")),
            };
        };
        let settings = |point: &PointReport| -> String {
            let phrase = |(name, value): (&String, &&Value)| format!("{name} {}", text_of(value));
            point.settings.iter().map(phrase).collect::<Vec<_>>().join(", ")
        };
        let rate = thousands(rate(prediction).round() as u64);
        let priced = self.planned().filter_map(|(point, _, run)| Some((point, run?.dollars?)));
        let cheapest = priced.min_by(|(_, a), (_, b)| a.total_cmp(b));
        let cheapest = cheapest.map_or(String::new(), |(point, dollars)| {
            format!(" Lowest cost: ${}, at {}.", rounded(dollars), settings(point))
        });
        let have = self.planned().count();
        let with_plan = match (have == total, total) {
            (true, 1) => String::new(),
            (true, _) => "all of them ".into(),
            (false, _) => format!("{have} of them "),
        };
        format!(
            "{}, {with_plan}with a plan. Highest throughput: {rate} tokens/s, at {}.{cheapest}",
            plural(total as u64, "point"),
            settings(best)
        )
    }
}

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
                step_cost: planned.step_cost.as_ref(),
                training_run: planned.training_run,
            },
            PointOutcome::Infeasible(search, diagnosis) => {
                let failure =
                    InfeasibleReport::diagnosed(&point.request, search, diagnosis.clone())
                        .into_failure();
                let search = Some(SearchSummary::without_plan(search));
                PointResult::Failed { error: failure.problems.into(), search }
            }
            PointOutcome::Invalid(problems) => {
                PointResult::Failed { error: problems.clone().into(), search: None }
            }
        })
    }

    /// The causes why a search found no plan, which are too long for a row.
    fn causes(&self) -> Option<String> {
        match self {
            PointResult::Failed { error, .. } if !error.causes.is_empty() => {
                Some(format!("No plan exists {}.", error.causes.join(", ")))
            }
            _ => None,
        }
    }

    /// Reason why there is no plan.
    fn reason(&self) -> Option<String> {
        match self {
            PointResult::Planned { .. } => None,
            PointResult::Failed { error, .. } => {
                Some(self.causes().unwrap_or_else(|| format!("{}.", error.message)))
            }
        }
    }

    /// Cells of a row of the table after the settings.
    fn cells(&self, columns: &[ResultColumn]) -> Vec<Cell> {
        match self {
            PointResult::Planned { decisions, prediction, step_cost, training_run, .. } => {
                let row = PlannedRow {
                    plan: decisions,
                    prediction: prediction.prediction,
                    step_cost: *step_cost,
                    training_run: training_run.as_ref(),
                };
                columns.iter().map(|column| column.cell(row)).collect()
            }
            PointResult::Failed { error, .. } => {
                let mut cells = vec![Cell::Text(String::new()); columns.len() - 1];
                cells.push(error.message.clone().into());
                cells
            }
        }
    }
}

/// Title of the column of a field. The last part of a path tells the columns of a table apart well enough.
fn title(name: &str) -> String {
    match name {
        "price_per_device_hour" => "$/h".into(),
        "power_watts" => "watts".into(),
        "mtbf_hours" => "MTBF h".into(),
        _ => name.rsplit('.').next().unwrap_or(name).replace('_', " "),
    }
}

/// Most reasons under a table.
const REASONS_MAX: usize = 10;

/// Writes the reasons under a table whose rows refer to them.
fn numbered(page: &mut Page, reasons: &IndexSet<String>) {
    for (reason, number) in reasons.iter().zip(1..=REASONS_MAX) {
        page.paragraph(&format!("({number}) {reason}"));
    }
    if reasons.len() > REASONS_MAX {
        page.line("--format json has the other reasons.");
    }
}

/// Legend of the letters of a plan.
const PLAN_LEGEND: &str = "T, P, D: devices along the tensor, pipeline and data axes; b: sequences of a microbatch; Z: ZeRO stage, with /N for shard groups of N replicas.";

/// Legend of meshes with a context axis.
const CONTEXT_LEGEND: &str = "C: devices along the context axis, which share each sequence.";

/// Legend of gathered keys and values.
const GATHER_LEGEND: &str = "Cg: keys and values are gathered over the context axis.";

/// Legend of ring attention.
const RING_LEGEND: &str = "Cr: keys and values rotate around the context axis (ring attention).";

/// Legend of the schedules of pipelines.
const SCHEDULE_LEGEND: &str = "Schedule of a pipeline: 1F1B; ZB: zero-bubble; v: interleaved, with this many model chunks per stage.";

/// Cells of the two alternatives of one value.
fn pair_cells(pair: &[PointReport], reasons: &IndexSet<String>) -> [Cell; 6] {
    let value = |(name, value): (&String, &&Value)| {
        let bytes = value.as_f64().filter(|_| FieldName::new(name.as_str()).unit() == Unit::Bytes);
        bytes.map_or_else(|| text_of(value), |bytes| Unit::Bytes.format(bytes))
    };
    let value = pair[0].settings.iter().next().map(value).unwrap_or_default();
    let without_plan = |point: Option<&PointReport>| {
        let number = point?.result.reason().and_then(|reason| reasons.get_index_of(&reason));
        number.map(|number| format!("no plan ({})", number + 1))
    };
    let step_time = |point: Option<&PointReport>| match &point?.result {
        PointResult::Planned { decisions, prediction, .. } => {
            Some((prediction.prediction.step_time_s, plan_phrase(decisions)))
        }
        PointResult::Failed { .. } => None,
    };
    let times = [step_time(pair.first()), step_time(pair.get(1))];
    let difference = match &times {
        [Some((first, _)), Some((second, _))] => signed_percents(100.0 * (second / first - 1.0), 1),
        _ => String::new(),
    };
    let cells = |time: &Option<(f64, String)>, point| match time {
        Some((time_s, plan)) => (Cell::from(Seconds(*time_s)), plan.clone()),
        None => (without_plan(point).unwrap_or_default().into(), String::new()),
    };
    let (first, first_plan) = cells(&times[0], pair.first());
    let (second, second_plan) = cells(&times[1], pair.get(1));
    [value.into(), first, first_plan.into(), second, second_plan.into(), difference.into()]
}

impl Report for WhatIfReport<'_> {
    fn reason_without_picture(&self, kind: PlotKind) -> Option<String> {
        let reason = match (kind, self.planned().count()) {
            (_, 0) => "because no point has a plan",
            (PlotKind::Memory | PlotKind::Scaling, 1) => {
                "because only one point has a plan, and two are needed"
            }
            (PlotKind::Scaling, _) => {
                "because no two numbers of devices have plans for one batch, or for one batch per device"
            }
            _ => return None,
        };
        Some(reason.into())
    }

    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        page.heading("What if");
        if self.points.is_empty() {
            page.paragraph(
                "The sweep was stopped before any point was planned: there is no result.",
            );
            return page;
        }
        let solution = self.solution.as_ref().map(SolutionReport::verdict);
        let break_even = self.break_even.as_ref().map(BreakEvenReport::verdict);
        page.paragraph(&solution.or(break_even).unwrap_or_else(|| self.verdict()));
        if let Some(phrase) = self.gap_phrase() {
            page.paragraph(&phrase);
        }
        if !self.is_complete {
            page.paragraph("The sweep was stopped; the points below are those that were planned.");
        }
        let first = &self.points[0];
        let reasons = self.reasons();
        if let Some(break_even) = &self.break_even {
            let pairs = self.points.chunks(2).map(|pair| pair_cells(pair, &reasons));
            break_even.table(&mut page, &pairs.collect::<Vec<_>>());
            numbered(&mut page, &reasons);
            self.plan_legend(&mut page);
            return page;
        }
        let titles: Vec<String> = first.settings.keys().map(|name| title(name)).collect();
        let settings = titles.iter().map(|title| (title.as_str(), Align::Right));
        let mut results = self.results();
        let headers = results.iter().map(|column| column.header());
        let mut columns: Vec<(&str, Align)> = settings.chain(headers).collect();
        let cells = |point: &PointReport| {
            let settings = point.settings.values().map(|value| text_of(value).into());
            let mut cells: Vec<Cell> = settings.chain(point.result.cells(&results)).collect();
            let reason = point.result.causes();
            let number = reason.and_then(|reason| reasons.get_index_of(&reason));
            if let (Some(number), Some(last)) = (number, cells.last_mut()) {
                *last = format!("no plan ({})", number + 1).into();
            }
            cells
        };
        let rows: Vec<Vec<Cell>> = self.points.iter().map(cells).collect();
        let mut rows = texts(columns.len(), &rows);
        let mut left_out = vec![];
        for dispensable in ResultColumn::DISPENSABLE {
            let position = results.iter().position(|column| *column == dispensable);
            let fits = Page::fits(&columns, &rows)
                && Page::fits_in_lines(&columns, &self.rows_of_plans(&rows));
            let Some(position) = position.filter(|_| !fits) else { continue };
            results.remove(position);
            columns.remove(titles.len() + position);
            rows.iter_mut().for_each(|row| drop(row.remove(titles.len() + position)));
            left_out.push(dispensable.header().0);
        }
        page.heading("Points");
        page.table(&columns, &rows);
        numbered(&mut page, &reasons);
        if !left_out.is_empty() {
            page.paragraph(&format!("Left out, and in --csv: {}.", left_out.join(", ")));
        }
        self.plan_legend(&mut page);
        if detail == Detail::Full {
            page.heading("Uncertainty");
            assumed(&mut page, &self.assumed_paths(), Detail::Summary);
        }
        page
    }
}
