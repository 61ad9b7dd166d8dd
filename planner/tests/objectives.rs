//! The objectives of least memory and of least cost, compared with searches for the fastest plan.

use std::time::Duration;

use narrows_cost_model::profile;
use narrows_plan::model::{self, presets};
use narrows_plan::random::SplitMix64;
use narrows_plan::strategy::{Baseline, Recompute, Rules, WeightRule};
use narrows_plan::{Bytes, PipelineSchedule, Zero};
use narrows_planner::{
    FeasiblePlan, MemoryLimit, Objective, Request, SearchCache, SearchResult, SearchStatus, search,
    search_with_cache,
};

fn request(model: &str, devices: u64, batch: u64, length: u64) -> Request {
    let model = presets::find(model).unwrap();
    Request::new(model, profile::preset("a100-80gb").unwrap(), devices, batch, length)
}

fn device_seconds(result: &SearchResult) -> Option<f64> {
    let best = result.best.as_ref()?;
    Some(best.time.0 * best.decisions.context.mesh.devices() as f64)
}

/// The least over separate searches for every number of devices.
#[test]
fn the_least_cost_is_that_of_the_best_number_of_devices() {
    let tiny = request("cola-tiny", 6, 6, 128);
    let cases = [
        tiny.clone(),
        Request { pipeline: Some(2), ..tiny.clone() },
        Request { zero: Some(Zero::One), tensor: Some(2), ..tiny.clone() },
        // On fewer devices, more must be recomputed.
        Request {
            memory_limit: MemoryLimit::Bytes(Bytes(4 << 30)),
            ..request("cola-350m", 8, 8, 2048)
        },
    ];
    let mut numbers = vec![];
    for case in cases {
        let cheapest = search(&Request { objective: Objective::Cost, ..case.clone() });
        let found = device_seconds(&cheapest).expect("some number of devices has a plan");
        let every = (1..=case.devices).filter_map(|devices| {
            let fastest = search(&Request { devices, ..case.clone() });
            device_seconds(&fastest)
        });
        let least = every.fold(f64::INFINITY, f64::min);
        let report = &cheapest.report;
        let context = cheapest.best.as_ref().unwrap().decisions.context;
        let label = format!("{} of {} devices: {:?}", context.mesh, case.devices, report.status);
        assert!((found - least).abs() <= 1e-9 * least, "{label}: {found}, not {least}");
        assert_eq!(report.objective, Objective::Cost);
        assert!(report.objective_bound <= found * (1.0 + 1e-9), "{label}");
        let gap = (found - report.objective_bound) / found;
        assert!((report.gap - gap).abs() < 1e-6, "{label}: {} is not {gap}", report.gap);
        numbers.push(context.mesh.devices());
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert!(numbers.len() > 1, "only {numbers:?} devices");
}

/// Bounds in device-seconds hold for every number of devices, also where time ran out.
#[test]
fn no_number_of_devices_beats_the_bound_on_the_cost() {
    let case = request("cola-60m", 12, 12, 1024);
    let cost = Request { objective: Objective::Cost, ..case.clone() };
    let limited = Request { time_limit: Some(Duration::from_millis(1)), ..cost.clone() };
    let bounds = [search(&cost), search(&limited)].map(|result| result.report.objective_bound);
    for devices in [1, 2, 3, 4, 6, 8, 12] {
        let fastest = search(&Request { devices, ..case.clone() });
        let cost = device_seconds(&fastest).expect("a plan");
        assert!(bounds.iter().all(|bound| *bound <= cost * (1.0 + 1e-9)), "{devices} devices");
    }
}

#[test]
fn the_least_memory_is_never_more_than_that_of_a_plan_within_a_limit() {
    check_least_memory(2, 4);
}

/// As above, with more models and limits.
#[test]
#[ignore = "second level: takes minutes"]
fn the_least_memory_of_many_models_is_never_more_than_that_of_a_plan_within_a_limit() {
    check_least_memory(8, 5);
}

/// Draws models, devices, batches and memory limits: no plan found within a limit needs less than the least memory, nor
/// is one of equal memory faster.
fn check_least_memory(draws: usize, limits: usize) {
    let mut random = SplitMix64::new(11);
    let mut below = |end: u64| random.next_u64() % end;
    let profile = profile::preset("a100-80gb").unwrap();
    let mut found = 0;
    for _ in 0..draws {
        let text = format!(
            r#"{{"format": "narrows-model/1", "hidden": {}, "vocab": {}, "heads": 4, "d_ff": {},
                "blocks": {{"count": {}, "default": {{"product": "plain",
                "all": {{"rank": {}, "activation": "silu"}}}}}}}}"#,
            128 * (1 + below(2)),
            512 << below(4),
            256 * (1 + below(3)),
            2 + below(5),
            32 << below(2),
        );
        let model = model::read("drawn.json", &text).unwrap();
        let devices = 1 + below(4);
        let batch = devices * (1 + below(3));
        let request = Request::new(model, profile.clone(), devices, batch, 128 << below(3));
        let cache = SearchCache::default();
        let smallest = Request { objective: Objective::Memory, ..request.clone() };
        let smallest = search_with_cache(&smallest, &cache);
        let least = smallest.best.as_ref().expect("a plan").peak_arena();
        let bound = smallest.report.objective_bound;
        assert!(bound <= least.as_f64(), "{text}: {bound} is more than {least}");
        assert_eq!(smallest.report.objective, Objective::Memory);
        // Up to a third more memory, and a little less than the least.
        for _ in 0..limits {
            let limit = Bytes(least.0 / 50 * (49 + below(17)) + below(least.0 / 50));
            let limited = Request { memory_limit: MemoryLimit::Bytes(limit), ..request.clone() };
            if let Some(plan) = search_with_cache(&limited, &cache).best {
                let peak = plan.peak_arena();
                assert!(peak >= least, "{peak} within {limit}, not {least}: {text}");
                let time = smallest.best.as_ref().unwrap().time;
                assert!(peak > least || plan.time.0 >= time.0 * (1.0 - 1e-9), "{text}");
                found += 1;
            }
        }
    }
    assert!(found >= draws * limits / 3, "{found} plans");
}

