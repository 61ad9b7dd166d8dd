//! The result of a step: combined from the devices of a process, and then from all processes.

use std::collections::BTreeSet;
use std::time::Duration;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::{BufferRole, Program};
use narrows_plan::{Axis, Bytes, Mesh};
use serde::{Deserialize, Serialize};

use super::coordinates::MeshCoordinates;
use crate::error::RunError;
use crate::process_group::{ProcessGroup, gather_and_broadcast};
use crate::report::{CollectiveCount, DeviceReport, StepReport};
use crate::time_breakdown::{TimeBreakdown, TimeCategory};

/// Result of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// Mean cross-entropy over the step's tokens, in nats.
    pub loss: f64,
    /// Norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// Instructions, collectives and transfers of each device.
    pub report: StepReport,
    /// Time of the step by category: means over the devices, which add up to the step.
    pub time_breakdown: TimeBreakdown,
    /// Bytes that each device holds outside its arena.
    pub scratch_bytes: Vec<u64>,
}

/// Result of a step on one device.
pub struct DeviceStep<'a> {
    /// Position of the device.
    pub coordinates: MeshCoordinates,
    /// Contribution of the device to the mean loss over the step's tokens.
    pub loss: f64,
    /// Sum of the squares of all gradients.
    pub gradient_square_sum: f32,
    /// Counts of the device.
    pub report: &'a DeviceReport,
}

/// Result of a step on the devices of one process.
pub struct LocalStepResult {
    mesh: Mesh,
    /// Sum of the devices' contributions to the mean loss.
    loss: f64,
    /// Sum of the squares of all gradients, from device 0.
    gradient_square_sum: Option<f32>,
    /// Report of a device of each stage that the process has devices of.
    stages: Vec<Option<DeviceReport>>,
    /// Time of the devices by category, summed over the devices.
    pub time_breakdown: TimeBreakdown,
    /// Bytes that each device holds outside its arena.
    pub scratch_bytes: Vec<u64>,
    /// Hash of the step's tokens.
    pub token_hash: u64,
}

impl LocalStepResult {
    /// Combines the results of the devices of a process.
    pub fn from_devices<'a>(
        program: &Program,
        devices: impl IntoIterator<Item = DeviceStep<'a>>,
    ) -> LocalStepResult {
        let mesh = program.context.mesh;
        let mut local = LocalStepResult::empty(mesh);
        let last = mesh.pipeline - 1;
        // With sharded tokens, each device of the tensor axis has the loss of its own; otherwise all
        // have the same.
        let stage = &program.stages[last as usize];
        let targets = stage.buffer_with_role(BufferRole::Targets);
        let sharded =
            targets.is_some_and(|id| stage.buffer(id).extent.rows < program.context.tokens());
        for device in devices {
            let MeshCoordinates { tensor, replica, stage } = device.coordinates;
            if stage == last && (sharded || tensor == 0) {
                local.loss += device.loss;
            }
            if tensor == 0 && replica == 0 {
                local.gradient_square_sum = Some(device.gradient_square_sum);
            }
            let report = local.stages[stage as usize].get_or_insert_with(|| device.report.clone());
            debug_assert_eq!(report, device.report, "reports of a stage's devices are equal");
        }
        local
    }

    fn empty(mesh: Mesh) -> LocalStepResult {
        LocalStepResult {
            mesh,
            loss: 0.0,
            gradient_square_sum: None,
            stages: vec![None; mesh.pipeline as usize],
            time_breakdown: TimeBreakdown::default(),
            scratch_bytes: vec![],
            token_hash: 0,
        }
    }

    /// Adds the result of the process of the next rank.
    fn merge(&mut self, next: LocalStepResult) {
        self.loss += next.loss;
        self.gradient_square_sum = next.gradient_square_sum.or(self.gradient_square_sum);
        for (own, next) in self.stages.iter_mut().zip(next.stages) {
            if own.is_none() {
                *own = next;
            }
        }
        self.time_breakdown.add_all(&next.time_breakdown);
        self.scratch_bytes.extend(next.scratch_bytes);
    }

    /// The result of the step, when this is the result of all devices.
    pub fn into_result(self) -> StepResult {
        let stages = self.stages.into_iter().map(Option::unwrap_or_default).collect();
        StepResult {
            loss: self.loss,
            gradient_norm: f64::from(self.gradient_square_sum.unwrap_or_default()).sqrt(),
            report: StepReport { mesh: self.mesh, stages },
            time_breakdown: self.time_breakdown.mean_over(self.scratch_bytes.len()),
            scratch_bytes: self.scratch_bytes,
        }
    }

    /// Combines the results of all processes.
    ///
    /// # Errors
    /// When a process is gone or late, or executed the step on other tokens than rank 0.
    pub fn reduce(
        self,
        group: &dyn ProcessGroup,
        program: &Program,
    ) -> Result<StepResult, RunError> {
        let mesh = self.mesh;
        let names = instruction_names(program);
        let own = StepMessage::encode(&self, &names);
        let (whole, mismatch) = gather_and_broadcast(group, own, |messages| {
            let mut whole = LocalStepResult::empty(mesh);
            messages.iter().for_each(|message| whole.merge(message.decode(mesh, &names)));
            let expected = messages[0].token_hash;
            let mismatch = messages.iter().position(|message| message.token_hash != expected);
            (StepMessage::encode(&whole, &names), mismatch)
        })?;
        match mismatch {
            None => Ok(whole.decode(mesh, &names).into_result()),
            Some(rank) => Err(RunError::TokensMismatch { rank: rank as u64 }),
        }
    }
}

