//! Passes of one microbatch at the multipliers of bytes of a grid, for the contexts with one tensor axis, context axis and
//! microbatch.

use std::sync::OnceLock;

/// Passes of one microbatch through the whole model at a multiplier of bytes; every value is the least over all boundary
/// layouts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RelaxedPasses {
    /// Price of a kept byte, in seconds.
    pub multiplier: f64,
    /// Forward and backward time of all blocks, with the multiplier times the bytes that they keep, in seconds.
    pub blocks: f64,
    /// The part of `blocks` that the fastest block takes.
    pub fastest_block: f64,
    /// Forward and backward time of the embedding, in seconds.
    pub embedding: f64,
    /// Forward and backward time of the head, in seconds.
    pub head: f64,
    /// Forward and backward time of the whole model with the multiplier, in seconds.
    pub total: f64,
    /// Bytes that all blocks keep in the fastest layout at this multiplier.
    pub(super) kept_bytes: f64,
}

/// Number of multipliers: none, and from 1 fs to about 1 ns for a byte in steps of a fourth of an octave.
pub(super) const MULTIPLIERS: usize = 80;

/// The multiplier of this number in the grid, in seconds per byte.
pub(super) fn multiplier(number: usize) -> f64 {
    match number {
        0 => 0.0,
        _ => 1e-15 * (0.25 * (number - 1) as f64).exp2(),
    }
}

/// Passes by the number of their multiplier, once computed; `None` where a segment has no legal decisions.
pub(super) struct PassLines {
    pub(super) by_multiplier: [OnceLock<Option<RelaxedPasses>>; MULTIPLIERS],
    /// Forward and backward time of embedding and head with each boundary layout, in seconds. They have no multiplier: microbatches
    /// in flight multiply the bytes of blocks, but not those of the head.
    pub(super) ends: OnceLock<Vec<Option<[f64; 2]>>>,
    /// Least forward time of all blocks, in seconds.
    pub(super) forward: OnceLock<f64>,
    /// Lower bound on the forward and backward time of the whole model from its ops alone, in seconds; `None` where an op
    /// has no alternative.
    pub(super) of_ops: OnceLock<Option<f64>>,
}

impl Default for PassLines {
    fn default() -> PassLines {
        PassLines {
            by_multiplier: [const { OnceLock::new() }; MULTIPLIERS],
            ends: OnceLock::new(),
            forward: OnceLock::new(),
            of_ops: OnceLock::new(),
        }
    }
}
