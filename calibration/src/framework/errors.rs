//! Errors of a framework's steps, and the intervals from them.

use narrows_cost_model::Profile;
use narrows_cost_model::interval::prediction_interval;
use narrows_cost_model::profile::{RelativeError, preset};
use narrows_plan::Mesh;
use serde::{Deserialize, Serialize};

use crate::measurements::TrainingStep;

/// Errors of measured steps, ln(measured / predicted).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StepErrors {
    /// Hardware profiles of the steps that the values were fitted to.
    pub fitted_hardware: Vec<String>,
    /// Errors on this hardware, with each model left out of the fit in turn. With `models_left_out_across_nodes` only
    /// those of steps within a node.
    pub models_left_out: RelativeError,
    /// Errors across nodes, where they differ: also of steps with sequence parallelism or interleaved stages, which no
    /// step of the fit has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models_left_out_across_nodes: Option<RelativeError>,
    /// Errors on other hardware, with each kind of hardware left out of the fit in turn.
    pub hardware_left_out: RelativeError,
}

impl StepErrors {
    /// The errors of such a step on this hardware, and their 90 % interval as ratios to the prediction. Hardware of the fit
    /// is a profile that equals its preset, not only in name.
    pub fn of(
        &self,
        step: &TrainingStep,
        mesh: Mesh,
        profile: &Profile,
    ) -> (&RelativeError, [f64; 2]) {
        let is_fitted = |name: &String| {
            preset(name).is_ok_and(|fitted| fitted.fingerprint() == profile.fingerprint())
        };
        let within_node = mesh.devices() <= profile.devices_per_node();
        let error = match &self.models_left_out_across_nodes {
            _ if !self.fitted_hardware.iter().any(is_fitted) => &self.hardware_left_out,
            Some(across) if !(within_node && step.has_fitted_sharding_and_schedule()) => across,
            _ => &self.models_left_out,
        };
        if error.residuals.is_empty() {
            return (error, [1.0 / (1.0 + error.half_width_90), 1.0 + error.half_width_90]);
        }
        (error, prediction_interval(&[], &error.residuals, 1.0).map(f64::exp))
    }
}
