//! What limits a plan: the resources on which its step spends time, its memory, and assumed numbers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use narrows_plan::{Bytes, Seconds};
use serde::{Serialize, Serializer};

use crate::feasible_plan::FeasiblePlan;
use crate::objective::Objective;
use crate::predict::Prediction;
use crate::request::{MemoryLimit, Request};
use crate::search::search_until_stopped;
use crate::search_cache::SearchCache;

/// A bottleneck of a plan. Its `Display` form is the sentence in JSON.
#[derive(Clone, Debug, PartialEq)]
pub enum Bottleneck {
    /// A resource that takes more than a twentieth of the step time.
    Resource {
        /// The resource.
        resource: Resource,
        /// Share of the resource in the step time in percent.
        percent: f64,
    },
    /// Whether the memory limit changes the plan.
    Memory(MemoryBinding),
    /// Parts of the profile that are assumed, as paths in its file.
    Assumed(Vec<String>),
}

/// A resource on which a step spends time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// GEMMs and attention.
    Compute,
    /// Fused ops and the optimizer.
    MemoryBandwidth,
    /// Collectives and transfers.
    Links,
    /// The pipeline bubble.
    Pipeline,
    /// Exact steps of LORO.
    Hosts,
}

/// Effect of the memory limit on a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryBinding {
    /// There is no limit.
    Unlimited {
        /// Peak memory of the fullest device.
        peak: Bytes,
    },
    /// No plan without a limit is faster.
    Slack {
        /// Peak memory of the fullest device.
        peak: Bytes,
        /// Memory that a device may use.
        limit: Bytes,
    },
    /// A plan without a limit is faster.
    Binding {
        /// Peak memory of the fullest device.
        peak: Bytes,
        /// Memory that a device may use.
        limit: Bytes,
        /// Step time without a limit.
        unlimited_step_time: Seconds,
        /// Peak memory without a limit.
        unlimited_peak: Bytes,
    },
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bottleneck::Resource { resource, percent } => {
                let name = match resource {
                    Resource::Compute => "compute (GEMMs and attention)",
                    Resource::MemoryBandwidth => "memory bandwidth (fused ops and the optimizer)",
                    Resource::Links => "links (collectives and transfers)",
                    Resource::Pipeline => "the pipeline (bubble)",
                    Resource::Hosts => "hosts (exact steps)",
                };
                write!(f, "{percent:.0} % of the step is {name}")
            }
            Bottleneck::Memory(MemoryBinding::Unlimited { peak }) => {
                write!(f, "memory is not limited; the plan uses {peak}")
            }
            Bottleneck::Memory(MemoryBinding::Slack { peak, limit }) => {
                write!(f, "memory does not bind: {peak} of {limit}")
            }
            Bottleneck::Memory(MemoryBinding::Binding {
                peak,
                limit,
                unlimited_step_time,
                unlimited_peak,
            }) => write!(
                f,
                "memory binds: {peak} of {limit}; without a limit a step takes \
                 {unlimited_step_time} with {unlimited_peak}"
            ),
            Bottleneck::Assumed(paths) => {
                write!(
                    f,
                    "these parts of the profile are assumed, not measured: {}",
                    paths.join(", ")
                )
            }
        }
    }
}

impl Serialize for Bottleneck {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The resources on which a step spends its time, and whether the memory limit changes the plan, unless `stop` is set before
/// that is known.
pub(crate) fn bottlenecks(
    request: &Request,
    best: &FeasiblePlan,
    prediction: &Prediction,
    cache: &SearchCache,
    stop: &Arc<AtomicBool>,
) -> Vec<Bottleneck> {
    let parts = &prediction.breakdown_s;
    let step = prediction.step_time_s;
    let hosts = prediction.exact_step.as_ref().map_or(0.0, |exact_step| exact_step.per_step_s);
    let mut shares = [
        (Resource::Compute, parts.gemm + parts.attention),
        (Resource::MemoryBandwidth, parts.elementwise + parts.optimizer),
        (Resource::Links, parts.collective_exposed + parts.other - hosts),
        (Resource::Hosts, hosts),
        (Resource::Pipeline, parts.bubble),
    ];
    shares.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut bottlenecks: Vec<Bottleneck> = shares
        .iter()
        .filter(|(_, time)| *time > 0.05 * step)
        .map(|&(resource, time)| Bottleneck::Resource { resource, percent: 100.0 * time / step })
        .collect();
    bottlenecks.extend(memory_binding(request, best, cache, stop).map(Bottleneck::Memory));
    if !prediction.assumed.is_empty() {
        bottlenecks.push(Bottleneck::Assumed(prediction.assumed.clone()));
    }
    bottlenecks
}

fn memory_binding(
    request: &Request,
    best: &FeasiblePlan,
    cache: &SearchCache,
    stop: &Arc<AtomicBool>,
) -> Option<MemoryBinding> {
    let limit = request.arena_limit();
    let peak = best.peak_arena();
    match request.memory_limit {
        MemoryLimit::None => return Some(MemoryBinding::Unlimited { peak }),
        // The plan with the least memory is the same without a limit.
        _ if request.objective == Objective::Memory => {
            return Some(MemoryBinding::Slack { peak, limit });
        }
        MemoryLimit::Auto | MemoryLimit::Bytes(_) => {}
    }
    // Plans on as many devices are compared by their step time.
    let free = Request {
        memory_limit: MemoryLimit::None,
        ..request.on_devices(best.decisions.context.mesh.devices())
    };
    let free = search_until_stopped(&free, cache, stop);
    let is_faster =
        |free: &FeasiblePlan| free.average_time().0 < best.average_time().0 * (1.0 - 1e-9);
    match free.best.filter(is_faster) {
        Some(free) => Some(MemoryBinding::Binding {
            peak,
            limit,
            unlimited_step_time: free.average_time()
                * request.profile.launch_costs(request.executor).step_factor,
            unlimited_peak: free.peak_arena(),
        }),
        None if free.report.is_interrupted => None,
        None => Some(MemoryBinding::Slack { peak, limit }),
    }
}
