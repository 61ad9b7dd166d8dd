//! Keys of results: everything that the result of a search depends on.

use std::num::NonZeroU64;

use indexmap::IndexMap;
use narrows_cost_model::{Executor, GroupLinks};
use narrows_plan::strategy::Rules;
use narrows_plan::{Bytes, ContextAttention, GradReduceDtype, PipelineSchedule, Zero};

use crate::objective::Objective;
use crate::request::{GroupingRule, Request};

/// All that the result of a search depends on: requests with equal keys have equal plans, times and proofs. On devices
/// of one node, for example, the links between nodes do not matter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SearchKey {
    objective: Objective,
    model: [String; 2],
    profile: String,
    links: GroupLinks,
    executor: Executor,
    sizes: [u64; 3],
    fixed: [Option<u64>; 5],
    tensor_limits: (Option<u64>, bool),
    context_attention: Option<ContextAttention>,
    grad_reduce_dtype: GradReduceDtype,
    zero: (Option<Zero>, Option<u64>),
    schedule: Option<PipelineSchedule>,
    overlap_grad_reduce: Option<bool>,
    overlap_tensor_collectives: bool,
    loro_every: Option<NonZeroU64>,
    overlap_microbatch_pairs: bool,
    rules: Rules,
    grouping: GroupingRule,
    limit: Bytes,
}

impl SearchKey {
    /// The key of a request, whatever its time limit.
    pub fn new(request: &Request) -> SearchKey {
        // All fields are named, so that none can be forgotten.
        let Request {
            objective,
            model,
            profile,
            devices,
            global_batch,
            sequence_length,
            micro_batch,
            tensor,
            tensor_max,
            tensor_within_node,
            pipeline,
            data,
            context,
            context_attention,
            grad_reduce_dtype,
            zero,
            shard_size,
            schedule,
            overlap_grad_reduce,
            overlap_tensor_collectives,
            loro_every,
            overlap_microbatch_pairs,
            rules,
            grouping,
            memory_limit: _,
            executor,
            time_limit: _,
        } = request;
        // On fewer devices, other links matter than on all of them.
        let profile_key = match objective {
            Objective::Cost => profile.fingerprint(),
            Objective::StepTime | Objective::Memory => profile.fingerprint_within_nodes(),
        };
        SearchKey {
            objective: *objective,
            model: [model.name.clone(), model.fingerprint()],
            profile: profile_key.to_owned(),
            links: GroupLinks::of_all_devices(profile, *devices),
            executor: *executor,
            sizes: [*devices, *global_batch, *sequence_length],
            fixed: [*micro_batch, *tensor, *pipeline, *data, *context],
            tensor_limits: (*tensor_max, *tensor_within_node),
            context_attention: *context_attention,
            grad_reduce_dtype: *grad_reduce_dtype,
            zero: (*zero, *shard_size),
            schedule: *schedule,
            overlap_grad_reduce: *overlap_grad_reduce,
            overlap_tensor_collectives: *overlap_tensor_collectives,
            loro_every: *loro_every,
            overlap_microbatch_pairs: *overlap_microbatch_pairs,
            rules: *rules,
            grouping: *grouping,
            limit: request.arena_limit(),
        }
    }
}

/// The indices of requests, grouped by equal keys. Where the requests of a group are searched one after the other, a
/// shared cache has the results of all but the first.
pub fn equal_searches(requests: &[&Request]) -> Vec<Vec<usize>> {
    let mut groups: IndexMap<SearchKey, Vec<usize>> = IndexMap::new();
    for (index, request) in requests.iter().enumerate() {
        groups.entry(SearchKey::new(request)).or_default().push(index);
    }
    groups.into_values().collect()
}
