//! Swept fields and the combinations of their values.

use narrows_cost_model::TrainingRunTerms;
use narrows_planner::Request;
use serde_json::Value;

use super::field::SweepField;

/// A swept field with its values.
#[derive(Clone, Debug)]
pub struct SweepAxis {
    /// The field.
    pub field: SweepField,
    /// Values of the field, at least one.
    pub values: Vec<Value>,
}

impl SweepAxis {
    /// The values that are numbers.
    pub fn numbers(&self) -> impl Iterator<Item = f64> + '_ {
        self.values.iter().filter_map(|value| self.field.number(value))
    }
}

/// One combination of values, with its request.
#[derive(Debug)]
pub struct Point {
    /// A value for each axis.
    pub values: Vec<Value>,
    /// Request of the point, not validated.
    pub request: Request,
    /// The training run to estimate.
    pub training_run: Option<TrainingRunTerms>,
    /// Whether the cost of a step is minimised, or compared with its minimum.
    pub reports_cost: bool,
    /// Price of one device for one hour, if it is known.
    pub price_per_device_hour: Option<f64>,
}
