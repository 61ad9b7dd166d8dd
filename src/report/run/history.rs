//! The steps of a run and their loss curve.

use std::time::Duration;

use narrows_runtime::TimeBreakdown;
use narrows_runtime::train::TrainedStep;

/// Width of a loss curve in characters.
const CURVE_WIDTH: usize = 60;

/// The completed steps of a run.
#[derive(Default)]
pub struct RunHistory {
    /// The loss of each step.
    pub losses: Vec<f64>,
    times: Vec<(Duration, TimeBreakdown)>,
    /// Tokens of all steps.
    pub tokens: u64,
    /// Bytes of each device's arena after the last step.
    pub allocated: Vec<u64>,
    /// Further bytes allocated by each device after the last step.
    pub scratch: Vec<u64>,
}

impl RunHistory {
    /// Adds a step.
    pub fn push(&mut self, trained: &TrainedStep) {
        self.losses.push(trained.loss);
        self.times.push((trained.step_time, trained.time_breakdown));
        self.tokens += trained.tokens;
        let devices = trained.report.devices();
        self.allocated = devices.map(|device| trained.report.device(device).allocated.0).collect();
        self.scratch = trained.scratch_bytes.clone();
    }

    /// Number of steps.
    pub fn steps(&self) -> u64 {
        self.losses.len() as u64
    }

    /// Time of all steps.
    pub fn time(&self) -> Duration {
        self.times.iter().map(|(time, _)| time).sum()
    }

    /// Time and breakdown of the step with the median time, which is robust to interruptions. Zero without steps.
    pub fn median(&self) -> (Duration, TimeBreakdown) {
        let mut times: Vec<&(Duration, TimeBreakdown)> = self.times.iter().collect();
        times.sort_by_key(|(time, _)| *time);
        times.get(times.len() / 2).copied().copied().unwrap_or_default()
    }

    /// Throughput over all steps.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.time().as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Steps below which a run is too short to tell whether its loss collapsed.
const COLLAPSE_STEPS_MIN: usize = 20;

/// A loss has collapsed when it regains this share of its earlier decrease.
const COLLAPSE_SHARE: f64 = 0.5;

/// Whether the loss grew back: the mean of the last tenth of the steps lies above the lowest mean of a tenth by more than
/// half of what it had fallen from the first tenth, or above the first tenth.
pub fn is_collapsed(losses: &[f64]) -> bool {
    if losses.len() < COLLAPSE_STEPS_MIN {
        return false;
    }
    let means = parts(losses, 10);
    let (first, last) = (means[0], means[means.len() - 1]);
    let lowest = means.iter().copied().fold(f64::INFINITY, f64::min);
    !last.is_finite() || last > first || last - lowest > COLLAPSE_SHARE * (first - lowest)
}

/// Means of consecutive parts of about the same size; one for each value where these are fewer.
fn parts(values: &[f64], count: usize) -> Vec<f64> {
    let count = values.len().min(count);
    let mean = |part: usize| {
        let range = &values[part * values.len() / count..(part + 1) * values.len() / count];
        range.iter().sum::<f64>() / range.len() as f64
    };
    (0..count).map(mean).collect()
}

/// The axes of a curve whose first value is that of `first_step`: its first and last step, and its lowest and highest
/// value.
pub fn curve_axes(values: &[f64], first_step: u64) -> String {
    let means = parts(values, CURVE_WIDTH);
    let low = means.iter().copied().fold(f64::INFINITY, f64::min);
    let high = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let last_step = first_step + (values.len() as u64).saturating_sub(1);
    format!("steps {first_step} to {last_step}; ▁ {low:.4}, █ {high:.4}")
}

/// A curve as one line of block characters.
pub fn curve(values: &[f64]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let means = parts(values, CURVE_WIDTH);
    let (low, high) = means
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)));
    let level = |value: &f64| {
        let share = if high > low { (value - low) / (high - low) } else { 0.0 };
        LEVELS[(share * 7.0).round() as usize]
    };
    means.iter().map(level).collect()
}

#[cfg(test)]
mod tests {
    use super::{curve, curve_axes, is_collapsed};

    #[test]
    fn a_loss_that_grows_back_has_collapsed() {
        let falling: Vec<f64> = (0..40).map(|step| 5.0 - 0.05 * f64::from(step)).collect();
        let grown = |end: f64| [&falling[..36], &[end; 4]].concat();
        assert!(!is_collapsed(&falling) && !is_collapsed(&grown(3.5)));
        assert!(is_collapsed(&grown(4.8)) && is_collapsed(&grown(9.0)));
        assert!(!is_collapsed(&[1.0, 2.0]), "too short to tell");
    }

    #[test]
    fn axes_name_the_steps_and_the_range() {
        assert_eq!(curve_axes(&[8.0, 4.5, 1.0], 7), "steps 7 to 9; ▁ 1.0000, █ 8.0000");
    }

    #[test]
    fn a_curve_has_a_character_per_step_up_to_its_width() {
        assert_eq!(curve(&[]), "");
        assert_eq!(curve(&[1.0]), "▁");
        assert_eq!(curve(&[8.0, 4.5, 1.0]), "█▅▁");
        assert_eq!(curve(&vec![2.0; 1000]).chars().count(), super::CURVE_WIDTH);
    }
}
