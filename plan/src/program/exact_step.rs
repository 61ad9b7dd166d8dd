//! The part of an exact step of LORO that the hosts of a stage run, after its step phase.
//!
//! The step phase of every step updates the moments of all weights; in an exact step it leaves the factors as they are. The
//! host of each device then runs these instructions, in order, on *rounds* of factor pairs:
//!
//! | instruction | host memory after it |
//! |---|---|
//! | `Read` | the elements of the round's factors, and of the directions in which AdamW would change them, that this device provides; zero elsewhere. Each element is provided by one device of the stage |
//! | `SumFactors`, over each axis that divides the stage | the whole factors and directions |
//! | `Decompose` | the new factors of the pairs that this device owns, zero for the others |
//! | `SumUpdates`, over the same axes | the new factors of all pairs |
//! | `Write` | written to the weights and master copies of the device |
//!
//! Each pair of a stage belongs to one device, in turn, so that the decompositions are spread over all devices of the
//! stage. A round has whole blocks, and at least as many pairs as devices, where the stage has as many.

use std::ops::Range;

use crate::mesh::DeviceGroup;
use crate::model::LinearKind;
use crate::{Bytes, DType, Flops};

use super::BufferId;

/// Instructions of the hosts of a stage in an exact step. Empty where the optimizer is not LORO.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExactStep {
    /// The factor pairs of the stage, in the order of the model.
    pub pairs: Vec<OwnedPair>,
    /// The instructions, in order.
    pub instrs: Vec<HostInstr>,
}

/// A factor pair and the device that decomposes it: A is d_in × rank, B is rank × d_out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedPair {
    /// The block.
    pub block: u64,
    /// The linear of the block.
    pub linear: LinearKind,
    /// Rows of A.
    pub d_in: u64,
    /// Columns of A, and rows of B.
    pub rank: u64,
    /// Columns of B.
    pub d_out: u64,
    /// The device that decomposes the pair: tensor index + tensor size · replica.
    pub owner: u64,
}

/// An instruction of a host on a round of pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInstr {
    /// The operation.
    pub action: HostAction,
    /// The pairs, by their index in the stage.
    pub pairs: Range<usize>,
}

/// Operation of a [`HostInstr`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostAction {
    /// Reads the parts of factors and moments that this device provides, from these buffers.
    Read(Vec<BufferId>),
    /// Adds the factors and directions of all members of a group.
    SumFactors(DeviceGroup),
    /// Computes the new factors of own pairs.
    Decompose,
    /// Adds the new factors of all members of a group.
    SumUpdates(DeviceGroup),
    /// Writes the new factors to these buffers.
    Write(Vec<BufferId>),
}

impl ExactStep {
    /// Whether the stage has no exact step.
    pub fn is_empty(&self) -> bool {
        self.instrs.is_empty()
    }

    /// The pairs of an instruction in words: from the first to the last.
    pub fn origin(&self, instr: &HostInstr) -> String {
        let name = |pair: &OwnedPair| format!("layer {} {}", pair.block, pair.linear);
        match self.pairs_of(instr) {
            [] => "no pairs".into(),
            [only] => name(only),
            [first, .., last] => format!("{} to {}", name(first), name(last)),
        }
    }

    /// The pairs of an instruction.
    pub fn pairs_of(&self, instr: &HostInstr) -> &[OwnedPair] {
        &self.pairs[instr.pairs.clone()]
    }
}

impl OwnedPair {
    /// Elements of both factors.
    pub fn elements(&self) -> u64 {
        (self.d_in + self.d_out) * self.rank
    }

    /// Floating-point operations of a decomposition: thin QR with an explicit Q, 4dr² each, of both factors and both normal
    /// components, the products with d rows, 9dr² on each side, Sᵀ·S of 16r³, and the decomposition of a symmetric matrix of
    /// order 2r with its vectors, 9(2r)³.
    pub fn decomposition_flops(&self) -> Flops {
        let [d_in, rank, d_out] = [self.d_in, self.rank, self.d_out].map(|size| size as f64);
        Flops(17.0 * (d_in + d_out) * rank.powi(2) + 88.0 * rank.powi(3))
    }
}

impl HostAction {
    /// Short name: `read`, `sum_factors`, …
    pub fn name(&self) -> &'static str {
        match self {
            HostAction::Read(_) => "read",
            HostAction::SumFactors(_) => "sum_factors",
            HostAction::Decompose => "decompose",
            HostAction::SumUpdates(_) => "sum_updates",
            HostAction::Write(_) => "write",
        }
    }

    /// Bytes of a sum over a group on pairs with so many elements: factors and directions, or new factors, all in fp32.
    pub fn summed_bytes(&self, elements: u64) -> Bytes {
        let tensors = match self {
            HostAction::SumFactors(_) => 2,
            HostAction::SumUpdates(_) => 1,
            HostAction::Read(_) | HostAction::Decompose | HostAction::Write(_) => 0,
        };
        DType::F32.bytes(tensors * elements)
    }
}
