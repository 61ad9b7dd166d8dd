//! The published baselines as restrictions of the search space: a baseline is planned, priced,
//! checked and run like any other plan.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::graph::{LinearOp, Op, OpNode};
use crate::model::{LinearKind, WeightId};
use crate::{Dim, EdgeLayout};

use super::{BoundaryLayout, Strategy};

/// The searched part of the space: all of it, or a published baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Baseline {
    /// The whole space.
    Auto,
    /// Megatron-LM's column-row pairs on dense linears, with a replicated residual stream.
    FullrankTp,
    /// As [`FullrankTp`](Baseline::FullrankTp) with sequence parallelism (Korthikanti et al., arXiv 2205.05198): norms,
    /// additions and the residual stream are sharded on tokens, which are gathered before column linears and
    /// reduce-scattered after row linears. Attention never keeps its scores, which is selective recomputation.
    MegatronSp,
    /// A column, B row; heads and d_ff sharded between.
    VanillaTp,
    /// A column, B row; attention and the product of gate and up replicated, as published.
    VanillaTpPublished,
    /// A row, B column: latents are reduced, the residual stream stays sharded. With fewer KV heads than
    /// devices, the gradients of k and v are summed at the width of the KV heads instead.
    Btp,
}

impl Baseline {
    /// Every baseline, `auto` first.
    pub const ALL: [Baseline; 6] = [
        Baseline::Auto,
        Baseline::FullrankTp,
        Baseline::MegatronSp,
        Baseline::VanillaTp,
        Baseline::VanillaTpPublished,
        Baseline::Btp,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Baseline::Auto => "auto",
            Baseline::FullrankTp => "fullrank-tp",
            Baseline::MegatronSp => "megatron-sp",
            Baseline::VanillaTp => "vanilla-tp",
            Baseline::VanillaTpPublished => "vanilla-tp-published",
            Baseline::Btp => "btp",
        }
    }

    /// The baseline with this name on the command line.
    pub fn from_name(name: &str) -> Option<Baseline> {
        Baseline::ALL.into_iter().find(|baseline| baseline.name() == name)
    }

    /// Whether the baseline shards dense linears, and so is one of models without factor pairs.
    pub fn is_for_dense_models(self) -> bool {
        matches!(self, Baseline::FullrankTp | Baseline::MegatronSp)
    }

    /// Whether the baseline shards the residual stream on tokens (sequence parallelism).
    pub fn shards_tokens(self) -> bool {
        self == Baseline::MegatronSp
    }

    /// Whether every device has the whole input of a block's first linears, so that each device has a part of its gradient.
    pub fn has_whole_inputs(self) -> bool {
        matches!(self, Baseline::FullrankTp | Baseline::VanillaTp | Baseline::VanillaTpPublished)
    }

    /// The baseline of dense models that shards, or does not shard, the residual stream on tokens.
    pub fn of_dense_model(shards_tokens: bool) -> Baseline {
        if shards_tokens { Baseline::MegatronSp } else { Baseline::FullrankTp }
    }

    /// The baselines of dense models.
    pub fn of_dense_models() -> impl Iterator<Item = Baseline> {
        Baseline::ALL.into_iter().filter(|baseline| baseline.is_for_dense_models())
    }

    /// Whether the baseline allows these layouts of the residual stream and of crossing latents.
    pub fn allows_boundary(self, boundary: BoundaryLayout) -> bool {
        match self {
            Baseline::Auto => true,
            Baseline::Btp => {
                boundary.hidden == EdgeLayout::sharded(Dim::Feature)
                    && boundary.latents == EdgeLayout::REPLICATED
            }
            Baseline::MegatronSp => {
                let tokens = [Dim::Sequence, Dim::Position].map(EdgeLayout::sharded);
                tokens.contains(&boundary.hidden)
            }
            Baseline::FullrankTp | Baseline::VanillaTp | Baseline::VanillaTpPublished => {
                boundary.hidden == EdgeLayout::REPLICATED
            }
        }
    }

    /// Whether the baseline allows a strategy for an op of a block, on more than one device.
    pub fn allows(self, node: &OpNode, strategy: Strategy, devices: u64) -> bool {
        use Baseline::{Auto, Btp, FullrankTp, MegatronSp, VanillaTp, VanillaTpPublished};
        use Strategy::{
            Column, Feature, Heads, Online, PendingNormRow, Recover, Replicate, Row, SharedKv,
            Sync, Token,
        };
        let allowed: &[Strategy] = match (self, &node.op) {
            (Auto, _) => return true,
            // No publication shards crossings, so every strategy is allowed.
            (
                _,
                Op::Cross { .. }
                | Op::GateBias { .. }
                | Op::LatentNorm { .. }
                | Op::TensorGate { .. },
            ) => return true,
            // Biases and norms of heads follow the layout of their linears.
            (_, Op::Bias(_) | Op::QkNorm(_)) => return true,
            (_, Op::Linear(linear)) if matches!(factor_role(linear), FactorRole::Gate) => {
                return true;
            }
            // Fewer KV heads than devices: k and v cannot be split by heads. The published vanilla form
            // does not split heads at all.
            (_, Op::Linear(linear))
                if self != VanillaTpPublished && has_indivisible_heads(linear, devices) =>
            {
                &[Replicate, Row]
            }
            (Btp, Op::Norm { .. }) => &[Sync, Online],
            (Btp, Op::Linear(linear)) => match factor_role(linear) {
                FactorRole::First => &[Row, PendingNormRow],
                FactorRole::Second => &[Column],
                FactorRole::Dense | FactorRole::Gate => &[Row, PendingNormRow, Column],
            },
            (Btp, Op::Latent(_)) => &[Replicate, Recover],
            (Btp, Op::Add { .. } | Op::GatedProduct { .. }) => &[Feature],
            (MegatronSp, Op::Norm { .. } | Op::Add { .. }) => &[Token],
            (FullrankTp | VanillaTp | VanillaTpPublished, Op::Norm { .. } | Op::Add { .. }) => {
                &[Replicate]
            }
            (FullrankTp | MegatronSp, Op::Linear(linear)) => match linear.members[0].parameter {
                WeightId::Dense(LinearKind::O | LinearKind::Down) => &[Row],
                _ => &[Column],
            },
            (VanillaTp | VanillaTpPublished, Op::Linear(linear)) => match factor_role(linear) {
                FactorRole::First => &[Column],
                FactorRole::Second => &[Row],
                FactorRole::Dense | FactorRole::Gate => &[Row, Column],
            },
            (FullrankTp | MegatronSp | VanillaTp | VanillaTpPublished, Op::Latent(_)) => &[Feature],
            (VanillaTpPublished, Op::Attention(_) | Op::GatedProduct { .. }) => &[Replicate],
            (FullrankTp | MegatronSp | VanillaTp, Op::GatedProduct { .. }) => &[Feature],
            (FullrankTp | MegatronSp | VanillaTp | Btp, Op::Attention(_)) => &[Heads, SharedKv],
            (_, Op::Embedding { .. } | Op::Loss { .. }) => return true,
        };
        allowed.contains(&strategy)
    }
}

fn has_indivisible_heads(linear: &LinearOp, devices: u64) -> bool {
    linear.head_dim.is_some_and(|head_dim| {
        linear.members.iter().any(|m| !(m.d_out / head_dim).is_multiple_of(devices))
    })
}

enum FactorRole {
    First,
    Second,
    Dense,
    /// The dense gate of a crossing latent.
    Gate,
}

fn factor_role(linear: &LinearOp) -> FactorRole {
    match linear.members[0].parameter {
        WeightId::FactorA(_) => FactorRole::First,
        WeightId::FactorB(_) => FactorRole::Second,
        WeightId::CrossingGate(_) => FactorRole::Gate,
        _ => FactorRole::Dense,
    }
}
