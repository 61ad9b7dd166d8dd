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
//! - *Overlapped instructions.* A collective may run beside the [`overlapped_instrs`](Instr::overlapped_instrs)
//!   instructions after it. It begins when all instructions before it have ended, and ends before any later one begins.
//!   If the first of them are collectives themselves, they run one after the other.
//! - *Parts of replicas.* With ZeRO, replica i of a shard group holds or updates the i-th of equal parts of a parameter's
//!   padded buffer. Where the step phase, or an addition within a pass, accesses fewer elements of a weight or gradient than
//!   its buffer has, it accesses the part of the device's own replica.

mod action;
mod arena;
mod fused_op;
mod pipeline_schedule;
mod text;

use std::fmt;
use std::ops::Range;

use crate::context::Context;
use crate::layout::WeightSplit;
use crate::model::{WeightId, WeightShape};
use crate::{Bytes, Kernel};

pub use crate::extent::Extent;
pub use action::{
    Action, CollectiveFunction, CollectiveOp, GemmOp, GemmRole, P2pTransfer, Reduction,
};
pub(crate) use arena::{ALIGNMENT, place_buffers};
pub use fused_op::FusedOp;
pub use pipeline_schedule::StageSchedule;

/// Index of a buffer within its stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

/// Contents of a buffer, which decide its lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BufferRole {
    /// A weight in the compute format.
    Weight,
    /// The fp32 gradient of a weight, accumulated over microbatches.
    WeightGradient,
    /// A whole weight, gathered from the parts of the replicas (ZeRO-3) for one pass and placed by lifetime.
    GatheredWeight,
    /// The whole fp32 gradient of a weight for one microbatch, until the replicas have reduced their parts of it (ZeRO-2
    /// and ZeRO-3). Placed by lifetime.
    MicrobatchGradient,
    /// AdamW's first moment of a weight, fp32.
    FirstMoment,
    /// AdamW's second moment of a weight, fp32.
    SecondMoment,
    /// The fp32 master copy of a weight, in mixed precision.
    MasterWeight,
    /// Input token ids of a microbatch. Stages with the embedding have one such buffer.
    Tokens,
    /// Token ids to predict. Stages with the head have one such buffer.
    Targets,
    /// Loss of the microbatch, one fp32 scalar. Stages with the head have one such buffer.
    Loss,
    /// Sum of all squared gradients, one fp32 scalar. Every stage has one such buffer.
    SquareSum,
    /// An activation, an activation gradient or a statistic, placed by lifetime.
    Activation,
}

impl BufferRole {
    /// Whether the buffer holds a parameter, its gradient or its optimizer state, and so has a
    /// [`ParameterShard`].
    pub fn is_parameter(self) -> bool {
        self.is_weight() || self.is_gradient() || self.is_optimizer_state()
    }

    /// Whether the buffer holds a weight in the compute format.
    pub fn is_weight(self) -> bool {
        matches!(self, BufferRole::Weight | BufferRole::GatheredWeight)
    }

    /// Whether the buffer holds the gradient of a weight.
    pub fn is_gradient(self) -> bool {
        matches!(self, BufferRole::WeightGradient | BufferRole::MicrobatchGradient)
    }

    /// Whether the buffer holds a moment or a master copy, of which ZeRO keeps a part per replica.
    pub fn is_optimizer_state(self) -> bool {
        use BufferRole::{FirstMoment, MasterWeight, SecondMoment};
        matches!(self, FirstMoment | SecondMoment | MasterWeight)
    }

    /// Whether the buffer keeps its bytes for the whole step and shares them with no other.
    pub fn is_resident(self) -> bool {
        use BufferRole::{Activation, GatheredWeight, MicrobatchGradient};
        !matches!(self, Activation | GatheredWeight | MicrobatchGradient)
    }
}

