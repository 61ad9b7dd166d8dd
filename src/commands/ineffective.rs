//! Warnings of flags that a search could not use on the mesh that it chose.

use narrows_plan::strategy::Baseline;
use narrows_plan::{ContextAttention, Mesh, Zero};
use narrows_planner::Request;

use crate::output;

/// Warns of every flag of a request that has no effect on a plan with this mesh.
pub fn warn_of_ineffective_flags(request: &Request, mesh: Mesh) {
    for (flag, reason) in ineffective_flags(request, mesh) {
        output::warn(&format!("`{flag}` has no effect on this plan: {reason}"));
    }
}

/// The flags without effect, with their values, and the reason of each with the flag that changes it.
fn ineffective_flags(request: &Request, mesh: Mesh) -> Vec<(String, String)> {
    let mut flags = vec![];
    let baseline = request.rules.baseline;
    // The step time is not one of the baseline, since all baselines have the same plans without a tensor axis.
    if baseline != Baseline::Auto && mesh.tensor == 1 && request.tensor.is_none() {
        let reason = "the mesh of the plan has no tensor axis, on which strategies differ; --tensor sets its size";
        flags.push((format!("--strategy {}", baseline.name()), reason.to_owned()));
    }
    let attention = request.context_attention.filter(|fixed| *fixed != ContextAttention::Exchange);
    if let Some(attention) = attention.filter(|_| mesh.context == 1) {
        let reason = match request.context {
            Some(_) => "a context axis of one device has no collectives",
            None => "the mesh has no context axis; --context sets its size",
        };
        flags.push((format!("--context-attention {}", attention.name()), reason.to_owned()));
    }
    let zero = request.zero.filter(|zero| *zero != Zero::Off && mesh.replicas() == 1);
    if let Some(zero) = zero {
        let reason =
            "ZeRO shards over replicas, and there is one; --data-parallel sets their number";
        flags.push((format!("--zero {}", zero.stage()), reason.to_owned()));
    }
    flags
}