/// Restricted searches find no smaller plan, and none of equal memory that is faster.
#[test]
fn no_restriction_leads_to_less_memory() {
    check_restrictions(request("cola-tiny", 2, 2, 128));
}

#[test]
#[ignore = "second level: a larger model"]
fn no_restriction_leads_to_less_memory_for_a_larger_model() {
    check_restrictions(request("cola-60m", 2, 2, 512));
}

fn check_restrictions(request: Request) {
    let case = Request { objective: Objective::Memory, ..request };
    let mut compared = 0;
    let free = search(&case).best.expect("a plan");
    let key = |plan: &FeasiblePlan| (plan.peak_arena(), plan.time.0 * (1.0 + 1e-9));
    for restricted in [
        Request { rules: Rules { recompute: Recompute::Block, ..Rules::ALL }, ..case.clone() },
        Request { rules: Rules { weights: WeightRule::Sharded, ..Rules::ALL }, ..case.clone() },
        Request { rules: Rules { baseline: Baseline::Btp, ..Rules::ALL }, ..case.clone() },
        Request { overlap_tensor_collectives: false, ..case.clone() },
        Request { schedule: Some(PipelineSchedule::ZeroBubble), pipeline: Some(2), ..case.clone() },
    ] {
        let label = format!("{:?}, schedule {:?}", restricted.rules, restricted.schedule);
        let Some(plan) = search(&restricted).best else { continue };
        compared += 1;
        assert!(key(&plan) >= (free.peak_arena(), free.time.0), "{label}: {}", plan.peak_arena());
    }
    assert!(compared >= 4, "only {compared} restrictions have plans");
}

/// A limit below the least memory has no plan; the report of a search for the least memory says why.
#[test]
fn least_memory_respects_the_limit() {
    let case = request("cola-tiny", 2, 4, 128);
    let smallest = |memory_limit| {
        search(&Request { objective: Objective::Memory, memory_limit, ..case.clone() })
    };
    let free = smallest(MemoryLimit::None);
    let least = free.best.expect("a plan").peak_arena();
    let same = smallest(MemoryLimit::Bytes(least)).best.expect("a plan");
    assert_eq!(same.peak_arena(), least);
    let below = smallest(MemoryLimit::Bytes(Bytes(1 << 20)));
    assert!(below.best.is_none());
    assert_eq!(below.report.status, SearchStatus::Infeasible);
}

