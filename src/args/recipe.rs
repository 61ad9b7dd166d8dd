//! The recipe of a training run: what decides its loss curve, apart from the plan.
//!
//! A value is that of the flag, or else of the recipe file, or else of the checkpoint that is resumed, or else the
//! default.

use std::ffi::OsString;
use std::num::NonZeroU64;

use clap::{Args, ValueEnum};
use narrows_runtime::checkpoint::CheckpointOutline;
use narrows_runtime::data::{LastTarget, TargetRule};
use narrows_runtime::{DecayedWeights, FactorRateScale, GemmDtype, Loro, Optimizer, StepCount};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::errors::{CommandResult, Failure, Problem};

use super::request::RequestArgs;
use super::units::{BelowOne, NonNegative, Positive};
use super::values::{DtypeArg, FactorRateScaleArg, LrScheduleArg, OptimizerArg};

/// Default number of steps of a run.
const STEPS: u64 = 200;

/// Default seed.
const SEED: u64 = 1;

/// Default peak learning rate.
const PEAK_LEARNING_RATE: f64 = 3e-3;

/// Default number of steps between exact steps of LORO: that of its scripts.
const LORO_EVERY: NonZeroU64 = NonZeroU64::new(500).unwrap();

/// Longest default warm-up.
const WARM_UP_STEPS_MAX: u64 = 100;

/// Steps of the learning-rate schedule per step of the default warm-up, of the default cooldown and of the default
/// warm-up after a restart.
pub(super) const STEPS_PER_RAMP: u64 = 10;

/// Flags of a recipe, and the fields of a recipe file.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RecipeArgs {
    /// Model to train: a preset such as cola-60m, a model file or a Hugging Face config.json
    #[arg(skip)]
    pub model: Option<String>,
    /// Token file to train on, as `narrows data` makes it
    #[arg(skip)]
    pub data: Option<String>,
    /// Token file to evaluate
    #[arg(skip)]
    pub eval_data: Option<String>,
    /// Sequences in one optimizer step, over all devices
    #[arg(skip)]
    pub global_batch: Option<NonZeroU64>,
    /// Tokens in a sequence
    #[arg(skip)]
    pub sequence_length: Option<NonZeroU64>,
    /// Optimizer steps, including those before a checkpoint that is resumed [default: 200, or with
    /// --resume the --decay-steps of the checkpoint]
    #[arg(long, value_name = "N")]
    pub steps: Option<NonZeroU64>,
    /// Seed of the initial weights and of the order of sequences [default: 1]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Optimizer [default: adamw]
    #[arg(long, value_name = "OPTIMIZER", value_enum)]
    pub optimizer: Option<OptimizerArg>,
    /// With --optimizer loro: steps between exact steps on the factor pairs [default: 500]
    #[arg(long, value_name = "N")]
    pub loro_every: Option<NonZeroU64>,
    /// With --optimizer loro: steps after which all moments become zero, or 0 for never [default: --loro-every]
    #[arg(long, value_name = "N")]
    pub loro_refresh_every: Option<u64>,
    /// With --optimizer loro: learning rate of factors between exact steps, as a fraction of --learning-rate, or auto: the rank over the
    /// hidden size [default: auto]
    #[arg(long, value_name = "SCALE")]
    pub loro_learning_rate_scale: Option<FactorRateScaleArg>,
    /// Peak learning rate [default: 0.003]
    #[arg(long, value_name = "RATE")]
    pub learning_rate: Option<Positive>,
    /// Course of the learning rate after the warm-up [default: cosine]
    #[arg(long, value_name = "SCHEDULE", value_enum)]
    pub lr_schedule: Option<LrScheduleArg>,
    /// Learning rate at the end of the schedule [default: a tenth of --learning-rate]
    #[arg(long, value_name = "RATE")]
    pub min_learning_rate: Option<NonNegative>,
    /// Steps until the learning rate peaks [default: a tenth of --decay-steps, at most 100]
    #[arg(long, value_name = "N")]
    pub warm_up_steps: Option<u64>,
    /// Steps until the learning rate has decayed to its minimum [default: --steps]
    #[arg(long, value_name = "N")]
    pub decay_steps: Option<NonZeroU64>,
    /// With --lr-schedule wsd: steps of the decay at its end [default: a tenth of --decay-steps]
    #[arg(long, value_name = "N")]
    pub cooldown_steps: Option<NonZeroU64>,
    /// With --lr-schedule cosine-restarts or loro-cosine-restarts: steps between restarts [default: --loro-refresh-every
    /// where moments become zero, or else a tenth of --decay-steps, at least 2]
    #[arg(long, value_name = "N")]
    pub restart_every: Option<NonZeroU64>,
    /// With --lr-schedule cosine-restarts or loro-cosine-restarts: steps of the warm-up after a restart [default: a tenth of
    /// --restart-every, at least 1 where it is more than 1]
    #[arg(long, value_name = "N")]
    pub restart_warm_up_steps: Option<u64>,
    /// With --lr-schedule loro-cosine-restarts: steps by which the schedule is ahead after the warm-up, or behind if negative
    /// [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub lr_adjust_steps: Option<i64>,
    /// Number of the first step in the schedule: from-zero as PyTorch's LambdaLR, whose first step has learning rate 0
    /// [default: from-one]
    #[arg(long, value_name = "COUNT", value_enum)]
    pub lr_step_count: Option<StepCountArg>,
    /// Decay β₁ of AdamW's first moment [default: 0.9]
    #[arg(long, value_name = "BETA")]
    pub beta1: Option<BelowOne>,
    /// Decay β₂ of AdamW's second moment [default: 0.95]
    #[arg(long, value_name = "BETA")]
    pub beta2: Option<BelowOne>,
    /// ε, added to the root of AdamW's second moment [default: 1e-8]
    #[arg(long, value_name = "EPSILON")]
    pub epsilon: Option<Positive>,
    /// Decoupled weight decay [default: 0.1]
    #[arg(long, value_name = "LAMBDA")]
    pub weight_decay: Option<NonNegative>,
    /// Decay scales and biases of norms too, not matrices alone [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub decay_norms: Option<bool>,
    /// Global norm to which gradients are clipped [default: 1]
    #[arg(long, value_name = "NORM")]
    pub clip_norm: Option<Positive>,
    /// Target of a sequence's last token: `next`, the token that follows in the file, or `ignored`, which leaves L − 1 targets
    /// to L tokens (labels shifted within the sequence, as in Hugging Face) [default: next]
    #[arg(long, value_name = "TARGET", value_enum)]
    pub last_target: Option<LastTargetArg>,
    /// Padding token, which is never a target: the --pad-id of `narrows data` [default: none]
    #[arg(long, value_name = "ID")]
    pub pad_id: Option<u32>,
    /// CPU: number format in which GEMMs multiply; bf16 needs a processor with AVX512_BF16 [default: f32]
    #[arg(long, value_name = "DTYPE", value_enum)]
    pub dtype: Option<DtypeArg>,
    /// Steps between evaluations of --eval-data, which also follow the last step [default: a tenth of --steps]
    #[arg(long, value_name = "N")]
    pub eval_every: Option<NonZeroU64>,
    /// Tokens of --eval-data that are evaluated, in whole sequences from its beginning [default: all]
    #[arg(long, value_name = "M")]
    pub eval_tokens: Option<NonZeroU64>,
}

