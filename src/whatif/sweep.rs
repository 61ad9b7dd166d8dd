//! The points of a sweep, and their plans.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indexmap::IndexSet;
use narrows_cost_model::TrainingRunEstimate;
use narrows_plan::{Bytes, Plan};
use narrows_planner::{
    Diagnosis, Prediction, Request, SearchCache, SearchReport, equal_searches, search_until_stopped,
};
use rayon::prelude::*;
use serde_json::Value;

use crate::args::validate;
use crate::diagnosis::diagnosis;
use crate::errors::{CommandResult, Failure, Problem};
use crate::priced_plan::PricedPlan;
use crate::search_defects::SearchDefects;
use crate::step_cost::StepCost;

use super::field::SweepField;
use super::point::{Point, SweepAxis};
use super::scenario::Scenario;

/// Combination of the axes of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Every combination; the last axis varies fastest.
    Product,
    /// The first values of all axes, then the second values, and so on.
    Zip,
}

/// Result of planning one point.
#[derive(Debug)]
pub enum PointOutcome {
    /// The fastest plan.
    Planned(Box<PlannedPoint>),
    /// The search found no plan, for these reasons.
    Infeasible(SearchReport, Diagnosis),
    /// The values do not fit each other.
    Invalid(Vec<Problem>),
    /// The sweep was stopped first.
    NotReached,
}

/// The fastest plan of a point.
#[derive(Debug)]
pub struct PlannedPoint {
    /// The plan.
    pub plan: Plan,
    /// Prediction of the plan.
    pub prediction: Prediction,
    /// Report of the search.
    pub search: SearchReport,
    /// Memory that a device may use; `Bytes(u64::MAX)` without a limit.
    pub memory_limit: Bytes,
    /// Cost of a step, if it is reported.
    pub step_cost: Option<StepCost>,
    /// The training run under the plan, if one is estimated.
    pub training_run: Option<TrainingRunEstimate>,
}

impl PointOutcome {
    /// Defects of its search.
    pub fn defects(&self) -> SearchDefects {
        match self {
            PointOutcome::Planned(planned) => SearchDefects::of(&planned.search),
            PointOutcome::Infeasible(search, _) => SearchDefects::of(search),
            PointOutcome::Invalid(_) | PointOutcome::NotReached => SearchDefects::default(),
        }
    }
}

impl SweepAxis {
    /// Removes repeated values, which would repeat points of a product.
    pub fn remove_repetitions(&mut self) {
        let distinct: IndexSet<Value> = self.values.drain(..).collect();
        self.values.extend(distinct);
    }

    /// Sorts the values, which have a smallest and a largest one then.
    ///
    /// # Errors
    /// Values that are not numbers.
    pub fn sort_numbers(&mut self) -> Result<(), Problem> {
        let field = &self.field;
        if let Some(value) = self.values.iter().find(|value| field.number(value).is_none()) {
            let message = format!("`{}` is not a number, so no value is the smallest", value);
            return Err(Problem::new("--vary", message).hint("numbers such as devices=8..64*2"));
        }
        let number = |value: &Value| field.number(value).unwrap_or_default();
        self.values.sort_by(|a, b| number(a).total_cmp(&number(b)));
        Ok(())
    }
}

impl Sweep {
    /// Number of points; saturates.
    ///
    /// # Errors
    /// Axes of different lengths that are to be zipped.
    pub fn size(self, axes: &[SweepAxis]) -> CommandResult<usize> {
        let lengths = axes.iter().map(|axis| axis.values.len());
        match self {
            Sweep::Product => Ok(lengths.fold(1, usize::saturating_mul)),
            Sweep::Zip => {
                let first = axes.first().map_or(0, |axis| axis.values.len());
                let Some(axis) = axes.iter().find(|axis| axis.values.len() != first) else {
                    return Ok(first);
                };
                let message = format!(
                    "`{}` has {first} values and `{}` has {}",
                    axes[0].field,
                    axis.field,
                    axis.values.len()
                );
                let problem = Problem::new("--zip", message);
                Err(Failure::input(problem.hint("as many values for every field, or no --zip")))
            }
        }
    }

    /// The values of the point with this index.
    fn values(self, axes: &[SweepAxis], index: usize) -> Vec<Value> {
        match self {
            Sweep::Zip => axes.iter().map(|axis| axis.values[index].clone()).collect(),
            Sweep::Product => {
                let mut rest = index;
                let mut values: Vec<Value> = axes
                    .iter()
                    .rev()
                    .map(|axis| {
                        let value = axis.values[rest % axis.values.len()].clone();
                        rest /= axis.values.len();
                        value
                    })
                    .collect();
                values.reverse();
                values
            }
        }
    }

