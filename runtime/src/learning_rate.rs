//! Learning-rate schedules.
//!
//! A schedule maps a position p to a fraction of the peak learning rate. With W warm-up steps, T steps in
//! total, and the final fraction f:
//!
//! ```text
//! warm-up, p < W:            p / W
//! linear in x from 1 to f:   f + (1 − f)·(1 − x)
//! cosine in x from 1 to f:   f + (1 − f)·(1 + cos πx)/2
//! ```
//!
//! where x = (p − W)/(T − W), and the fraction is f from p = T on; the warm-up of LORO's restarts begins at f. The position of a step is its number,
//! counted from 1 or, as PyTorch's `LambdaLR` counts, from 0 ([`StepCount`]).

use std::f64::consts::PI;
use std::fmt;

use narrows_plan::counts::{every, plural};
use serde::{Deserialize, Serialize};

/// Course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum LearningRateSchedule {
    /// The peak.
    Constant,
    /// Linear to the final fraction at the last step.
    Linear,
    /// Half a cosine to the final fraction at the last step.
    #[default]
    Cosine,
    /// Half a cosine over all steps, interrupted by a linear warm-up from 0 at every restart, which
    /// rises to the cosine's value at the restart: the jagged cosine of ReLoRA (Lialin et al. 2023), as the
    /// code of CoLA and GaLore computes it.
    CosineRestarts {
        /// Steps between restarts.
        restart_every: u64,
        /// Steps of the warm-up after a restart.
        restart_warm_up_steps: u64,
    },
    /// The jagged cosine in the form of LORO's code. The warm-up rises from the final fraction to the cosine at −a, also after
    /// restarts; afterwards the cosine and its restarts are those of position p + a, where a are the adjusted steps, and
    /// each restart begins at 1e-6.
    LoroCosineRestarts {
        /// Steps between restarts.
        restart_every: u64,
        /// Steps of the warm-up after a restart.
        restart_warm_up_steps: u64,
        /// a: steps by which the schedule after the warm-up is ahead.
        adjust_steps: i64,
    },
    /// The peak, then linear to the final fraction over the last steps: warm-up, stable, decay
    /// (Hu et al. 2024, Hägele et al. 2024).
    WarmUpStableDecay {
        /// Steps of the decay.
        cooldown_steps: u64,
    },
}

/// Position of the first step in a learning-rate schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepCount {
    /// 0, as PyTorch's `LambdaLR` counts: the first step of a warm-up has learning rate 0.
    FromZero,
    /// 1: the last step of the warm-up has the peak.
    #[default]
    FromOne,
}

impl StepCount {
    /// Position of a step, counted from 1.
    pub fn position(self, step: u64) -> u64 {
        match self {
            StepCount::FromZero => step.saturating_sub(1),
            StepCount::FromOne => step,
        }
    }
}

/// Fraction of the peak at a restart of [`LearningRateSchedule::LoroCosineRestarts`].
const LORO_RESTART: f64 = 1e-6;

/// Steps between restarts, at least one, and steps of the warm-up after each.
#[derive(Clone, Copy)]
struct Restarts {
    every: u64,
    warm_up: u64,
}

/// Lengths of a schedule and its final value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScheduleSpan {
    /// W.
    pub warm_up_steps: u64,
    /// T.
    pub total_steps: u64,
    /// f.
    pub final_fraction: f64,
}

impl ScheduleSpan {
    fn linear(&self, progress: f64) -> f64 {
        self.final_fraction + (1.0 - self.final_fraction) * (1.0 - progress)
    }

    fn cosine(&self, progress: f64) -> f64 {
        let cosine = 0.5 * (1.0 + (PI * progress).cos());
        self.final_fraction + (1.0 - self.final_fraction) * cosine
    }

    /// The fraction of [`LearningRateSchedule::LoroCosineRestarts`].
    fn loro_fraction(&self, position: u64, restarts: Restarts, adjust_steps: i64) -> f64 {
        let ScheduleSpan { warm_up_steps, total_steps, final_fraction } = *self;
        // Of a restart some steps ago, which rises to `target`.
        let ramp = |since_restart: u64, target: f64| {
            since_restart as f64 / restarts.warm_up as f64 * (target - LORO_RESTART) + LORO_RESTART
        };
        let decay_steps = self.decay_steps() as f64;
        if position < warm_up_steps {
            let end = 0.5 * (1.0 + (PI * -(adjust_steps as f64) / decay_steps).cos());
            let rising = |position: u64| {
                position as f64 / warm_up_steps as f64 * (end - final_fraction) + final_fraction
            };
            let since_restart = position % restarts.every;
            return match position - since_restart {
                restart if restart > 0 && since_restart < restarts.warm_up => {
                    ramp(since_restart, rising(restart))
                }
                _ => rising(position),
            };
        }
        if position >= total_steps {
            return final_fraction;
        }
        let adjusted = i128::from(position) + i128::from(adjust_steps);
        let progress = |position: i128| (position - i128::from(warm_up_steps)) as f64 / decay_steps;
        let since_restart = adjusted.rem_euclid(i128::from(restarts.every)) as u64;
        match adjusted - i128::from(since_restart) {
            restart if restart > 0 && since_restart < restarts.warm_up => {
                ramp(since_restart, self.cosine(progress(restart)))
            }
            _ => self.cosine(progress(adjusted)),
        }
    }

