//! The null backend: executes a program without computing anything.
//!
//! The backend visits the instructions of every pass in order, checks that each operand lies in the arena,
//! matches transfers between stages, and counts instructions and bytes. It allocates no arena.
//!
//! Stages are executed round-robin, each until it needs a transfer that was not sent yet. A send
//! never waits here, so a program that deadlocks here deadlocks on every backend.

use std::collections::{BTreeMap, VecDeque};

use narrows_plan::program::{Access, Action, Phase, Program, StageProgram};
use narrows_plan::{Bytes, CheckedProgram};

use crate::addressing::operand_range;
use crate::error::RunError;
use crate::instruction_order::{ScheduledInstruction, scheduled_instructions};
use crate::report::{DeviceReport, StepReport};

/// Counts the instructions, collectives and transfers of one step of a program.
///
/// # Errors
/// The first operand outside its arena, transfer of mismatched size or deadlock, with its stage and
/// instruction.
pub fn count_step(program: &CheckedProgram) -> Result<StepReport, RunError> {
    execute(program.program())
}

/// Transfers that were sent and not yet received, by sending stage, receiving stage and phase.
type InFlight = BTreeMap<(usize, usize, Phase), VecDeque<Bytes>>;

fn execute(program: &Program) -> Result<StepReport, RunError> {
    let stages = program.stages.iter().enumerate();
    let mut devices: Vec<NullDevice> =
        stages.map(|(index, stage)| NullDevice::new(index, stage)).collect();
    let mut in_flight = InFlight::new();
    loop {
        let mut progressed = false;
        for device in &mut devices {
            progressed |= device.advance(&mut in_flight)?;
        }
        if !progressed {
            break;
        }
    }
    let waiting = devices.iter().find_map(|device| Some((device.stage_index, device.next?)));
    if let Some((stage, scheduled)) = waiting {
        return Err(RunError::Deadlock { stage, origin: scheduled.instr.origin.to_string() });
    }
    let stages = devices.into_iter().map(|device| device.report).collect();
    Ok(StepReport { mesh: program.context.mesh, stages })
}

/// One device of a stage. Its other devices execute the same.
struct NullDevice<'a> {
    stage_index: usize,
    stage: &'a StageProgram,
    remaining: Box<dyn Iterator<Item = ScheduledInstruction<'a>> + 'a>,
    /// The next instruction; `None` when the step is complete.
    next: Option<ScheduledInstruction<'a>>,
    report: DeviceReport,
}

impl<'a> NullDevice<'a> {
    fn new(stage_index: usize, stage: &'a StageProgram) -> Self {
        let mut remaining = Box::new(scheduled_instructions(stage));
        let next = remaining.next();
        let report = DeviceReport::with_arena(stage.arena);
        NullDevice { stage_index, stage, remaining, next, report }
    }

    /// Executes instructions up to the end of the step or a transfer that was not sent yet. Returns
    /// whether any was executed.
    fn advance(&mut self, in_flight: &mut InFlight) -> Result<bool, RunError> {
        let mut progressed = false;
        while let Some(scheduled) = self.next {
            if !self.execute(&scheduled, in_flight)? {
                break;
            }
            self.next = self.remaining.next();
            progressed = true;
        }
        Ok(progressed)
    }

    /// Executes one instruction. Returns `false` when it has to wait for a transfer.
    fn execute(
        &mut self,
        scheduled: &ScheduledInstruction<'_>,
        in_flight: &mut InFlight,
    ) -> Result<bool, RunError> {
        let instr = scheduled.instr;
        for access in instr.reads.iter().chain(&instr.writes) {
            self.check_range(access, scheduled)?;
        }
        let mut axis = None;
        match &instr.action {
            Action::Collective(collective) => axis = Some(collective.axis),
            Action::Send(transfer) => {
                let sent = bytes_of(&instr.reads);
                in_flight
                    .entry((self.stage_index, transfer.peer_stage as usize, scheduled.pass.phase))
                    .or_default()
                    .push_back(sent);
                self.report.sent += sent;
            }
            Action::Receive(transfer) => {
                let from = transfer.peer_stage as usize;
                let queue =
                    in_flight.entry((from, self.stage_index, scheduled.pass.phase)).or_default();
                let Some(sent) = queue.pop_front() else { return Ok(false) };
                let received = bytes_of(&instr.writes);
                if sent != received {
                    let (stage, origin) = (self.stage_index, instr.origin.to_string());
                    return Err(RunError::TransferSizeMismatch { stage, origin, sent, received });
                }
                self.report.received += received;
            }
            Action::Attention(attention) => {
                for (count, shift) in attention.ring_shifts() {
                    (0..count).for_each(|_| self.report.count_collective(shift.group.axis, &shift));
                }
            }
            Action::Gemm(_) | Action::Fused(_) => {}
        }
        self.report.count(instr.action.name(), axis, &instr.kernel());
        Ok(true)
    }