/// Shard of one or several parameters in a buffer, over the tensor axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterShard {
    /// The block that the parameter belongs to; `None` for embedding, final norm and head.
    pub block: Option<u64>,
    /// The parameters side by side in the buffer, with their whole shapes.
    pub members: Vec<WeightShape>,
    /// Split dimension.
    pub split: WeightSplit,
    /// For each member: on the device with tensor index i, the shard begins at row or column
    /// i·`offset_stride`.
    pub offset_stride: Vec<u64>,
}

impl ParameterShard {
    /// The shards of parameters side by side over this many devices of the tensor axis.
    pub(crate) fn new(
        block: Option<u64>,
        members: Vec<WeightShape>,
        split: WeightSplit,
        devices: u64,
    ) -> ParameterShard {
        let offset_stride = members
            .iter()
            .map(|member| match split {
                WeightSplit::Whole => 0,
                WeightSplit::Rows => member.rows / devices,
                WeightSplit::Columns => member.columns / devices,
            })
            .collect();
        ParameterShard { block, members, split, offset_stride }
    }

    /// Whether the buffer holds the head, which a tied model stores as the embedding's table.
    pub fn holds_head(&self) -> bool {
        self.members.iter().any(|member| member.weight == WeightId::Head)
    }
}

/// A tensor in a device's arena.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// For display; unique within the stage.
    pub name: String,
    /// Rows and columns on this device, and the format.
    pub extent: Extent,
    /// Role of the contents.
    pub role: BufferRole,
    /// Offset in the arena, in bytes.
    pub offset: u64,
    /// Number of copies, a divisor of the [`slots`](ModelChunk::slots) of the chunk that uses it: a microbatch in slot i
    /// uses copy i mod `copies`. Copy k begins at `offset + k·`[`copy_stride`](Buffer::copy_stride).
    pub copies: u64,
    /// The parameters in the buffer; `None` for roles other than parameters.
    pub shard: Option<ParameterShard>,
    /// Whole (unsharded) widths of tensors side by side in the buffer; empty for one tensor. A shard of
    /// the features is a shard of each tensor, side by side again.
    pub sections: Vec<u64>,
}

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

/// A phase of the step of one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Forward pass of a microbatch.
    Forward,
    /// Backward pass of a microbatch.
    Backward,
    /// Weight gradients of a microbatch that its backward pass leaves out.
    WeightGradient,
    /// Gradient reductions and optimizer updates, once per step.
    Step,
}

impl Phase {
    /// All phases, in the order in which a microbatch and then the step run them.
    pub const ALL: [Phase; 4] =
        [Phase::Forward, Phase::Backward, Phase::WeightGradient, Phase::Step];

    /// The phases of a microbatch, in the order in which it runs them.
    pub const PASSES: [Phase; 3] = [Phase::Forward, Phase::Backward, Phase::WeightGradient];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::WeightGradient => "weight_gradient",
            Phase::Step => "step",
        }
    }
}

/// The name in messages: "forward pass", "step phase".
impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Forward => "forward pass",
            Phase::Backward => "backward pass",
            Phase::WeightGradient => "weight-gradient pass",
            Phase::Step => "step phase",
        })
    }
}

/// A phase of a chunk, which is a list of instructions of its stage; or the step phase of the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkPhase {
    /// Index of the chunk in its stage; 0 in the step phase.
    pub chunk: usize,
    /// The phase.
    pub phase: Phase,
}

impl ChunkPhase {
    /// The step phase.
    pub const STEP: ChunkPhase = ChunkPhase { chunk: 0, phase: Phase::Step };
}

/// The forward, backward or weight-gradient pass of a microbatch through a chunk, or the step phase. Schedules of stages
/// have passes of microbatches only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MicrobatchPass {
    /// Phase of the pass.
    pub phase: Phase,
    /// Index of the chunk in its stage; 0 in the step phase.
    pub chunk: usize,
    /// Index of the microbatch; 0 in the step phase.
    pub microbatch: u64,
}

/// The name in messages: "forward", or "chunk 1, forward".
impl fmt::Display for ChunkPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.chunk > 0 {
            write!(f, "chunk {}, ", self.chunk)?;
        }
        f.write_str(self.phase.name())
    }
}

