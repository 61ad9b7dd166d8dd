//! Flags with a fixed set of values.

use std::str::FromStr;

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule};
use narrows_plan::{ContextAttention, Executor, GradReduceDtype, PipelineSchedule, Zero};
use narrows_planner::{GroupingRule, Objective};
use narrows_runtime::{FactorRateScale, GemmDtype};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::units::Positive;

/// `--grad-reduce-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GradReduceDtypeArg {
    /// Reduce in fp32, as accumulated
    Fp32,
    /// Round to bf16, reduce, and convert back to fp32
    Bf16,
}

impl From<GradReduceDtypeArg> for GradReduceDtype {
    fn from(dtype: GradReduceDtypeArg) -> GradReduceDtype {
        match dtype {
            GradReduceDtypeArg::Fp32 => GradReduceDtype::Fp32,
            GradReduceDtypeArg::Bf16 => GradReduceDtype::Bf16,
        }
    }
}

/// `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DtypeArg {
    /// As stored, in f32
    F32,
    /// Rounded to bf16; products are accumulated in f32, and all else is f32
    Bf16,
}

impl From<DtypeArg> for GemmDtype {
    fn from(dtype: DtypeArg) -> GemmDtype {
        match dtype {
            DtypeArg::F32 => GemmDtype::F32,
            DtypeArg::Bf16 => GemmDtype::Bf16,
        }
    }
}

/// `--zero`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ZeroArg {
    /// Searched
    Auto,
    /// Every replica holds all optimizer states; 0 means the same
    #[value(alias = "0")]
    Off,
    /// ZeRO-1: optimizer states are sharded over the replicas
    #[value(name = "1", alias = "one")]
    One,
    /// ZeRO-2: as ZeRO-1, and the gradients of blocks are sharded
    #[value(name = "2", alias = "two")]
    Two,
    /// ZeRO-3: as ZeRO-2, and the weights of blocks are sharded
    #[value(name = "3", alias = "three")]
    Three,
}

impl ZeroArg {
    /// The stage; `None` for a search.
    pub fn stage(self) -> Option<Zero> {
        match self {
            ZeroArg::Auto => None,
            ZeroArg::Off => Some(Zero::Off),
            ZeroArg::One => Some(Zero::One),
            ZeroArg::Two => Some(Zero::Two),
            ZeroArg::Three => Some(Zero::Three),
        }
    }
}

/// `--context-attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ContextAttentionArg {
    /// Searched for sequences of at least 8,192 tokens, otherwise exchange
    Auto,
    /// Positions exchanged for heads by all-to-all (Ulysses)
    Exchange,
    /// Keys and values gathered; causal work balanced by zigzag positions
    Gather,
    /// Keys and values passed around a ring beside attention; zigzag positions
    Ring,
}

impl ContextAttentionArg {
    /// The collectives; `None` for a search.
    pub fn attention(self) -> Option<ContextAttention> {
        match self {
            ContextAttentionArg::Auto => None,
            ContextAttentionArg::Exchange => Some(ContextAttention::Exchange),
            ContextAttentionArg::Gather => Some(ContextAttention::Gather),
            ContextAttentionArg::Ring => Some(ContextAttention::Ring),
        }
    }
}

/// `--schedule`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScheduleArg {
    /// Searched
    Auto,
    /// One forward and one backward pass in turn
    #[value(name = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B with weight gradients in passes of their own, which fill waiting time
    ZeroBubble,
    /// 1F1B through several chunks of the model on each stage
    Interleaved,
}

impl ScheduleArg {
    /// The order of passes; `None` for a search.
    pub fn schedule(self) -> Option<PipelineSchedule> {
        match self {
            ScheduleArg::Auto => None,
            ScheduleArg::OneForwardOneBackward => Some(PipelineSchedule::OneForwardOneBackward),
            ScheduleArg::ZeroBubble => Some(PipelineSchedule::ZeroBubble),
            ScheduleArg::Interleaved => Some(PipelineSchedule::Interleaved),
        }
    }
}

