//! A whole training run: time, cost and energy from the time of one step, with failures and checkpoints.
//!
//! # Failures
//! Devices fail independently at a constant rate, and one failure stops the run: with N devices of mean time between
//! failures m, the cluster has M = m / N. A checkpoint takes δ, a restart R from the failure to the first step, and the
//! work since the last checkpoint is lost. The interval of work between checkpoints is the higher-order optimum of Daly
//! (J. T. Daly, *A higher order estimate of the optimum checkpoint interval for restart dumps*, Future Generation Computer
//! Systems 22, 2006):
//!
//! > τ = √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ for δ < 2M, else τ = M,
//!
//! whose first term is that of Young (J. W. Young, *A first order approximation to the optimum checkpoint interval*,
//! Communications of the ACM 17, 1974). The expected time of a run with T of useful work is, in his complete model,
//!
//! > W = M · e^{R/M} · (e^{(τ+δ)/M} − 1) · T/τ,
//!
//! in which checkpoints and restarts may fail too. Training waits for every checkpoint, and the result is written by the
//! last one, so that a run shorter than τ has one checkpoint. Checkpoints are written between steps: where τ is shorter
//! than a step, there is one after every step.
//!
//! Not included: queueing, evaluation, and repairs that take longer than a restart. Goodput is T / W.

use schemars::JsonSchema;
use serde::Serialize;

const SECONDS_PER_HOUR: f64 = 3600.0;
const HOURS_PER_DAY: f64 = 24.0;

/// Terms of a training run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingRunTerms {
    /// Tokens to train on.
    pub tokens: f64,
    /// Price of one device for one hour.
    pub price_per_device_hour: Option<f64>,
    /// Electrical power of one device, with its share of its host.
    pub device_watts: Option<f64>,
    /// Failures and checkpoints; without them nothing fails.
    pub failures: Option<FailureTerms>,
}

/// Failures of devices, and the time of checkpoints. All values are above zero; the time of a restart may be zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailureTerms {
    /// Mean time between failures of one device, in seconds.
    pub device_mtbf_s: f64,
    /// Time that training waits for a checkpoint, in seconds.
    pub checkpoint_s: f64,
    /// Time from a failure to the next step, in seconds.
    pub restart_s: f64,
}

/// The step that a run repeats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepEstimate {
    /// Devices of the mesh.
    pub devices: u64,
    /// Tokens of the global batch.
    pub tokens: u64,
    /// Step time in seconds.
    pub time_s: f64,
    /// 90 % interval of the step time.
    pub interval_s: [f64; 2],
}

/// Time, cost and energy of a run. Intervals follow from the interval of the step time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct TrainingRunEstimate {
    /// Tokens to train on.
    pub tokens: f64,
    /// Optimizer steps, the last one with a full batch.
    pub steps: u64,
    /// Days from the first step to the last checkpoint.
    pub days: f64,
    /// 90 % interval of the days.
    pub days_interval: [f64; 2],
    /// Hours of all devices together.
    pub device_hours: f64,
    /// 90 % interval of the device hours.
    pub device_hours_interval: [f64; 2],
    /// Price of the device hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dollars: Option<f64>,
    /// 90 % interval of the price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dollars_interval: Option<[f64; 2]>,
    /// Energy of all devices in kilowatt-hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_kwh: Option<f64>,
    /// 90 % interval of the energy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_kwh_interval: Option<[f64; 2]>,
    /// Failures and checkpoints, if their terms are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<FailureEstimate>,
}

/// Failures of a run and their cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct FailureEstimate {
    /// Mean time between failures of the cluster, in hours.
    pub cluster_mtbf_hours: f64,
    /// Work between two checkpoints, in seconds: the optimum, but at least one step.
    pub checkpoint_interval_s: f64,
    /// Steps between two checkpoints; 1 where the optimum is shorter than a step.
    pub checkpoint_interval_steps: f64,
    /// Time of a checkpoint, in seconds.
    pub checkpoint_s: f64,
    /// Time from a failure to the next step, in seconds.
    pub restart_s: f64,
    /// Expected number of failures.
    pub failures_expected: f64,
    /// Share of the time in steps whose work is not lost.
    pub goodput: f64,
}

/// A run that makes next to no progress: its goodput is below 10⁻⁶, since failures are more frequent than restarts.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "the run never ends: one of {devices} devices fails every {cluster_mtbf_s:.1} s, and a checkpoint and a restart \
     take {overhead_s:.1} s"
)]
pub struct EndlessRun {
    devices: u64,
    cluster_mtbf_s: f64,
    overhead_s: f64,
}

