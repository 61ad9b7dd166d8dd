//! The null backend: executes a program without computing anything.
//!
//! Every instruction of every turn is met in order. Each operand's place is computed and held
//! against the arena, transfers between stages are matched as they happen, and what a device would
//! do is counted. Nothing is allocated: the arena is a number, as everything in it is.
//!
//! The stages take turns: each goes on until it needs a transfer that was not sent yet. A send
//! never waits here, so a program that gets stuck here gets stuck everywhere.

use std::collections::{BTreeMap, VecDeque};

use narrows_plan::program::{Access, Action, Extent, Program, StageProgram};
use narrows_plan::{Bytes, CheckedProgram};

use crate::addressing::operand_range;
use crate::error::RunError;
use crate::report::{DeviceReport, StepReport};
use crate::schedule::{ScheduledInstruction, scheduled_instructions};

/// Counts what the devices of a program would do in one step.
///
/// # Errors
/// The first operand outside its arena or transfer that does not match, with its stage and
/// instruction.
pub fn count_step(program: &CheckedProgram) -> Result<StepReport, RunError> {
    execute(program.program())
}

/// Transfers that were sent and not yet received, by sender and receiver.
type InFlight = BTreeMap<(usize, usize), VecDeque<Bytes>>;

fn execute(program: &Program) -> Result<StepReport, RunError> {
    let mut devices: Vec<NullDevice> =
        program.stages.iter().enumerate().map(|(at, stage)| NullDevice::new(at, stage)).collect();
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
    if let Some((stage, moment)) = devices.iter().find_map(|d| d.next.map(|next| (d.at, next))) {
        return Err(RunError::Deadlock { stage, origin: moment.instr.origin.clone() });
    }
    let stages = devices.into_iter().map(|device| device.report).collect();
    Ok(StepReport { mesh: program.context.mesh, stages })
}

/// One device of a stage; the others do the same.
struct NullDevice<'a> {
    at: usize,
    stage: &'a StageProgram,
    rest: Box<dyn Iterator<Item = ScheduledInstruction<'a>> + 'a>,
    /// What is executed next; `None` when the step is over.
    next: Option<ScheduledInstruction<'a>>,
    report: DeviceReport,
}

impl<'a> NullDevice<'a> {
    fn new(at: usize, stage: &'a StageProgram) -> Self {
        let mut rest = Box::new(scheduled_instructions(stage));
        let next = rest.next();
        let report = DeviceReport { allocated: stage.arena, ..DeviceReport::default() };
        NullDevice { at, stage, rest, next, report }
    }

    /// Executes until the end or a transfer that is not there yet. Says whether anything was done.
    fn advance(&mut self, in_flight: &mut InFlight) -> Result<bool, RunError> {
        let mut progressed = false;
        while let Some(moment) = self.next {
            if !self.execute(&moment, in_flight)? {
                break;
            }
            self.next = self.rest.next();
            progressed = true;
        }
        Ok(progressed)
    }

    /// Executes one instruction; `false` when it has to wait.
    fn execute(
        &mut self,
        moment: &ScheduledInstruction<'_>,
        in_flight: &mut InFlight,
    ) -> Result<bool, RunError> {
        let instr = moment.instr;
        for access in instr.reads.iter().chain(&instr.writes) {
            self.check_place(access, moment)?;
        }
        let mut axis = None;
        match &instr.action {
            Action::Collective(exchange) => axis = Some(exchange.axis),
            Action::Send(hop) => {
                let sent = bytes_of(&instr.reads);
                in_flight.entry((self.at, hop.stage as usize)).or_default().push_back(sent);
                self.report.sent += sent;
            }
            Action::Receive(hop) => {
                let queue = in_flight.entry((hop.stage as usize, self.at)).or_default();
                let Some(sent) = queue.pop_front() else { return Ok(false) };
                let received = bytes_of(&instr.writes);
                if sent != received {
                    let (stage, origin) = (self.at, instr.origin.clone());
                    return Err(RunError::TransferSizeMismatch { stage, origin, sent, received });
                }
                self.report.received += received;
            }
            Action::Gemm(_) | Action::Attention(_) | Action::Fused(_) => {}
        }
        self.report.count(instr.action.name(), axis, &instr.kernel());
        Ok(true)
    }

    fn check_place(
        &self,
        access: &Access,
        moment: &ScheduledInstruction<'_>,
    ) -> Result<(), RunError> {
        let range = operand_range(self.stage, access, moment.slot);
        if range.end <= self.stage.arena.0 {
            return Ok(());
        }
        Err(RunError::OutsideArena {
            stage: self.at,
            phase: moment.phase,
            microbatch: moment.microbatch,
            origin: moment.instr.origin.clone(),
            buffer: self.stage.buffer(access.buffer).name.clone(),
            end: range.end,
            arena: self.stage.arena,
        })
    }
}

