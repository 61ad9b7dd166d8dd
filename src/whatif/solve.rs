//! Smallest or largest value of a field for which a condition on the answer holds.
//!
//! Few values are all planned, so that nothing is assumed. More values are bisected, which assumes that the condition
//! changes once between the first and the last value; the answer says which of the two was done.

use std::fmt;

use narrows_cost_model::TrainingRunTerms;
use serde::Serialize;

use crate::errors::Problem;

use super::sweep::{PlannedPoint, PointOutcome};

/// Most values that are all planned.
const PLANNED_ALL_MAX: usize = 16;

const BYTES_PER_GIB: f64 = 1_073_741_824.0;

/// A condition on the answer for one value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Condition {
    /// A plan exists within the memory limit.
    Fits,
    /// A quantity lies on one side of a bound.
    Bound {
        /// The quantity.
        quantity: Quantity,
        /// The side, and whether the bound belongs to it.
        comparison: ComparisonOperator,
        /// The bound.
        bound: f64,
    },
}

/// A quantity of a planned point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Seconds of a step.
    StepTime,
    /// Tokens per second.
    Throughput,
    /// Model FLOPs utilisation, from 0 to 1.
    Mfu,
    /// GiB of a device of the fullest stage.
    Memory,
    /// Days of the training run.
    Days,
    /// Device hours of the training run.
    DeviceHours,
    /// Price of the training run.
    Dollars,
    /// Energy of the training run.
    Energy,
    /// Share of the time of the training run in steps whose work is not lost.
    Goodput,
}

/// A comparison with a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparisonOperator {
    /// Below the bound.
    Less,
    /// At most the bound.
    LessOrEqual,
    /// Above the bound.
    Greater,
    /// At least the bound.
    GreaterOrEqual,
}

/// End of the values that is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Extreme {
    /// Smallest value.
    Smallest,
    /// Largest value.
    Largest,
}

/// Values that were planned to find the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Every value.
    All,
    /// The ends, and the middles of ranges between a value for which the condition holds and one for which it does not.
    Bisection,
}

impl Quantity {
    const ALL: [Quantity; 9] = [
        Quantity::StepTime,
        Quantity::Throughput,
        Quantity::Mfu,
        Quantity::Memory,
        Quantity::Days,
        Quantity::DeviceHours,
        Quantity::Dollars,
        Quantity::Energy,
        Quantity::Goodput,
    ];

    /// The name on the command line, with its unit.
    fn name(self) -> &'static str {
        match self {
            Quantity::StepTime => "step_time_s",
            Quantity::Throughput => "tokens_per_s",
            Quantity::Mfu => "mfu",
            Quantity::Memory => "memory_gib",
            Quantity::Days => "days",
            Quantity::DeviceHours => "device_hours",
            Quantity::Dollars => "dollars",
            Quantity::Energy => "energy_kwh",
            Quantity::Goodput => "goodput",
        }
    }

    /// Whether the quantity is a share, which is never above 1.
    fn is_share(self) -> bool {
        matches!(self, Quantity::Mfu | Quantity::Goodput)
    }

    /// The flag without which a run has no such quantity.
    fn missing_flag(self, run: Option<&TrainingRunTerms>) -> Option<&'static str> {
        let needs_run = !matches!(
            self,
            Quantity::StepTime | Quantity::Throughput | Quantity::Mfu | Quantity::Memory
        );
        let Some(run) = run else { return needs_run.then_some("--tokens") };
        match self {
            Quantity::Dollars if run.price_per_device_hour.is_none() => {
                Some("--price-per-device-hour")
            }
            Quantity::Energy if run.device_watts.is_none() => Some("--power-watts"),
            Quantity::Goodput if run.failures.is_none() => Some("--mtbf-hours"),
            _ => None,
        }
    }

    fn of(self, planned: &PlannedPoint) -> Option<f64> {
        let prediction = &planned.prediction;
        let run = planned.training_run.as_ref();
        match self {
            Quantity::StepTime => Some(prediction.step_time_s),
            Quantity::Throughput => Some(prediction.tokens_per_s),
            Quantity::Mfu => Some(prediction.mfu),
            Quantity::Memory => Some(prediction.peak_memory().as_f64() / BYTES_PER_GIB),
            Quantity::Days => Some(run?.days),
            Quantity::DeviceHours => Some(run?.device_hours),
            Quantity::Dollars => run?.dollars,
            Quantity::Energy => run?.energy_kwh,
            Quantity::Goodput => Some(run?.failures?.goodput),
        }
    }
}

