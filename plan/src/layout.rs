//! Layouts of tensors over the tensor axis, and of the heads of attention over the context axis.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A dimension of an activation `[sequence, position, feature]`.
///
/// Tokens shard by whole sequences (attention stays local) or by positions: two different dims.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Dim {
    /// The hidden, head, latent or vocabulary features.
    Feature,
    /// Whole sequences of the microbatch.
    Sequence,
    /// Positions within each sequence.
    Position,
}

/// Layout of one tensor over the tensor axis.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Every device has the whole tensor.
    Replicated,
    /// Device i has the i-th of equal parts along the dimension.
    Sharded(Dim),
    /// Attention with a context axis: whole heads, split over the tensor axis and each part over the context axis, with
    /// all positions of each sequence.
    Heads,
    /// Attention with a context axis: whole heads, split over the tensor axis alone, with all positions of each
    /// sequence on every device of the context axis. A gradient in this layout is a summand on each of these.
    Gathered,
    /// Every device has a summand of the tensor: a sum still to be reduced.
    Partial,
}

impl Layout {
    /// Whether a reshard from this layout to the other exists: none has a partial target.
    pub(crate) fn reshards_to(self, other: Layout) -> bool {
        self == other || other != Layout::Partial
    }
}

/// Sharding of a weight matrix over the tensor axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightSplit {
    /// The whole matrix on every device.
    Whole,
    /// Split on its rows (a linear's input features, the embedding's vocabulary).
    Rows,
    /// Split on its columns.
    Columns,
}

/// The layouts of a tensor and of its gradient at one end of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EdgeLayout {
    /// The tensor's layout in the forward pass.
    pub forward: Layout,
    /// The layout of its gradient in the backward pass.
    pub backward: Layout,
    /// Whether the division by the norm's root mean square is pending (online RMSNorm, DESIGN §3.3): the
    /// statistic is reduced with the tensor.
    pub norm_pending: bool,
}

impl EdgeLayout {
    pub(crate) const fn new(forward: Layout, backward: Layout) -> Self {
        EdgeLayout { forward, backward, norm_pending: false }
    }

    /// Replicated in both directions.
    pub(crate) const REPLICATED: EdgeLayout =
        EdgeLayout::new(Layout::Replicated, Layout::Replicated);
    /// Replicated, with a partial gradient: the input of a column-split linear.
    pub(crate) const GRADIENT_PARTIAL: EdgeLayout =
        EdgeLayout::new(Layout::Replicated, Layout::Partial);
    /// Partial, with a replicated gradient: the output of a row-split linear.
    pub(crate) const PARTIAL: EdgeLayout = EdgeLayout::new(Layout::Partial, Layout::Replicated);

    /// Sharded along `dim` in both directions.
    pub(crate) const fn sharded(dim: Dim) -> Self {
        EdgeLayout::new(Layout::Sharded(dim), Layout::Sharded(dim))
    }

    /// Whole heads in both directions, with all positions.
    pub(crate) const HEADS: EdgeLayout = EdgeLayout::new(Layout::Heads, Layout::Heads);

    /// Heads with the keys or values of all positions, whose gradient is partial over the context axis.
    pub(crate) const GATHERED: EdgeLayout = EdgeLayout::new(Layout::Gathered, Layout::Gathered);

    /// The same layouts, with the division of the norm pending.
    pub(crate) const fn with_norm_pending(self) -> Self {
        EdgeLayout { norm_pending: true, ..self }
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Layout::Replicated => "replicated",
            Layout::Sharded(Dim::Feature) => "feature",
            Layout::Sharded(Dim::Sequence) => "sequence",
            Layout::Sharded(Dim::Position) => "position",
            Layout::Heads => "heads",
            Layout::Gathered => "gathered",
            Layout::Partial => "partial",
        })
    }
}

impl std::fmt::Display for EdgeLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.forward)?;
        if self.backward != self.forward {
            write!(f, "/{}", self.backward)?;
        }
        if self.norm_pending {
            write!(f, ", norm pending")?;
        }
        Ok(())
    }
}