/// `--overlap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OverlapArg {
    /// All overlap that shortens the step, where the hardware supports it
    Auto,
    /// All overlap, where the hardware supports it
    On,
    /// Collectives and computation run one after the other
    Off,
}

impl OverlapArg {
    /// Whether gradients are reduced during the last backward pass; `None` for a search.
    pub fn grad_reduce(self) -> Option<bool> {
        match self {
            OverlapArg::Auto => None,
            OverlapArg::On => Some(true),
            OverlapArg::Off => Some(false),
        }
    }
}

/// Parser of the baselines of `--strategy`.
pub fn baselines() -> impl TypedValueParser<Value = Baseline> {
    let help = |baseline| match baseline {
        Baseline::Auto => "All plans",
        Baseline::FullrankTp => "Dense models: Megatron's column and row pairs",
        Baseline::MegatronSp => {
            "As fullrank-tp with sequence parallelism: the residual stream and norms are sharded on tokens"
        }
        Baseline::VanillaTp => {
            "Factor pairs: column then row, with heads and d_ff sharded in between"
        }
        Baseline::VanillaTpPublished => {
            "As vanilla-tp, with attention and the gated MLP product replicated, as published"
        }
        Baseline::Btp => {
            "Bottleneck tensor parallelism: latents are reduced, the residual stream stays sharded"
        }
    };
    let values = Baseline::ALL.map(|it| PossibleValue::new(it.name()).help(help(it)));
    PossibleValuesParser::new(values)
        .try_map(|name| Baseline::from_name(&name).ok_or("no baseline has this name"))
}

/// `--recompute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecomputeArg {
    /// Searched for every activation
    Auto,
    /// Nothing
    None,
    /// Everything but the latents and the block's input
    Latents,
    /// Everything but the block's input
    Block,
}

impl From<RecomputeArg> for Recompute {
    fn from(recompute: RecomputeArg) -> Recompute {
        match recompute {
            RecomputeArg::Auto => Recompute::Auto,
            RecomputeArg::None => Recompute::None,
            RecomputeArg::Latents => Recompute::Latents,
            RecomputeArg::Block => Recompute::Block,
        }
    }
}

/// `--recompute` of `convert`: the recomputation for which GPT steps can be predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GptRecomputeArg {
    /// Nothing
    None,
    /// Whole blocks
    Block,
}

impl GptRecomputeArg {
    /// The value as it is typed.
    pub fn name(self) -> &'static str {
        match self {
            GptRecomputeArg::None => "none",
            GptRecomputeArg::Block => "block",
        }
    }
}

impl From<GptRecomputeArg> for Recompute {
    fn from(recompute: GptRecomputeArg) -> Recompute {
        match recompute {
            GptRecomputeArg::None => Recompute::None,
            GptRecomputeArg::Block => Recompute::Block,
        }
    }
}

/// `--norm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NormArg {
    /// Searched
    Auto,
    /// A separate all-reduce
    Sync,
    /// Along with the all-reduce of the latents
    Online,
}

impl From<NormArg> for NormRule {
    fn from(norm: NormArg) -> NormRule {
        match norm {
            NormArg::Auto => NormRule::Auto,
            NormArg::Sync => NormRule::Sync,
            NormArg::Online => NormRule::Online,
        }
    }
}

/// `--grouping`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GroupingArg {
    /// Searched
    Auto,
    /// Wherever possible
    On,
    /// Never
    Off,
}

impl From<GroupingArg> for GroupingRule {
    fn from(grouping: GroupingArg) -> GroupingRule {
        match grouping {
            GroupingArg::Auto => GroupingRule::Auto,
            GroupingArg::On => GroupingRule::On,
            GroupingArg::Off => GroupingRule::Off,
        }
    }
}

