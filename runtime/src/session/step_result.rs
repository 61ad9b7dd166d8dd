//! What came of a step, from some of the devices: those of a process, until all have agreed.

use narrows_plan::Bytes;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::mesh::{Axis, Mesh};
use narrows_plan::program::{Phase, Program};
use serde::{Deserialize, Serialize};

use super::{MeshCoordinates, StepResult};
use crate::error::RunError;
use crate::process_group::{ProcessGroup, agree};
use crate::report::{CollectiveCount, DeviceReport, StepReport};
use crate::time_breakdown::{TimeBreakdown, TimeCategory};

/// What is left of a device when its step is over.
pub struct DeviceStep<'a> {
    /// Where it is.
    pub coordinates: MeshCoordinates,
    /// The mean loss over the step's tokens, as far as it has seen it.
    pub loss: f64,
    /// The sum of all squares of gradients.
    pub gradient_square_sum: f32,
    /// What it did.
    pub report: &'a DeviceReport,
}

/// A part of a [`StepResult`].
pub struct LocalStepResult {
    mesh: Mesh,
    /// The loss over the tokens of these devices.
    loss: f64,
    /// The sum of all squares of gradients, from the first device.
    squares: Option<f32>,
    /// A device of each stage, where there is one.
    stages: Vec<Option<DeviceReport>>,
    /// What the devices' time was spent on, added up.
    pub time_breakdown: TimeBreakdown,
    /// Bytes that each device holds besides its arena.
    pub scratch_bytes: Vec<u64>,
    /// What the step's tokens hash to.
    pub token_hash: u64,
}

impl LocalStepResult {
    /// What devices of a process leave.
    pub fn from_devices<'a>(
        program: &Program,
        left: impl IntoIterator<Item = DeviceStep<'a>>,
    ) -> LocalStepResult {
        let mesh = program.context.mesh;
        let mut share = LocalStepResult::none(mesh);
        let last = mesh.pipeline - 1;
        // Where tokens are split, each device of the tensor axis has the loss of its own.
        let targets = program.stages[last as usize].buffers.iter().find(|b| b.name == "targets");
        let split = targets.is_some_and(|buffer| buffer.extent.rows < program.context.tokens());
        for left in left {
            if left.coordinates.stage == last && (split || left.coordinates.tensor == 0) {
                share.loss += left.loss;
            }
            if left.coordinates.tensor == 0 && left.coordinates.data == 0 {
                share.squares = Some(left.gradient_square_sum);
            }
            let report = share.stages[left.coordinates.stage as usize]
                .get_or_insert_with(|| left.report.clone());
            debug_assert_eq!(report, left.report, "devices of a stage move and hold as much");
        }
        share
    }

    fn none(mesh: Mesh) -> LocalStepResult {
        let stages = vec![None; mesh.pipeline as usize];
        let (loss, squares, time_breakdown) = (0.0, None, TimeBreakdown::default());
        LocalStepResult {
            mesh,
            loss,
            squares,
            stages,
            time_breakdown,
            scratch_bytes: vec![],
            token_hash: 0,
        }
    }

    /// Adds what other devices leave, whose numbers come after.
    fn merge(&mut self, other: LocalStepResult) {
        self.loss += other.loss;
        self.squares = other.squares.or(self.squares);
        for (mine, theirs) in self.stages.iter_mut().zip(other.stages) {
            if mine.is_none() {
                *mine = theirs;
            }
        }
        self.time_breakdown.add_all(&other.time_breakdown);
        self.scratch_bytes.extend(other.scratch_bytes);
    }

    /// What came of the step, when this is everyone's share.
    pub fn into_result(self) -> StepResult {
        let stages = self.stages.into_iter().map(Option::unwrap_or_default).collect();
        StepResult {
            loss: self.loss,
            gradient_norm: f64::from(self.squares.unwrap_or_default()).sqrt(),
            report: StepReport { mesh: self.mesh, stages },
            time_breakdown: self.time_breakdown.mean_over(self.scratch_bytes.len()),
            scratch_bytes: self.scratch_bytes,
        }
    }

    /// What came of the step of all processes, each of which gives its share.
    ///
    /// # Errors
    /// When a process is gone or late, or made the step on other tokens than process 0.
    pub fn reduce(
        self,
        cluster: &dyn ProcessGroup,
        program: &Program,
    ) -> Result<StepResult, RunError> {
        let mesh = self.mesh;
        let (all, stranger) = agree(cluster, StepMessage::of(&self), |all| {
            let mut whole = LocalStepResult::none(mesh);
            all.iter().for_each(|said| whole.merge(said.share(program)));
            let stranger = all.iter().position(|said| said.tokens != all[0].tokens);
            (StepMessage::of(&whole), stranger)
        })?;
        match stranger {
            None => Ok(all.share(program).into_result()),
            Some(process) => Err(RunError::TokensMismatch { rank: process as u64 }),
        }
    }
}

