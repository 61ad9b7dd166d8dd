//! The part of an exact step of LORO that the hosts of a stage run, after its step phase.
//!
//! The step phase of every step updates the moments of all weights; in an exact step it leaves the factors as they are. The
//! host of each device then runs these instructions, in order. Each pair of a stage belongs to one device, so that the
//! decompositions are spread over all devices of the stage. Factors travel in *transfers* of one block, of which a host holds one at
//! a time; it holds the factors of its own pairs until they are decomposed.
//!
//! | instruction | what the host of a device does |
//! |---|---|
//! | `Read` | begins a transfer: the elements of factors that this device provides, and the directions in which AdamW would change them; zero elsewhere. Each element is provided by one of the devices that share a copy of the optimizer states |
//! | `SumFactors`, over the tensor axis and the shard group | adds the transfers of all members, which makes the factors whole |
//! | `Keep` | keeps the factors of own pairs, and ends the transfer |
//! | `Decompose` | computes the new factors of own pairs |
//! | `Place` | begins a transfer: the new factors of own pairs; zero for the others |
//! | `SumUpdates`, over the tensor and the data axis | adds the transfers of all members |
//! | `Write` | writes the new factors to the weights and master copies of the device, and ends the transfer |
//!
//! A stage decomposes the pairs of several blocks at once: as many as keep the threads of all hosts busy within their memory.

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

/// An instruction of a host on consecutive pairs.
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
    /// Begins a transfer with the parts of factors and moments that this device provides, from these buffers.
    Read(Vec<BufferId>),
    /// Adds the factors and directions of all members of a group.
    SumFactors(DeviceGroup),
    /// Ends a transfer: keeps the factors of own pairs.
    Keep,
    /// Computes the new factors of own pairs.
    Decompose,
    /// Begins a transfer with the new factors of own pairs.
    Place,
    /// Adds the new factors of all members of a group.
    SumUpdates(DeviceGroup),
    /// Ends a transfer: writes the new factors to these buffers.
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

    /// Floating-point operations of a decomposition, in its terms of third order.
    ///
    /// With d rows: 6dr² − 8r³/3 for each QR decomposition with an explicit Q, of M, N and Z − V·Vᵀ·Z; dr² each for Y and Z; 2dr²
    /// each for Uᵀ·Y, C, the two projections and the Gram matrix of Y; 4dr² for each new factor. Without: 2r³ for R_M·R_Nᵀ,
    /// 8r³ for Sᵀ·S, 4r³ for the upper half of S·T, and for the eigenvectors of order 2r 32r³ / 3 (tridiagonalisation), 32r³ / 3 at
    /// most (divide and conquer) and 16r³ (reflections). The symbols are those of the runtime's `loro` module.
    pub fn decomposition_flops(&self) -> Flops {
        let [d_in, rank, d_out] = [self.d_in, self.rank, self.d_out].map(|size| size as f64);
        Flops((21.0 * d_in + 17.0 * d_out) * rank.powi(2) + 130.0 / 3.0 * rank.powi(3))
    }
}

impl HostAction {
    /// Short name: `read`, `sum_factors`, …
    pub fn name(&self) -> &'static str {
        match self {
            HostAction::Read(_) => "read",
            HostAction::SumFactors(_) => "sum_factors",
            HostAction::Keep => "keep",
            HostAction::Decompose => "decompose",
            HostAction::Place => "place",
            HostAction::SumUpdates(_) => "sum_updates",
            HostAction::Write(_) => "write",
        }
    }

    /// Bytes of a sum over a group on pairs with so many elements: factors and directions, or new factors, all in fp32.
    pub fn summed_bytes(&self, elements: u64) -> Bytes {
        let tensors = match self {
            HostAction::SumFactors(_) => 2,
            HostAction::SumUpdates(_) => 1,
            _ => 0,
        };
        DType::F32.bytes(tensors * elements)
    }
}
