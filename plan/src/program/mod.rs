//! Programs: the instructions, buffers and schedule of each pipeline stage.
//!
//! All devices of a stage run the same instructions on their own shards. A step of a
//! stage is a *schedule* of passes, each the forward or backward pass of one microbatch through a chunk of the model,
//! followed by the step phase. Instructions name numbered buffers, and every buffer has an offset in the arena.
//!
//! A stage has one chunk, a run of consecutive segments, or with an interleaved schedule several: chunk c of stage p is
//! virtual stage c·P + p of the model, on P stages. Each virtual stage sends to the next, so the last stage
//! sends activations to the first.
//!
//! # Rules for executors
//!
//! - *Inputs.* Token and target buffers have one copy, not one per microbatch in flight. Before every
//!   pass, forward or backward, they are loaded with the ids of the pass's microbatch.
//! - *Pairs of microbatches.* With [`overlap_microbatch_pairs`](Context::overlap_microbatch_pairs), pass i runs microbatches
//!   2·i and 2·i + 1: its instruction lists have the instructions of both, each with activations of its own. The first of two
//!   token buffers has the ids of the first microbatch, and the second those of the second; so do target buffers
//!   ([`StageProgram::inputs`]). A transfer has the tensors of the first microbatch and then those of the second.
//! - *Tied weights.* On one stage the embedding and the head share one buffer. It is stored
//!   output-major, vocabulary × hidden, as the embedding's passes see it; its gradient, moments and
//!   master copy have the same layout. The head's GEMMs read the transpose, and the buffer's shard is
//!   described as hidden × vocabulary.
//! - *Transfers.* Sends from one stage to another in one phase are received in their order. A send may still be pending
//!   while its stage does other transfers. 1F1B needs this: between warm-up and cool-down, one stage sends an activation
//!   forward while its neighbour sends a gradient back, and each receives only after its own send. A send ends before the
//!   next send of its stage in the same phase begins. Placement assumes that a send ends at once, so a receive may write
//!   to the bytes of a pending send: an executor must send from a copy.
//! - *Gradient buckets.* The reductions of a [`GradientBucket`] may run from the point that the bucket
//!   names in the last pass, on a stream of their own and in the order of the buckets. All other
//!   instructions of the step phase follow them.
//! - *Gather buckets.* The gathers of a [`GatherBucket`] may run on a stream of their own from the end of all other
//!   instructions of the step phase, in the order of the buckets, and end before the point that the bucket names in
//!   the first pass of the next step. Whatever else reads weights between two steps follows them.
//! - *Overlapped instructions.* A collective may overlap with the [`overlapped_instrs`](Instr::overlapped_instrs)
//!   instructions after it. It begins when all instructions before it have ended, and ends before any later instruction
//!   begins. If the first overlapped instructions are collectives that overlap up to the same instruction, the collectives run
//!   one after the other. A collective over the data axis may overlap with collectives over other axes, which may overlap
//!   with computation in turn: it runs on a stream of its own.
//! - *Parts of replicas.* With ZeRO, replica i of a shard group holds or updates the i-th of equal parts of a parameter's
//!   padded buffer. Where the step phase, or an addition within a pass, accesses fewer elements of a weight or gradient than
//!   its buffer has, it accesses the part of the device's own replica.
//! - *Exact steps.* In a step that is a multiple of [`Context::loro_every`], the optimizer LORO moves factor pairs on the
//!   manifold of matrices of their rank. The hosts of a stage run its [`ExactStep`] after the step phase, and before the
//!   next pass.

mod action;
mod arena;
mod buffer;
mod exact_step;
mod fused_op;
mod phase;
mod pipeline_schedule;
mod stage;
mod text;
mod update;

use crate::Kernel;
use crate::context::Context;
use crate::mesh::Axis;
use crate::model::Rope;

pub use crate::extent::Extent;
pub use action::{
    Action, CollectiveFunction, CollectiveOp, GemmOp, GemmRole, P2pTransfer, Reduction,
};
pub(crate) use arena::place_buffers;
pub(crate) use buffer::ALIGNMENT;
pub use buffer::{Buffer, BufferId, BufferRole, ParameterShard};
pub use exact_step::{ExactStep, HostAction, HostInstr, OwnedPair};
pub use fused_op::{FusedOp, QkHeads};
pub use phase::{ChunkPhase, MicrobatchPass, Phase};
pub use pipeline_schedule::StageSchedule;
pub use stage::{GatherBucket, GradientBucket, ModelChunk, StageProgram};
pub use update::ParameterUpdate;

