//! A search that its deadline interrupts claims no proof that it does not have.

use narrows_cost_model::profile;
use narrows_plan::Bytes;
use narrows_plan::model::presets;
use narrows_planner::{
    ContextOutcome, ContextReport, Deadline, MemoryLimit, Request, SearchStatus, search,
    search_until,
};

/// Memory so tight that even partitions do not fit and budgets are corrected often.
fn tight() -> Request {
    Request {
        tensor: Some(4),
        micro_batch: Some(4),
        memory_limit: MemoryLimit::Bytes(Bytes(18 << 30)),
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
        let result = search_until(&request, &Deadline::after_checks(checks));
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
            Some(best) if report.status == SearchStatus::Optimal => {
                assert!(best.time.0 <= time * (1.0 + 1e-9), "{case}");
            }
            Some(_) => {}
        }
        let not_reached = |c: &ContextReport| matches!(c.outcome, ContextOutcome::NotReached);
        interrupted += usize::from(report.contexts.iter().any(not_reached));
    }
    assert!(empty > 0 && interrupted > 0, "{empty} without a plan, {interrupted} interrupted");
}

/// Where blocks divide evenly, there is a plan however short the time.
#[test]
fn there_is_a_plan_when_time_is_short() {
    for (name, devices) in [("cola-1b", 8), ("llama-7b", 16)] {
        let request = Request::new(
            presets::find(name).unwrap(),
            profile::preset("a100-80gb").unwrap(),
            devices,
            16,
            4096,
        );
        let result = search_until(&request, &Deadline::after_checks(0));
        assert_eq!(result.report.status, SearchStatus::TimeLimit, "{name}");
        assert!(result.best.is_some(), "{name}");
        assert!(result.report.gap > 0.0, "{name}");
    }
}
