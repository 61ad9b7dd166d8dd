//! The memory that messages name: a lower bound on the memory needed, and a limit that is enough.

use narrows_cost_model::profile;
use narrows_plan::random::SplitMix64;
use narrows_plan::{Bytes, model};
use narrows_planner::{
    ContextOutcome, Infeasible, MemoryLimit, Request, SearchCache, SearchStatus, diagnose,
    search_with_cache,
};

#[test]
fn the_memory_that_is_said_to_be_needed_is_neither_too_much_nor_too_little() {
    check_needed_memory(4, 2);
}

/// As above, with more models and limits.
#[test]
#[ignore = "second level: takes a minute"]
fn the_memory_that_many_models_need_is_neither_too_much_nor_too_little() {
    check_needed_memory(20, 8);
}

/// Draws models, meshes and batches: the memory that is said to be needed is a bound, and the limit of the hint suffices.
/// Each is searched with `parts + 1` limits between the two.
fn check_needed_memory(draws: usize, parts: u64) {
    let mut random = SplitMix64::new(7);
    let mut below = |end: u64| random.next_u64() % end;
    let profile = profile::preset("a100-80gb").unwrap();
    let (mut found, mut refuted) = (0, 0);
    for _ in 0..draws {
        let (blocks, pipeline) = (3 + below(6), 1 + below(3));
        let text = format!(
            r#"{{"format": "narrows-model/1", "hidden": {}, "vocab": {}, "heads": 4, "d_ff": {},
                "blocks": {{"count": {blocks}, "default": {{"product": "plain",
                "all": {{"rank": 32, "activation": "silu"}}}}}}}}"#,
            128 * (1 + below(2)),
            512 << below(4),
            256 * (1 + below(3)),
        );
        let model = model::read("drawn.json", &text).unwrap();
        let devices = pipeline * (1 + below(2));
        let batch = devices * (1 + below(3));
        let limited = |limit: Bytes| Request {
            pipeline: Some(pipeline),
            memory_limit: MemoryLimit::Bytes(limit),
            ..Request::new(model.clone(), profile.clone(), devices, batch, 128)
        };
        let smallest = limited(Bytes(1 << 16));
        let cache = SearchCache::default();
        let report = search_with_cache(&smallest, &cache).report;
        assert_eq!(report.status, SearchStatus::Infeasible, "{text}");
        let needed = report.contexts.iter().filter_map(|context| match &context.outcome {
            ContextOutcome::Infeasible(Infeasible::Memory { needed, .. }) => Some(needed.0),
            _ => None,
        });
        let bound = needed.min().expect("some context needs more memory");
        let hints = diagnose(&smallest, &report, &cache).hints;
        let sufficient = hints.iter().find_map(|hint| {
            hint.strip_prefix("--memory-limit ")?.split(' ').next()?.parse::<u64>().ok()
        });
        let sufficient = sufficient.unwrap_or_else(|| panic!("no limit in {hints:?}"));
        assert!(bound <= sufficient, "{text}: at least {bound}, but {sufficient} is enough");
        for part in 0..=parts {
            let limit = bound - 1 + (sufficient + 1 - bound) * part / parts;
            let result = search_with_cache(&limited(Bytes(limit)), &cache);
            let case =
                format!("{limit} of {bound} to {sufficient} for {batch} × {devices}: {text}");
            match result.best {
                Some(best) => {
                    assert!(best.peak_arena().0 <= limit && part > 0, "{case}");
                    found += 1;
                }
                None => {
                    assert!(part < parts, "the hint's limit is not enough: {case}");
                    refuted += usize::from(result.report.status == SearchStatus::Infeasible);
                }
            }
        }
    }
    assert!(found >= draws && refuted >= draws, "{found} found, {refuted} refuted");
}
