//! The rows of a sweep as CSV.

use narrows_cost_model::TrainingRunEstimate;
use narrows_plan::Mesh;
use narrows_runtime::TimeCategory;
use serde_json::json;

use super::whatif::{PointResult, WhatIfReport};
use crate::breakdown::predicted_s;
use crate::step_cost::StepCost;
use crate::text::csv_table;
use crate::whatif::text_of;

/// Columns of the CSV between the settings and the parts of the step.
const CSV_RESULTS: [&str; 15] = [
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "tokens_per_s",
    "mfu",
    "peak_memory_bytes",
    "tensor",
    "pipeline",
    "data",
    "context",
    "micro_batch",
    "zero",
    "schedule",
    "status",
    "gap",
];

/// Columns of the CSV after the parts of the step, if training runs are estimated.
const CSV_RUN: [&str; 8] = [
    "days",
    "days_low",
    "days_high",
    "device_hours",
    "dollars",
    "energy_kwh",
    "goodput",
    "checkpoint_interval_s",
];

/// Columns of the CSV after those of the training run, if costs of steps are reported.
const CSV_COST: [&str; 2] = ["device_seconds", "dollars_per_step"];

/// Columns of the CSV after all others.
const CSV_LAST: [&str; 3] = ["context_attention", "shard_size", "error"];

/// Cells of the columns of the cost of a step.
fn csv_cost(cost: Option<&StepCost>) -> [String; CSV_COST.len()] {
    let seconds = cost.map(|cost| cost.device_seconds);
    let dollars = cost.and_then(|cost| cost.dollars_per_step);
    [seconds, dollars].map(|cell| cell.map_or(String::new(), |number| number.to_string()))
}

/// Cells of the columns of a training run.
fn csv_run(run: &TrainingRunEstimate) -> [String; CSV_RUN.len()] {
    let [low, high] = run.days_interval;
    let goodput = run.failures.map(|failures| failures.goodput);
    let interval_s = run.failures.map(|failures| failures.checkpoint_interval_s);
    let [days, low, high, device_hours] = [run.days, low, high, run.device_hours].map(Some);
    [days, low, high, device_hours, run.dollars, run.energy_kwh, goodput, interval_s]
        .map(|cell| cell.map_or(String::new(), |number| number.to_string()))
}

impl WhatIfReport<'_> {
    /// The rows as CSV (RFC 4180): the settings, then results in the units of their names. A result that has the name of a setting
    /// begins with `plan_`.
    pub fn csv(&self) -> String {
        let settings = self.points.first().map(|point| point.settings.keys().cloned());
        let settings: Vec<String> = settings.into_iter().flatten().collect();
        let categories = TimeCategory::ALL.iter().map(|category| format!("{}_s", category.name()));
        let (has_runs, has_costs) = (self.has_runs(), self.has_costs());
        let run_columns = CSV_RUN.iter().filter(|_| has_runs);
        let cost_columns = CSV_COST.iter().filter(|_| has_costs);
        let more = run_columns.chain(cost_columns).map(|column| column.to_string());
        let results = CSV_RESULTS.map(str::to_owned).into_iter();
        let results = results.chain(categories).chain(more).chain(CSV_LAST.map(str::to_owned));
        let results = results.map(|name| match settings.contains(&name) {
            true => format!("plan_{name}"),
            false => name,
        });
        let header: Vec<String> = settings.iter().cloned().chain(results).collect();
        let rows = self.points.iter().map(|point| {
            let settings = point.settings.values().map(|value| text_of(value));
            settings.chain(point.result.csv(has_runs, has_costs)).collect::<Vec<_>>()
        });
        csv_table(&header, rows)
    }
}

impl PointResult<'_> {
    /// Cells of a row of the CSV after the settings.
    fn csv(&self, has_runs: bool, has_costs: bool) -> Vec<String> {
        let PointResult::Planned { decisions, prediction, search, step_cost, training_run } = self
        else {
            let PointResult::Failed { error, .. } = self else { return vec![] };
            let run_columns = if has_runs { CSV_RUN.len() } else { 0 };
            let cost_columns = if has_costs { CSV_COST.len() } else { 0 };
            let columns = CSV_RESULTS.len() + TimeCategory::ALL.len() + run_columns + cost_columns;
            let mut cells = vec![String::new(); columns];
            cells.extend([String::new(), String::new(), error.sentence()]);
            return cells;
        };
        let prediction = prediction.prediction;
        let Mesh { tensor, pipeline, data, context } = decisions.mesh;
        let [low, high] = prediction.step_time_interval_s;
        let memory = prediction.peak_memory().0;
        let zero = decisions.zero.stage();
        let times = [prediction.step_time_s, low, high, prediction.tokens_per_s, prediction.mfu];
        let micro_batch = decisions.workload.micro_batch;
        let sizes = [memory, tensor, pipeline, data, context, micro_batch, zero];
        let parts = TimeCategory::ALL.map(|c| predicted_s(&prediction.breakdown_s, c).to_string());
        times
            .map(|time| time.to_string())
            .into_iter()
            .chain(sizes.map(|size| size.to_string()))
            .chain([text_of(&json!(decisions.schedule))])
            .chain([search.status().to_owned(), search.gap().unwrap_or_default().to_string()])
            .chain(parts)
            .chain(training_run.as_ref().map(csv_run).into_iter().flatten())
            .chain(has_costs.then(|| csv_cost(*step_cost)).into_iter().flatten())
            .chain([decisions.context_attention.name().to_owned()])
            .chain([decisions.shard_size.map_or(String::new(), |size| size.to_string())])
            .chain([String::new()])
            .collect()
    }
}
