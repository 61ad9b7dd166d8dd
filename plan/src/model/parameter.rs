//! Identities of linears and parameters, whose text forms are their names in plans, checkpoints and messages.

use std::fmt;

/// A linear of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinearKind {
    /// Query projection.
    Q,
    /// Key projection.
    K,
    /// Value projection.
    V,
    /// Output projection of attention.
    O,
    /// Gate projection of the MLP.
    Gate,
    /// Up projection of the MLP.
    Up,
    /// Down projection of the MLP.
    Down,
}

impl LinearKind {
    /// The seven linears of a block, in the order in which they are computed.
    pub const ALL: [LinearKind; 7] = [
        LinearKind::Q,
        LinearKind::K,
        LinearKind::V,
        LinearKind::O,
        LinearKind::Gate,
        LinearKind::Up,
        LinearKind::Down,
    ];

    /// The name in model files, plans and messages.
    pub fn name(self) -> &'static str {
        match self {
            LinearKind::Q => "q",
            LinearKind::K => "k",
            LinearKind::V => "v",
            LinearKind::O => "o",
            LinearKind::Gate => "gate",
            LinearKind::Up => "up",
            LinearKind::Down => "down",
        }
    }

    /// Whether the linear belongs to attention rather than to the MLP.
    pub fn is_attention(self) -> bool {
        matches!(self, LinearKind::Q | LinearKind::K | LinearKind::V | LinearKind::O)
    }
}

impl fmt::Display for LinearKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A parameter within its segment: the embedding, a block or the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightId {
    /// Embedding table, vocab × hidden.
    Embedding,
    /// Scale of the norm before attention.
    Norm1,
    /// Scale of the norm before the MLP.
    Norm2,
    /// Scale of the norm before the head.
    FinalNorm,
    /// Head, hidden × vocab.
    Head,
    /// Matrix of a dense linear, d_in × d_out.
    Dense(LinearKind),
    /// First factor A of a pair, d_in × r.
    FactorA(LinearKind),
    /// Second factor B of a pair, r × d_out.
    FactorB(LinearKind),
    /// Bias of a linear, 1 × d_out.
    Bias(LinearKind),
    /// Scale of the norm of every head of q or k, 1 × head_dim.
    QkNorm(LinearKind),
    /// Dense gate of a crossing latent, r_prev × r.
    CrossingGate(LinearKind),
    /// Bias of an affine gate, 1 × r.
    CrossingGateBias(LinearKind),
    /// First matrix of a tensor gate, a × a.
    CrossingGateU(LinearKind),
    /// Second matrix of a tensor gate, b × b.
    CrossingGateV(LinearKind),
    /// Scale of the LayerNorm over a crossed latent.
    LatentNormScale(LinearKind),
    /// Bias of the LayerNorm over a crossed latent.
    LatentNormBias(LinearKind),
}

impl fmt::Display for WeightId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightId::Embedding => f.write_str("embedding"),
            WeightId::Norm1 => f.write_str("norm1"),
            WeightId::Norm2 => f.write_str("norm2"),
            WeightId::FinalNorm => f.write_str("final_norm"),
            WeightId::Head => f.write_str("head"),
            WeightId::Dense(linear) => f.write_str(linear.name()),
            WeightId::FactorA(linear) => write!(f, "{linear}.a"),
            WeightId::FactorB(linear) => write!(f, "{linear}.b"),
            WeightId::Bias(linear) => write!(f, "{linear}.bias"),
            WeightId::QkNorm(linear) => write!(f, "{linear}.norm"),
            WeightId::CrossingGate(linear) => write!(f, "{linear}.gate"),
            WeightId::CrossingGateBias(linear) => write!(f, "{linear}.gate.bias"),
            WeightId::CrossingGateU(linear) => write!(f, "{linear}.gate.u"),
            WeightId::CrossingGateV(linear) => write!(f, "{linear}.gate.v"),
            WeightId::LatentNormScale(linear) => write!(f, "{linear}.latent_norm.scale"),
            WeightId::LatentNormBias(linear) => write!(f, "{linear}.latent_norm.bias"),
        }
    }
}

/// A parameter within its segment, with its whole (unsharded) shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightShape {
    /// The parameter.
    pub weight: WeightId,
    /// Rows of the whole parameter.
    pub rows: u64,
    /// Columns of the whole parameter.
    pub columns: u64,
}

impl WeightShape {
    /// A parameter of this shape.
    pub fn new(weight: WeightId, rows: u64, columns: u64) -> WeightShape {
        WeightShape { weight, rows, columns }
    }

    /// Elements of the whole parameter.
    pub fn elements(&self) -> u64 {
        self.rows * self.columns
    }
}

/// A parameter of a model, printed as `layer 3 q.a` or `embedding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParameterId {
    /// The block; `None` for embedding, final norm and head.
    pub block: Option<u64>,
    /// The parameter within the block.
    pub weight: WeightId,
}

impl fmt::Display for ParameterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block {
            Some(block) => write!(f, "layer {block} {}", self.weight),
            None => self.weight.fmt(f),
        }
    }
}