impl MicrobatchPass {
    /// The step phase.
    pub const STEP: MicrobatchPass = MicrobatchPass { phase: Phase::Step, chunk: 0, microbatch: 0 };

    /// The instructions of the pass.
    pub fn chunk_phase(self) -> ChunkPhase {
        ChunkPhase { chunk: self.chunk, phase: self.phase }
    }
}

/// The name in messages: "forward pass of microbatch 3", or "forward pass of microbatch 3 through chunk 1". The step phase
/// has no microbatch.
impl fmt::Display for MicrobatchPass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Step => return write!(f, "{}", self.phase),
            phase => write!(f, "{phase} of microbatch {}", self.microbatch)?,
        }
        match self.chunk {
            0 => Ok(()),
            chunk => write!(f, " through chunk {chunk}"),
        }
    }
}

/// Reductions of gradients over the data axis that run beside the last pass of a stage: the backward pass of the last
/// microbatch, or its weight-gradient pass. Their instructions are the first of the step phase, where executors without a
/// second stream run them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientBucket {
    /// Instructions of the last pass that end before the reductions begin. No later one accesses their operands.
    pub after: usize,
    /// The reductions, by index in the step phase. Buckets run one after the other.
    pub reductions: Range<usize>,
}

/// Passes through consecutive segments of the model on a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelChunk {
    /// Forward pass of one microbatch.
    pub forward: Vec<Instr>,
    /// Backward pass of one microbatch.
    pub backward: Vec<Instr>,
    /// Weight-gradient pass of one microbatch; empty where the backward pass computes all weight gradients.
    pub weight_gradient: Vec<Instr>,
    /// Microbatches that have begun their forward pass and not ended their last pass at once, at most.
    pub slots: u64,
}

/// Program of the devices of one pipeline stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StageProgram {
    /// All buffers.
    pub buffers: Vec<Buffer>,
    /// The chunks, in the order of the model. One, unless the schedule is interleaved.
    pub chunks: Vec<ModelChunk>,
    /// The step phase, once per step.
    pub step: Vec<Instr>,
    /// The reductions of the step phase that may run beside the last pass, in order.
    pub gradient_buckets: Vec<GradientBucket>,
    /// The order of passes.
    pub schedule: Vec<MicrobatchPass>,
    /// Size of the arena: the peak memory of a device, and the bytes that an engine allocates.
    pub arena: Bytes,
}

/// Model constants that instructions need beside their operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelConstants {
    /// Width d of the hidden state, which every RMSNorm divides its statistic by.
    pub hidden: u64,
    /// Tokens in the vocabulary.
    pub vocab: u64,
    /// ε of every RMSNorm.
    pub norm_epsilon: f64,
    /// Base θ of the rotary position embedding.
    pub rope_theta: f64,
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
            rope_theta: model.rope_theta,
        }
    }
}

impl Buffer {
    /// Whether each replica stores only its part of the parameters: optimizer states with ZeRO, gradients of blocks from
    /// ZeRO-2 on, and weights of blocks with ZeRO-3.
    pub fn is_replica_part(&self, context: &Context) -> bool {
        let of_block = self.shard.as_ref().is_some_and(|shard| shard.block.is_some());
        match self.role {
            BufferRole::Weight => of_block && context.shards_weights(),
            BufferRole::WeightGradient => of_block && context.shards_gradients(),
            role => role.is_optimizer_state() && context.shard_size > 1,
        }
    }

