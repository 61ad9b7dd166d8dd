//! Requests for the plans to which a plan is compared.

use narrows_plan::strategy::{Baseline, WeightRule};

use crate::feasible_plan::FeasiblePlan;
use crate::request::Request;

/// The sizes of a tensor axis that fit a node and divide the number of devices.
fn sizes_within_a_node(request: &Request) -> impl DoubleEndedIterator<Item = u64> {
    let node = request.profile.devices_per_node().min(request.devices);
    let divides = |size: &u64| request.devices.is_multiple_of(*size);
    (1..=node).filter(divides).filter(|size| request.allows_tensor(*size))
}

/// Size of the tensor axis on which strategies differ: that of the plan, or a node where the plan has none.
fn compared_tensor_axis(request: &Request, best: &FeasiblePlan) -> u64 {
    match best.decisions.context.mesh.tensor {
        1 => sizes_within_a_node(request).next_back().unwrap_or(1),
        more => more,
    }
}

/// The request for a baseline with this tensor axis.
fn with_tensor_axis(
    request: &Request,
    best: &FeasiblePlan,
    (baseline, tensor): (Baseline, u64),
) -> Request {
    let mut other = request.clone();
    other.rules.baseline = baseline;
    other.tensor = Some(tensor);
    // The search for the alternative may choose the other axes anew.
    if best.decisions.context.mesh.tensor != tensor {
        (other.pipeline, other.data) = (None, None);
    }
    other
}

/// Requests for the published baselines to which a plan is compared, with their names: on a tensor-parallel mesh, for a
/// low-rank model also that of its dense counterpart.
pub fn baseline_requests(request: &Request, best: &FeasiblePlan) -> Vec<(String, Request)> {
    let request = &request.beside(best);
    let tensor = compared_tensor_axis(request, best);
    let on_mesh = |baseline: Baseline| with_tensor_axis(request, best, (baseline, tensor));
    let mut requests = vec![];
    let name = |baseline: &str| format!("{baseline}, tensor axis {tensor}");
    if tensor > 1 && request.model.is_low_rank() {
        for baseline in [Baseline::Btp, Baseline::VanillaTp, Baseline::VanillaTpPublished] {
            if request.rules.baseline != baseline {
                requests.push((name(baseline.name()), on_mesh(baseline)));
            }
        }
        for baseline in Baseline::of_dense_models() {
            let mut dense = on_mesh(baseline);
            dense.model = dense.model.dense_counterpart();
            dense.loro_every = None;
            requests.push((name(&format!("{} of {}", baseline.name(), dense.model.name)), dense));
        }
    } else if tensor > 1 {
        let others = Baseline::of_dense_models().filter(|other| *other != request.rules.baseline);
        requests.extend(others.map(|baseline| (name(baseline.name()), on_mesh(baseline))));
    }
    requests
}

/// The alternatives to a plan: the published baselines, all weights sharded, the other sizes of the tensor axis.
pub(crate) fn alternative_requests(
    request: &Request,
    best: &FeasiblePlan,
) -> Vec<(String, Request)> {
    let request = &request.beside(best);
    let tensor = compared_tensor_axis(request, best);
    let mut requests = baseline_requests(request, best);
    if tensor > 1 && request.rules.weights == WeightRule::Any {
        let mut sharded = with_tensor_axis(request, best, (request.rules.baseline, tensor));
        sharded.rules.weights = WeightRule::Sharded;
        requests.push((format!("every weight sharded, tensor axis {tensor}"), sharded));
    }
    for size in sizes_within_a_node(request) {
        if request.tensor.is_none() && size != best.decisions.context.mesh.tensor {
            let mut other = request.clone();
            other.tensor = Some(size);
            requests.push((format!("best plan with tensor axis {size}"), other));
        }
    }
    requests
}