/// A share as it goes from process to process. Numbers that may be infinite or none go as their bits.
#[derive(Serialize, Deserialize)]
struct StepMessage {
    loss: u64,
    squares: Option<u32>,
    stages: Vec<Option<ReportMessage>>,
    nanoseconds: Vec<u64>,
    scratch: Vec<u64>,
    tokens: u64,
}

#[derive(Serialize, Deserialize)]
struct ReportMessage {
    allocated: u64,
    sent: u64,
    received: u64,
    instructions: Vec<(String, u64)>,
    /// Kind and axis by their place in [`KINDS`] and [`Axis::ALL`]; calls, payload, bytes sent.
    collectives: Vec<((usize, usize), [u64; 3])>,
}

const KINDS: [CollectiveKind; 4] = [
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllGather,
    CollectiveKind::AllToAll,
];

impl StepMessage {
    fn of(share: &LocalStepResult) -> StepMessage {
        let nanoseconds = |part: &TimeCategory| share.time_breakdown.get(*part).as_nanos() as u64;
        StepMessage {
            loss: share.loss.to_bits(),
            squares: share.squares.map(f32::to_bits),
            stages: share
                .stages
                .iter()
                .map(|stage| stage.as_ref().map(ReportMessage::of))
                .collect(),
            nanoseconds: TimeCategory::ALL.iter().map(nanoseconds).collect(),
            scratch: share.scratch_bytes.clone(),
            tokens: share.token_hash,
        }
    }

    fn share(&self, program: &Program) -> LocalStepResult {
        let mut share = LocalStepResult::none(program.context.mesh);
        share.loss = f64::from_bits(self.loss);
        share.squares = self.squares.map(f32::from_bits);
        for (stage, said) in share.stages.iter_mut().zip(&self.stages) {
            *stage = said.as_ref().map(|said| said.report(program));
        }
        for (part, nanoseconds) in TimeCategory::ALL.iter().zip(&self.nanoseconds) {
            share.time_breakdown.add(*part, std::time::Duration::from_nanos(*nanoseconds));
        }
        share.scratch_bytes.clone_from(&self.scratch);
        share
    }
}

impl ReportMessage {
    fn of(report: &DeviceReport) -> ReportMessage {
        let name = |(name, count): (&&str, &u64)| (name.to_string(), *count);
        let place = |((kind, axis), count): (&(CollectiveKind, Axis), &CollectiveCount)| {
            let kind = KINDS.iter().position(|known| known == kind).unwrap_or(0);
            let axis = Axis::ALL.iter().position(|known| known == axis).unwrap_or(0);
            ((kind, axis), [count.calls, count.payload.0, count.sent.0])
        };
        ReportMessage {
            allocated: report.allocated.0,
            sent: report.sent.0,
            received: report.received.0,
            instructions: report.instructions.iter().map(name).collect(),
            collectives: report.collectives.iter().map(place).collect(),
        }
    }

    fn report(&self, program: &Program) -> DeviceReport {
        let phases = [Phase::Forward, Phase::Backward, Phase::Step];
        let known = |name: &str| {
            let stages = program.stages.iter();
            let mut names = stages
                .flat_map(|stage| phases.into_iter().flat_map(|phase| stage.phase(phase)))
                .map(|instr| instr.action.name());
            names.find(|known| *known == name)
        };
        let instructions = self.instructions.iter();
        let collectives = self.collectives.iter().filter_map(|((kind, axis), count)| {
            let [calls, payload, sent] = *count;
            let count = CollectiveCount { calls, payload: Bytes(payload), sent: Bytes(sent) };
            Some(((*KINDS.get(*kind)?, *Axis::ALL.get(*axis)?), count))
        });
        DeviceReport {
            allocated: Bytes(self.allocated),
            sent: Bytes(self.sent),
            received: Bytes(self.received),
            instructions: instructions.filter_map(|(name, n)| Some((known(name)?, *n))).collect(),
            collectives: collectives.collect(),
        }
    }
}