    /// Bytes between the copies of the buffer.
    pub fn copy_stride(&self) -> u64 {
        self.extent.bytes().0.div_ceil(ALIGNMENT) * ALIGNMENT
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

impl ModelChunk {
    /// A chunk without instructions.
    pub fn empty() -> ModelChunk {
        ModelChunk { forward: vec![], backward: vec![], weight_gradient: vec![], slots: 1 }
    }

    /// The instructions of a pass; none in the step phase, which belongs to the stage.
    pub fn instructions(&self, phase: Phase) -> &[Instr] {
        match phase {
            Phase::Forward => &self.forward,
            Phase::Backward => &self.backward,
            Phase::WeightGradient => &self.weight_gradient,
            Phase::Step => &[],
        }
    }

    /// The instructions of a pass, to change; `None` in the step phase.
    pub fn instructions_mut(&mut self, phase: Phase) -> Option<&mut Vec<Instr>> {
        match phase {
            Phase::Forward => Some(&mut self.forward),
            Phase::Backward => Some(&mut self.backward),
            Phase::WeightGradient => Some(&mut self.weight_gradient),
            Phase::Step => None,
        }
    }

    /// The phase that ends the passes of a microbatch and completes its weight gradients.
    pub fn last_phase(&self) -> Phase {
        match self.weight_gradient.is_empty() {
            true => Phase::Backward,
            false => Phase::WeightGradient,
        }
    }

    /// The slot of a microbatch, which decides the copies of buffers that it uses. Microbatches in flight are
    /// consecutive, so their remainders differ.
    pub fn slot(&self, microbatch: u64) -> u64 {
        microbatch % self.slots.max(1)
    }
}

impl StageProgram {
    /// The instructions of a phase of a chunk, or of the step phase; none where the stage has no such chunk.
    pub fn instructions(&self, at: ChunkPhase) -> &[Instr] {
        match at.phase {
            Phase::Step => &self.step,
            phase => self.chunks.get(at.chunk).map_or(&[], |chunk| chunk.instructions(phase)),
        }
    }

    /// All lists of instructions: the passes of each chunk, then the step phase.
    pub fn chunk_phases(&self) -> impl Iterator<Item = ChunkPhase> + use<> {
        self.pass_phases().chain([ChunkPhase::STEP])
    }

    /// The passes of each chunk.
    pub fn pass_phases(&self) -> impl Iterator<Item = ChunkPhase> + use<> {
        let of_chunk =
            |chunk: usize| Phase::PASSES.into_iter().map(move |phase| ChunkPhase { chunk, phase });
        (0..self.chunks.len()).flat_map(of_chunk)
    }

    /// The instructions of all phases, each once.
    pub fn all_instructions(&self) -> impl Iterator<Item = &Instr> {
        self.chunk_phases().flat_map(|at| self.instructions(at))
    }

    /// The slot of a pass's microbatch in its chunk; 0 in the step phase.
    pub fn slot(&self, pass: MicrobatchPass) -> u64 {
        match pass.phase {
            Phase::Step => 0,
            _ => self.chunks.get(pass.chunk).map_or(0, |chunk| chunk.slot(pass.microbatch)),
        }
    }

    /// The instructions of the last pass of the schedule, beside which gradients are reduced; none without passes.
    pub fn last_pass_instructions(&self) -> &[Instr] {
        self.schedule.last().map_or(&[], |pass| self.instructions(pass.chunk_phase()))
    }

    /// Number of instructions at the begin of the step phase that are reductions of gradient buckets.
    pub fn bucket_reductions(&self) -> usize {
        self.gradient_buckets.last().map_or(0, |bucket| bucket.reductions.end)
    }

    /// The buffer with this id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// The first buffer with this role, if any. A stage has at most one buffer of each role of
    /// microbatch inputs, loss and square sum.
    pub fn buffer_with_role(&self, role: BufferRole) -> Option<BufferId> {
        let index = self.buffers.iter().position(|buffer| buffer.role == role)?;
        Some(BufferId(index as u32))
    }

    /// The buffer of the sum of all squared gradients.
    ///
    /// # Panics
    /// When the stage has none. Every stage of a checked program has exactly one.
    pub fn square_sum(&self) -> BufferId {
        match self.buffer_with_role(BufferRole::SquareSum) {
            Some(id) => id,
            None => panic!("the stage has no buffer for the sum of squared gradients"),
        }
    }
}
