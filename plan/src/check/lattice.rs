//! The lattice of the abstract interpretation: what is known of a buffer's contents.

use crate::program::Extent;
use crate::{DType, Dim, Layout};

use super::error::{CheckResult, fault};

/// One side of a matrix: its whole size, and how the tensor axis shards it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShardedExtent {
    /// Size of the whole (unsharded) side.
    pub size: u64,
    /// The dimension that the tensor axis shards into equal parts, if any.
    pub cut: Option<Dim>,
}

/// The reduction that is still to be done over the tensor axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingSum {
    /// Nothing.
    Done,
    /// A sum: each device has a summand.
    Owed,
    /// A maximum: each device has a candidate.
    MaximumOwed,
}

/// A value of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SymbolId(pub u32);

/// Which tensor a buffer's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AbstractValue {
    /// A value of the forward pass.
    Value(SymbolId),
    /// A sum of gradient contributions, one bit for each use of the value.
    Gradient { of: SymbolId, uses: u64 },
    /// Zeros: no contribution yet, in any layout.
    Zero,
}

/// The known properties of a buffer's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AbstractState {
    pub meaning: AbstractValue,
    /// Tokens, or a weight's input features.
    pub rows: ShardedExtent,
    /// Features.
    pub columns: ShardedExtent,
    /// The reduction still pending over the tensor axis.
    pub tensor: PendingSum,
    /// The statistic of the norm whose division is still pending.
    pub norm: Option<SymbolId>,
    /// The dimension whose parts are packed one after the other, before or after a collective.
    pub packed: Option<Dim>,
    pub dtype: DType,
}

/// A result, and where it may be written.
pub(super) struct OperandWrite {
    pub state: AbstractState,
    pub target: WriteTarget,
}

/// Where a result may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteTarget {
    /// To a buffer that the instruction does not read.
    Fresh,
    /// In place of the operand with this number.
    Over(usize),
    /// Either.
    Either(usize),
}

impl ShardedExtent {
    pub fn whole(size: u64) -> ShardedExtent {
        ShardedExtent { size, cut: None }
    }

    pub fn local(self, devices: u64) -> u64 {
        if self.cut.is_some() { self.size / devices } else { self.size }
    }

    /// `sections` sides of this size side by side, each sharded the same way.
    pub fn times(self, sections: u64) -> ShardedExtent {
        ShardedExtent { size: self.size * sections, ..self }
    }
}

impl AbstractState {
    /// A matrix with nothing pending.
    pub fn new(
        meaning: AbstractValue,
        rows: ShardedExtent,
        columns: ShardedExtent,
        dtype: DType,
    ) -> AbstractState {
        AbstractState {
            meaning,
            rows,
            columns,
            tensor: PendingSum::Done,
            norm: None,
            packed: None,
            dtype,
        }
    }

    /// Another tensor in the same layout.
    pub fn with(self, meaning: AbstractValue) -> AbstractState {
        AbstractState { meaning, ..self }
    }

    pub fn owing(self, tensor: PendingSum) -> AbstractState {
        AbstractState { tensor, ..self }
    }

    /// `count` fp32 elements for each row.
    pub fn per_row(self, value: SymbolId, count: u64) -> AbstractState {
        AbstractState {
            meaning: AbstractValue::Value(value),
            columns: ShardedExtent::whole(count),
            norm: None,
            dtype: DType::F32,
            ..self
        }
    }

    pub fn transposed(self) -> AbstractState {
        AbstractState { rows: self.columns, columns: self.rows, ..self }
    }

    /// The layout over the tensor axis.
    pub fn layout(&self) -> Layout {
        match (self.tensor, self.rows.cut.or(self.columns.cut)) {
            (PendingSum::Owed | PendingSum::MaximumOwed, _) => Layout::Partial,
            (PendingSum::Done, Some(dim)) => Layout::Sharded(dim),
            (PendingSum::Done, None) => Layout::Replicated,
        }
    }

    pub fn extent(&self, devices: u64) -> Extent {
        Extent {
            rows: self.rows.local(devices),
            columns: self.columns.local(devices),
            dtype: self.dtype,
        }
    }

    /// Whether both have the same layout, whichever tensors they are.
    pub fn lies_as(&self, other: &AbstractState) -> bool {
        self.rows == other.rows
            && self.columns == other.columns
            && self.tensor == other.tensor
            && self.packed == other.packed
            && self.dtype == other.dtype
    }

    /// Checks that the axis shards the tensor at most once, into equal parts.
    pub fn consistent(self, devices: u64) -> CheckResult<AbstractState> {
        let cuts = [self.rows, self.columns];
        if let Some(side) = cuts.iter().find(|s| s.cut.is_some() && !s.size.is_multiple_of(devices))
        {
            return fault(format!("{} does not divide into {devices} equal parts", side.size));
        }
        let marks = cuts.iter().filter(|side| side.cut.is_some()).count()
            + usize::from(self.tensor != PendingSum::Done);
        if marks > 1 {
            return fault(format!(
                "the result would be {self}: one mesh axis either shards a tensor once or leaves a partial sum"
            ));
        }
        Ok(self)
    }
}

fn cut(side: ShardedExtent) -> String {
    let name = match side.cut {
        None => return side.size.to_string(),
        Some(dim) => Layout::Sharded(dim),
    };
    format!("{} sharded by {name}", side.size)
}

impl std::fmt::Display for AbstractState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{} × {}] {}", cut(self.rows), cut(self.columns), self.dtype.name())?;
        match self.tensor {
            PendingSum::Done => {}
            PendingSum::Owed => write!(f, ", partial")?,
            PendingSum::MaximumOwed => write!(f, ", partial maximum")?,
        }
        if self.norm.is_some() {
            write!(f, ", norm division pending")?;
        }
        if let Some(dim) = self.packed {
            write!(f, ", packed by {}", Layout::Sharded(dim))?;
        }
        Ok(())
    }
}
