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

/// A curve as one line of block characters.
pub fn curve(values: &[f64]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let columns = values.len().min(CURVE_WIDTH);
    let means: Vec<f64> = (0..columns)
        .map(|column| {
            let range =
                &values[column * values.len() / columns..(column + 1) * values.len() / columns];
            range.iter().sum::<f64>() / range.len() as f64
        })
        .collect();
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
    use super::curve;

    #[test]
    fn a_curve_has_a_character_per_step_up_to_its_width() {
        assert_eq!(curve(&[]), "");
        assert_eq!(curve(&[1.0]), "▁");
        assert_eq!(curve(&[8.0, 4.5, 1.0]), "█▅▁");
        assert_eq!(curve(&vec![2.0; 1000]).chars().count(), super::CURVE_WIDTH);
    }
}