fn bytes_of(side: &[Access]) -> Bytes {
    side.iter().map(|access| access.extent).map(|extent: Extent| extent.bytes()).sum()
}

#[cfg(test)]
mod tests {
    use narrows_plan::mesh::{Axis, Mesh, Workload};
    use narrows_plan::program::{
        Buffer, BufferId, Constants, FusedOp, Instr, MicrobatchPass, P2pTransfer, Phase, Region,
        one_forward_one_backward,
    };
    use narrows_plan::strategy::{Context, Zero};
    use narrows_plan::{DType, Precision};

    use super::*;

    const MESH: Mesh = Mesh { tensor: 1, pipeline: 2, data: 1 };
    const NUMBERS: Extent = Extent { rows: 2, columns: 32, dtype: DType::F32 };

    fn instr(action: Action, reads: &[u32], writes: &[u32]) -> Instr {
        let list = |side: &[u32]| -> Vec<Access> {
            side.iter().map(|id| Access { buffer: BufferId(*id), extent: NUMBERS }).collect()
        };
        Instr { action, reads: list(reads), writes: list(writes), origin: "test".into() }
    }

    fn stage(forward: Vec<Instr>, schedule: Vec<MicrobatchPass>) -> StageProgram {
        let buffer = Buffer {
            name: "x".into(),
            extent: NUMBERS,
            region: Region::Activation,
            offset: 256,
            per_microbatch: true,
            shard: None,
            sections: vec![],
        };
        StageProgram {
            buffers: vec![buffer],
            forward,
            backward: vec![],
            step: vec![],
            schedule,
            slots: 2,
            slot_stride: 256,
            arena: Bytes(768),
        }
    }

    fn hop(stage: u32) -> P2pTransfer {
        P2pTransfer { carries: vec!["hidden"], stage, group: MESH.group(Axis::Pipeline) }
    }

    /// Two stages: the first sends what the second receives.
    fn sending() -> Program {
        let context = Context {
            mesh: MESH,
            workload: Workload { global_batch: 2, sequence_length: 2, micro_batch: 1 },
            precision: Precision::MixedBf16,
            zero: Zero::Off,
        };
        let schedule = |at| one_forward_one_backward(at, 2, 2);
        let sends = vec![
            instr(Action::Fused(FusedOp::Fill), &[], &[0]),
            instr(Action::Send(hop(1)), &[0], &[]),
        ];
        let receives = vec![instr(Action::Receive(hop(0)), &[], &[0])];
        let stages = vec![stage(sends, schedule(0)), stage(receives, schedule(1))];
        Program {
            context,
            constants: Constants { hidden: 32, vocab: 32, norm_epsilon: 1e-5, rope_theta: 1e4 },
            tied: false,
            stages,
        }
    }

    #[test]
    fn transfers_meet() {
        let report = execute(&sending()).expect("it runs");
        assert_eq!(report.stages[0].sent, Bytes(512));
        assert_eq!(report.stages[1].received, Bytes(512));
        assert_eq!(report.stages[0].instructions, BTreeMap::from([("fill", 2), ("send", 2)]));
        assert_eq!(report.stages[1].allocated, Bytes(768));
    }

    #[test]
    fn a_transfer_that_nobody_sends_is_no_hang() {
        let mut program = sending();
        program.stages[0].forward.pop();
        let error = execute(&program).expect_err("nothing was sent");
        assert_eq!(error, RunError::Deadlock { stage: 1, origin: "test".into() });
    }

    #[test]
    fn a_transfer_of_another_size_is_refused() {
        let mut program = sending();
        program.stages[1].forward[0].writes[0].extent.rows = 1;
        let error = execute(&program).expect_err("half of it fits");
        assert!(matches!(error, RunError::TransferSizeMismatch { stage: 1, .. }), "{error}");
    }

    #[test]
    fn every_copy_of_an_operand_lies_in_the_arena() {
        let mut program = sending();
        program.stages[0].arena = Bytes(767);
        let error = execute(&program).expect_err("the second copy does not fit");
        // The first microbatch's copy fits, the second's does not.
        assert_eq!(
            error.to_string(),
            "stage 0, Forward of microbatch 1, test: `x` ends at byte 768 of an arena of 767 B"
        );
        assert!(matches!(error, RunError::OutsideArena { phase: Phase::Forward, .. }));
    }
}
