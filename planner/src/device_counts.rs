//! The numbers of devices that a search covers.

use crate::context_space::contexts;
use crate::feasible_plan::FeasiblePlan;
use crate::objective::Objective;
use crate::request::Request;

/// Numbers up to this one are all searched for the least cost.
const EVERY_COUNT_MAX: u64 = 64;

/// Largest number of whole nodes up to which every number of nodes is searched for the least cost.
const EVERY_NODE_MAX: u64 = 64;

impl Request {
    /// The requests whose plans a search compares, by ascending number of devices: this one, or for the least cost one for
    /// each number of devices with a mesh.
    pub(crate) fn by_devices(&self) -> Vec<Request> {
        if self.objective != Objective::Cost {
            return vec![self.clone()];
        }
        let counts = (1..=self.devices).filter(|devices| self.searches_count(*devices));
        let requests = counts.map(|devices| self.on_devices(devices));
        requests.filter(|request| !contexts(request).is_empty()).collect()
    }

    /// The request for the fastest plan on this number of devices.
    pub(crate) fn on_devices(&self, devices: u64) -> Request {
        Request { devices, objective: Objective::StepTime, ..self.clone() }
    }

    /// The request whose plans are compared with a plan of this one: for the least cost, the fastest on as many devices.
    pub fn beside(&self, plan: &FeasiblePlan) -> Request {
        match self.objective {
            Objective::Cost => self.on_devices(plan.decisions.context.mesh.devices()),
            Objective::StepTime | Objective::Memory => self.clone(),
        }
    }

    /// Whether the least cost is searched on this number of devices: small numbers, whole nodes, and from there on divisors
    /// of the number of the request and powers of two.
    fn searches_count(&self, devices: u64) -> bool {
        let per_node = self.profile.devices_per_node();
        let whole_nodes = devices.is_multiple_of(per_node) && devices / per_node <= EVERY_NODE_MAX;
        devices.is_multiple_of(self.fixed_axes())
            && (devices <= EVERY_COUNT_MAX
                || whole_nodes
                || self.devices.is_multiple_of(devices)
                || devices.is_power_of_two())
    }
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use super::*;

    /// Nodes have four devices.
    fn counts(devices: u64, batch: u64, tensor: Option<u64>) -> Vec<u64> {
        let model = presets::find("cola-tiny").unwrap();
        let profile = profile::preset("a100-80gb").unwrap();
        let request = Request {
            objective: Objective::Cost,
            tensor,
            ..Request::new(model, profile, devices, batch, 128)
        };
        request.by_devices().iter().map(|request| request.devices).collect()
    }

    #[test]
    fn the_least_cost_is_searched_on_every_useful_number_of_devices() {
        assert_eq!(counts(6, 6, None), [1, 2, 3, 4, 5, 6]);
        assert_eq!(counts(10, 3, Some(4)), [4, 8]);
        // Whole nodes, and the divisors of 1,004.
        let many = counts(1004, 1 << 10, None);
        assert!(many[..64].iter().copied().eq(1..=64), "{many:?}");
        assert_eq!(many[64..68], [68, 72, 76, 80]);
        let beyond: Vec<u64> = many.into_iter().filter(|devices| *devices > 256).collect();
        assert_eq!(beyond, [502, 512, 1004]);
    }
}