    fn check_range(
        &self,
        access: &Access,
        scheduled: &ScheduledInstruction<'_>,
    ) -> Result<(), RunError> {
        let range = operand_range(self.stage, access, scheduled.slot);
        if range.end <= self.stage.arena.0 {
            return Ok(());
        }
        Err(RunError::OutsideArena {
            stage: self.stage_index,
            pass: scheduled.pass,
            origin: scheduled.instr.origin.to_string(),
            buffer: self.stage.buffer(access.buffer).name.clone(),
            end: range.end,
            arena: self.stage.arena,
        })
    }
}

fn bytes_of(operands: &[Access]) -> Bytes {
    operands.iter().map(|access| access.extent.bytes()).sum()
}

#[cfg(test)]
mod tests {
    use narrows_plan::model::Rope;
    use narrows_plan::program::{
        Buffer, BufferId, BufferRole, Extent, FusedOp, Instr, MicrobatchPass, ModelChunk,
        ModelConstants, P2pTransfer, StageSchedule,
    };
    use narrows_plan::{Axis, Context, DType, Mesh, Precision, Workload, Zero};

    use super::*;

    const MESH: Mesh = Mesh { tensor: 1, pipeline: 2, data: 1, context: 1 };
    const EXTENT: Extent = Extent { rows: 2, columns: 32, dtype: DType::F32 };

    fn instr(action: Action, reads: &[u32], writes: &[u32]) -> Instr {
        let operands = |ids: &[u32]| -> Vec<Access> {
            ids.iter().map(|id| Access { buffer: BufferId(*id), extent: EXTENT }).collect()
        };
        let (reads, writes) = (operands(reads), operands(writes));
        Instr { action, reads, writes, origin: "test".into(), overlapped_instrs: 0 }
    }

    fn stage(forward: Vec<Instr>, schedule: Vec<MicrobatchPass>) -> StageProgram {
        let buffer = Buffer {
            name: "x".into(),
            extent: EXTENT,
            role: BufferRole::Activation,
            offset: 256,
            copies: 2,
            shard: None,
            sections: vec![],
        };
        StageProgram {
            buffers: vec![buffer],
            chunks: vec![ModelChunk { forward, slots: 2, ..ModelChunk::empty() }],
            step: vec![],
            gradient_buckets: vec![],
            gather_buckets: vec![],
            exact_step: Default::default(),
            schedule,
            arena: Bytes(768),
        }
    }

    fn transfer(stage: u32) -> P2pTransfer {
        P2pTransfer {
            tensors: vec![narrows_plan::graph::BoundaryTensorId::Hidden],
            peer_stage: stage,
            group: MESH.group(Axis::Pipeline),
        }
    }

    /// Two stages: the first sends what the second receives.
    fn two_stage_program() -> Program {
        let context = Context::new(
            MESH,
            Workload { global_batch: 2, sequence_length: 2, micro_batch: 1 },
            Precision::MixedBf16,
            Zero::Off,
        );
        let schedule = |at| StageSchedule::of(&context, at).passes(false);
        let sends = vec![
            instr(Action::Fused(FusedOp::Fill), &[], &[0]),
            instr(Action::Send(transfer(1)), &[0], &[]),
        ];
        let receives = vec![instr(Action::Receive(transfer(0)), &[], &[0])];
        let stages = vec![stage(sends, schedule(0)), stage(receives, schedule(1))];
        Program {
            context,
            constants: ModelConstants {
                hidden: 32,
                vocab: 32,
                norm_epsilon: 1e-5,
                latent_norm_epsilon: 1e-6,
                rope: Rope::plain(1e4, 2),
                padding_token: None,
            },
            tied: false,
            stages,
        }
    }

    #[test]
    fn sends_match_receives() {
        let report = execute(&two_stage_program()).expect("a step");
        assert_eq!(report.stages[0].sent, Bytes(512));
        assert_eq!(report.stages[1].received, Bytes(512));
        assert_eq!(report.stages[0].instructions, BTreeMap::from([("fill", 2), ("send", 2)]));
        assert_eq!(report.stages[1].allocated, Bytes(768));
    }

    #[test]
    fn a_receive_without_a_send_is_a_deadlock() {
        let mut program = two_stage_program();
        program.stages[0].chunks[0].forward.pop();
        let error = execute(&program).expect_err("no send");
        assert_eq!(error, RunError::Deadlock { stage: 1, origin: "test".into() });
    }

    #[test]
    fn a_transfer_of_another_size_is_an_error() {
        let mut program = two_stage_program();
        program.stages[1].chunks[0].forward[0].writes[0].extent.rows = 1;
        let error = execute(&program).expect_err("half the size");
        assert!(matches!(error, RunError::TransferSizeMismatch { stage: 1, .. }), "{error}");
    }

    #[test]
    fn every_slot_of_an_operand_lies_in_the_arena() {
        let mut program = two_stage_program();
        program.stages[0].arena = Bytes(767);
        let error = execute(&program).expect_err("the second slot does not fit");
        // The slot of microbatch 0 fits.
        assert_eq!(
            error.to_string(),
            "stage 0, forward pass of microbatch 1, test: `x` ends at byte 768 of an arena of 767 B"
        );
        assert!(
            matches!(error, RunError::OutsideArena { pass, .. } if pass.phase == Phase::Forward)
        );
    }
}
