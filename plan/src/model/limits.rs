//! Upper limits of the sizes of a model.

/// Largest width of any kind: residual stream, vocabulary, all heads together, MLP, rank.
pub const MAX_WIDTH: u64 = 1 << 24;
/// Most blocks a model may have.
pub const MAX_BLOCKS: u64 = 4096;
/// Longest sequence a model may be meant for, in tokens.
pub const MAX_SEQUENCE_LENGTH: u64 = 1 << 30;
/// Most parameters a model may have. Far beyond any machine, and small enough that bytes and
/// floating-point operations of a step never overflow 64 bits.
pub const MAX_PARAMETERS: u64 = 1 << 48;
