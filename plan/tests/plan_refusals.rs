//! What a plan refuses before it is resolved against a model.

use narrows_plan::{Context, ContextAttention, Mesh, Plan, Precision, Workload, Zero};
use narrows_test_support::plans::{TestRng, draw_case, draw_plan, drawable_models};

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

#[test]
fn pairs_of_microbatches_are_refused_where_they_overlap_nothing_or_do_not_divide() {
    let model = drawable_models().swap_remove(0);
    let context = Context::new(
        Mesh { tensor: 2, pipeline: 1, data: 2, context: 1 },
        Workload { global_batch: 8, sequence_length: 64, micro_batch: 2 },
        Precision::Fp32,
        Zero::Off,
    );
    let context = Context { overlap_microbatch_pairs: true, ..context };
    let mut rng = TestRng::new(4);
    let plan = (0..100).find_map(|_| draw_plan(&mut rng, &model, context)).expect("a plan");
    assert!(plan.resolve(&model).is_ok());
    let edits: [(Edit, &str); 4] = [
        (|plan, _| plan.mesh.tensor = 1, "without a tensor or a context axis"),
        (
            |plan, _| plan.workload.micro_batch = 4,
            "needs a multiple of 2 microbatches on each replica; a step has 1",
        ),
        (|plan, _| plan.overlap_tensor_collectives = true, "`overlap_tensor_collectives`"),
        (|plan, _| plan.zero = Zero::Two, "together with ZeRO-2"),
    ];
    for (edit, problem) in edits {
        let mut plan = plan.clone();
        edit(&mut plan, 0);
        let defects = plan.resolve(&model).expect_err("no pairs").to_string();
        assert!(
            defects.contains("overlap_microbatch_pairs: ") && defects.contains(problem),
            "{defects}"
        );
    }
}

#[test]
fn rings_are_refused_in_pairs_of_microbatches_and_within_sliding_windows() {
    let model = |window: &str| {
        let text = format!(
            r#"{{"format": "narrows-model/1", "hidden": 64, "vocab": 256, "heads": 4, "kv_heads": 4, "d_ff": 96,
            "blocks": {{"count": 2, "default": {{"product": "swiglu", "all": "dense"{window}}}}}}}"#
        );
        narrows_plan::model::read("ring.json", &text).expect("a model")
    };
    let context = Context {
        context_attention: ContextAttention::Ring,
        ..Context::new(
            Mesh { tensor: 1, pipeline: 1, data: 1, context: 2 },
            Workload { global_batch: 2, sequence_length: 16, micro_batch: 1 },
            Precision::Fp32,
            Zero::Off,
        )
    };
    let mut rng = TestRng::new(5);
    let plan = (0..100).find_map(|_| draw_plan(&mut rng, &model(""), context)).expect("a plan");
    assert!(plan.resolve(&model("")).is_ok());
    let pairs = Plan { overlap_microbatch_pairs: true, ..plan.clone() };
    let defects = pairs.resolve(&model("")).expect_err("pairs").to_string();
    assert!(defects.contains("the context_attention `ring`, whose transfers overlap"), "{defects}");
    let windowed = model(r#", "attention": {"sliding_window": 15}"#);
    let defects = plan.resolve(&windowed).expect_err("a window").to_string();
    assert!(defects.contains("a sliding window of 15 keys hides some of them"), "{defects}");
    let wide = model(r#", "attention": {"sliding_window": 16}"#);
    assert!(plan.resolve(&wide).is_ok());
}
