//! Entry points of the search, with and without a cache of results.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use narrows_plan::Bytes;

use crate::deadline::Deadline;
use crate::feasible_plan::FeasiblePlan;
use crate::least_memory::{search_least_memory, small_plan};
use crate::least_time::search_least_time;
use crate::objective::Objective;
use crate::report::SearchStatus;
use crate::request::Request;
use crate::restricted::{LARGE_GAP_MIN, binds_memory};
use crate::search_cache::SearchCache;
use crate::search_key::SearchKey;
use crate::search_result::SearchResult;

/// Searches the whole space of a request, until its time limit.
pub fn search(request: &Request) -> SearchResult {
    // Nothing reads the cache later, so the result is not stored.
    search_space(request, &Deadline::after(request.time_limit), &SearchCache::default())
}

/// As [`search`], with a cache that several searches share. Solutions without proof, of searches with a time limit, stay
/// out of it.
pub fn search_with_cache(request: &Request, cache: &SearchCache) -> SearchResult {
    search_until(request, &Deadline::after(request.time_limit), cache)
}

/// As [`search_with_cache`]; ends soon after `stop` is set, as if the time limit had passed.
pub fn search_until_stopped(
    request: &Request,
    cache: &SearchCache,
    stop: &Arc<AtomicBool>,
) -> SearchResult {
    let deadline = Deadline::after(request.time_limit).or_stopped(Arc::clone(stop));
    let mut result = search_until(request, &deadline, cache);
    let is_proven = result.report.status != SearchStatus::TimeLimit;
    result.report.is_interrupted = !is_proven && deadline.is_stopped();
    result
}

/// Time that a search has for a first plan once it is stopped without one.
const FIRST_PLAN_TIME: Duration = Duration::from_secs(1);

/// As [`search_until_stopped`], for a caller that needs a plan: bounds, which come first, take most of a search without a time
/// limit. One that is stopped before its first plan is followed by a search with a time limit of a second, which has the tables
/// of the first in the cache.
pub fn search_until_interrupted(
    request: &Request,
    cache: &SearchCache,
    stop: &Arc<AtomicBool>,
) -> SearchResult {
    let begin = Instant::now();
    let stopped = search_until_stopped(request, cache, stop);
    if stopped.best.is_some() || !stopped.report.is_interrupted {
        return stopped;
    }
    let limited = Request { time_limit: Some(FIRST_PLAN_TIME), ..request.clone() };
    let mut result = search_with_cache(&limited, cache);
    result.report.is_interrupted = result.report.status == SearchStatus::TimeLimit;
    result.report.wall_time = begin.elapsed();
    result
}

/// Searches the whole space of a request until a deadline, unless the cache has its result; the request's own time limit
/// is ignored.
fn search_until(request: &Request, deadline: &Deadline, cache: &SearchCache) -> SearchResult {
    // A search that may be interrupted depends on the clock.
    if deadline.exists() {
        return search_space(request, deadline, cache);
    }
    let begin = Instant::now();
    let key = SearchKey::new(request);
    if let Some(known) = cache.result(&key) {
        return known.for_request(request, begin);
    }
    let result = search_space(request, deadline, cache);
    if !deadline.is_over() {
        cache.store(key, result.clone());
    }
    result
}

/// Searches the whole space of a request until a deadline.
fn search_space(request: &Request, deadline: &Deadline, cache: &SearchCache) -> SearchResult {
    match request.objective {
        Objective::StepTime | Objective::Cost => search_time_or_cost(request, deadline, cache),
        Objective::Memory => search_least_memory(request, deadline, cache),
    }
}

