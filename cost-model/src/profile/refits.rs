//! Fits repeated on draws of their measurements, within a profile: how certain its numbers are.
//!
//! Written by the fit that made the numbers; [`interval`](crate::interval) has the mathematics.

use narrows_plan::Kernel;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::file::{ProfileFile, Provenance};

/// Fits repeated on draws of their measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BootstrapRefits {
    /// The numbers that were fitted, by their paths.
    pub numbers: Vec<FittedParameters>,
    /// Their values, a list for each draw.
    pub draws: Vec<Vec<f64>>,
    /// The kernels that were measured, once each.
    pub kernels: Vec<Kernel>,
    /// What was drawn from.
    pub provenance: Provenance,
}

/// The numbers that can be fitted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FittedParameters {
    /// [`GemmCurve::efficiency_max`](super::GemmCurve::efficiency_max)
    #[serde(rename = "gemm.efficiency_max")]
    EfficiencyMax,
    /// [`GemmCurve::exposed_epilogue`](super::GemmCurve::exposed_epilogue)
    #[serde(rename = "gemm.exposed_epilogue")]
    ExposedEpilogue,
    /// [`GemmCurve::tile_overhead_elements`](super::GemmCurve::tile_overhead_elements)
    #[serde(rename = "gemm.tile_overhead_elements")]
    TileOverhead,
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

impl FittedParameters {
    /// Where the number is.
    pub fn of(self, file: &mut ProfileFile) -> &mut f64 {
        match self {
            FittedParameters::EfficiencyMax => &mut file.gemm.efficiency_max,
            FittedParameters::ExposedEpilogue => &mut file.gemm.exposed_epilogue,
            FittedParameters::TileOverhead => &mut file.gemm.tile_overhead_elements,
            FittedParameters::GemmStart => &mut file.gemm.start_s,
            FittedParameters::LinkEfficiency => &mut file.links.intra_node.efficiency,
            FittedParameters::LinkFill => &mut file.links.intra_node.fill_s,
        }
    }
}

impl BootstrapRefits {
    /// The profile with each draw's numbers for its own.
    pub(crate) fn files<'a>(
        &'a self,
        file: &'a ProfileFile,
    ) -> impl Iterator<Item = ProfileFile> + 'a {
        let own = ProfileFile { refits: None, measured: None, ..file.clone() };
        self.draws.iter().map(move |draw| {
            let mut file = own.clone();
            for (number, value) in self.numbers.iter().zip(draw) {
                *number.of(&mut file) = *value;
            }
            file
        })
    }
}
