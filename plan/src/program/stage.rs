//! The program of one pipeline stage.

use std::ops::Range;

use super::{Buffer, BufferId, BufferRole, ChunkPhase, ExactStep, Instr, MicrobatchPass, Phase};
use crate::Bytes;

/// Reductions of gradients over the data axis that run during the last pass of a stage: the backward pass of the last
/// microbatch, or its weight-gradient pass. Their instructions are the first of the step phase, where executors without
/// a second stream run them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientBucket {
    /// Instructions of the last pass that end before the reductions begin. No later one accesses their operands.
    pub after: usize,
    /// The reductions, by index in the step phase. Buckets run one after the other.
    pub reductions: Range<usize>,
}

/// Gathers of updated weights over the data axis that run during the first pass of the next step. Their instructions are
/// the last of the step phase, where executors without a second stream run them. The first step after initialisation
/// or loading finds whole weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatherBucket {
    /// Instructions of the first pass that may run before the gathers have ended. None of them accesses their operands.
    pub before: usize,
    /// The gathers, by index in the step phase. Buckets run one after the other.
    pub gathers: Range<usize>,
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
    /// Slots that microbatches use in turn: at least as many as have begun their forward pass and not ended their last pass at once.
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
    /// The reductions of the step phase that may run during the last pass, in order.
    pub gradient_buckets: Vec<GradientBucket>,
    /// The gathers of the step phase that may run during the first pass of the next step, in order.
    pub gather_buckets: Vec<GatherBucket>,
    /// Instructions of the hosts in an exact step of LORO, after the step phase.
    pub exact_step: ExactStep,
    /// The order of passes.
    pub schedule: Vec<MicrobatchPass>,
    /// Size of the arena: the peak memory of a device, and the bytes that an engine allocates.
    pub arena: Bytes,
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

    /// The instructions of the last pass of the schedule, during which gradients are reduced; none without passes.
    pub fn last_pass_instructions(&self) -> &[Instr] {
        self.schedule.last().map_or(&[], |pass| self.instructions(pass.chunk_phase()))
    }

    /// Number of instructions at the begin of the step phase that are reductions of gradient buckets.
    pub fn bucket_reductions(&self) -> usize {
        self.gradient_buckets.last().map_or(0, |bucket| bucket.reductions.end)
    }

    /// The instructions of the first pass of the schedule, during which the weights of the step before are gathered; none
    /// without passes.
    pub fn first_pass_instructions(&self) -> &[Instr] {
        self.schedule.first().map_or(&[], |pass| self.instructions(pass.chunk_phase()))
    }

    /// Number of instructions of the step phase before the gathers of gather buckets.
    pub fn before_gathers(&self) -> usize {
        self.gather_buckets.first().map_or(self.step.len(), |bucket| bucket.gathers.start)
    }

    /// The buffer with this id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// The buffers that are loaded with token ids before each pass, with the microbatches that they are for, counted from the
    /// pass's first.
    pub fn inputs(&self) -> impl Iterator<Item = (BufferId, u64)> {
        let mut counts = [0; 2];
        let inputs = self.buffers.iter().enumerate().filter(|(_, buffer)| buffer.role.is_input());
        inputs.map(move |(index, buffer)| {
            let count = &mut counts[usize::from(buffer.role == BufferRole::Targets)];
            *count += 1;
            (BufferId(index as u32), *count - 1)
        })
    }

    /// The first buffer with this role, if any. A stage has at most one buffer with the role of the loss or of the square
    /// sum.
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
