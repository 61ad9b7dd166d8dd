//! A pass and its operands as launches of kernels.
//!
//! [`pass`] reads an instruction as the processor backend does (`cpu/execute/`), and says with
//! which kernels, grids and arguments it is executed. What it names is memory of one device: places
//! in the arena, the scratch memory that the launches of one instruction share, and a few tables
//! that belong to a session. Nothing is executed and nothing is read.

mod attention;
mod copies;
mod crossing;
mod elementwise;
mod ends;
mod gated;
mod latent;
mod norm;
mod operand;
mod shape;
mod step;

use std::collections::HashMap;

use narrows_plan::program::{Action, BufferId, FusedOp, ModelConstants, StageProgram};
use narrows_plan::strategy::Context;

use copies::CopyKind;
use narrows_runtime::ScheduledInstruction;

pub use super::source::KernelFamily;
pub use copies::rotary_table;
pub use elementwise::{Cast, cast};
pub use operand::{Argument, ByteRows, MemoryAccess, MemorySpace};
pub use step::{COEFFICIENTS, coefficients};

/// What launches depend on besides the instruction: the device's place, and its program.
#[derive(Clone, Copy, Debug)]
pub struct LaunchContext<'a> {
    /// Mesh, workload, formats.
    pub context: &'a Context,
    /// Numbers of the model.
    pub constants: &'a ModelConstants,
    /// What the device executes.
    pub stage: &'a StageProgram,
    /// Its place along the tensor axis.
    pub tensor: u64,
    /// Its place along the data axis.
    pub data: u64,
    /// Whether weight decay applies, by the buffer of the weight; not, where nothing is said.
    pub decays: &'a HashMap<BufferId, bool>,
}

/// One kernel, started once.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The file it is in.
    pub family: KernelFamily,
    /// Its name there.
    pub kernel: String,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes. Beyond 48 KiB a kernel must be allowed it first.
    pub shared_bytes: u32,
    /// What it is given, in its order.
    pub arguments: Vec<Argument>,
}

/// What an instruction is on a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launches {
    /// One after the other, on one stream.
    pub launches: Vec<Launch>,
    /// Scratch memory they need together, in bytes. What is in it before and after means nothing.
    pub scratch_bytes: u64,
}

/// Why an instruction has no kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no CUDA kernel for `{pass}` of {origin}: {why}; run it on the processor backend \
     (`--backend cpu`), or plan with other choices for this op"
)]
pub struct UnsupportedInstr {
    /// The pass.
    pub pass: &'static str,
    /// Where the instruction comes from.
    pub origin: String,
    /// What of it no kernel does.
    pub why: String,
}

/// The launches of an instruction that is a pass, or attention.
///
/// # Errors
/// A [`UnsupportedInstr`] that names the pass, where it comes from, and what no kernel does: another action
/// than a pass, operands in formats or numbers that the pass does not have in any lowered program,
/// or sizes beyond what a kernel holds.
pub fn pass(
    device: &LaunchContext,
    moment: &ScheduledInstruction,
) -> Result<Launches, UnsupportedInstr> {
    let made = match &moment.instr.action {
        Action::Fused(op) => InstrSite { device, moment, op: *op }.launches(),
        Action::Attention(op) => attention::launches(&InstrSite { device, moment, op }),
        other => Err(format!("`{}` is neither a pass nor attention", other.name())),
    };
    made.map_err(|why| UnsupportedInstr {
        pass: moment.instr.action.name(),
        origin: moment.instr.origin.clone(),
        why,
    })
}

/// Why a pass is refused, or what it made.
type LaunchResult<T> = Result<T, String>;

/// An instruction on a device.
#[derive(Clone, Copy)]
struct InstrSite<'a, Op = FusedOp> {
    device: &'a LaunchContext<'a>,
    moment: &'a ScheduledInstruction<'a>,
    op: Op,
}

impl InstrSite<'_> {
    fn launches(&self) -> LaunchResult<Launches> {
        use FusedOp::*;
        match self.op {
            NormForward | NormStatistic | NormApply | NormOnline | NormScale => norm::forward(self),
            NormBackwardStatistic => norm::backward_statistic(self),
            NormBackward | NormBackwardApply | NormOnlineBackward => norm::backward(self),
            LatentForward { activation } => latent::forward(self, activation, false),
            LatentRecover { activation } => latent::forward(self, activation, true),
            LatentBackward { activation } => latent::backward(self, activation),
            LatentRecoverBackward { activation } => latent::recover_backward(self, activation),
            GatedProduct { product } => gated::forward(self, product),
            GatedProductBackward { product } => gated::backward(self, product),
            LatentNorm { activation } => crossing::norm(self, activation),
            LatentNormBackward { activation } => crossing::norm_backward(self, activation),
            TensorGate { a, b } => crossing::tensor_gate(self, (a, b)),
            TensorGateBackward { a, b } => crossing::tensor_gate_backward(self, (a, b)),
            Rope { head_dim } => copies::rope(self, head_dim, 1.0),
            RopeBackward { head_dim } => copies::rope(self, head_dim, -1.0),
            Add => elementwise::add(self),
            AddInto => elementwise::add_into(self),
            Fill => elementwise::fill(self),
            Gather => ends::gather(self),
            ScatterAdd => ends::scatter_add(self),
            LossMaximum | LossSum | LossGradient => ends::loss(self),
            Pack { dim } => copies::copy(self, dim, CopyKind::Pack),
            Unpack { dim } => copies::copy(self, dim, CopyKind::Unpack),
            Slice { dim } => copies::copy(self, dim, CopyKind::Slice),
            SquareSum => step::square_sum(self),
            AdamW => step::adamw(self),
        }
    }
}

impl Launch {
    /// A launch with a grid of one dimension.
    fn new(family: KernelFamily, kernel: impl Into<String>, arguments: Vec<Argument>) -> Launch {
        let one = [1, 1, 1];
        Launch { family, kernel: kernel.into(), grid: one, block: one, shared_bytes: 0, arguments }
    }

    fn grid(mut self, grid: [u32; 3]) -> Launch {
        self.grid = grid;
        self
    }

    fn block(mut self, block: [u32; 3]) -> Launch {
        self.block = block;
        self
    }

    fn shared(mut self, bytes: u32) -> Launch {
        self.shared_bytes = bytes;
        self
    }
}

impl From<Launch> for Launches {
    fn from(launch: Launch) -> Launches {
        Launches { launches: vec![launch], scratch_bytes: 0 }
    }
}