impl ComparisonOperator {
    /// All comparisons; a symbol precedes those that it begins with.
    const ALL: [ComparisonOperator; 4] = [
        ComparisonOperator::LessOrEqual,
        ComparisonOperator::GreaterOrEqual,
        ComparisonOperator::Less,
        ComparisonOperator::Greater,
    ];

    fn symbol(self) -> &'static str {
        match self {
            ComparisonOperator::Less => "<",
            ComparisonOperator::LessOrEqual => "<=",
            ComparisonOperator::Greater => ">",
            ComparisonOperator::GreaterOrEqual => ">=",
        }
    }

    fn holds(self, value: f64, bound: f64) -> bool {
        match self {
            ComparisonOperator::Less => value < bound,
            ComparisonOperator::LessOrEqual => value <= bound,
            ComparisonOperator::Greater => value > bound,
            ComparisonOperator::GreaterOrEqual => value >= bound,
        }
    }
}

impl Condition {
    /// Parses `fits`, or a quantity, a comparison and a number: `step_time_s < 0.4`.
    ///
    /// # Errors
    /// A text of another form.
    pub fn parse(text: &str) -> Result<Condition, Problem> {
        let forms = "fits, or a comparison such as \"step_time_s < 0.4\"";
        if text.trim() == "fits" {
            return Ok(Condition::Fits);
        }
        let split = ComparisonOperator::ALL.into_iter().find_map(|comparison| {
            let (name, bound) = text.split_once(comparison.symbol())?;
            Some((name.trim(), comparison, bound.trim()))
        });
        let Some((name, comparison, bound)) = split else {
            let message = format!("`{text}` is not a condition");
            return Err(Problem::new("--until", message).hint(forms));
        };
        let Some(quantity) = Quantity::ALL.into_iter().find(|known| known.name() == name) else {
            let names = Quantity::ALL.map(Quantity::name).join(", ");
            let problem = Problem::new("--until", format!("no quantity is called `{name}`"));
            return Err(problem.hint(names));
        };
        match bound.parse() {
            Ok(bound) if quantity.is_share() && bound > 1.0 && f64::is_finite(bound) => {
                let message = format!("{} is a share, at most 1, not {bound}", quantity.name());
                let (share, symbol) = (bound / 100.0, comparison.symbol());
                let hint = format!("{} {symbol} {share}", quantity.name());
                let problem = Problem::new("--until", message);
                Err(if share <= 1.0 { problem.hint(hint) } else { problem })
            }
            Ok(bound) if f64::is_finite(bound) => {
                Ok(Condition::Bound { quantity, comparison, bound })
            }
            _ => Err(Problem::new("--until", format!("`{bound}` is not a number")).hint(forms)),
        }
    }

    /// Checks that a training run has the quantity of the condition.
    ///
    /// # Errors
    /// The flag that is missing.
    pub fn check(&self, run: Option<&TrainingRunTerms>) -> Result<(), Problem> {
        let Condition::Bound { quantity, .. } = self else { return Ok(()) };
        match quantity.missing_flag(run) {
            None => Ok(()),
            Some(flag) => {
                let message = format!("`{}` needs {flag}", quantity.name());
                Err(Problem::new("--until", message).hint(flag))
            }
        }
    }

    /// Whether the condition holds; never without a plan.
    pub fn holds(&self, outcome: &PointOutcome) -> bool {
        let PointOutcome::Planned(planned) = outcome else { return false };
        match self {
            Condition::Fits => true,
            Condition::Bound { quantity, comparison, bound } => {
                quantity.of(planned).is_some_and(|value| comparison.holds(value, *bound))
            }
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Condition::Fits => f.write_str("fits"),
            Condition::Bound { quantity, comparison, bound } => {
                write!(f, "{} {} {bound}", quantity.name(), comparison.symbol())
            }
        }
    }
}

