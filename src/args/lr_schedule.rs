//! The learning-rate schedule of a recipe: its shape and its lengths.

use std::num::NonZeroU64;

use narrows_runtime::{LearningRateSchedule, Loro, Optimizer};

use crate::errors::{CommandResult, Failure, Problem};
use crate::text::plural;

use super::recipe::{RecipeArgs, STEPS_PER_RAMP};
use super::values::LrScheduleArg;

impl RecipeArgs {
    /// The schedule. Its own lengths are those of the schedule of the checkpoint where that has the same shape. Restarts follow the
    /// refreshes of LORO, after which small learning rates let new moments settle.
    pub(super) fn schedule(
        &self,
        [warm_up_steps, total_steps]: [u64; 2],
        base: LearningRateSchedule,
        loro: Option<Loro>,
    ) -> CommandResult<LearningRateSchedule> {
        let schedule = self.lr_schedule.unwrap_or(LrScheduleArg::of(base));
        self.reject_lengths_of_other_schedules(schedule)?;
        let tenth = |steps: u64| (steps / STEPS_PER_RAMP).max(1);
        Ok(match schedule {
            LrScheduleArg::Constant => LearningRateSchedule::Constant,
            LrScheduleArg::Linear => LearningRateSchedule::Linear,
            LrScheduleArg::Cosine => LearningRateSchedule::Cosine,
            LrScheduleArg::CosineRestarts | LrScheduleArg::LoroCosineRestarts => {
                let (every, warm_up_steps, adjusted) = match base {
                    LearningRateSchedule::CosineRestarts {
                        restart_every,
                        restart_warm_up_steps,
                    } => (Some(restart_every), Some(restart_warm_up_steps), None),
                    LearningRateSchedule::LoroCosineRestarts {
                        restart_every,
                        restart_warm_up_steps,
                        adjust_steps,
                    } => (Some(restart_every), Some(restart_warm_up_steps), Some(adjust_steps)),
                    _ => (None, None, None),
                };
                let restart_every = self.restart_every.map(NonZeroU64::get).or(every);
                let refresh_every = loro.map(|loro| loro.refresh_every).filter(|every| *every > 0);
                let restart_every =
                    restart_every.or(refresh_every).unwrap_or(tenth(total_steps).max(2));
                let restart_warm_up_steps = self.restart_warm_up_steps.or(warm_up_steps);
                // A whole restart of warm-up may have no learning rate but 0.
                let restart_warm_up_steps = restart_warm_up_steps
                    .unwrap_or(tenth(restart_every).min(restart_every.saturating_sub(1)));
                match schedule {
                    LrScheduleArg::LoroCosineRestarts => LearningRateSchedule::LoroCosineRestarts {
                        restart_every,
                        restart_warm_up_steps,
                        adjust_steps: self.lr_adjust_steps.or(adjusted).unwrap_or(0),
                    },
                    _ => LearningRateSchedule::CosineRestarts {
                        restart_every,
                        restart_warm_up_steps,
                    },
                }
            }
            LrScheduleArg::Wsd => {
                let resumed = match base {
                    LearningRateSchedule::WarmUpStableDecay { cooldown_steps } => {
                        Some(cooldown_steps)
                    }
                    _ => None,
                };
                let cooldown_steps = self.cooldown_steps.map(NonZeroU64::get).or(resumed);
                let after_warm_up = total_steps.saturating_sub(warm_up_steps).max(1);
                LearningRateSchedule::WarmUpStableDecay {
                    cooldown_steps: cooldown_steps.unwrap_or(tenth(total_steps).min(after_warm_up)),
                }
            }
        })
    }

    fn reject_lengths_of_other_schedules(&self, schedule: LrScheduleArg) -> CommandResult<()> {
        let (wsd, loro) = (LrScheduleArg::Wsd, LrScheduleArg::LoroCosineRestarts);
        let has_restarts = schedule == LrScheduleArg::CosineRestarts || schedule == loro;
        for (flag, is_set, applies, hint) in [
            ("--cooldown-steps", self.cooldown_steps.is_some(), schedule == wsd, "wsd"),
            ("--restart-every", self.restart_every.is_some(), has_restarts, "cosine-restarts"),
            (
                "--restart-warm-up-steps",
                self.restart_warm_up_steps.is_some(),
                has_restarts,
                "cosine-restarts",
            ),
            (
                "--lr-adjust-steps",
                self.lr_adjust_steps.is_some(),
                schedule == loro,
                "loro-cosine-restarts",
            ),
            (
                "--min-learning-rate",
                self.min_learning_rate.is_some(),
                schedule != LrScheduleArg::Constant,
                "cosine",
            ),
        ] {
            if is_set && !applies {
                let message = format!("has no effect with --lr-schedule {}", schedule.name());
                let problem = Problem::new(flag, message);
                return Err(Failure::input(problem.hint(format!("--lr-schedule {hint}"))));
            }
        }
        Ok(())
    }