impl TrainingRunTerms {
    /// The run that repeats a step until the tokens are used.
    ///
    /// # Errors
    /// Failures so frequent that the run makes no progress.
    pub fn estimate(&self, step: &StepEstimate) -> Result<TrainingRunEstimate, EndlessRun> {
        let steps = (self.tokens / step.tokens as f64).ceil().max(1.0);
        let [low, high] = step.interval_s;
        let wall_s = |step_s: f64| -> Result<f64, EndlessRun> {
            let useful_s = steps * step_s;
            self.failures.map_or(Ok(useful_s), |failures| {
                failures.wall_time_s(step.devices, useful_s, step_s)
            })
        };
        let expected_s = wall_s(step.time_s)?;
        let interval_s = [wall_s(low)?, wall_s(high)?];
        let hours = expected_s / SECONDS_PER_HOUR;
        let interval_hours = interval_s.map(|seconds| seconds / SECONDS_PER_HOUR);
        let devices = step.devices as f64;
        let (device_hours, device_hours_interval) =
            (hours * devices, interval_hours.map(|hours| hours * devices));
        let priced = |rate: Option<f64>| {
            let rate = rate?;
            Some((device_hours * rate, device_hours_interval.map(|hours| hours * rate)))
        };
        let dollars = priced(self.price_per_device_hour);
        let energy = priced(self.device_watts.map(|watts| watts / 1e3));
        let failures = self.failures.map(|failures| {
            let useful_s = steps * step.time_s;
            let cluster_mtbf_s = failures.device_mtbf_s / devices;
            let checkpoint_interval_s = failures.work_s(step.devices, useful_s, step.time_s);
            FailureEstimate {
                cluster_mtbf_hours: cluster_mtbf_s / SECONDS_PER_HOUR,
                checkpoint_interval_s,
                checkpoint_interval_steps: checkpoint_interval_s / step.time_s,
                checkpoint_s: failures.checkpoint_s,
                restart_s: failures.restart_s,
                failures_expected: expected_s / cluster_mtbf_s,
                goodput: useful_s / expected_s,
            }
        });
        Ok(TrainingRunEstimate {
            tokens: self.tokens,
            steps: steps as u64,
            days: hours / HOURS_PER_DAY,
            days_interval: interval_hours.map(|hours| hours / HOURS_PER_DAY),
            device_hours,
            device_hours_interval,
            dollars: dollars.map(|(expected, _)| expected),
            dollars_interval: dollars.map(|(_, interval)| interval),
            energy_kwh: energy.map(|(expected, _)| expected),
            energy_kwh_interval: energy.map(|(_, interval)| interval),
            failures,
        })
    }
}

/// Share of useful time below which a run makes no progress worth a number.
const GOODPUT_MIN: f64 = 1e-6;

impl FailureTerms {
    /// Daly's optimal work between two checkpoints, in seconds.
    pub fn checkpoint_interval_s(&self, devices: u64) -> f64 {
        let mtbf_s = self.device_mtbf_s / devices as f64;
        let ratio = self.checkpoint_s / (2.0 * mtbf_s);
        if ratio >= 1.0 {
            return mtbf_s;
        }
        let young_s = (2.0 * self.checkpoint_s * mtbf_s).sqrt();
        young_s * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - self.checkpoint_s
    }

    /// Work between two checkpoints of a run of `useful_s` seconds: the optimum within one step and the whole run.
    fn work_s(&self, devices: u64, useful_s: f64, step_s: f64) -> f64 {
        self.checkpoint_interval_s(devices).max(step_s).min(useful_s)
    }