/// Index of the smallest or largest of `count` values for which `holds` is true, or `None`. `holds` is asked for many
/// indices at once, so that they can be planned in parallel; each index is asked once.
pub fn solve(
    count: usize,
    extreme: Extreme,
    mut holds: impl FnMut(&[usize]) -> Vec<bool>,
) -> (Option<usize>, Method) {
    // Position 0 is the end that is searched.
    let index = |position: usize| match extreme {
        Extreme::Smallest => position,
        Extreme::Largest => count - 1 - position,
    };
    if count == 0 {
        return (None, Method::All);
    }
    if count <= PLANNED_ALL_MAX {
        let all: Vec<usize> = (0..count).map(index).collect();
        let found = holds(&all).iter().position(|holds| *holds);
        return (found.map(index), Method::All);
    }
    let ends = holds(&[index(0), index(count - 1)]);
    match ends[..] {
        [true, _] => return (Some(index(0)), Method::Bisection),
        [_, false] => return (None, Method::Bisection),
        _ => {}
    }
    let (mut fails, mut succeeds) = (0, count - 1);
    while succeeds - fails > 1 {
        let middle = fails + (succeeds - fails) / 2;
        match holds(&[index(middle)])[..] {
            [true] => succeeds = middle,
            _ => fails = middle,
        }
    }
    (Some(index(succeeds)), Method::Bisection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_parsed_and_printed() {
        for text in ["fits", "step_time_s < 0.4", "tokens_per_s >= 100000", "dollars <= 5000"] {
            assert_eq!(Condition::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Condition::parse("days<3").unwrap().to_string(), "days < 3");
        for (text, part) in [
            ("", "not a condition"),
            ("step_time_s = 1", "not a condition"),
            ("time < 1", "no quantity"),
            ("days < soon", "not a number"),
            ("days < inf", "not a number"),
            ("mfu >= 40", "mfu is a share, at most 1, not 40"),
            ("goodput > 1.5", "goodput is a share"),
        ] {
            let problem = Condition::parse(text).unwrap_err();
            assert!(problem.message.contains(part), "{text}: {}", problem.message);
        }
        assert_eq!(Condition::parse("mfu >= 40").unwrap_err().hints, ["mfu >= 0.4"]);
        let days = Condition::parse("days < 3").unwrap();
        assert!(days.check(None).unwrap_err().message.contains("--tokens"));
        assert!(Condition::Fits.check(None).is_ok());
    }

    /// Every threshold among few and among many values is found from both ends.
    #[test]
    fn every_threshold_is_found() {
        for count in [1, 2, 7, 16, 17, 100] {
            for threshold in 0..=count {
                let at_least =
                    |indices: &[usize]| indices.iter().map(|i| *i >= threshold).collect();
                let (found, method) = solve(count, Extreme::Smallest, at_least);
                assert_eq!(found, (threshold < count).then_some(threshold), "{count}");
                assert_eq!(method == Method::All, count <= PLANNED_ALL_MAX);
                let below = |indices: &[usize]| indices.iter().map(|i| *i < threshold).collect();
                let (found, _) = solve(count, Extreme::Largest, below);
                assert_eq!(found, threshold.checked_sub(1), "{count}");
            }
        }
    }

    #[test]
    fn bisection_asks_for_few_values_and_each_once() {
        let mut asked = vec![];
        let (found, _) = solve(1000, Extreme::Smallest, |indices| {
            asked.extend_from_slice(indices);
            indices.iter().map(|index| *index >= 777).collect()
        });
        assert_eq!(found, Some(777));
        assert!(asked.len() <= 12, "{asked:?}");
        asked.sort_unstable();
        assert!(asked.windows(2).all(|pair| pair[0] != pair[1]), "{asked:?}");
    }
}
