//! Requests of tests of bounds, whose collectives take longer than with a preset.

use narrows_cost_model::profile;
use narrows_plan::model::presets;
use narrows_plan::strategy::{Rules, WeightRule};

use crate::request::{MemoryLimit, Request};

/// A request without a memory limit for a preset on devices of `a100-80gb` whose links inside a node and between nodes are
/// `slower` times slower.
pub(crate) fn request(
    model: &str,
    slower: [f64; 2],
    [devices, global_batch, sequence_length]: [u64; 3],
) -> Request {
    let model = presets::find(model).expect("a preset");
    let mut file = profile::preset("a100-80gb").expect("a preset").file().clone();
    file.links.intra_node.bandwidth_bytes_per_s /= slower[0];
    file.links.inter_node.bandwidth_bytes_per_s /= slower[1];
    let hardware = file.resolve().expect("a positive bandwidth");
    Request {
        memory_limit: MemoryLimit::None,
        ..Request::new(model, hardware, devices, global_batch, sequence_length)
    }
}

/// The request, and the same with sharded weights.
pub(crate) fn with_sharded_weights(request: Request) -> [Request; 2] {
    let sharded = Rules { weights: WeightRule::Sharded, ..Rules::ALL };
    let restricted = Request { rules: sharded, ..request.clone() };
    [request, restricted]
}