/// An operand: a buffer accessed with an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// The buffer.
    pub buffer: BufferId,
    /// The part of the buffer that the instruction accesses, from its start.
    pub extent: Extent,
}

/// One instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct Instr {
    /// The operation.
    pub action: Action,
    /// Operands read. Operands updated in place are also among the writes.
    pub reads: Vec<Access>,
    /// Operands written.
    pub writes: Vec<Access>,
    /// The part of the model that the instruction belongs to.
    pub origin: InstrOrigin,
    /// Number of instructions directly after this one that may run at the same time; 0 except for collectives.
    pub overlapped_instrs: usize,
}

/// The part of the model that an instruction belongs to, printed as `layer 3 q.a` or `head loss`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstrOrigin {
    /// The block; `None` for embedding, head, transfers and the step phase.
    pub block: Option<u64>,
    /// The op or value, for display.
    pub op: String,
}

impl Instr {
    /// Whether this is a collective over the data axis that overlaps with other instructions of its pass, collectives over
    /// other axes among them.
    pub fn overlaps_collectives(&self) -> bool {
        self.overlapped_instrs > 0
            && matches!(&self.action, Action::Collective(op) if op.axis == Axis::Data)
    }

    /// Number of instructions at the begin of `following`, those after this one, that are collectives which run one after
    /// the other with this one.
    pub fn collectives_in_sequence(&self, following: &[Instr]) -> usize {
        let in_sequence = |(at, other): (usize, &Instr)| {
            other.overlapped_instrs > 0
                && at + 1 + other.overlapped_instrs == self.overlapped_instrs
                && matches!(other.action, Action::Collective(_))
                && other.overlaps_collectives() == self.overlaps_collectives()
        };
        following.iter().enumerate().take_while(|(at, other)| in_sequence((*at, other))).count()
    }
}

/// Model constants that instructions need in addition to their operands.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConstants {
    /// Width d of the hidden state, which every RMSNorm divides its statistic by.
    pub hidden: u64,
    /// Tokens in the vocabulary.
    pub vocab: u64,
    /// ε of every RMSNorm.
    pub norm_epsilon: f64,
    /// ε of the LayerNorm over a crossed latent.
    pub latent_norm_epsilon: f64,
    /// The rotary position embedding of queries and keys.
    pub rope: Rope,
    /// Token whose row of the embedding gets no gradient from the lookup.
    pub padding_token: Option<u64>,
}

/// The lowered plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Mesh, workload, formats.
    pub context: Context,
    /// Model constants.
    pub constants: ModelConstants,
    /// Whether embedding and head are one weight. With several stages, the first and the last have a copy.
    pub tied: bool,
    /// One for each pipeline stage.
    pub stages: Vec<StageProgram>,
}

impl Program {
    /// The instructions of all stages, each once.
    pub fn instructions(&self) -> impl Iterator<Item = &Instr> {
        self.stages.iter().flat_map(StageProgram::all_instructions)
    }

    /// Features of a head, from the first rotation or attention; `None` where there is neither.
    pub fn head_dim(&self) -> Option<u64> {
        self.instructions().find_map(|instr| match &instr.action {
            Action::Fused(FusedOp::Rope { head_dim } | FusedOp::RopeBackward { head_dim }) => {
                Some(*head_dim)
            }
            Action::Attention(attention) => Some(attention.head_dim),
            _ => None,
        })
    }
}

impl ModelConstants {
    /// The constants of a model.
    pub fn of(model: &crate::model::Model) -> ModelConstants {
        ModelConstants {
            hidden: model.hidden,
            vocab: model.vocab,
            norm_epsilon: model.norm_epsilon,
            latent_norm_epsilon: model.latent_norm_epsilon,
            rope: model.rope.clone(),
            padding_token: model.padding_token,
        }
    }
}

impl Instr {
    /// The kernel of this instruction.
    pub fn kernel(&self) -> Kernel {
        let extents =
            |side: &[Access]| -> Vec<Extent> { side.iter().map(|access| access.extent).collect() };
        self.action.kernel(&extents(&self.reads), &extents(&self.writes))
    }
}
