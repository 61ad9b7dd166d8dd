//! Cost of one step.

use narrows_cost_model::{Profile, TrainingRunTerms};
use narrows_plan::Mesh;
use narrows_planner::Request;
use schemars::JsonSchema;
use serde::Serialize;

const SECONDS_PER_HOUR: f64 = 3600.0;

/// Cost of one step, and the devices that the plan uses.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct StepCost {
    /// Devices of the plan.
    pub devices: u64,
    /// Devices of the request: no plan uses more.
    pub devices_max: u64,
    /// Devices times step time.
    pub device_seconds: f64,
    /// Price of the device-seconds; absent if no price is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dollars_per_step: Option<f64>,
    /// Price of one device for one hour; absent if none is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price_per_device_hour: Option<f64>,
}

impl StepCost {
    /// The cost of a step of a plan on a mesh.
    pub fn new(
        request: &Request,
        mesh: Mesh,
        step_time_s: f64,
        price_per_device_hour: Option<f64>,
    ) -> StepCost {
        let devices = mesh.devices();
        let device_seconds = devices as f64 * step_time_s;
        let dollars = |price: f64| device_seconds / SECONDS_PER_HOUR * price;
        StepCost {
            devices,
            devices_max: request.devices,
            device_seconds,
            dollars_per_step: price_per_device_hour.map(dollars),
            price_per_device_hour,
        }
    }
}

/// The terms of a run with the price of a profile, unless they have one of their own.
pub fn priced_terms(terms: TrainingRunTerms, profile: &Profile) -> TrainingRunTerms {
    let price_per_device_hour =
        terms.price_per_device_hour.or(profile.file().price_per_device_hour);
    TrainingRunTerms { price_per_device_hour, ..terms }
}
