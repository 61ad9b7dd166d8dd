//! The steps of a run, in bounded memory.

use std::time::Duration;

use narrows_runtime::TimeBreakdown;
use narrows_runtime::train::TrainedStep;

use super::loss_curve::LossCurve;

/// Times of steps that are kept at most. A longer run keeps those of every second step, then of every fourth, and so on.
const TIMES_MAX: usize = 4096;

/// The completed steps of a run.
#[derive(Default)]
pub struct RunHistory {
    /// The loss of each step.
    pub losses: LossCurve,
    /// Times of every step whose number is a multiple of `2^doublings`.
    times: Vec<(Duration, TimeBreakdown)>,
    doublings: u32,
    /// Time of all steps.
    pub time: Duration,
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
        self.push_time(trained.step_time, trained.time_breakdown);
        self.losses.push(trained.loss);
        self.tokens += trained.tokens;
        let devices = trained.report.devices();
        self.allocated = devices.map(|device| trained.report.device(device).allocated.0).collect();
        self.scratch.clone_from(&trained.scratch_bytes);
    }

    fn push_time(&mut self, time: Duration, breakdown: TimeBreakdown) {
        self.time += time;
        if self.steps().is_multiple_of(1 << self.doublings) {
            self.times.push((time, breakdown));
        }
        if self.times.len() == TIMES_MAX {
            let mut index = 0;
            self.times.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.doublings += 1;
        }
    }

    /// Number of steps.
    pub fn steps(&self) -> u64 {
        self.losses.steps()
    }

    /// Time and breakdown of the step with the median time, which is robust to interruptions: of the slower of the middle two
    /// where their number is even. Zero without steps.
    pub fn median(&self) -> (Duration, TimeBreakdown) {
        let mut times: Vec<&(Duration, TimeBreakdown)> = self.times.iter().collect();
        times.sort_by_key(|(time, _)| *time);
        times.get(times.len() / 2).copied().copied().unwrap_or_default()
    }

    /// Throughput over all steps.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_long_run_are_sampled_evenly_in_bounded_memory() {
        const STEPS: u64 = 1_000_001;
        let mut history = RunHistory::default();
        for step in 0..STEPS {
            history.push_time(Duration::from_nanos(step), TimeBreakdown::default());
            history.losses.push(1.0);
        }
        assert!(history.times.capacity() <= 2 * TIMES_MAX);
        assert_eq!(history.time, Duration::from_nanos(STEPS * (STEPS - 1) / 2));
        let share = history.median().0.as_nanos() as f64 / STEPS as f64;
        assert!((share - 0.5).abs() < 0.01, "{share}");
    }
}
