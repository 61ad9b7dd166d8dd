//! Sharding strategies of ops (DESIGN §3.2).
//!
//! A strategy fixes the layouts of an op's inputs, outputs and weights, forward and backward. For
//! `Y = X·W` over the tensor axis:
//!
//! | strategy  | X        | Y        | dY       | dX       | W          | dW         |
//! |-----------|----------|----------|----------|----------|------------|------------|
//! | replicate | whole    | whole    | whole    | whole    | whole      | whole      |
//! | column    | whole    | features | features | partial  | split d_out| split d_out|
//! | row       | features | partial  | whole    | features | split d_in | split d_in |
//! | token     | tokens   | tokens   | tokens   | tokens   | whole      | partial    |
//!
//! BTP and Megatron's column-row pairs are points of this space; only `baseline` names them.

mod baseline;
mod boundary;
mod flow;
mod op_choices;
mod parameters;
mod rules;
mod space;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::EdgeLayout;

pub use baseline::Baseline;
pub use boundary::{BoundaryLayout, boundary_layouts};
pub(crate) use flow::flows;
pub use flow::{Flow, Save, backward_reads_input, backward_reads_output, flow_is_legal};
pub use op_choices::has_separate_queries;
pub(crate) use op_choices::op_choices;
pub use parameters::{OpParameters, op_parameters};
pub use rules::{NormRule, Recompute, Rules, WeightRule};
pub(crate) use space::owned_parameters;
pub use space::{AlternativesContext, OpOption, SegmentChoice, SegmentSpace, TiedWeightLayout};

/// Sharding strategy of an op over the tensor axis.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Every device runs the whole op.
    Replicate,
    /// Tokens are split; weights are whole and their gradients partial.
    Token,
    /// Element-wise ops: features are split.
    Feature,
    /// Linears: the weight is split on its output features. Embedding: the table is split on the hidden
    /// features.
    Column,
    /// Linears: the weight is split on its input features.
    Row,
    /// As row, on an input whose division by the root mean square is pending (online RMSNorm).
    #[serde(rename = "owed-row")]
    PendingNormRow,
    /// Norms: features are split, the statistic is all-reduced at once.
    Sync,
    /// Norms: features are split, the statistic is reduced in the launch of the latents' all-reduce.
    Online,
    /// Latents: the pending division by the root mean square, then φ.
    Recover,
    /// Attention: whole heads are split.
    Heads,
    /// Attention: query heads are split; key and value heads, fewer than devices, are replicated.
    SharedKv,
    /// Embedding and loss: the vocabulary is split.
    Vocabulary,
}

impl Strategy {
    /// All strategies.
    pub const ALL: [Strategy; 12] = [
        Strategy::Replicate,
        Strategy::Token,
        Strategy::Feature,
        Strategy::Column,
        Strategy::Row,
        Strategy::PendingNormRow,
        Strategy::Sync,
        Strategy::Online,
        Strategy::Recover,
        Strategy::Heads,
        Strategy::SharedKv,
        Strategy::Vocabulary,
    ];

    /// The name used in plans.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Replicate => "replicate",
            Strategy::Token => "token",
            Strategy::Feature => "feature",
            Strategy::Column => "column",
            Strategy::Row => "row",
            Strategy::PendingNormRow => "owed-row",
            Strategy::Sync => "sync",
            Strategy::Online => "online",
            Strategy::Recover => "recover",
            Strategy::Heads => "heads",
            Strategy::SharedKv => "shared-kv",
            Strategy::Vocabulary => "vocabulary",
        }
    }
}

/// A strategy with the layouts it implies at every port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpChoice {
    /// The strategy.
    pub strategy: Strategy,
    /// Layouts of the inputs, by port.
    pub inputs: Vec<EdgeLayout>,
    /// Layouts of the outputs, by port.
    pub outputs: Vec<EdgeLayout>,
}
