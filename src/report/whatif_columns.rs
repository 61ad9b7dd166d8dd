//! Columns of the table of a sweep, after the settings.

use narrows_cost_model::TrainingRunEstimate;
use narrows_plan::{Plan, Seconds};
use narrows_planner::Prediction;

use super::page::{Align, Cell};
use super::step_cost;
use super::training_run::rounded;
use crate::step_cost::StepCost;
use crate::text::{half_width, percent, plan_phrase, thousands};
use crate::unit::Unit;

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultColumn {
    /// Step time.
    StepTime,
    /// Half the width of the 90 % interval of the step time.
    StepInterval,
    /// Tokens per second.
    Throughput,
    /// Model FLOPs utilisation.
    Mfu,
    /// Memory of the stage that needs the most.
    Memory,
    /// Cost of a step.
    StepCost,
    /// Duration of the training run.
    RunDuration,
    /// Half the width of the 90 % interval of that duration.
    RunInterval,
    /// Dollars of the training run.
    Dollars,
    /// Energy of the training run.
    Energy,
    /// Share of the time of the training run in which it progresses.
    Goodput,
    /// Mesh and other decisions.
    Plan,
}

/// A planned point.
#[derive(Clone, Copy, Debug)]
pub struct PlannedRow<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The prediction of the plan.
    pub prediction: &'a Prediction,
    /// Cost of a step, if one is stated.
    pub step_cost: Option<&'a StepCost>,
    /// The training run, if one is estimated.
    pub training_run: Option<&'a TrainingRunEstimate>,
}

impl ResultColumn {
    /// Columns of steps. The last column is the widest, and holds the reason where a point has no plan.
    pub fn of_steps(with_costs: bool) -> Vec<ResultColumn> {
        use ResultColumn::*;
        let mut columns = vec![StepTime, StepInterval, Throughput, Mfu, Memory];
        columns.extend(with_costs.then_some(StepCost));
        columns.push(Plan);
        columns
    }

    /// Columns of training runs.
    pub fn of_training_runs() -> Vec<ResultColumn> {
        use ResultColumn::*;
        vec![RunDuration, RunInterval, Dollars, Energy, Goodput, Plan]
    }

    /// Columns that make room for many swept fields, in this order.
    pub const DISPENSABLE: [ResultColumn; 6] = [
        ResultColumn::Mfu,
        ResultColumn::StepInterval,
        ResultColumn::RunInterval,
        ResultColumn::Memory,
        ResultColumn::Goodput,
        ResultColumn::Energy,
    ];

    /// Title and alignment.
    pub fn header(self) -> (&'static str, Align) {
        let title = match self {
            ResultColumn::StepTime => "step time",
            ResultColumn::StepInterval | ResultColumn::RunInterval => "90 %",
            ResultColumn::Throughput => "tokens/s",
            ResultColumn::Mfu => "MFU",
            ResultColumn::Memory => "memory",
            ResultColumn::StepCost => "cost",
            ResultColumn::RunDuration => "run",
            ResultColumn::Dollars => "$",
            ResultColumn::Energy => "kWh",
            ResultColumn::Goodput => "goodput",
            ResultColumn::Plan => return ("plan", Align::Left),
        };
        (title, Align::Right)
    }

    /// The cell of a planned point; empty where the point lacks the value.
    pub fn cell(self, row: PlannedRow) -> Cell {
        let PlannedRow { plan, prediction, step_cost, training_run } = row;
        let of_run = |cell: &dyn Fn(&TrainingRunEstimate) -> Option<String>| {
            training_run.and_then(cell).unwrap_or_default()
        };
        let relative = |[low, high]: [f64; 2], value: f64| half_width((high - low) / 2.0 / value);
        let text = match self {
            ResultColumn::StepTime => return Seconds(prediction.step_time_s).into(),
            ResultColumn::Memory => return prediction.peak_memory().into(),
            ResultColumn::RunDuration => {
                let days = training_run.map(|run| Cell::Quantity(Unit::Days, run.days));
                return days.unwrap_or_else(|| String::new().into());
            }
            ResultColumn::StepInterval => {
                relative(prediction.step_time_interval_s, prediction.step_time_s)
            }
            ResultColumn::Throughput => thousands(prediction.tokens_per_s.round() as u64),
            ResultColumn::Mfu => percent(prediction.mfu),
            ResultColumn::StepCost => step_cost.map(step_cost::amount).unwrap_or_default(),
            ResultColumn::RunInterval => of_run(&|run| Some(relative(run.days_interval, run.days))),
            ResultColumn::Dollars => of_run(&|run| run.dollars.map(rounded)),
            ResultColumn::Energy => of_run(&|run| run.energy_kwh.map(rounded)),
            ResultColumn::Goodput => {
                of_run(&|run| run.failures.map(|failures| percent(failures.goodput)))
            }
            ResultColumn::Plan => plan_phrase(plan),
        };
        text.into()
    }
}
