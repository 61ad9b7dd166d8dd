//! Measurements within a profile: what kernels took on the machine itself.
//!
//! The numbers of the other groups are then a fit to these, and prices are corrected by the nearest of
//! them ([`price::measured`](crate::price::measured)). A profile that names threads is one of a whole machine of
//! processors: of D devices each has 1/D of them and of the memory's bandwidth. One that names none is of
//! devices that are whole, as GPUs are.

use narrows_plan::Kernel;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::file::{Provenance, RelativeError};

/// Further apart than this, two rounds of the same work were disturbed.
const ROUNDS_APART_MAX: f64 = 0.2;
/// And where steps took longer than their undisturbed instructions by more than this allows.
const UNDISTURBED_MIN: f64 = 0.8;

/// What kernels took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelMeasurements {
    /// Threads of the machine, which its devices share evenly; absent where devices are whole and share
    /// nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// The machine, as `narrows doctor` names it; absent where nobody says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// How well the measurement repeats; absent where nobody says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeatability: Option<Repeatability>,
    /// How far whole steps of plans lay from what this profile predicted of them, what their kernels were
    /// off included; absent where no plans were compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<RelativeError>,
    /// What was measured, a kernel and a number of devices once each.
    pub points: Vec<MeasuredPoint>,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

/// What one kernel took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredPoint {
    /// What was executed.
    pub kernel: Kernel,
    /// Devices that shared the machine; where devices are whole, those of the mesh.
    pub devices: u64,
    /// Mean time on one of them, waiting for others within a collective included. Where devices are whole, without
    /// the launch gap.
    pub time_s: f64,
    /// How far two passes of the measurement lay apart, relative to the shorter.
    pub spread: f64,
}

impl KernelMeasurements {
    /// Whether devices share the machine, and each of D has 1/D of it.
    pub fn is_shared(&self) -> bool {
        self.threads.is_some()
    }
}

/// How well a measurement repeats. Everything is run in several rounds, so that other work on the machine
/// meets some of them and not others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Repeatability {
    /// Rounds.
    pub rounds: u32,
    /// Kernels with half of the measured time had rounds further apart than this, relative to the shorter.
    pub rounds_apart_median: f64,
    /// The same with a tenth of the time.
    pub rounds_apart_90: f64,
    /// The sum of a step's instructions, each at its shortest, over the shortest step by the clock: the
    /// middle of all plans.
    pub undisturbed: f64,
}

impl Repeatability {
    /// How far the rounds of these lie apart.
    pub fn of(points: &[MeasuredPoint], rounds: u32, undisturbed: f64) -> Repeatability {
        let mut apart: Vec<(f64, f64)> =
            points.iter().map(|point| (point.spread, point.time_s)).collect();
        apart.sort_by(|a, b| a.0.total_cmp(&b.0));
        let total: f64 = apart.iter().map(|(_, time)| time).sum();
        let further = |share: f64| {
            let mut before = 0.0;
            let reached = apart.iter().find(|(_, time)| {
                before += time;
                before >= share * total
            });
            reached.map_or(0.0, |(spread, _)| *spread)
        };
        let (rounds_apart_median, rounds_apart_90) = (further(0.5), further(0.9));
        Repeatability { rounds, rounds_apart_median, rounds_apart_90, undisturbed }
    }

    /// Why this measurement is not to be trusted: a sentence without its subject; `None` when it repeats.
    pub fn warning(&self) -> Option<String> {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let mut signs = vec![];
        if self.rounds_apart_median > ROUNDS_APART_MAX {
            let apart = percent(self.rounds_apart_median);
            signs.push(format!(
                "half of its time is of kernels whose rounds lie {apart} or more apart"
            ));
        }
        if self.undisturbed < UNDISTURBED_MIN {
            let share = percent(self.undisturbed);
            signs.push(format!("instructions make up {share} of the shortest steps by the clock"));
        }
        if signs.is_empty() {
            return None;
        }
        Some(format!("was measured on a busy machine: {}", signs.join(", and ")))
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
        let pass = FusedKernel { kind, traffic, unfused_traffic: traffic, unfused_launches: 1 };
        MeasuredPoint { kernel: Kernel::Fused(pass), devices: 1, time_s, spread }
    }

    #[test]
    fn what_takes_long_counts() {
        let many_short = (0..20).map(|_| point(1e-6, 3.0));
        let quiet: Vec<MeasuredPoint> = many_short.clone().chain([point(1e-3, 0.02)]).collect();
        let found = Repeatability::of(&quiet, 2, 0.95);
        assert_eq!((found.rounds_apart_median, found.rounds_apart_90), (0.02, 0.02));
        assert_eq!(found.warning(), None);
        let busy: Vec<MeasuredPoint> = many_short.chain([point(1e-3, 0.5)]).collect();
        let warning = Repeatability::of(&busy, 2, 0.95).warning().unwrap();
        assert!(warning.contains("50 % or more apart") && !warning.contains("clock"), "{warning}");
        let warning = Repeatability::of(&quiet, 2, 0.5).warning().unwrap();
        assert!(
            warning.contains("50 % of the shortest") && !warning.contains("apart"),
            "{warning}"
        );
        assert_eq!(Repeatability::of(&[], 0, 1.0).warning(), None);
    }
}
