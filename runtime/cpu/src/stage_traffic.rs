//! Transfers between the pipeline stages of a program, and the buffers that they need.

use narrows_plan::program::{Action, Program, StageProgram};

/// Transfers from a stage to a neighbour that can be in flight at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StageTraffic {
    /// Sending stage.
    pub from: u64,
    /// Receiving stage.
    pub to: u64,
    /// Maximum number of transfers that are sent and not yet received. Each belongs to a microbatch
    /// that the earlier of the two stages has in flight.
    pub transfers: u64,
    /// Elements of the largest transfer.
    pub elements: usize,
}

impl StageTraffic {
    /// Bytes of the buffers for all transfers.
    pub fn bytes(&self) -> u64 {
        self.transfers * 4 * self.elements as u64
    }
}

/// The traffic between all neighbouring stages, in both directions. Every device of a stage has the
/// traffic of its stage.
pub(crate) fn stage_traffic(program: &Program) -> impl Iterator<Item = StageTraffic> {
    let later_stages = 1..program.stages.len() as u64;
    let pairs = later_stages.flat_map(|stage| [(stage - 1, stage), (stage, stage - 1)]);
    pairs.map(|(from, to)| StageTraffic {
        from,
        to,
        transfers: program.stages[from.min(to) as usize].slots,
        elements: largest_transfer_elements(&program.stages[from as usize], to),
    })
}

fn largest_transfer_elements(stage: &StageProgram, to: u64) -> usize {
    let sends = stage.all_instructions().filter(
        |instr| matches!(&instr.action, Action::Send(transfer) if u64::from(transfer.peer_stage) == to),
    );
    let bytes =
        sends.map(|instr| instr.reads.iter().map(|read| read.extent.bytes().0).sum::<u64>());
    (bytes.max().unwrap_or(0) / 4) as usize
}
