//! The cost of a step in words.

use super::training_run::{decimals, rounded};
use crate::step_cost::StepCost;

/// Device-seconds of a step, and their price where one is known.
pub fn phrase(cost: &StepCost) -> String {
    let StepCost { device_seconds, dollars_per_step, price_per_device_hour, .. } = cost;
    let seconds = short(*device_seconds);
    match (dollars_per_step, price_per_device_hour) {
        (Some(dollars), Some(price)) => {
            format!("${} per step: {seconds} device-seconds at ${price} per hour", short(*dollars))
        }
        _ => format!("{seconds} device-seconds per step; no price of a device is known"),
    }
}

/// Dollars of a step, or its device-seconds where no price is known.
pub fn amount(cost: &StepCost) -> String {
    match cost.dollars_per_step {
        Some(dollars) => format!("${}", short(dollars)),
        None => format!("{} device-s", short(cost.device_seconds)),
    }
}

/// Number of devices that the plan uses, and of those that it could use.
pub fn devices_phrase(cost: &StepCost) -> String {
    let StepCost { devices, devices_max, .. } = cost;
    match devices == devices_max {
        true => format!("all {devices_max} of the request"),
        false => {
            format!("{devices} of the {devices_max} of the request, for the least cost of a step")
        }
    }
}

/// A number with three significant digits, or with all digits before the decimal point.
pub fn short(value: f64) -> String {
    if !(0.01..100.0).contains(&value) {
        return rounded(value);
    }
    format!("{value:.*}", decimals(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_and_devices_are_phrased() {
        let cost = StepCost {
            devices: 2,
            devices_max: 8,
            device_seconds: 1.5,
            dollars_per_step: None,
            price_per_device_hour: None,
        };
        assert_eq!(phrase(&cost), "1.50 device-seconds per step; no price of a device is known");
        let devices = "2 of the 8 of the request, for the least cost of a step";
        assert_eq!(devices_phrase(&cost), devices);
        let priced =
            StepCost { dollars_per_step: Some(0.001), price_per_device_hour: Some(2.4), ..cost };
        assert_eq!(phrase(&priced), "$0.00100 per step: 1.50 device-seconds at $2.4 per hour");
        assert_eq!(devices_phrase(&StepCost { devices_max: 2, ..cost }), "all 2 of the request");
    }
}
