//! Bootstrap refits: the uncertainty of the fitted parameters of a profile.
//!
//! `narrows-calibration` writes refits along with the fit; [`interval`](crate::interval) reads them.

use narrows_plan::Kernel;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::provenance::Provenance;

/// Refits to bootstrap draws of the measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BootstrapRefits {
    /// The fitted parameters, serialized as their paths.
    #[serde(rename = "numbers")]
    pub parameters: Vec<FittedParameter>,
    /// Values of the parameters by the fit. A parameter with another value was set afterwards, so that its draws say nothing
    /// about it. Absent where all of them are as fitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fitted: Vec<f64>,
    /// Values of the parameters: one list for each draw.
    pub draws: Vec<Vec<f64>>,
    /// The kernels that were measured, once each.
    pub kernels: Vec<Kernel>,
    /// Provenance of the measurements that are resampled.
    pub provenance: Provenance,
}

/// A number of a profile that a fit to published figures determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FittedParameter {
    /// [`GemmCurve::efficiency_max`](super::GemmCurve::efficiency_max)
    #[serde(rename = "gemm.efficiency_max")]
    GemmEfficiencyMax,
    /// [`GemmCurve::exposed_epilogue`](super::GemmCurve::exposed_epilogue)
    #[serde(rename = "gemm.exposed_epilogue")]
    GemmExposedEpilogue,
    /// [`GemmCurve::tile_overhead_elements`](super::GemmCurve::tile_overhead_elements)
    #[serde(rename = "gemm.tile_overhead_elements")]
    GemmTileOverhead,
    /// [`GemmCurve::start_s`](super::GemmCurve::start_s)
    #[serde(rename = "gemm.start_s")]
    GemmStart,
    /// [`IntraNodeLinks::efficiency`](super::IntraNodeLinks::efficiency)
    #[serde(rename = "links.intra_node.efficiency")]
    LinkEfficiency,
    /// [`IntraNodeLinks::fill_s`](super::IntraNodeLinks::fill_s)
    #[serde(rename = "links.intra_node.fill_s")]
    LinkFill,
}