/// Searches for the least step time or cost. Where no plan was found that fits, the search for the least memory may find a first
/// one, and a better one where memory leaves a large gap.
fn search_time_or_cost(
    request: &Request,
    deadline: &Deadline,
    cache: &SearchCache,
) -> SearchResult {
    let begin = Instant::now();
    let result = search_least_time(request, deadline, cache, None);
    let is_tight =
        |best: &FeasiblePlan| result.report.gap >= LARGE_GAP_MIN && binds_memory(request, best);
    if result.report.status != SearchStatus::GapLimit || !result.best.as_ref().is_none_or(is_tight)
    {
        return result;
    }
    let objective = request.objective;
    let value = |plan: &Option<FeasiblePlan>| {
        plan.as_ref().map_or(f64::INFINITY, |plan| objective.value(plan))
    };
    // Any plan is a first one. A better one may be the smallest of all, near which hardly any other is found.
    let enough = match result.best {
        None => request.arena_limit(),
        Some(_) => Bytes(0),
    };
    let known = small_plan(request, deadline, cache, enough);
    if value(&known) >= value(&result.best) {
        return result;
    }
    let mut result = search_least_time(request, deadline, cache, known);
    result.report.wall_time = begin.elapsed();
    result
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::{Executor, profile};
    use narrows_plan::model::{Model, presets};
    use narrows_plan::strategy::{Recompute, Rules};
    use narrows_plan::{PipelineSchedule, Zero};

    use super::*;
    use crate::report::{ContextOutcome, ContextReport, SearchReport};
    use crate::request::{GroupingRule, MemoryLimit};

    /// A memory limit so tight that even partitions do not fit and budgets are corrected often.
    fn tight() -> Request {
        Request {
            tensor: Some(4),
            micro_batch: Some(4),
            memory_limit: MemoryLimit::Bytes(Bytes(14 << 30)),
            ..Request::new(
                presets::find("cola-7b").unwrap(),
                profile::preset("a100-80gb").unwrap(),
                4,
                4,
                4096,
            )
        }
    }

    #[test]
    fn an_interrupted_search_proves_nothing() {
        let request = tight();
        let whole = search(&request);
        let time = whole.best.as_ref().expect("a plan fits").time.0;
        let (mut empty, mut interrupted) = (0, 0);
        for checks in (0..12).map(|power| 1 << power).chain([3, 6, 12, 24, 48]) {
            let result =
                search_until(&request, &Deadline::after_checks(checks), &SearchCache::default());
            let report = &result.report;
            let case = format!("{checks} checks: {:?}", report.status);
            assert_ne!(report.status, SearchStatus::Infeasible, "{case}");
            assert!(!report.contexts.iter().any(ContextReport::is_proven_infeasible), "{case}");
            assert!(report.bound.0 <= time * (1.0 + 1e-9), "{case}: {}", report.bound);
            match &result.best {
                None => {
                    assert_eq!(report.status, SearchStatus::TimeLimit, "{case}");
                    empty += 1;
                }
                Some(best) if report.is_proven_best() => {
                    assert!(best.time.0 <= time * (1.0 + 1e-9), "{case}");
                }
                Some(_) => {}
            }
            let not_reached = |c: &ContextReport| matches!(c.outcome, ContextOutcome::NotReached);
            interrupted += usize::from(report.contexts.iter().any(not_reached));
        }
        assert!(empty > 0 && interrupted > 0, "{empty} without a plan, {interrupted} interrupted");
    }

    /// Zero-bubble pipelines whose tensor axis spans nodes: bounds of their divisions may be smaller than those of undivided
    /// blocks.
    #[test]
    fn a_search_proves_no_less_than_the_bounds_of_its_contexts() {
        for (name, micro_batch) in [("cola-1b", None), ("cola-7b", Some(64))] {
            let request = Request {
                tensor: Some(16),
                pipeline: Some(4),
                micro_batch,
                schedule: Some(PipelineSchedule::ZeroBubble),
                ..Request::new(
                    presets::find(name).unwrap(),
                    profile::preset("a100-80gb").unwrap(),
                    64,
                    64,
                    4096,
                )
            };
            let report = search(&request).report;
            let bounds = report.contexts.iter().filter_map(|context| context.bound);
            let least = bounds.reduce(|a, b| if a < b { a } else { b }).expect("a bound").0;
            assert!(report.bound.0 >= least * (1.0 - 1e-9), "{name}: {} < {least}", report.bound);
            assert!(report.gap < 0.2, "{name}: {}", report.gap);
        }
    }

    /// Within the memory of the plan with the least, a search for the least step time is hardly ever left with more than one plan.
    #[test]
    fn the_least_memory_has_no_slower_plan_than_the_one_with_the_least_memory() {
        for (name, devices, batch, length) in
            [("cola-350m", 2, 2, 512), ("cola-350m", 2, 4, 2048), ("cola-60m", 8, 8, 512)]
        {
            let model = presets::find(name).unwrap();
            let profile = profile::preset("a100-80gb").unwrap();
            let request = Request::new(model, profile, devices, batch, length);
            let smallest = Request { objective: Objective::Memory, ..request.clone() };
            let smallest = search(&smallest).best.expect("a plan");
            let memory_limit = MemoryLimit::Bytes(smallest.peak_arena());
            let fastest = search(&Request { memory_limit, ..request }).best.expect("a plan");
            let (fastest, smallest) = (fastest.time.0, smallest.time.0);
            assert!(fastest <= smallest * (1.0 + 1e-9), "{name}: {fastest}, not {smallest}");
        }
    }

    /// Contexts that are left when the time has passed are reported without an effort that grows with their square.
    #[test]
    fn a_search_of_very_many_contexts_can_be_interrupted() {
        let (devices, batch) = (720_720, 720_720);
        let model = presets::find("cola-60m").unwrap();
        let profile = profile::preset("a100-80gb").unwrap();
        let request = Request::new(model, profile, devices, batch, 512);
        let deadline = Deadline::after_checks(1);
        let report = search_until(&request, &deadline, &SearchCache::default()).report;
        assert!(report.contexts.len() > 50_000, "{}", report.contexts.len());
        assert_eq!(report.status, SearchStatus::TimeLimit);
    }

    /// A search that is stopped at once proves nothing, and leaves nothing in the cache that changes a later one.
    #[test]
    fn interrupted_searches_change_no_later_one() {
        let request = tight();
        let whole = search(&request);
        let outcome = |result: &SearchResult| {
            let plan = result.best.as_ref().map(|best| (best.time.0, best.plan.clone()));
            (plan, result.report.status, result.report.bound.0)
        };
        let cache = SearchCache::default();
        let stopped = search_until_stopped(&request, &cache, &Arc::new(AtomicBool::new(true)));
        assert_eq!(stopped.report.status, SearchStatus::TimeLimit);
        assert!(stopped.report.is_interrupted);
        for checks in [1, 8, 64, 512] {
            search_until(&request, &Deadline::after_checks(checks), &cache);
            let later = search_until_stopped(&request, &cache, &Arc::default());
            assert_eq!(outcome(&later), outcome(&whole), "after {checks} checks");
            assert!(!later.report.is_interrupted);
        }
    }

    /// A search that is stopped while it has bounds alone has no plan, and one that is interrupted then has one.
    #[test]
    fn an_interrupted_search_finds_a_first_plan() {
        let (model, profile) = (presets::find("llama-7b"), profile::preset("a100-80gb"));
        let request = Request::new(model.unwrap(), profile.unwrap(), 16, 16, 4096);
        let stop = Arc::new(AtomicBool::new(true));
        let stopped = search_until_stopped(&request, &SearchCache::default(), &stop);
        assert!(stopped.best.is_none() && stopped.report.is_interrupted);
        let interrupted = search_until_interrupted(&request, &SearchCache::default(), &stop);
        assert!(interrupted.best.is_some());
        let SearchReport { status, is_interrupted, .. } = interrupted.report;
        assert_eq!(is_interrupted, status == SearchStatus::TimeLimit);
    }

    /// The shortest time limit yields a plan where blocks divide evenly.
    #[test]
    fn a_search_without_time_returns_an_even_partition() {
        for (name, devices) in [("cola-1b", 8), ("llama-7b", 16)] {
            let request = Request::new(
                presets::find(name).unwrap(),
                profile::preset("a100-80gb").unwrap(),
                devices,
                16,
                4096,
            );
            let result =
                search_until(&request, &Deadline::after_checks(0), &SearchCache::default());
            assert_eq!(result.report.status, SearchStatus::TimeLimit, "{name}");
            assert!(result.best.is_some(), "{name}");
            assert!(result.report.gap > 0.0, "{name}");
        }
    }

    /// Requests that differ in everything that a cache depends on, each searched with one cache for all and alone.
    #[test]
    fn a_shared_cache_changes_no_result() {
        let model = presets::find("cola-60m").unwrap();
        let profile = profile::preset("a100-80gb-8").unwrap();
        let base = Request::new(model.clone(), profile.clone(), 4, 8, 1024);
        let mut slower_links = profile.file().clone();
        slower_links.links.inter_node.bandwidth_bytes_per_s /= 2.0;
        let mut slower_gemms = profile.file().clone();
        slower_gemms.gemm.memory_efficiency *= 0.9;
        let mut less_memory = profile.file().clone();
        less_memory.device.memory_bytes = less_memory.device.reserve.bytes + Bytes(2 << 30);
        let rules = Rules { recompute: Recompute::None, ..Rules::ALL };
        // Links between nodes are in the prices of the other axes.
        let two_nodes = Request { devices: 16, tensor: Some(8), ..base.clone() };
        let requests = [
            base.clone(),
            Request { global_batch: 16, ..base.clone() },
            Request { sequence_length: 512, ..base.clone() },
            two_nodes.clone(),
            Request { executor: Executor::Eager, ..base.clone() },
            Request { rules, ..base.clone() },
            Request { grouping: GroupingRule::Off, ..base.clone() },
            Request { model: Model { tied: true, ..model }, ..base.clone() },
            Request { profile: slower_links.resolve().unwrap(), ..two_nodes },
            Request { profile: slower_gemms.resolve().unwrap(), ..base.clone() },
            Request { profile: less_memory.resolve().unwrap(), ..base.clone() },
            Request { memory_limit: MemoryLimit::Bytes(Bytes(2 << 30)), ..base.clone() },
            Request { zero: Some(Zero::One), ..base.clone() },
            Request { overlap_grad_reduce: Some(false), ..base.clone() },
        ];
        let outcome = |result: &SearchResult| {
            let plan = result.best.as_ref().map(|best| (best.time.0, best.plan.clone()));
            let report = &result.report;
            (plan, report.status, report.bound.0, report.gap)
        };
        let alone: Vec<_> = requests.iter().map(|request| outcome(&search(request))).collect();
        let cache = SearchCache::default();
        for round in 0..2 {
            for index in 0..requests.len() {
                // Another order in the second round, in which most entries are known.
                let number = (index * 5 + round) % requests.len();
                let shared = search_with_cache(&requests[number], &cache);
                assert_eq!(outcome(&shared), alone[number], "round {round}, request {number}");
            }
        }
    }
}
