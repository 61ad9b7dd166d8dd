//! The lattice of the abstract interpretation: known properties of the contents of a buffer.

use crate::context::Context;
use crate::mesh::Axis;
use crate::program::Extent;
use crate::{DType, Dim, Layout};

use super::error::{CheckResult, fault};

/// One side of a matrix: its whole size, and how the tensor axis shards it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShardedExtent {
    /// Whole (unsharded) size.
    pub size: u64,
    /// The dimension that the tensor axis shards into equal parts, if any.
    pub sharded: Option<Dim>,
}

/// The pending reduction over the tensor axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingReduction {
    None,
    /// Each device has a summand.
    Sum,
    /// Each device has a candidate of the maximum.
    Maximum,
}

/// A value of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ForwardValueId(pub u32);

/// The tensor that a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AbstractValue {
    /// A value of the forward pass.
    Value(ForwardValueId),
    /// A sum of gradient contributions, one bit for each use of the value.
    Gradient { of: ForwardValueId, uses: u64 },
    /// Zeros: no contribution yet, in any layout.
    Zero,
}

/// The known properties of a buffer's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AbstractState {
    pub value: AbstractValue,
    /// Tokens, or a weight's input features.
    pub rows: ShardedExtent,
    /// Features.
    pub columns: ShardedExtent,
    /// The pending reduction over the tensor axis.
    pub pending: PendingReduction,
    /// The statistic of the norm whose division is pending.
    pub pending_norm: Option<ForwardValueId>,
    /// The parts that are packed one after the other, before or after a collective.
    pub packed: Option<PackedParts>,
    /// The part of each device of the context axis. `rows` counts the tokens of the positions of one device.
    pub over_context: ContextPart,
    pub dtype: DType,
}

/// The part of a tensor that each device of the context axis has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContextPart {
    /// All features of its positions.
    Positions,
    /// All positions of a part of the features.
    Features,
    /// All positions and features.
    Whole,
    /// A summand of all positions and features.
    Summand,
}

/// Parts of a tensor that are contiguous in memory, one for each member of a device group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedParts {
    /// The dimension along which the tensor is divided.
    pub dim: Dim,
    /// The axis of the group.
    pub axis: Axis,
}

/// A result and its allowed target.
pub(super) struct OperandWrite {
    pub state: AbstractState,
    pub target: WriteTarget,
}

/// The buffers that a result may be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteTarget {
    /// A buffer that the instruction does not read.
    Fresh,
    /// The buffer of the operand with this index.
    InPlace(usize),
    /// Either of them.
    FreshOrInPlace(usize),
    /// A buffer that the instruction does not read, whose contents no other instruction may read.
    Scratch,
}

impl ShardedExtent {
    pub fn whole(size: u64) -> ShardedExtent {
        ShardedExtent { size, sharded: None }
    }

    pub fn local(self, devices: u64) -> u64 {
        if self.sharded.is_some() { self.size / devices } else { self.size }
    }

    /// `sections` sides of this size side by side, each sharded the same way.
    pub fn times(self, sections: u64) -> ShardedExtent {
        ShardedExtent { size: self.size * sections, ..self }
    }
}

impl AbstractState {
    /// A matrix with nothing pending.
    pub fn new(
        value: AbstractValue,
        rows: ShardedExtent,
        columns: ShardedExtent,
        dtype: DType,
    ) -> AbstractState {
        AbstractState {
            value,
            rows,
            columns,
            pending: PendingReduction::None,
            pending_norm: None,
            packed: None,
            over_context: ContextPart::Positions,
            dtype,
        }
    }

    /// The same state with another value.
    pub fn with_value(self, value: AbstractValue) -> AbstractState {
        AbstractState { value, ..self }
    }

    pub fn with_pending(self, tensor: PendingReduction) -> AbstractState {
        AbstractState { pending: tensor, ..self }
    }

