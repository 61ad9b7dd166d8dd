//! Rows, columns and number format of an operand.

use std::fmt;

use crate::{Bytes, DType};

/// Rows, columns and number format of an operand on one device: all of it that a price depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Rows on one device.
    pub rows: u64,
    /// Columns on one device.
    pub columns: u64,
    /// Number format.
    pub dtype: DType,
}

impl Extent {
    /// One row of `elements` columns.
    pub fn flat(elements: u64, dtype: DType) -> Extent {
        Extent { rows: 1, columns: elements, dtype }
    }

    /// Size of the operand.
    pub fn bytes(&self) -> Bytes {
        self.dtype.bytes(self.rows * self.columns)
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}×{} {}", self.rows, self.columns, self.dtype.name())
    }
}
