//! Parts of step time, memory and communication of plans, the largest difference first.

use std::collections::BTreeMap;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::{Axis, Bytes};
use narrows_runtime::{RunError, TimeCategory, count_step};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use crate::breakdown;
use crate::stage_memory::{MemoryContents, stage_memory};

use super::ComparedPlan;

/// A part of a quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Time of a step.
    Time(TimeCategory),
    /// Memory of a device.
    Memory(MemoryContents),
    /// Bytes that a device sends in collectives of a kind over an axis.
    Collective(Axis, CollectiveKind),
    /// Bytes that a device sends to neighbouring stages.
    StageTransfer,
}

impl Part {
    /// The name in JSON: `gemm`, `weights`, `tensor.all_reduce`, `pipeline.p2p`.
    pub fn name(self) -> String {
        match self {
            Part::Time(category) => category.name().to_owned(),
            Part::Memory(contents) => contents.name().to_owned(),
            Part::Collective(axis, kind) => format!("{}.{}", axis.name(), kind.name()),
            Part::StageTransfer => "pipeline.p2p".to_owned(),
        }
    }

    /// The name in a table.
    pub fn title(self) -> String {
        match self {
            Part::Time(TimeCategory::CollectiveExposed) => "exposed collectives".to_owned(),
            Part::Time(category) => breakdown::title(category).to_owned(),
            Part::Memory(contents) => contents.title().to_owned(),
            Part::Collective(axis, kind) => {
                format!("{}: {}", axis.name(), kind.name().replace('_', "-"))
            }
            Part::StageTransfer => "pipeline: P2P".to_owned(),
        }
    }

    /// The name in a sentence.
    pub fn phrase(self) -> String {
        match self {
            Part::Time(TimeCategory::Optimizer) => "the optimizer".to_owned(),
            Part::Time(TimeCategory::Bubble) => "the pipeline bubble".to_owned(),
            Part::Time(TimeCategory::Other) => "other work".to_owned(),
            _ => self.title(),
        }
    }
}

impl Serialize for Part {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.name())
    }
}

/// One part of a quantity, in every plan.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PartDifference {
    /// Name of the part.
    #[schemars(with = "String")]
    pub part: Part,
    /// Size in every plan, in the unit of the quantity.
    pub values: Vec<f64>,
}

/// Largest value less smallest value.
pub fn spread(values: &[f64]) -> f64 {
    let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let smallest = values.iter().copied().fold(f64::INFINITY, f64::min);
    largest - smallest
}

/// Seconds of a step by category. Categories without time in any plan are omitted.
pub fn time_parts(plans: &[ComparedPlan]) -> Vec<PartDifference> {
    let seconds = |category: TimeCategory| {
        let predicted = |plan: &ComparedPlan| {
            breakdown::predicted_s(&plan.priced.prediction.breakdown_s, category)
        };
        PartDifference { part: Part::Time(category), values: plans.iter().map(predicted).collect() }
    };
    sorted(TimeCategory::ALL.map(seconds).to_vec())
}

/// Bytes of a device of the stage that needs the most memory, by contents.
pub fn memory_parts(plans: &[ComparedPlan]) -> Vec<PartDifference> {
    let fullest_stage = |plan: &ComparedPlan| -> [Bytes; 4] {
        let stages = &plan.priced.program.program().stages;
        let fullest = stages.iter().max_by_key(|stage| stage.arena);
        fullest.map(stage_memory).unwrap_or_default()
    };
    let memories: Vec<[Bytes; 4]> = plans.iter().map(fullest_stage).collect();
    let part = |(index, contents): (usize, MemoryContents)| PartDifference {
        part: Part::Memory(contents),
        values: memories.iter().map(|memory| memory[index].as_f64()).collect(),
    };
    sorted(MemoryContents::ALL.into_iter().enumerate().map(part).collect())
}

/// Bytes that a device sends in a step, by axis and kind, of the stage that sends the most.
///
/// # Errors
/// A program that does not execute, which a checked one does.
pub fn communication_parts(plans: &[ComparedPlan]) -> Result<Vec<PartDifference>, RunError> {
    // In the order of their names.
    let mut parts: BTreeMap<String, PartDifference> = BTreeMap::new();
    for (index, plan) in plans.iter().enumerate() {
        let stages = count_step(&plan.priced.program)?.stages.into_iter().map(|device| {
            let collectives = device
                .collectives
                .iter()
                .map(|(&(kind, axis), count)| (Part::Collective(axis, kind), count.sent));
            collectives.chain([(Part::StageTransfer, device.sent)]).collect::<Vec<_>>()
        });
        // Parts of one stage, so that they add up to what one device sends.
        let sent = |stage: &Vec<(Part, Bytes)>| stage.iter().map(|(_, bytes)| bytes.0).sum::<u64>();
        for (part, bytes) in stages.max_by_key(sent).unwrap_or_default() {
            let absent = || PartDifference { part, values: vec![0.0; plans.len()] };
            parts.entry(part.name()).or_insert_with(absent).values[index] = bytes.as_f64();
        }
    }
    Ok(sorted(parts.into_values().collect()))
}

/// The parts that are not zero everywhere, by descending difference.
fn sorted(mut parts: Vec<PartDifference>) -> Vec<PartDifference> {
    parts.retain(|part| part.values.iter().any(|value| *value != 0.0));
    parts.sort_by(|a, b| spread(&b.values).total_cmp(&spread(&a.values)));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_comes_first() {
        let part = |contents, values: &[f64]| PartDifference {
            part: Part::Memory(contents),
            values: values.to_vec(),
        };
        let parts = vec![
            part(MemoryContents::Weights, &[5.0, 5.0, 5.0]),
            part(MemoryContents::WeightGradients, &[0.0, 0.0, 0.0]),
            part(MemoryContents::OptimizerStates, &[1.0, 2.0, 1.5]),
            part(MemoryContents::Activations, &[9.0, 3.0, 1.0]),
        ];
        let names: Vec<String> = sorted(parts).iter().map(|part| part.part.name()).collect();
        assert_eq!(names, ["activations", "optimizer_states", "weights"]);
    }
}
