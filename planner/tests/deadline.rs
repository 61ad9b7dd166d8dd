//! Whatever place a deadline interrupts a search at, what was not found is not proved away.

use narrows_cost_model::profile;
use narrows_plan::Bytes;
use narrows_plan::model::presets;
use narrows_planner::{
    ContextOutcome, ContextReport, Deadline, MemoryLimit, Request, SearchStatus, search,
    search_until,
};

/// Memory is so tight that even divisions do not fit, and that arenas correct budgets often.
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
    for questions in (0..12).map(|power| 1 << power).chain([3, 6, 12, 24, 48]) {
        let found = search_until(&request, &Deadline::after_checks(questions));
        let report = &found.report;
        let what = format!("{questions} questions: {:?}", report.status);
        assert_ne!(report.status, SearchStatus::Infeasible, "{what}");
        assert!(!report.contexts.iter().any(ContextReport::is_proven_infeasible), "{what}");
        assert!(report.bound.0 <= time * (1.0 + 1e-9), "{what}: {}", report.bound);
        match &found.best {
            None => {
                assert_eq!(report.status, SearchStatus::TimeLimit, "{what}");
                empty += 1;
            }
            Some(best) if report.status == SearchStatus::Optimal => {
                assert!(best.time.0 <= time * (1.0 + 1e-9), "{what}");
            }
            Some(_) => {}
        }
        let not_reached = |c: &ContextReport| matches!(c.outcome, ContextOutcome::NotReached);
        interrupted += usize::from(report.contexts.iter().any(not_reached));
    }
    assert!(empty > 0 && interrupted > 0, "{empty} without a plan, {interrupted} interrupted");
}

/// Where blocks can be divided evenly, there is a plan however short the time is.
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
        let found = search_until(&request, &Deadline::after_checks(0));
        assert_eq!(found.report.status, SearchStatus::TimeLimit, "{name}");
        assert!(found.best.is_some(), "{name}");
        assert!(found.report.gap > 0.0, "{name}");
    }
}