/// `--lr-step-count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StepCountArg {
    /// The first step is step 0
    FromZero,
    /// The first step is step 1
    FromOne,
}

impl From<StepCountArg> for StepCount {
    fn from(count: StepCountArg) -> StepCount {
        match count {
            StepCountArg::FromZero => StepCount::FromZero,
            StepCountArg::FromOne => StepCount::FromOne,
        }
    }
}

/// The value of `--lr-step-count`.
fn step_count_name(count: StepCount) -> &'static str {
    match count {
        StepCount::FromZero => "from-zero",
        StepCount::FromOne => "from-one",
    }
}

/// `--last-target`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LastTargetArg {
    /// The token that follows
    Next,
    /// None
    Ignored,
}

impl From<LastTargetArg> for LastTarget {
    fn from(target: LastTargetArg) -> LastTarget {
        match target {
            LastTargetArg::Next => LastTarget::Next,
            LastTargetArg::Ignored => LastTarget::Ignored,
        }
    }
}

/// A recipe with all of its values.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Steps of the whole run.
    pub steps: u64,
    /// Seed of the initial weights and of the order of sequences.
    pub seed: u64,
    /// The optimizer and its schedule.
    pub optimizer: Optimizer,
    /// The inputs whose next token is predicted.
    pub targets: TargetRule,
    /// Format to which the CPU backend rounds the operands of GEMMs.
    pub gemm_dtype: GemmDtype,
}

