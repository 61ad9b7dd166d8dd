//! Searches with a cache that other requests filled have the results of searches without one.

use narrows_cost_model::{Profile, profile};
use narrows_plan::model::presets;
use narrows_plan::{Bytes, GradReduceDtype};
use narrows_planner::{
    ContextOutcome, MemoryLimit, Request, SearchCache, SearchResult, equal_searches, search,
    search_with_cache,
};

/// A preset with this bandwidth between nodes, of four devices each.
fn profile_with(gb_per_s: f64) -> Profile {
    let mut file = profile::preset("a100-80gb").expect("a preset").file().clone();
    file.links.inter_node.bandwidth_bytes_per_s = gb_per_s * 1e9;
    file.resolve().expect("a positive bandwidth")
}

/// Products of bandwidths, batches and limits on these devices, in an order in which neighbours differ in most of them.
fn shuffled_requests(devices: &[u64]) -> Vec<Request> {
    let model = presets::find("cola-1b").expect("a preset");
    let mut requests = vec![];
    for devices in devices {
        for bandwidth in [6.25, 100.0] {
            for global_batch in [32, 64] {
                for limit_gib in [3, 5, 24] {
                    let (model, profile) = (model.clone(), profile_with(bandwidth));
                    let mut request = Request::new(model, profile, *devices, global_batch, 2048);
                    request.memory_limit = MemoryLimit::Bytes(Bytes(limit_gib << 30));
                    requests.push(request);
                }
            }
        }
    }
    // 7 divides no number of requests used here, so that every request comes once.
    let count = requests.len();
    (0..count).map(|index| requests[index * 7 % count].clone()).collect()
}

/// All of a result that the effort of its search does not change: the plan and its time, status, bound and gap, and the
/// outcome of every context with its bound.
fn outcome(result: &SearchResult) -> impl PartialEq + std::fmt::Debug + use<> {
    let plan = result.best.as_ref().map(|best| (best.time.0, best.plan.clone()));
    let report = &result.report;
    let contexts: Vec<String> =
        report.contexts.iter().map(|context| format!("{context:?}")).collect();
    (plan, report.status, report.bound.0, report.gap, contexts)
}

/// The limit at which searches take longest.
const TIGHTEST: MemoryLimit = MemoryLimit::Bytes(Bytes(3 << 30));

/// On two nodes: four requests, in which every bandwidth and batch and the wider limits occur.
#[test]
fn a_cache_filled_by_other_requests_changes_no_result() {
    let mut requests = shuffled_requests(&[8]);
    requests.retain(|request| request.memory_limit != TIGHTEST);
    shared_and_own_results_agree(&requests[..3]);
}

#[test]
fn a_cache_filled_in_another_format_of_reductions_changes_no_result() {
    let mut requests = shuffled_requests(&[8]);
    requests.retain(|request| request.memory_limit != TIGHTEST);
    let fp32 = requests.swap_remove(0);
    let bf16 = Request { grad_reduce_dtype: GradReduceDtype::Bf16, ..fp32.clone() };
    assert_eq!(equal_searches(&[&fp32, &bf16]).len(), 2);
    shared_and_own_results_agree(&[fp32, bf16]);
}

#[test]
#[ignore = "second level: three times as many searches"]
fn a_cache_filled_by_all_other_requests_changes_no_result() {
    shared_and_own_results_agree(&shuffled_requests(&[8]));
}

#[test]
#[ignore = "second level: searches 16 devices"]
fn a_cache_filled_by_other_requests_changes_no_result_on_four_nodes() {
    shared_and_own_results_agree(&shuffled_requests(&[16]));
}

/// Compares searches that share a cache with searches without one, which run at the same time.
fn shared_and_own_results_agree(requests: &[Request]) {
    let cache = SearchCache::default();
    let mut pipelines = 0;
    for request in requests {
        let (shared, alone) =
            rayon::join(|| search_with_cache(request, &cache), || search(request));
        let links = &request.profile.file().links.inter_node;
        assert_eq!(
            outcome(&shared),
            outcome(&alone),
            "{} devices, {} sequences, {:?}, {} B/s",
            request.devices,
            request.global_batch,
            request.memory_limit,
            links.bandwidth_bytes_per_s
        );
        let is_pipeline = |result: &SearchResult| {
            result.report.contexts.iter().any(|context| {
                context.context.mesh.pipeline > 1
                    && !matches!(context.outcome, ContextOutcome::Infeasible(_))
            })
        };
        pipelines += usize::from(is_pipeline(&alone));
    }
    assert!(pipelines > requests.len() / 2, "{pipelines} with pipelines");
}

/// On one node, links between nodes are in no price: one search serves all bandwidths. The plan names the hardware that
/// was asked for.
#[test]
fn links_that_no_device_uses_need_no_search() {
    let mut requests = shuffled_requests(&[4]);
    requests.retain(|request| request.global_batch == 32 && request.memory_limit != TIGHTEST);
    one_search_serves_all_bandwidths(&requests);
    let nodes = shuffled_requests(&[8]);
    assert_eq!(equal_searches(&nodes.iter().collect::<Vec<_>>()).len(), nodes.len());
}

#[test]
#[ignore = "second level: three times as many searches"]
fn links_that_no_device_uses_need_no_search_for_any_batch_and_limit() {
    one_search_serves_all_bandwidths(&shuffled_requests(&[4]));
}

fn one_search_serves_all_bandwidths(requests: &[Request]) {
    let all: Vec<&Request> = requests.iter().collect();
    let groups = equal_searches(&all);
    assert_eq!(groups.len() * 2, requests.len());
    let cache = SearchCache::default();
    for group in groups {
        let first = search_with_cache(&requests[group[0]], &cache);
        for index in &group[1..] {
            let request = &requests[*index];
            let known = search_with_cache(request, &cache);
            assert_eq!(known.report.segment_solves, first.report.segment_solves);
            assert_eq!(outcome(&known), outcome(&search(request)));
            let hardware = known.best.map(|best| best.plan.hardware.fingerprint);
            assert!(hardware.is_none_or(|hardware| hardware == request.profile.fingerprint()));
        }
    }
}
