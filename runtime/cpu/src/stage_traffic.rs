//! Transfers between the pipeline stages of a program, and the buffers that they need.

use narrows_plan::program::{Action, Phase, Program, StageProgram};
use narrows_runtime::PipelineDirection;

/// Transfers in one direction from a stage to a neighbour that can be in flight at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StageTraffic {
    /// Sending stage.
    pub from: u64,
    /// Receiving stage.
    pub to: u64,
    /// Direction of the transfers.
    pub direction: PipelineDirection,
    /// Maximum number of transfers that are sent and not yet received. Each belongs to a microbatch
    /// that the one of the two stages with the earlier segments has in flight in a chunk.
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
    let stages = program.stages.len() as u64;
    let all = PipelineDirection::ALL.into_iter().flat_map(move |direction| {
        (0..stages).map(move |from| (from, direction.receiver(from, stages), direction))
    });
    all.filter_map(|(from, to, direction)| {
        let elements = largest_transfer_elements(&program.stages[from as usize], direction)?;
        let earlier = if direction == PipelineDirection::Downstream { from } else { to };
        let chunks = program.stages[earlier as usize].chunks.iter();
        let transfers = chunks.map(|chunk| chunk.slots).sum();
        Some(StageTraffic { from, to, direction, transfers, elements })
    })
}

/// Elements of the largest transfer that a stage sends in a direction; `None` where it sends none.
fn largest_transfer_elements(stage: &StageProgram, direction: PipelineDirection) -> Option<usize> {
    let phase = match direction {
        PipelineDirection::Downstream => Phase::Forward,
        PipelineDirection::Upstream => Phase::Backward,
    };
    let instructions = stage.chunks.iter().flat_map(|chunk| chunk.instructions(phase));
    let sends = instructions.filter(|instr| matches!(instr.action, Action::Send(_)));
    let bytes = sends.map(|instr| instr.reads.iter().map(|a| a.extent.bytes().0).sum::<u64>());
    Some((bytes.max()? / 4) as usize)
}
