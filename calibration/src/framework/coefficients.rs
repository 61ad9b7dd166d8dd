//! Fitted coefficients as a vector.

use narrows_cost_model::Profile;
use narrows_cost_model::profile::ProfileFile;

use super::model::FrameworkModel;

/// Coefficients of a framework, and the fraction of the network's bandwidth that collectives reach, in the order of the fields
/// of [`FrameworkModel`].
pub(crate) type Coefficients = [f64; 7];

/// The names of [`Coefficients`].
pub(super) const COEFFICIENT_NAMES: [&str; 7] = [
    "operator_s",
    "idle_operators",
    "elementwise_factor",
    "gemm_factor",
    "fixed_s",
    "lockstep",
    "links.inter_node.efficiency",
];

/// The index of the network's efficiency.
pub(super) const NETWORK: usize = 6;

impl FrameworkModel {
    /// The framework part of fitted coefficients.
    pub fn from_coefficients(coefficients: &Coefficients) -> FrameworkModel {
        let [operator_s, idle_operators, elementwise_factor, gemm_factor, fixed_s, lockstep, _] =
            *coefficients;
        FrameworkModel {
            operator_s,
            idle_operators,
            elementwise_factor,
            gemm_factor,
            collective_factor: 1.0,
            fixed_s,
            lockstep,
        }
    }

    /// The coefficients of this framework on a profile.
    pub fn coefficients(&self, profile: &Profile) -> Coefficients {
        [
            self.operator_s,
            self.idle_operators,
            self.elementwise_factor,
            self.gemm_factor,
            self.fixed_s,
            self.lockstep,
            profile.file().links.inter_node.efficiency,
        ]
    }
}

/// A profile whose network reaches another fraction of its bandwidth.
pub(super) fn with_network_efficiency(file: &ProfileFile, efficiency: f64) -> ProfileFile {
    let mut file = file.clone();
    file.links.inter_node.efficiency = efficiency.clamp(0.05, 1.0);
    file
}
