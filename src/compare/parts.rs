//! Parts of step time, memory and communication of plans, the largest difference first.

use std::collections::BTreeMap;

use narrows_plan::Bytes;
use narrows_plan::program::{BufferRole, StageProgram};
use narrows_runtime::{RunError, TimeCategory, count_step};
use schemars::JsonSchema;
use serde::Serialize;

use crate::breakdown::seconds_by_category;

use super::ComparedPlan;

/// One part of a quantity, in every plan.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PartDifference {
    /// Name of the part.
    pub part: String,
    /// Size in every plan, in the unit of the quantity.
    pub values: Vec<f64>,
}

impl PartDifference {
    /// Largest value less smallest value.
    pub fn spread(&self) -> f64 {
        let largest = self.values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let smallest = self.values.iter().copied().fold(f64::INFINITY, f64::min);
        largest - smallest
    }
}

/// Seconds of a step by category. Categories without time in any plan are omitted.
pub fn time_parts(plans: &[ComparedPlan]) -> Vec<PartDifference> {
    let breakdowns: Vec<BTreeMap<&str, f64>> =
        plans.iter().map(|p| seconds_by_category(&p.priced.prediction.breakdown_s)).collect();
    let seconds = |category: TimeCategory| {
        let values = breakdowns.iter().map(|breakdown| breakdown[category.name()]).collect();
        PartDifference { part: category.name().to_owned(), values }
    };
    sorted(TimeCategory::ALL.map(seconds).to_vec())
}

/// Bytes of a device of the stage that needs the most memory, by contents.
pub fn memory_parts(plans: &[ComparedPlan]) -> Vec<PartDifference> {
    let parts: Vec<[(&str, Bytes); 4]> = plans
        .iter()
        .map(|plan| {
            let stages = &plan.priced.program.program().stages;
            let fullest = stages.iter().max_by_key(|stage| stage.arena);
            fullest.map(stage_memory).unwrap_or_default()
        })
        .collect();
    let part = |index: usize| PartDifference {
        part: parts[0][index].0.to_owned(),
        values: parts.iter().map(|parts| parts[index].1.as_f64()).collect(),
    };
    sorted(if parts.is_empty() { vec![] } else { (0..4).map(part).collect() })
}

/// Contents of the arena of a stage. Activations include inputs, gradients of activations, and unused gaps.
fn stage_memory(stage: &StageProgram) -> [(&'static str, Bytes); 4] {
    let sum = |of: fn(BufferRole) -> bool| -> Bytes {
        let buffers = stage.buffers.iter().filter(|buffer| of(buffer.role));
        buffers.map(|buffer| buffer.extent.bytes()).sum()
    };
    let weights = sum(|role| role == BufferRole::Weight);
    let gradients = sum(|role| role == BufferRole::WeightGradient);
    let optimizer = sum(BufferRole::is_optimizer_state);
    let activations = stage.arena.saturating_sub(weights + gradients + optimizer);
    [
        ("weights", weights),
        ("weight_gradients", gradients),
        ("optimizer_states", optimizer),
        ("activations", activations),
    ]
}

/// Bytes that a device sends in a step, by axis and kind (`tensor.all_reduce`, `pipeline.p2p`), of the stage that sends
/// the most.
///
/// # Errors
/// A program that does not execute, which a checked one does.
pub fn communication_parts(plans: &[ComparedPlan]) -> Result<Vec<PartDifference>, RunError> {
    let mut parts: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (index, plan) in plans.iter().enumerate() {
        let stages = count_step(&plan.priced.program)?.stages.into_iter().map(|device| {
            let collectives = device.collectives.iter().map(|((kind, axis), count)| {
                (format!("{}.{}", axis.name(), kind.name()), count.sent.0)
            });
            collectives.chain([("pipeline.p2p".to_owned(), device.sent.0)]).collect::<Vec<_>>()
        });
        // Parts of one stage, so that they add up to what one device sends.
        let sent = |stage: &Vec<(String, u64)>| stage.iter().map(|(_, bytes)| bytes).sum::<u64>();
        for (part, bytes) in stages.max_by_key(sent).unwrap_or_default() {
            let values = parts.entry(part).or_insert_with(|| vec![0.0; plans.len()]);
            values[index] = bytes as f64;
        }
    }
    let part = |(part, values)| PartDifference { part, values };
    Ok(sorted(parts.into_iter().map(part).collect()))
}

/// The parts that are not zero everywhere, by descending difference.
fn sorted(mut parts: Vec<PartDifference>) -> Vec<PartDifference> {
    parts.retain(|part| part.values.iter().any(|value| *value != 0.0));
    parts.sort_by(|a, b| b.spread().total_cmp(&a.spread()));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_comes_first() {
        let part = |part: &str, values: &[f64]| PartDifference {
            part: part.into(),
            values: values.to_vec(),
        };
        let parts = vec![
            part("equal", &[5.0, 5.0, 5.0]),
            part("absent", &[0.0, 0.0, 0.0]),
            part("small", &[1.0, 2.0, 1.5]),
            part("large", &[9.0, 3.0, 1.0]),
        ];
        let names: Vec<String> = sorted(parts).into_iter().map(|part| part.part).collect();
        assert_eq!(names, ["large", "small", "equal"]);
    }
}