    /// Steps after the warm-up, at least one.
    fn decay_steps(&self) -> u64 {
        self.total_steps.saturating_sub(self.warm_up_steps).max(1)
    }
}

impl LearningRateSchedule {
    /// Fraction of the peak learning rate at a position.
    pub(crate) fn fraction(self, position: u64, span: &ScheduleSpan) -> f64 {
        let ScheduleSpan { warm_up_steps, total_steps, final_fraction } = *span;
        if let LearningRateSchedule::LoroCosineRestarts {
            restart_every,
            restart_warm_up_steps,
            adjust_steps,
        } = self
        {
            let restarts = Restarts { every: restart_every.max(1), warm_up: restart_warm_up_steps };
            return span.loro_fraction(position, restarts, adjust_steps);
        }
        if position < warm_up_steps {
            return position as f64 / warm_up_steps as f64;
        }
        if self == LearningRateSchedule::Constant {
            return 1.0;
        }
        if position >= total_steps {
            return final_fraction;
        }
        let progress = (position - warm_up_steps) as f64 / span.decay_steps() as f64;
        match self {
            LearningRateSchedule::Constant | LearningRateSchedule::LoroCosineRestarts { .. } => 1.0,
            LearningRateSchedule::Linear => span.linear(progress),
            LearningRateSchedule::Cosine => span.cosine(progress),
            LearningRateSchedule::CosineRestarts { restart_every, restart_warm_up_steps } => {
                let since_restart = position % restart_every.max(1);
                if since_restart >= restart_warm_up_steps {
                    return span.cosine(progress);
                }
                // The original measures the cosine at a restart from step 0, without the warm-up.
                let restart = (position - since_restart) as f64 / span.decay_steps() as f64;
                since_restart as f64 / restart_warm_up_steps as f64 * span.cosine(restart)
            }
            LearningRateSchedule::WarmUpStableDecay { cooldown_steps } => {
                let cooldown_steps = cooldown_steps.clamp(1, span.decay_steps());
                let start = total_steps - cooldown_steps;
                let progress = position.saturating_sub(start) as f64 / cooldown_steps as f64;
                span.linear(progress)
            }
        }
    }
}

