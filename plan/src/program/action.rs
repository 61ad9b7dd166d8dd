//! The instruction set: closed and small (DESIGN §5).
//!
//! Shapes are those on one device. An action is an operation without operands; the operands are slots of
//! a template or buffers of a program. Action and operand extents determine the kernel, and so the price.

use crate::extent::Extent;
use crate::graph::BoundaryTensorId;
use crate::kernel::{Attention, Collective, CollectiveKind, Gemm, Kernel, Transfer};
use crate::mesh::{Axis, DeviceGroup};
use crate::{Bytes, DType, Layout};

use super::fused_op::FusedOp;

/// The operation of an instruction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A GEMM. Reads the left and right operand, writes the result.
    Gemm(GemmOp),
    /// Causal attention. Forward reads q, k, v and writes output, log-sum-exp; backward reads
    /// q, k, v, output, log-sum-exp, output gradient and writes the gradients of q, k, v. Ring attention also writes its
    /// scratch memory: keys and values in flight, then sums.
    Attention(Attention),
    /// A fused element-wise or reduction pass.
    Fused(FusedOp),
    /// A collective, in place for an all-reduce. Further operands are statistics in the same launch.
    Collective(CollectiveOp),
    /// Sends to the neighbouring stage.
    Send(P2pTransfer),
    /// Receives from the neighbouring stage.
    Receive(P2pTransfer),
}

/// One of the three GEMMs of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmRole {
    /// `Y[m,n] = X[m,k]·W[k,n]`.
    Forward,
    /// `dX[m,k'] = dY[m,n']·Wᵀ`.
    InputGradient,
    /// `dW[k',n'] = Xᵀ·dY`.
    WeightGradient,
}

/// A GEMM of a [`LinearOp`](crate::graph::LinearOp): `C[m,n] (+)= A·B` with inner size k.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GemmOp {
    /// Role in the linear, which decides the transposed operand.
    pub role: GemmRole,
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// The contracted size.
    pub k: u64,
    /// GEMMs of equal shape in one launch.
    pub batch: u64,
    /// Whether the product is added to a further operand: the output buffer, or in the forward pass a residual, which is
    /// another buffer.
    pub accumulate: bool,
}

impl GemmOp {
    /// Whether the result is the sum of the product and a residual.
    pub fn is_residual_sum(&self) -> bool {
        self.role == GemmRole::Forward && self.accumulate
    }
}

/// A collective that changes the layout of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CollectiveOp {
    /// Function that the collective computes.
    pub function: CollectiveFunction,
    /// Axis of the mesh.
    pub axis: Axis,
    /// Layout over the axis before the collective.
    pub from: Layout,
    /// Layout over the axis after the collective.
    pub to: Layout,
    /// Bytes of the whole (unsharded) tensor.
    pub payload: Bytes,
    /// Bytes of per-token statistics in the same launch, with or without a payload.
    pub statistic: Bytes,
    /// The device group.
    pub group: DeviceGroup,
}

/// Function that a collective computes of the operands of all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveFunction {
    /// All-reduce: partial → replicated.
    AllReduce(Reduction),
    /// Reduce-scatter: sums partial tensors; partial → sharded.
    ReduceScatter,
    /// All-gather: sharded → replicated.
    AllGather,
    /// All-to-all: sharded on one dim → sharded on another.
    AllToAll,
}

impl CollectiveFunction {
    /// Kind, by which collectives are priced and counted.
    pub fn kind(self) -> CollectiveKind {
        match self {
            CollectiveFunction::AllReduce(_) => CollectiveKind::AllReduce,
            CollectiveFunction::ReduceScatter => CollectiveKind::ReduceScatter,
            CollectiveFunction::AllGather => CollectiveKind::AllGather,
            CollectiveFunction::AllToAll => CollectiveKind::AllToAll,
        }
    }

    /// Combination of the operands; `Sum` for functions that do not reduce.
    pub fn reduction(self) -> Reduction {
        match self {
            CollectiveFunction::AllReduce(reduction) => reduction,
            _ => Reduction::Sum,
        }
    }
}

impl CollectiveOp {
    /// Kind, by which collectives are priced and counted.
    pub fn kind(&self) -> CollectiveKind {
        self.function.kind()
    }
}

/// Reduction of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Adds summands.
    Sum,
    /// Takes the largest.
    Maximum,
}

/// A point-to-point transfer over the pipeline axis, in one launch: the hidden state and the crossing
/// latents, or their gradients, one operand per tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct P2pTransfer {
    /// The tensor of each operand.
    pub tensors: Vec<BoundaryTensorId>,
    /// The neighbouring stage.
    pub peer_stage: u32,
    /// The pipeline group.
    pub group: DeviceGroup,
}

impl Action {
    /// Whether this is a collective, a transfer, or ring attention, which is computation too.
    pub fn is_communication(&self) -> bool {
        match self {
            Action::Collective(_) | Action::Send(_) | Action::Receive(_) => true,
            Action::Attention(attention) => attention.rotation().is_some(),
            Action::Gemm(_) | Action::Fused(_) => false,
        }
    }

    /// Whether this is the GEMM of a weight gradient.
    pub fn is_weight_gradient(&self) -> bool {
        matches!(self, Action::Gemm(gemm) if gemm.role == GemmRole::WeightGradient)
    }

    /// The kernel of this action on operands of these extents. Operands that an action both reads
    /// and writes appear on both sides.
    pub fn kernel(&self, reads: &[Extent], writes: &[Extent]) -> Kernel {
        match self {
            Action::Gemm(gemm) => Kernel::Gemm(Gemm {
                m: gemm.m,
                n: gemm.n,
                k: gemm.k,
                batch: gemm.batch,
                accumulate: gemm.accumulate,
                residual: gemm.is_residual_sum(),
                input: reads.first().map_or(DType::F32, |extent| extent.dtype),
                output: writes.first().map_or(DType::F32, |extent| extent.dtype),
            }),
            Action::Attention(attention) => Kernel::Attention(attention.clone()),
            Action::Fused(op) => Kernel::Fused(op.kernel(reads, writes)),
            Action::Collective(collective) => Kernel::Collective(Collective {
                kind: collective.kind(),
                payload: collective.payload + collective.statistic,
                group: collective.group,
            }),
            Action::Send(p2p) | Action::Receive(p2p) => {
                let side = if matches!(self, Action::Send(_)) { reads } else { writes };
                let bytes = side.iter().map(Extent::bytes).sum();
                Kernel::Transfer(Transfer { bytes, group: p2p.group })
            }
        }
    }
}