/// A search within the least memory finds a plan: heads that keep little are not always the smallest, and plans that fit may lie
/// beside the fewest bytes of every mesh.
#[test]
fn a_search_within_the_least_memory_has_a_plan() {
    let one_stage = |request: Request| Request { pipeline: Some(1), ..request };
    let cola = one_stage(request("cola-60m", 4, 6, 512));
    let rules = Rules { recompute: Recompute::None, ..cola.rules };
    let cases = [
        Request { micro_batch: Some(1), rules, ..cola },
        Request { zero: Some(Zero::Two), ..one_stage(request("llama-60m", 4, 12, 2048)) },
        one_stage(request("dlr-60m", 2, 6, 512)),
        Request { micro_batch: Some(4), ..one_stage(request("llama-60m", 4, 4, 1024)) },
        Request { micro_batch: Some(4), ..one_stage(request("llama-130m", 4, 16, 2048)) },
        Request { micro_batch: Some(4), pipeline: Some(2), ..request("llama-60m", 8, 64, 256) },
    ];
    for case in cases {
        let least = Request { objective: Objective::Memory, ..case.clone() };
        let least = search(&least).best.expect("a plan").peak_arena();
        let within = Request { memory_limit: MemoryLimit::Bytes(least), ..case };
        let best = search(&within).best.expect("the plan with the least memory fits");
        assert!(best.peak_arena() <= least);
    }
}

#[test]
fn objectives_have_one_result() {
    check_one_result(&request("cola-tiny", 2, 4, 128));
}

#[test]
#[ignore = "second level: more devices and a larger model"]
fn objectives_have_one_result_for_larger_requests() {
    check_one_result(&request("cola-tiny", 4, 4, 128));
    check_one_result(&request("cola-60m", 4, 4, 512));
}

/// Results depend neither on the number of threads nor on a cache that other searches filled.
fn check_one_result(case: &Request) {
    let cache = SearchCache::default();
    let mut smallest = None;
    for objective in Objective::ALL {
        let request = Request { objective, ..case.clone() };
        let outcome = |result: &SearchResult| {
            let best = result.best.as_ref().expect("a plan");
            let report = &result.report;
            (best.time.0, best.plan.clone(), report.status, report.gap, report.objective_bound)
        };
        let on_threads = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            outcome(&pool.install(|| search(&request)))
        };
        let alone = on_threads(1);
        assert_eq!(on_threads(8), alone, "{objective:?}");
        assert_eq!(outcome(&search_with_cache(&request, &cache)), alone, "{objective:?}");
        if objective == Objective::Memory {
            smallest = Some((request, alone));
        } else if let Some((request, alone)) = &smallest {
            // The search for the least cost filled the cache too.
            assert_eq!(outcome(&search_with_cache(request, &cache)), *alone, "{objective:?}");
        }
    }
}

/// The shortest time limit yields a plan, and proves nothing that the whole search refutes.
#[test]
fn objectives_keep_time_limits() {
    let case = request("cola-60m", 2, 4, 512);
    for objective in [Objective::Memory, Objective::Cost] {
        let value = |result: &SearchResult| match objective {
            Objective::Memory => result.best.as_ref().unwrap().peak_arena().as_f64(),
            _ => device_seconds(result).unwrap(),
        };
        let whole = Request { objective, ..case.clone() };
        let limited = Request { time_limit: Some(Duration::from_millis(1)), ..whole.clone() };
        let (whole, limited) = (search(&whole), search(&limited));
        assert_eq!(limited.report.status, SearchStatus::TimeLimit, "{objective:?}");
        assert!(value(&limited) >= value(&whole), "{objective:?}");
        assert!(limited.report.objective_bound <= value(&whole), "{objective:?}");
    }
}

/// Smaller plans that only restricted rules lead to are found in every space.
#[test]
#[ignore = "second level: takes a minute"]
fn no_schedule_leads_to_less_memory() {
    let text = r#"{"format": "narrows-model/1", "hidden": 256, "vocab": 4096, "heads": 8, "d_ff": 768,
        "blocks": {"count": 4, "default": {"product": "plain", "all": {"rank": 64, "activation": "silu",
        "crossing": {"form": "released", "gate": "identity"}}}}}"#;
    let model = model::read("drawn.json", text).unwrap();
    let any = Request {
        objective: Objective::Memory,
        tensor: Some(2),
        pipeline: Some(2),
        micro_batch: Some(1),
        ..Request::new(model, profile::preset("cpu-local").unwrap(), 8, 8, 256)
    };
    let least = |schedule| {
        let request = Request { schedule, ..any.clone() };
        search(&request).best.expect("a plan").peak_arena()
    };
    use PipelineSchedule::{Interleaved, OneForwardOneBackward, ZeroBubble};
    let least_of_all = least(None);
    for schedule in [OneForwardOneBackward, ZeroBubble, Interleaved] {
        assert!(least_of_all <= least(Some(schedule)), "{schedule:?}");
    }
}
