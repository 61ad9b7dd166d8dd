//! The steps of a run so far.

use std::time::Duration;

use narrows_runtime::TimeBreakdown;
use narrows_runtime::train::TrainedStep;

/// Columns of a loss curve.
const CURVE_WIDTH: usize = 60;

/// The steps of a run so far.
#[derive(Default)]
pub struct RunHistory {
    /// Of each step.
    pub losses: Vec<f64>,
    times: Vec<(Duration, TimeBreakdown)>,
    /// Of all steps.
    pub tokens: u64,
    /// Bytes allocated on each device of the mesh, and held besides, after the last.
    pub held: (Vec<u64>, Vec<u64>),
}

impl RunHistory {
    /// One more.
    pub fn add(&mut self, trained: &TrainedStep) {
        self.losses.push(trained.loss);
        self.times.push((trained.step_time, trained.time_breakdown));
        self.tokens += trained.tokens;
        let devices = trained.report.devices();
        let allocated = devices.map(|device| trained.report.device(device).allocated.0).collect();
        self.held = (allocated, trained.scratch_bytes.clone());
    }

    /// How many.
    pub fn steps(&self) -> u64 {
        self.losses.len() as u64
    }

    /// Of all steps.
    pub fn time(&self) -> Duration {
        self.times.iter().map(|(time, _)| time).sum()
    }

    /// The step in the middle of all, of which a pause of the machine takes nothing: its time, and
    /// what that was spent on. Zeros when there was none.
    pub fn median(&self) -> (Duration, TimeBreakdown) {
        let mut times: Vec<&(Duration, TimeBreakdown)> = self.times.iter().collect();
        times.sort_by_key(|(time, _)| *time);
        times.get(times.len() / 2).copied().copied().unwrap_or_default()
    }

    /// Over the time of all steps.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.time().as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// A curve in one line of text, highest at the top.
pub fn curve(values: &[f64]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let columns = values.len().min(CURVE_WIDTH);
    let means: Vec<f64> = (0..columns)
        .map(|column| {
            let part =
                &values[column * values.len() / columns..(column + 1) * values.len() / columns];
            part.iter().sum::<f64>() / part.len() as f64
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
    fn a_curve_is_as_wide_as_it_needs_to_be() {
        assert_eq!(curve(&[]), "");
        assert_eq!(curve(&[1.0]), "▁");
        assert_eq!(curve(&[8.0, 4.5, 1.0]), "█▅▁");
        assert_eq!(curve(&vec![2.0; 1000]).chars().count(), super::CURVE_WIDTH);
    }
}