impl RecipeArgs {
    /// These values, and those of `below` for values that are not set. Where another optimizer or schedule is set, those of its own
    /// that `below` has are left out.
    pub fn or(self, mut below: RecipeArgs) -> RecipeArgs {
        if self.optimizer == Some(OptimizerArg::AdamW) {
            below.loro_every = None;
            below.loro_refresh_every = None;
            below.loro_learning_rate_scale = None;
        }
        if self.lr_schedule.is_some_and(|schedule| Some(schedule) != below.lr_schedule) {
            below.cooldown_steps = None;
            below.restart_every = None;
            below.restart_warm_up_steps = None;
            below.lr_adjust_steps = None;
        }
        RecipeArgs {
            model: self.model.or(below.model),
            global_batch: self.global_batch.or(below.global_batch),
            sequence_length: self.sequence_length.or(below.sequence_length),
            steps: self.steps.or(below.steps),
            seed: self.seed.or(below.seed),
            optimizer: self.optimizer.or(below.optimizer),
            loro_every: self.loro_every.or(below.loro_every),
            loro_refresh_every: self.loro_refresh_every.or(below.loro_refresh_every),
            loro_learning_rate_scale: self
                .loro_learning_rate_scale
                .or(below.loro_learning_rate_scale),
            learning_rate: self.learning_rate.or(below.learning_rate),
            lr_schedule: self.lr_schedule.or(below.lr_schedule),
            min_learning_rate: self.min_learning_rate.or(below.min_learning_rate),
            warm_up_steps: self.warm_up_steps.or(below.warm_up_steps),
            decay_steps: self.decay_steps.or(below.decay_steps),
            cooldown_steps: self.cooldown_steps.or(below.cooldown_steps),
            restart_every: self.restart_every.or(below.restart_every),
            restart_warm_up_steps: self.restart_warm_up_steps.or(below.restart_warm_up_steps),
            lr_adjust_steps: self.lr_adjust_steps.or(below.lr_adjust_steps),
            lr_step_count: self.lr_step_count.or(below.lr_step_count),
            beta1: self.beta1.or(below.beta1),
            beta2: self.beta2.or(below.beta2),
            epsilon: self.epsilon.or(below.epsilon),
            weight_decay: self.weight_decay.or(below.weight_decay),
            decay_norms: self.decay_norms.or(below.decay_norms),
            clip_norm: self.clip_norm.or(below.clip_norm),
            last_target: self.last_target.or(below.last_target),
            pad_id: self.pad_id.or(below.pad_id),
            dtype: self.dtype.or(below.dtype),
            data: self.data.or(below.data),
            eval_data: self.eval_data.or(below.eval_data),
            eval_every: self.eval_every.or(below.eval_every),
            eval_tokens: self.eval_tokens.or(below.eval_tokens),
        }
    }

    /// Sets the flags of a planning request that are not set, from the values of this recipe.
    pub fn fill_request(&self, request: &mut RequestArgs) {
        let size = |number: Option<NonZeroU64>| number.map(NonZeroU64::get);
        request.model.model =
            request.model.model.take().or_else(|| self.model.clone().map(OsString::from));
        request.global_batch = request.global_batch.or(size(self.global_batch));
        request.sequence_length = request.sequence_length.or(size(self.sequence_length));
    }

    /// The recipe, with values of the checkpoint that is resumed, or else defaults, where none is set.
    ///
    /// # Errors
    /// Values that contradict each other.
    pub fn resolve(&self, resumed: Option<&CheckpointOutline>) -> CommandResult<Recipe> {
        let end_of_schedule = resumed.map(|checkpoint| checkpoint.optimizer.total_steps);
        let steps = self.steps.map(NonZeroU64::get).or(end_of_schedule).unwrap_or(STEPS);
        let targets = resumed.map(|checkpoint| checkpoint.targets).unwrap_or_default();
        Ok(Recipe {
            steps,
            seed: self.seed.or(resumed.map(|checkpoint| checkpoint.seed)).unwrap_or(SEED),
            optimizer: self.optimizer(steps, resumed.map(|checkpoint| &checkpoint.optimizer))?,
            targets: TargetRule {
                last: self.last_target.map_or(targets.last, LastTarget::from),
                pad_id: self.pad_id.or(targets.pad_id),
            },
            gemm_dtype: self
                .dtype
                .map(GemmDtype::from)
                .or(resumed.map(|checkpoint| checkpoint.gemm_dtype))
                .unwrap_or_default(),
        })
    }

