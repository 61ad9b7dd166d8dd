//! Upper limits of the sizes of a model.

/// Largest width: residual stream, vocabulary, all heads together, MLP, rank.
pub(super) const MAX_WIDTH: u64 = 1 << 24;
/// Most blocks of a model.
pub(super) const MAX_BLOCKS: u64 = 4096;
/// Largest `max_sequence_length` of a model, in tokens.
pub(super) const MAX_SEQUENCE_LENGTH: u64 = 1 << 30;
/// Most parameters of a model: far beyond any machine, and small enough that bytes and floating-point
/// operations of a step fit 64 bits.
pub(super) const MAX_PARAMETERS: u64 = 1 << 48;