/// `--weights`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightsArg {
    /// Replicated or sharded
    Any,
    /// Every weight matrix sharded
    Sharded,
}

impl From<WeightsArg> for WeightRule {
    fn from(weights: WeightsArg) -> WeightRule {
        match weights {
            WeightsArg::Any => WeightRule::Any,
            WeightsArg::Sharded => WeightRule::Sharded,
        }
    }
}

/// `--executor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExecutorArg {
    /// As captured graphs, with fused ops
    Captured,
    /// One launch per kernel, with fused ops
    Compiled,
    /// One launch per operator
    Eager,
}

impl From<ExecutorArg> for Executor {
    fn from(executor: ExecutorArg) -> Executor {
        match executor {
            ExecutorArg::Captured => Executor::Captured,
            ExecutorArg::Compiled => Executor::Compiled,
            ExecutorArg::Eager => Executor::Eager,
        }
    }
}

/// `--within-node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WithinNodeArg {
    /// The tensor axis
    Tensor,
}

/// `--objective`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ObjectiveArg {
    /// Seconds of one optimizer step
    StepTime,
    /// Memory of the fullest device; among plans of equal memory, step time
    Memory,
    /// Cost of one optimizer step, on at most --devices devices
    Cost,
}

impl From<ObjectiveArg> for Objective {
    fn from(objective: ObjectiveArg) -> Objective {
        match objective {
            ObjectiveArg::StepTime => Objective::StepTime,
            ObjectiveArg::Memory => Objective::Memory,
            ObjectiveArg::Cost => Objective::Cost,
        }
    }
}

/// `--lr-schedule`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LrScheduleArg {
    /// The peak
    Constant,
    /// A straight line to the minimum
    Linear,
    /// Half a cosine to the minimum
    Cosine,
    /// Half a cosine with a warm-up from 0 after every restart, as the code of CoLA, GaLore and ReLoRA computes it
    CosineRestarts,
    /// The same in the form of LORO's code: see --lr-adjust-steps
    LoroCosineRestarts,
    /// Warm-up, stable, decay: the peak, and a straight line to the minimum over the last steps
    Wsd,
}

/// `--optimizer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerArg {
    /// AdamW of all weights
    #[value(name = "adamw")]
    #[serde(rename = "adamw")]
    AdamW,
    /// LORO: AdamW, with Riemannian steps of factor pairs from time to time
    Loro,
}

/// `--loro-learning-rate-scale`: `auto` or a number above 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected `auto` or a number above 0")]
pub enum FactorRateScaleArg {
    /// The rank over the width of the hidden state.
    Auto(AutoArg),
    /// A constant.
    Constant(Positive),
}

/// `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AutoArg {
    /// Follows from the model.
    Auto,
}

impl FromStr for FactorRateScaleArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<FactorRateScaleArg, Self::Err> {
        match text {
            "auto" => Ok(FactorRateScaleArg::Auto(AutoArg::Auto)),
            _ => text
                .parse()
                .map(FactorRateScaleArg::Constant)
                .map_err(|_| "expected `auto` or a number above 0"),
        }
    }
}

impl From<FactorRateScaleArg> for FactorRateScale {
    fn from(scale: FactorRateScaleArg) -> FactorRateScale {
        match scale {
            FactorRateScaleArg::Auto(AutoArg::Auto) => FactorRateScale::RankOverHidden,
            FactorRateScaleArg::Constant(scale) => FactorRateScale::Constant(scale.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_stages_have_aliases() {
        for (typed, expected) in [
            ("auto", ZeroArg::Auto),
            ("off", ZeroArg::Off),
            ("0", ZeroArg::Off),
            ("1", ZeroArg::One),
            ("one", ZeroArg::One),
            ("2", ZeroArg::Two),
            ("three", ZeroArg::Three),
        ] {
            assert_eq!(ZeroArg::from_str(typed, false), Ok(expected), "{typed}");
        }
    }
}