    fn optimizer(&self, steps: u64, resumed: Option<&Optimizer>) -> CommandResult<Optimizer> {
        let total_steps = self
            .decay_steps
            .map(NonZeroU64::get)
            .or(resumed.map(|optimizer| optimizer.total_steps))
            .unwrap_or(steps);
        let warm_up_steps = (total_steps / STEPS_PER_RAMP).clamp(1, WARM_UP_STEPS_MAX);
        let base = match resumed {
            Some(resumed) => *resumed,
            None => Optimizer::new(PEAK_LEARNING_RATE, warm_up_steps, total_steps),
        };
        let peak = self.learning_rate.map_or(base.peak_learning_rate, |rate| rate.0);
        let warm_up_steps = self.warm_up_steps.unwrap_or(base.warm_up_steps);
        let loro = self.loro(base.loro)?;
        let schedule = self.schedule([warm_up_steps, total_steps], base.schedule, loro)?;
        let final_fraction = match self.min_learning_rate {
            Some(NonNegative(min)) if min > peak => {
                let message = format!("{min} is larger than the peak {peak}");
                let hint = "at most --learning-rate";
                return Err(Failure::input(
                    Problem::new("--min-learning-rate", message).hint(hint),
                ));
            }
            Some(NonNegative(min)) => min / peak,
            None => base.final_fraction,
        };
        let decayed = match self.decay_norms {
            None => base.decayed,
            Some(true) => DecayedWeights::All,
            Some(false) => DecayedWeights::Matrices,
        };
        let optimizer = Optimizer {
            peak_learning_rate: peak,
            schedule,
            warm_up_steps,
            total_steps,
            final_fraction,
            step_count: self.lr_step_count.map_or(base.step_count, StepCount::from),
            beta1: self.beta1.map_or(base.beta1, |beta| beta.0),
            beta2: self.beta2.map_or(base.beta2, |beta| beta.0),
            epsilon: self.epsilon.map_or(base.epsilon, |epsilon| epsilon.0),
            weight_decay: self.weight_decay.map_or(base.weight_decay, |decay| decay.0),
            decayed,
            clip_norm: self.clip_norm.map_or(base.clip_norm, |norm| norm.0),
            loro,
        };
        // A run continues the schedule of its checkpoint, unless a flag changes its lengths.
        match resumed.is_some() && !self.sets_schedule_lengths() {
            true => Ok(optimizer),
            false => self.require_possible_lengths(&optimizer).map(|()| optimizer),
        }
    }
}

impl RecipeArgs {
    /// The settings of LORO, `None` for AdamW; `base` are those of the checkpoint that is resumed.
    fn loro(&self, base: Option<Loro>) -> CommandResult<Option<Loro>> {
        let resumed = if base.is_some() { OptimizerArg::Loro } else { OptimizerArg::AdamW };
        if self.optimizer.unwrap_or(resumed) == OptimizerArg::Loro {
            let exact_every = self.loro_every.or(base.map(|loro| loro.exact_every));
            let exact_every = exact_every.unwrap_or(LORO_EVERY);
            let refresh_every = self.loro_refresh_every.or(base.map(|loro| loro.refresh_every));
            let rate_scale = self.loro_learning_rate_scale.map(FactorRateScale::from);
            return Ok(Some(Loro {
                exact_every,
                refresh_every: refresh_every.unwrap_or(exact_every.get()),
                rate_scale: rate_scale
                    .or(base.map(|loro| loro.rate_scale))
                    .unwrap_or(FactorRateScale::RankOverHidden),
            }));
        }
        for (flag, is_set) in [
            ("--loro-every", self.loro_every.is_some()),
            ("--loro-refresh-every", self.loro_refresh_every.is_some()),
            ("--loro-learning-rate-scale", self.loro_learning_rate_scale.is_some()),
        ] {
            if is_set {
                let problem = Problem::new(flag, "has no effect with --optimizer adamw");
                return Err(Failure::input(problem.hint("--optimizer loro")));
            }
        }
        Ok(None)
    }
}

/// The values of an optimizer and its schedule, each as the flag that sets it and in text that is equal for equal values alone.
/// Those of LORO are there where it is the optimizer.
pub fn flags_of_optimizer(optimizer: &Optimizer) -> Vec<(&'static str, String)> {
    let Optimizer { schedule, step_count, decayed, loro, .. } = optimizer;
    let of_loro = loro.map(|Loro { exact_every, refresh_every, rate_scale }| {
        [
            ("--loro-every", exact_every.to_string()),
            ("--loro-refresh-every", refresh_every.to_string()),
            ("--loro-learning-rate-scale", rate_scale.to_string()),
        ]
    });
    let of_all = [
        ("--learning-rate", optimizer.peak_learning_rate.to_string()),
        ("--lr-schedule", schedule.to_string()),
        ("--warm-up-steps", optimizer.warm_up_steps.to_string()),
        ("--decay-steps", optimizer.total_steps.to_string()),
        ("--min-learning-rate", format!("{} of the peak", optimizer.final_fraction)),
        ("--lr-step-count", step_count_name(*step_count).to_owned()),
        ("--beta1", optimizer.beta1.to_string()),
        ("--beta2", optimizer.beta2.to_string()),
        ("--epsilon", optimizer.epsilon.to_string()),
        ("--weight-decay", optimizer.weight_decay.to_string()),
        ("--decay-norms", (*decayed == DecayedWeights::All).to_string()),
        ("--clip-norm", optimizer.clip_norm.to_string()),
        ("--optimizer", loro.map_or("adamw", |_| "loro").into()),
    ];
    of_all.into_iter().chain(of_loro.into_iter().flatten()).collect()
}