    /// Whether a value sets the shape or a length of the schedule.
    pub(super) fn sets_schedule_lengths(&self) -> bool {
        self.lr_schedule.is_some()
            || self.warm_up_steps.is_some()
            || self.decay_steps.is_some()
            || self.cooldown_steps.is_some()
            || self.restart_every.is_some()
            || self.restart_warm_up_steps.is_some()
            || self.lr_adjust_steps.is_some()
    }

    /// Rejects lengths that do not fit into each other, of which the schedule would silently cut one.
    pub(super) fn require_possible_lengths(&self, optimizer: &Optimizer) -> CommandResult<()> {
        let Optimizer { schedule, warm_up_steps, total_steps, .. } = *optimizer;
        let after_warm_up = total_steps.saturating_sub(warm_up_steps).max(1);
        // The default warm-up of a schedule of one step is that step.
        let fits = warm_up_steps < total_steps.max(2);
        let (flag, message, hint) = match schedule {
            LearningRateSchedule::Constant => return Ok(()),
            _ if !fits => (
                "--warm-up-steps",
                format!(
                    "{} leave nothing of the {} of --decay-steps, by default --steps",
                    plural(warm_up_steps, "step"),
                    plural(total_steps, "step"),
                ),
                "fewer --warm-up-steps, or --decay-steps with the length of the whole schedule",
            ),
            LearningRateSchedule::WarmUpStableDecay { cooldown_steps }
                if cooldown_steps > after_warm_up =>
            {
                (
                    "--cooldown-steps",
                    format!(
                        "{} are more than the {} that --warm-up-steps leaves of --decay-steps",
                        plural(cooldown_steps, "step"),
                        plural(after_warm_up, "step"),
                    ),
                    "fewer --cooldown-steps or --warm-up-steps, or more --decay-steps",
                )
            }
            LearningRateSchedule::LoroCosineRestarts { adjust_steps, .. }
                if i128::from(adjust_steps) + i128::from(warm_up_steps)
                    >= i128::from(total_steps) =>
            {
                (
                    "--lr-adjust-steps",
                    format!(
                        "{adjust_steps} and --warm-up-steps {warm_up_steps} leave nothing of the {} of --decay-steps",
                        plural(total_steps, "step"),
                    ),
                    "fewer --lr-adjust-steps",
                )
            }
            LearningRateSchedule::CosineRestarts { restart_every, restart_warm_up_steps }
            | LearningRateSchedule::LoroCosineRestarts {
                restart_every,
                restart_warm_up_steps,
                ..
            } if restart_warm_up_steps > restart_every => (
                "--restart-warm-up-steps",
                format!(
                    "{} are more than the {} of --restart-every",
                    plural(restart_warm_up_steps, "step"),
                    plural(restart_every, "step"),
                ),
                "at most --restart-every",
            ),
            LearningRateSchedule::CosineRestarts { restart_every: 1, restart_warm_up_steps: 1 }
            | LearningRateSchedule::LoroCosineRestarts {
                restart_every: 1,
                restart_warm_up_steps: 1,
                ..
            } => (
                "--restart-warm-up-steps",
                "1 step begins every restart with almost no learning rate, and --restart-every 1 has no other step"
                    .into(),
                "more steps of --restart-every, or --restart-warm-up-steps 0",
            ),
            _ => return Ok(()),
        };
        Err(Failure::input(Problem::new(flag, message).hint(hint)))
    }
}

impl LrScheduleArg {
    fn of(schedule: LearningRateSchedule) -> LrScheduleArg {
        match schedule {
            LearningRateSchedule::Constant => LrScheduleArg::Constant,
            LearningRateSchedule::Linear => LrScheduleArg::Linear,
            LearningRateSchedule::Cosine => LrScheduleArg::Cosine,
            LearningRateSchedule::CosineRestarts { .. } => LrScheduleArg::CosineRestarts,
            LearningRateSchedule::LoroCosineRestarts { .. } => LrScheduleArg::LoroCosineRestarts,
            LearningRateSchedule::WarmUpStableDecay { .. } => LrScheduleArg::Wsd,
        }
    }

    fn name(self) -> &'static str {
        match self {
            LrScheduleArg::Constant => "constant",
            LrScheduleArg::Linear => "linear",
            LrScheduleArg::Cosine => "cosine",
            LrScheduleArg::CosineRestarts => "cosine-restarts",
            LrScheduleArg::LoroCosineRestarts => "loro-cosine-restarts",
            LrScheduleArg::Wsd => "wsd",
        }
    }
}