    /// All points.
    ///
    /// # Errors
    /// A value that its field does not take.
    pub fn points(self, scenario: &Scenario, axes: &[SweepAxis]) -> CommandResult<Vec<Point>> {
        (0..self.size(axes)?)
            .map(|index| {
                let values = self.values(axes, index);
                let fields = axes.iter().map(|axis| axis.field.clone());
                let settings: Vec<(SweepField, Value)> = fields.zip(values.clone()).collect();
                scenario.point(values, &settings)
            })
            .collect()
    }
}

/// Plans every point, in parallel and with one cache, until `stop` is set. Outcomes are in the order of the points; points
/// whose search was stopped are not reached.
pub fn plan_points(
    points: &[&Point],
    cache: &SearchCache,
    stop: &Arc<AtomicBool>,
    progress: &(dyn Fn() + Sync),
) -> Vec<PointOutcome> {
    let requests: Vec<&Request> = points.iter().map(|point| &point.request).collect();
    let planned: Vec<(usize, PointOutcome)> = equal_searches(&requests)
        .into_par_iter()
        .flat_map_iter(|group| {
            group.into_iter().map(|index| {
                if stop.load(Ordering::Relaxed) {
                    return (index, PointOutcome::NotReached);
                }
                let outcome = plan_point(points[index], cache, stop);
                progress();
                (index, outcome)
            })
        })
        .collect();
    let mut outcomes: Vec<PointOutcome> = points.iter().map(|_| PointOutcome::NotReached).collect();
    planned.into_iter().for_each(|(index, outcome)| outcomes[index] = outcome);
    outcomes
}

fn plan_point(point: &Point, cache: &SearchCache, stop: &Arc<AtomicBool>) -> PointOutcome {
    let request = &point.request;
    if let Err(failure) = validate(request) {
        return PointOutcome::Invalid(failure.problems);
    }
    let result = search_until_stopped(request, cache, stop);
    if result.report.is_interrupted {
        return PointOutcome::NotReached;
    }
    let Some(best) = result.best else {
        let diagnosis = diagnosis(request, &result.report, cache);
        return PointOutcome::Infeasible(result.report, diagnosis);
    };
    let planned = || -> CommandResult<PlannedPoint> {
        let priced = PricedPlan::of_search(request, best)?;
        let training_run = priced.training_run(point.training_run.as_ref())?;
        let PricedPlan { plan, prediction, .. } = priced;
        let (memory_limit, price) = (request.arena_limit(), point.price_per_device_hour);
        let step_cost = || StepCost::new(request, plan.mesh, prediction.step_time_s, price);
        let step_cost = point.reports_cost.then(step_cost);
        let search = result.report;
        Ok(PlannedPoint { plan, prediction, search, memory_limit, step_cost, training_run })
    };
    match planned() {
        Ok(planned) => PointOutcome::Planned(Box::new(planned)),
        Err(failure) => PointOutcome::Invalid(failure.problems),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn axis(flag: &str, values: Value) -> SweepAxis {
        let values = values.as_array().unwrap().clone();
        SweepAxis { field: SweepField::Flag(flag.into()), values }
    }

    #[test]
    fn the_last_axis_of_a_product_varies_fastest() {
        let axes = [axis("devices", json!([1, 2])), axis("tensor", json!([4, 8, 16]))];
        assert_eq!(Sweep::Product.size(&axes).unwrap(), 6);
        let values: Vec<Vec<Value>> = (0..6).map(|i| Sweep::Product.values(&axes, i)).collect();
        assert_eq!(json!(values), json!([[1, 4], [1, 8], [1, 16], [2, 4], [2, 8], [2, 16]]));
    }

    #[test]
    fn zipped_axes_have_equal_lengths() {
        let axes = [axis("devices", json!([1, 2])), axis("tensor", json!([4, 8]))];
        assert_eq!(Sweep::Zip.size(&axes).unwrap(), 2);
        assert_eq!(json!(Sweep::Zip.values(&axes, 1)), json!([2, 8]));
        let axes = [axis("devices", json!([1, 2])), axis("tensor", json!([4]))];
        assert!(Sweep::Zip.size(&axes).is_err());
    }
}