    /// `count` fp32 elements for each row.
    pub fn per_row(self, value: ForwardValueId, count: u64) -> AbstractState {
        AbstractState {
            value: AbstractValue::Value(value),
            columns: ShardedExtent::whole(count),
            pending_norm: None,
            dtype: DType::F32,
            ..self
        }
    }

    pub fn transposed(self) -> AbstractState {
        AbstractState { rows: self.columns, columns: self.rows, ..self }
    }

    /// The layout over the tensor axis.
    pub fn layout(&self) -> Layout {
        match (self.pending, self.rows.sharded.or(self.columns.sharded)) {
            (PendingReduction::Sum | PendingReduction::Maximum, _) => Layout::Partial,
            (PendingReduction::None, Some(dim)) => Layout::Sharded(dim),
            (PendingReduction::None, None) => Layout::Replicated,
        }
    }

    /// Extent on one device.
    pub fn extent(&self, context: &Context) -> Extent {
        let devices = context.tensor_size();
        let places = match self.over_context {
            ContextPart::Positions => 1,
            _ => context.mesh.context,
        };
        Extent {
            rows: self.rows.local(devices) * places,
            columns: self.columns.local(devices) / self.exchanged_parts(context),
            dtype: self.dtype,
        }
    }

    /// Parts of the features over the context axis.
    pub fn exchanged_parts(&self, context: &Context) -> u64 {
        if self.over_context == ContextPart::Features { context.mesh.context } else { 1 }
    }

    /// Whether both have the same extent and layout.
    pub fn same_layout(&self, other: &AbstractState) -> bool {
        self.rows == other.rows
            && self.columns == other.columns
            && self.pending == other.pending
            && self.packed == other.packed
            && self.over_context == other.over_context
            && self.dtype == other.dtype
    }

    /// Checks that the axis shards the tensor at most once, into equal parts.
    pub fn consistent(self, context: &Context) -> CheckResult<AbstractState> {
        let devices = context.tensor_size();
        let sides = [self.rows, self.columns];
        let features = self.columns.local(devices);
        if !features.is_multiple_of(self.exchanged_parts(context)) {
            return fault(format!(
                "{features} features do not divide into equal parts over the context axis"
            ));
        }
        if let Some(side) =
            sides.iter().find(|s| s.sharded.is_some() && !s.size.is_multiple_of(devices))
        {
            return fault(format!("{} does not divide into {devices} equal parts", side.size));
        }
        let uses_of_axis = sides.iter().filter(|side| side.sharded.is_some()).count()
            + usize::from(self.pending != PendingReduction::None);
        if uses_of_axis > 1 {
            return fault(format!(
                "the result would be {self}: one mesh axis either shards a tensor once or leaves a partial sum"
            ));
        }
        Ok(self)
    }
}

fn side_text(side: ShardedExtent) -> String {
    let name = match side.sharded {
        None => return side.size.to_string(),
        Some(dim) => Layout::Sharded(dim),
    };
    format!("{} sharded by {name}", side.size)
}

impl std::fmt::Display for PackedParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} over the {} axis", Layout::Sharded(self.dim), self.axis.name())
    }
}

impl std::fmt::Display for AbstractState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "[{} × {}] {}",
            side_text(self.rows),
            side_text(self.columns),
            self.dtype.name()
        )?;
        match self.pending {
            PendingReduction::None => {}
            PendingReduction::Sum => write!(f, ", partial")?,
            PendingReduction::Maximum => write!(f, ", partial maximum")?,
        }
        if self.pending_norm.is_some() {
            write!(f, ", norm division pending")?;
        }
        match self.over_context {
            ContextPart::Positions => {}
            ContextPart::Features => write!(f, ", features over the context axis")?,
            ContextPart::Whole => write!(f, ", whole on the context axis")?,
            ContextPart::Summand => write!(f, ", partial over the context axis")?,
        }
        if let Some(parts) = self.packed {
            write!(f, ", packed by {parts}")?;
        }
        Ok(())
    }
}
