//! The answer of `whatif --until`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::text::{plural, thousands};
use crate::whatif::{Extreme, Method, text_of};

/// Smallest or largest value of a field for which a condition holds.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SolutionReport {
    /// The condition.
    pub condition: String,
    /// The field.
    pub field: String,
    /// End of the values that was searched.
    pub extreme: Extreme,
    /// The value; `null` if the condition holds for none that was planned.
    pub value: Option<Value>,
    /// Whether a more extreme value may satisfy the condition too, because none was to be planned and the field takes some.
    pub is_range_end: bool,
    /// Values that were planned.
    pub method: Method,
    /// Number of values of the field that fit the request.
    pub values_total: usize,
    /// Number of values that do not fit the request, which are not planned.
    #[serde(skip)]
    pub values_unfit: usize,
    /// Number of values that were planned.
    pub values_planned: usize,
}

impl SolutionReport {
    /// Whether not all values of a method that plans all were planned.
    fn is_stopped(&self) -> bool {
        self.method == Method::All && self.values_planned < self.values_total
    }

    /// The answer and its assumptions in words.
    pub fn verdict(&self) -> String {
        let SolutionReport { condition, field, value, values_total, values_planned, .. } = self;
        let condition = if condition == "fits" { "a plan that fits" } else { condition };
        let (extreme, beyond) = match self.extreme {
            Extreme::Smallest => ("Smallest", "smaller"),
            Extreme::Largest => ("Largest", "larger"),
        };
        let answer = match value {
            Some(value) if self.is_range_end => format!(
                "{extreme} {field} with {condition}: {}, the end of the range; a {beyond} one may do too.",
                text_of(value)
            ),
            Some(value) => format!("{extreme} {field} with {condition}: {}.", text_of(value)),
            None => format!("No planned value of {field} satisfies {condition}."),
        };
        let fit = if self.values_unfit == 0 { "" } else { " that fit the request" };
        let total = format!("{}{fit}", plural(*values_total as u64, "value"));
        let planned = thousands(*values_planned as u64);
        let method = match self.method {
            _ if self.is_stopped() => format!("{planned} of {total} were planned before the stop."),
            Method::All if *values_total == 1 => format!("The only value{fit} was planned."),
            Method::All => format!("All {total} were planned."),
            Method::Bisection => format!(
                "{planned} of {total} were planned, by bisection, which assumes that the condition changes only once."
            ),
        };
        format!("{answer} {method}")
    }
}
