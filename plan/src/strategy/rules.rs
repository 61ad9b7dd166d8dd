//! Restrictions of the search space. [`Baseline`] is one of them; `op_choices.rs`, `flow.rs` and `space.rs` apply the
//! others.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Baseline;

/// Restrictions of the search space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Rules {
    /// A published baseline, or the whole space.
    pub baseline: Baseline,
    /// Allowed layouts of weights.
    pub weights: WeightRule,
    /// Allowed forms of norms.
    pub norm: NormRule,
    /// Allowed recomputation.
    pub recompute: Recompute,
}

impl Rules {
    /// The whole space.
    pub const ALL: Rules = Rules {
        baseline: Baseline::Auto,
        weights: WeightRule::Any,
        norm: NormRule::Auto,
        recompute: Recompute::Auto,
    };
}

/// Allowed layouts of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WeightRule {
    /// Replicated or sharded.
    Any,
    /// Every weight matrix must be sharded over the tensor axis, except norm scales and the small
    /// matrices of a tensor gate.
    Sharded,
}

/// The searched forms of RMSNorm on sharded features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NormRule {
    /// Both forms; the search chooses.
    Auto,
    /// The statistic is all-reduced in a launch of its own.
    Sync,
    /// The statistic is reduced in the launch of the latents' all-reduce.
    Online,
}

/// Allowed saves of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// The search decides for every copy.
    Auto,
    /// Nothing is recomputed.
    None,
    /// Only the latents and the block's input are kept (the published communication-free scheme).
    Latents,
    /// Only the block's input is kept.
    Block,
}
