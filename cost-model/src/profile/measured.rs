//! Kernel times measured on the machine that a profile describes.
//!
//! The other groups of the profile are fitted to these times, and the nearest times correct each price. A profile
//! with `threads` describes a machine of CPUs that D devices share: each has 1/D of the threads and of the memory
//! bandwidth. A profile without `threads` describes whole devices, such as GPUs.

use narrows_plan::Kernel;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::provenance::{Provenance, RelativeError};

/// Relative difference between rounds of the same work above which a measurement was disturbed.
const ROUNDS_APART_MAX: f64 = 0.2;
/// Fraction of a step's time in undisturbed instructions below which a measurement was disturbed.
const UNDISTURBED_MIN: f64 = 0.8;

/// Measured times of kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelMeasurements {
    /// Threads of the machine, which its devices share evenly; absent for whole devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// The machine, as `narrows doctor` names it; absent where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Repeatability of the measurement; absent where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeatability: Option<Repeatability>,
    /// Error of whole steps of plans relative to their predictions by this profile, the errors of kernels included;
    /// absent where no plans were compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<RelativeError>,
    /// The measurements: each pair of a kernel and a number of devices once.
    pub points: Vec<MeasuredPoint>,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// The measured time of one kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredPoint {
    /// The kernel that was executed.
    pub kernel: Kernel,
    /// Devices that share the machine; for whole devices, the devices of the mesh.
    pub devices: u64,
    /// Mean time on one device, including the wait for other devices within a collective. For whole devices,
    /// without the launch gap.
    pub time_s: f64,
    /// Difference of the slowest and the fastest round, relative to the fastest.
    pub spread: f64,
}

impl KernelMeasurements {
    /// Whether devices share one machine, of which each of D has 1/D.
    pub fn devices_share_machine(&self) -> bool {
        self.threads.is_some()
    }
}

/// Repeatability of a measurement. All kernels are timed in several rounds, so that other work on the machine
/// disturbs some rounds only.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Repeatability {
    /// Number of rounds.
    pub rounds: u32,
    /// Median over kernels, weighted by time, of the difference between rounds relative to the fastest round.
    pub rounds_apart_median: f64,
    /// 90th percentile of this difference, weighted by time.
    pub rounds_apart_90: f64,
    /// Median over plans of the sum of a step's shortest instruction times, divided by the shortest step time.
    pub undisturbed: f64,
}

impl Repeatability {
    /// Computes the differences between rounds from measured points.
    pub fn from_points(points: &[MeasuredPoint], rounds: u32, undisturbed: f64) -> Repeatability {
        let mut apart: Vec<(f64, f64)> =
            points.iter().map(|point| (point.spread, point.time_s)).collect();
        apart.sort_by(|a, b| a.0.total_cmp(&b.0));
        let total: f64 = apart.iter().map(|(_, time)| time).sum();
        let weighted_quantile = |share: f64| {
            let mut sum = 0.0;
            let point = apart.iter().find(|(_, time)| {
                sum += time;
                sum >= share * total
            });
            point.map_or(0.0, |(spread, _)| *spread)
        };
        let (rounds_apart_median, rounds_apart_90) =
            (weighted_quantile(0.5), weighted_quantile(0.9));
        Repeatability { rounds, rounds_apart_median, rounds_apart_90, undisturbed }
    }

    /// The reason why the measurement is unreliable, as the predicate of a sentence about the profile; `None` when
    /// the measurement repeats.
    pub fn warning(&self) -> Option<String> {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let mut reasons = vec![];
        if self.rounds_apart_median > ROUNDS_APART_MAX {
            let apart = percent(self.rounds_apart_median);
            reasons.push(format!(
                "kernels with half of its time differ by {apart} or more between rounds"
            ));
        }
        if self.undisturbed < UNDISTURBED_MIN {
            let share = percent(self.undisturbed);
            reasons.push(format!("instructions make up {share} of the shortest measured steps"));
        }
        if reasons.is_empty() {
            return None;
        }
        Some(format!("was measured on a busy machine: {}", reasons.join(", and ")))
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::Bytes;
    use narrows_plan::kernel::{FusedKernel, FusedKind, Kernel};

    use super::{MeasuredPoint, Repeatability};

    fn point(time_s: f64, spread: f64) -> MeasuredPoint {
        let traffic = Bytes(1024);
        let kind = FusedKind::Add;
        let (unfused_traffic, unfused_launches, parameters) = (traffic, 1, 1);
        let op = FusedKernel { kind, traffic, unfused_traffic, unfused_launches, parameters };
        MeasuredPoint { kernel: Kernel::Fused(op), devices: 1, time_s, spread }
    }

    #[test]
    fn repeatability_is_weighted_by_time() {
        let many_short = (0..20).map(|_| point(1e-6, 3.0));
        let quiet: Vec<MeasuredPoint> = many_short.clone().chain([point(1e-3, 0.02)]).collect();
        let repeatability = Repeatability::from_points(&quiet, 2, 0.95);
        assert_eq!(repeatability.rounds_apart_median, 0.02);
        assert_eq!(repeatability.rounds_apart_90, 0.02);
        assert_eq!(repeatability.warning(), None);
        let busy: Vec<MeasuredPoint> = many_short.chain([point(1e-3, 0.5)]).collect();
        let warning = Repeatability::from_points(&busy, 2, 0.95).warning().unwrap();
        assert!(
            warning.contains("50 % or more between rounds") && !warning.contains("instructions"),
            "{warning}"
        );
        let warning = Repeatability::from_points(&quiet, 2, 0.5).warning().unwrap();
        assert!(
            warning.contains("50 % of the shortest") && !warning.contains("between rounds"),
            "{warning}"
        );
        assert_eq!(Repeatability::from_points(&[], 0, 1.0).warning(), None);
    }
}