/// A [`LocalStepResult`] between processes. Floats are sent as their bits, because JSON has neither
/// infinity nor NaN.
#[derive(Serialize, Deserialize)]
struct StepMessage {
    loss: u64,
    #[serde(rename = "squares")]
    gradient_square_sum: Option<u32>,
    stages: Vec<Option<ReportMessage>>,
    /// Nanoseconds, indexed as [`TimeCategory::ALL`].
    nanoseconds: Vec<u64>,
    #[serde(rename = "scratch")]
    scratch_bytes: Vec<u64>,
    #[serde(rename = "tokens")]
    token_hash: u64,
}

/// A [`DeviceReport`] between processes.
#[derive(Serialize, Deserialize)]
struct ReportMessage {
    allocated: u64,
    sent: u64,
    received: u64,
    /// Index of the instruction's name in [`instruction_names`], and its count.
    instructions: Vec<(usize, u64)>,
    collectives: Vec<CollectiveMessage>,
}

/// A [`CollectiveCount`] between processes.
#[derive(Serialize, Deserialize)]
struct CollectiveMessage {
    kind: CollectiveKind,
    axis: Axis,
    calls: u64,
    payload: u64,
    sent: u64,
}

/// The names of the program's instructions, sorted. All processes of a run have the same program.
fn instruction_names(program: &Program) -> Vec<&'static str> {
    let names: BTreeSet<_> = program.instructions().map(|instr| instr.action.name()).collect();
    names.into_iter().collect()
}

impl StepMessage {
    fn encode(local: &LocalStepResult, names: &[&'static str]) -> StepMessage {
        let nanoseconds =
            |category: &TimeCategory| local.time_breakdown.get(*category).as_nanos() as u64;
        let encode_report = |report: &DeviceReport| ReportMessage::encode(report, names);
        let stages = local.stages.iter().map(|report| report.as_ref().map(encode_report));
        StepMessage {
            loss: local.loss.to_bits(),
            gradient_square_sum: local.gradient_square_sum.map(f32::to_bits),
            stages: stages.collect(),
            nanoseconds: TimeCategory::ALL.iter().map(nanoseconds).collect(),
            scratch_bytes: local.scratch_bytes.clone(),
            token_hash: local.token_hash,
        }
    }

    fn decode(&self, mesh: Mesh, names: &[&'static str]) -> LocalStepResult {
        let mut local = LocalStepResult::empty(mesh);
        local.loss = f64::from_bits(self.loss);
        local.gradient_square_sum = self.gradient_square_sum.map(f32::from_bits);
        for (stage, message) in local.stages.iter_mut().zip(&self.stages) {
            *stage = message.as_ref().map(|message| message.decode(names));
        }
        for (category, nanoseconds) in TimeCategory::ALL.iter().zip(&self.nanoseconds) {
            local.time_breakdown.add(*category, Duration::from_nanos(*nanoseconds));
        }
        local.scratch_bytes.clone_from(&self.scratch_bytes);
        local
    }
}

impl ReportMessage {
    /// # Panics
    /// When `names` lacks an instruction of the report.
    fn encode(report: &DeviceReport, names: &[&'static str]) -> ReportMessage {
        let instruction = |(name, count): (&&'static str, &u64)| {
            let index = names.binary_search(name);
            (index.unwrap_or_else(|_| panic!("the program has no instruction {name}")), *count)
        };
        let collective = |(&(kind, axis), count): (&(CollectiveKind, Axis), &CollectiveCount)| {
            let CollectiveCount { calls, payload, sent } = *count;
            CollectiveMessage { kind, axis, calls, payload: payload.0, sent: sent.0 }
        };
        ReportMessage {
            allocated: report.allocated.0,
            sent: report.sent.0,
            received: report.received.0,
            instructions: report.instructions.iter().map(instruction).collect(),
            collectives: report.collectives.iter().map(collective).collect(),
        }
    }

    /// # Panics
    /// When the message was encoded with more `names`.
    fn decode(&self, names: &[&'static str]) -> DeviceReport {
        let collective = |message: &CollectiveMessage| {
            let CollectiveMessage { kind, axis, calls, payload, sent } = *message;
            let count = CollectiveCount { calls, payload: Bytes(payload), sent: Bytes(sent) };
            ((kind, axis), count)
        };
        let instructions = self.instructions.iter();
        DeviceReport {
            allocated: Bytes(self.allocated),
            sent: Bytes(self.sent),
            received: Bytes(self.received),
            instructions: instructions.map(|(index, count)| (names[*index], *count)).collect(),
            collectives: self.collectives.iter().map(collective).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_reports() {
        let pairs = CollectiveKind::ALL.iter().flat_map(|kind| Axis::ALL.map(|axis| (*kind, axis)));
        let count =
            |calls| CollectiveCount { calls, payload: Bytes(2 * calls), sent: Bytes(calls) };
        let report = DeviceReport {
            allocated: Bytes(1),
            instructions: [("fill", 2), ("send", 0)].into(),
            collectives: pairs.zip((3..).map(count)).collect(),
            sent: Bytes(4),
            received: Bytes(5),
        };
        let names = ["fill", "gemm", "send"];
        let text = serde_json::to_string(&ReportMessage::encode(&report, &names)).expect("JSON");
        let message: ReportMessage = serde_json::from_str(&text).expect("a message");
        assert_eq!(message.decode(&names), report);
    }
}