    /// Expected seconds for `useful_s` seconds of work on this many devices, in steps of `step_s` seconds.
    ///
    /// # Errors
    /// A goodput below [`GOODPUT_MIN`].
    fn wall_time_s(&self, devices: u64, useful_s: f64, step_s: f64) -> Result<f64, EndlessRun> {
        let mtbf_s = self.device_mtbf_s / devices as f64;
        if useful_s == 0.0 || !mtbf_s.is_finite() {
            return Ok(useful_s);
        }
        let interval_s = self.work_s(devices, useful_s, step_s);
        let segment_s = interval_s + self.checkpoint_s;
        let segment_expected_s =
            mtbf_s * (self.restart_s / mtbf_s).exp() * (segment_s / mtbf_s).exp_m1();
        let wall_s = segment_expected_s * useful_s / interval_s;
        let overhead_s = self.checkpoint_s + self.restart_s;
        let endless = EndlessRun { devices, cluster_mtbf_s: mtbf_s, overhead_s };
        if useful_s >= GOODPUT_MIN * wall_s { Ok(wall_s) } else { Err(endless) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: StepEstimate =
        StepEstimate { devices: 8, tokens: 1_000_000, time_s: 2.0, interval_s: [1.5, 3.0] };

    const TERMS: TrainingRunTerms = TrainingRunTerms {
        tokens: 43.2e9,
        price_per_device_hour: Some(2.5),
        device_watts: Some(500.0),
        failures: None,
    };

    fn near(actual: f64, expected: f64) {
        assert!((actual - expected).abs() <= 1e-9 * expected.abs(), "{actual} != {expected}");
    }

    /// 43,200 steps of 2 s are one day; eight devices for 24 hours at 2.50 and 0.5 kW.
    #[test]
    fn a_run_without_failures_is_its_steps() {
        let run = TERMS.estimate(&STEP).unwrap();
        assert_eq!(run.steps, 43_200);
        near(run.days, 1.0);
        near(run.days_interval[0], 0.75);
        near(run.days_interval[1], 1.5);
        near(run.device_hours, 192.0);
        near(run.dollars.unwrap(), 480.0);
        near(run.energy_kwh.unwrap(), 96.0);
        near(run.dollars_interval.unwrap()[1], 720.0);
        assert_eq!(run.failures, None);
        let free = TrainingRunTerms { price_per_device_hour: None, device_watts: None, ..TERMS };
        let run = free.estimate(&STEP).unwrap();
        assert_eq!((run.dollars, run.energy_kwh), (None, None));
    }

    #[test]
    fn the_last_step_has_a_full_batch() {
        for (tokens, steps) in [(1.0, 1), (1e6, 1), (1e6 + 1.0, 2)] {
            let run = TrainingRunTerms { tokens, ..TERMS }.estimate(&STEP).unwrap();
            assert_eq!(run.steps, steps, "{tokens}");
        }
    }

    /// δ = 200 s and M = 10,000 s: √(2δM) = 2,000 s and √(δ/2M) = 0.1, so
    /// τ = 2,000 · (1 + 0.1/3 + 0.01/9) − 200 = 1,868.888… s.
    #[test]
    fn the_interval_is_that_of_daly() {
        let terms = FailureTerms { device_mtbf_s: 80_000.0, checkpoint_s: 200.0, restart_s: 0.0 };
        near(terms.checkpoint_interval_s(8), 1_868.888_888_888_889);
        let slow = FailureTerms { checkpoint_s: 20_000.0, ..terms };
        near(slow.checkpoint_interval_s(8), 10_000.0);
    }

    /// With τ = 1,868.888… s, δ = 200 s and R = 100 s: W/T = M/τ · e^{0.01} · (e^{0.206888…} − 1).
    #[test]
    fn failures_cost_what_daly_says() {
        let terms = FailureTerms { device_mtbf_s: 80_000.0, checkpoint_s: 200.0, restart_s: 100.0 };
        let run = TrainingRunTerms { failures: Some(terms), ..TERMS }.estimate(&STEP).unwrap();
        let overhead = 10_000.0 / 1_868.888_888_888_889
            * 0.01_f64.exp()
            * (0.206_888_888_888_888_9_f64.exp() - 1.0);
        near(run.days, overhead);
        let failures = run.failures.unwrap();
        near(failures.goodput, 1.0 / overhead);
        near(failures.cluster_mtbf_hours, 10_000.0 / 3600.0);
        near(failures.failures_expected, overhead * 86_400.0 / 10_000.0);
        near(run.device_hours, 192.0 * overhead);
    }

    /// The interval of Daly is a minimum of his expected time up to its third order.
    #[test]
    fn no_other_interval_is_much_better() {
        let terms = FailureTerms { device_mtbf_s: 1e6, checkpoint_s: 60.0, restart_s: 300.0 };
        let expected = |interval_s: f64| {
            let mtbf_s = 1e6 / 8.0;
            ((interval_s + 60.0) / mtbf_s).exp_m1() / interval_s
        };
        let optimum = expected(terms.checkpoint_interval_s(8));
        for factor in [0.25, 0.5, 0.9, 1.1, 2.0, 4.0] {
            assert!(expected(terms.checkpoint_interval_s(8) * factor) > optimum, "{factor}");
        }
    }

    #[test]
    fn devices_that_hardly_fail_cost_one_checkpoint() {
        let terms = FailureTerms { device_mtbf_s: 1e18, checkpoint_s: 60.0, restart_s: 300.0 };
        let run = TrainingRunTerms { failures: Some(terms), ..TERMS }.estimate(&STEP).unwrap();
        near(run.days, (86_400.0 + 60.0) / 86_400.0);
        let failures = run.failures.unwrap();
        near(failures.checkpoint_interval_s, 86_400.0);
        assert!(failures.failures_expected < 1e-9);
    }

    /// δ = 1 s and M = 1 s: the optimum is 1 s, but a step takes 2 s.
    #[test]
    fn checkpoints_are_at_least_a_step_apart() {
        let terms = FailureTerms { device_mtbf_s: 8.0, checkpoint_s: 1.0, restart_s: 0.0 };
        assert!(terms.checkpoint_interval_s(8) < STEP.time_s);
        let run = TrainingRunTerms { failures: Some(terms), ..TERMS }.estimate(&STEP).unwrap();
        let failures = run.failures.unwrap();
        near(failures.checkpoint_interval_s, 2.0);
        near(failures.checkpoint_interval_steps, 1.0);
        // W/T = M/τ · (e^{(τ+δ)/M} − 1) with τ = 2 s.
        near(run.days, 0.5 * (3.0_f64.exp() - 1.0));
    }

    #[test]
    fn a_run_that_always_fails_never_ends() {
        let terms = FailureTerms { device_mtbf_s: 1.0, checkpoint_s: 60.0, restart_s: 300.0 };
        let error = TrainingRunTerms { failures: Some(terms), ..TERMS }.estimate(&STEP);
        assert!(error.unwrap_err().to_string().contains("never ends"));
    }
}
