//! Results and effort of a search on several numbers of threads.

use narrows_cost_model::profile;
use narrows_plan::Bytes;
use narrows_plan::model::presets;
use narrows_planner::{MemoryLimit, Request, search};

#[test]
fn the_effort_of_a_search_does_not_depend_on_threads() {
    check_threads(&[8]);
}

#[test]
#[ignore = "second level: three times as many searches on several threads"]
fn the_effort_of_repeated_searches_does_not_depend_on_threads() {
    check_threads(&[2, 8, 8]);
}

/// Compares searches on these numbers of threads with searches on one thread.
fn check_threads(numbers: &[usize]) {
    for (model, hardware, devices, batch, limit) in [
        ("cola-1b", "a100-80gb", 8, 16, MemoryLimit::Auto),
        ("llama-60m", "a100-80gb-8", 12, 24, MemoryLimit::Auto),
        ("cola-350m", "a100-40gb", 4, 4, MemoryLimit::Bytes(Bytes(2_603_380_147))),
    ] {
        let model = presets::find(model).unwrap();
        let profile = profile::preset(hardware).unwrap();
        let memory_limit = limit;
        let request =
            Request { memory_limit, ..Request::new(model, profile, devices, batch, 1024) };
        let outcome = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let result = pool.install(|| search(&request));
            let report = result.report;
            let plan = result.best.expect("a plan");
            (
                report.candidates_priced,
                report.segment_solves,
                report.bound.0,
                plan.time.0,
                plan.plan,
            )
        };
        let alone = outcome(1);
        for threads in numbers {
            assert_eq!(outcome(*threads), alone, "{threads} threads");
        }
    }
}
