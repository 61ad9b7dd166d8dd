//! Phases of a step, and passes of microbatches.

use std::fmt;

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

/// The name in messages: "forward", or "chunk 1, forward".
impl fmt::Display for ChunkPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.chunk > 0 {
            write!(f, "chunk {}, ", self.chunk)?;
        }
        f.write_str(self.phase.name())
    }
}

/// The forward, backward or weight-gradient pass of a microbatch through a chunk, or the step phase. Schedules of stages
/// have passes of microbatches only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MicrobatchPass {
    /// Phase of the pass.
    pub phase: Phase,
    /// Index of the chunk in its stage; 0 in the step phase.
    pub chunk: usize,
    /// Index of the microbatch, or of the pair where passes run two; 0 in the step phase.
    pub microbatch: u64,
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