impl fmt::Display for LearningRateSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LearningRateSchedule::Constant => f.write_str("constant"),
            LearningRateSchedule::Linear => f.write_str("linear"),
            LearningRateSchedule::Cosine => f.write_str("cosine"),
            LearningRateSchedule::CosineRestarts { restart_every, restart_warm_up_steps } => {
                write!(
                    f,
                    "cosine-restarts {} with {}",
                    every(*restart_every, "step"),
                    plural(*restart_warm_up_steps, "warm-up step"),
                )
            }
            LearningRateSchedule::LoroCosineRestarts {
                restart_every,
                restart_warm_up_steps,
                adjust_steps,
            } => {
                write!(
                    f,
                    "loro-cosine-restarts {} with {}, adjusted by {adjust_steps} steps",
                    every(*restart_every, "step"),
                    plural(*restart_warm_up_steps, "warm-up step"),
                )
            }
            LearningRateSchedule::WarmUpStableDecay { cooldown_steps } => {
                write!(f, "wsd with {}", plural(*cooldown_steps, "cooldown step"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: ScheduleSpan =
        ScheduleSpan { warm_up_steps: 20, total_steps: 100, final_fraction: 0.1 };

    /// Values of `_get_cyclical_cosine_schedule_with_min_lr_lambda` and of
    /// `_get_cosine_schedule_with_multiple_warmups_lambda` in CoLA's `pretraining_utils/training_utils.py`, and of
    /// `get_linear_schedule_with_warmup` of transformers, computed with Python.
    #[test]
    fn schedules_have_the_values_of_the_original_code() {
        let restarts =
            LearningRateSchedule::CosineRestarts { restart_every: 40, restart_warm_up_steps: 8 };
        let to_zero = ScheduleSpan { final_fraction: 0.0, ..SPAN };
        let cases = [
            (LearningRateSchedule::Cosine, SPAN, 0, 0.0),
            (LearningRateSchedule::Cosine, SPAN, 1, 0.05),
            (LearningRateSchedule::Cosine, SPAN, 19, 0.95),
            (LearningRateSchedule::Cosine, SPAN, 20, 1.0),
            (LearningRateSchedule::Cosine, SPAN, 35, 0.9241613255361454),
            (LearningRateSchedule::Cosine, SPAN, 99, 0.1003469336916747),
            (restarts, SPAN, 10, 0.5),
            (restarts, SPAN, 39, 0.8804451292460584),
            (restarts, SPAN, 40, 0.0),
            (restarts, SPAN, 44, 0.275),
            (restarts, SPAN, 50, 0.7222075445642904),
            (restarts, SPAN, 84, 0.05),
            (restarts, SPAN, 90, 0.13425421036992097),
            (LearningRateSchedule::Linear, to_zero, 60, 0.5),
            (LearningRateSchedule::Linear, to_zero, 99, 0.0125),
        ];
        for (schedule, span, position, expected) in cases {
            let fraction = schedule.fraction(position, &span);
            assert!((fraction - expected).abs() < 1e-15, "{schedule} at {position}: {fraction}");
        }
    }

    /// Values of `_get_cosine_schedule_with_multiple_warmups_lambda` in LORO's `peft_pretraining/training_utils.py`, computed with
    /// Python.
    #[test]
    fn restarts_of_loro_have_the_values_of_the_original_code() {
        for (restart_every, adjust_steps, position, expected) in [
            (20, -20, 0, 0.1),
            (20, -20, 10, 0.4767766952966369),
            (20, -20, 20, 0.8681980515339464),
            (20, -20, 39, 0.9996530663083254),
            (20, -20, 40, 1e-06),
            (20, -20, 44, 0.5000005),
            (20, -20, 62, 0.21705026288348658),
            (20, -20, 90, 0.3777924554357096),
            (20, -20, 99, 0.2445396645101762),
            (15, -12, 19, 0.3670642232853189),
            (15, -12, 20, 0.9509529358847655),
            (15, -12, 60, 0.30000310182205786),
            (15, -12, 84, 0.345704275117204),
            (20, 0, 20, 1e-06),
            (20, 0, 44, 0.43409952576697314),
            (20, 10, 35, 0.5426241572087165),
            (20, 10, 90, 1e-06),
            (20, 10, 99, 0.12781389883488214),
        ] {
            let schedule = LearningRateSchedule::LoroCosineRestarts {
                restart_every,
                restart_warm_up_steps: 8,
                adjust_steps,
            };
            let fraction = schedule.fraction(position, &SPAN);
            assert!((fraction - expected).abs() < 1e-15, "{schedule} at {position}: {fraction}");
        }
    }

    #[test]
    fn a_stable_phase_ends_in_a_linear_cooldown() {
        let wsd = LearningRateSchedule::WarmUpStableDecay { cooldown_steps: 10 };
        let fraction = |position| wsd.fraction(position, &SPAN);
        assert_eq!([fraction(20), fraction(90), fraction(95)], [1.0, 1.0, 0.55]);
        assert_eq!([fraction(100), fraction(1000)], [0.1, 0.1]);
    }

    /// Steps, lengths and restarts in any relation to each other give a fraction of the peak.
    #[test]
    fn every_schedule_stays_between_zero_and_the_peak() {
        arbtest::arbtest(|u| {
            let mut steps = || u.int_in_range(0..=12u64);
            let span = ScheduleSpan {
                warm_up_steps: steps()?,
                total_steps: steps()?,
                final_fraction: steps()? as f64 / 12.0,
            };
            let (first, second, position) = (steps()?, steps()?, steps()?);
            for schedule in [
                LearningRateSchedule::Constant,
                LearningRateSchedule::Linear,
                LearningRateSchedule::Cosine,
                LearningRateSchedule::CosineRestarts {
                    restart_every: first,
                    restart_warm_up_steps: second,
                },
                LearningRateSchedule::LoroCosineRestarts {
                    restart_every: first,
                    restart_warm_up_steps: second,
                    adjust_steps: position as i64 - 6,
                },
                LearningRateSchedule::WarmUpStableDecay { cooldown_steps: first },
            ] {
                let fraction = schedule.fraction(position, &span);
                assert!((0.0..=1.0).contains(&fraction), "{schedule}, {span:?} at {position}");
            }
            Ok(())
        })
        .budget_ms(100);
    }

    #[test]
    fn steps_are_counted_from_zero_or_one() {
        assert_eq!([1, 2].map(|step| StepCount::FromZero.position(step)), [0, 1]);
        assert_eq!([1, 2].map(|step| StepCount::FromOne.position(step)), [1, 2]);
    }
}
