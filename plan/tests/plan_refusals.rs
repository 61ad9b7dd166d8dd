//! What a plan refuses before it is resolved against a model.

use narrows_plan::Plan;
use narrows_test_support::plans::{TestRng, draw_case, drawable_models};

/// Sets a field of a plan to a value.
type Edit = fn(&mut Plan, u64);

#[test]
fn sizes_out_of_range_are_refused_by_field() {
    let fields: [(&str, Edit); 7] = [
        ("mesh.tensor", |plan, size| plan.mesh.tensor = size),
        ("mesh.pipeline", |plan, size| plan.mesh.pipeline = size),
        ("mesh.data", |plan, size| plan.mesh.data = size),
        ("mesh.context", |plan, size| plan.mesh.context = size),
        ("workload.global_batch", |plan, size| plan.workload.global_batch = size),
        ("workload.sequence_length", |plan, size| plan.workload.sequence_length = size),
        ("workload.micro_batch", |plan, size| plan.workload.micro_batch = size),
    ];
    let drawn = draw_case(&mut TestRng::new(3), &drawable_models());
    assert!(drawn.plan.resolve(&drawn.model).is_ok());
    for (field, set) in fields {
        for size in [0, (1 << 24) + 1, u64::MAX] {
            let mut plan = drawn.plan.clone();
            set(&mut plan, size);
            let defects = plan.resolve(&drawn.model).expect_err("a size out of range");
            let problem = format!("{field}: {size} is not between 1 and 16777216");
            assert!(defects.to_string().contains(&problem), "{defects}");
        }
    }
}
