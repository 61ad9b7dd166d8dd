//! Every plan of the search space lowers to a program that the check accepts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use narrows_plan::model::{GatedProduct, presets};
use narrows_plan::program::{Action, BufferRole, FusedOp, Instr, Phase, Program};
use narrows_plan::strategy::Strategy;
use narrows_plan::{CheckedProgram, Context, Mesh, Precision, Workload, Zero, lower};
use narrows_test_support::plans::{TestRng, draw_case, draw_plan, drawable_models, to_json};

fn count() -> usize {
    std::env::var("NARROWS_CHECK_PLANS").ok().and_then(|n| n.parse().ok()).unwrap_or(400)
}

#[test]
fn programs_of_drawn_plans_pass_the_check() {
    let models = drawable_models();
    let mut rng = TestRng::new(1);
    let mut strategies = BTreeMap::from(Strategy::ALL.map(|strategy| (strategy, 0)));
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for index in 0..count() {
        let drawn = draw_case(&mut rng, &models);
        let program = drawn.program();
        if let Err(errors) = CheckedProgram::check(program.clone()) {
            panic!("plan {index}:\n{errors}\n{}\n{program}", to_json(&drawn.plan));
        }
        let ops = drawn.plan.blocks.values().flat_map(|block| block.ops.iter());
        for (_, strategy) in ops.chain(&drawn.plan.embedding.ops).chain(&drawn.plan.head.ops) {
            *strategies.get_mut(strategy).expect("Strategy::ALL has all strategies") += 1;
        }
        let (mesh, stages) = (drawn.plan.mesh, &drawn.plan.stages);
        for (name, occurs) in [
            ("tied", drawn.model.tied),
            ("tied over stages", drawn.model.tied && mesh.pipeline > 1),
            ("ZeRO-1 over replicas", mesh.replicas() > 1 && drawn.plan.zero == Zero::One),
            ("ZeRO-2 over replicas", mesh.replicas() > 1 && drawn.plan.zero == Zero::Two),
            ("ZeRO-3 over replicas", mesh.replicas() > 1 && drawn.plan.zero == Zero::Three),
            ("shard groups", drawn.plan.shard_size.is_some()),
            ("rounded gradients", is_rounded(&program)),
            ("rounded gradients in buckets", is_rounded_in_buckets(&program)),
            ("gathers in forward passes", has_gather_buckets(&program)),
            ("gathered keys", program.context.gathers_keys() && mesh.tensor == 1),
            ("gathered keys and tensor axis", program.context.gathers_keys() && mesh.tensor > 1),
            ("ring attention", program.context.rotates_keys() && mesh.tensor == 1),
            ("ring attention and tensor axis", program.context.rotates_keys() && mesh.tensor > 1),
            ("context axis", mesh.context > 1 && mesh.tensor == 1),
            ("context and tensor axes", mesh.context > 1 && mesh.tensor > 1),
            ("pairs of microbatches", program.context.overlap_microbatch_pairs),
            ("three stages", mesh.pipeline == 3),
            ("eight devices", mesh.tensor == 8),
            ("first stage without blocks", stages[0].runs.is_empty()),
            ("last stage without blocks", stages[stages.len() - 1].runs.is_empty()),
        ] {
            *counts.entry(name).or_default() += u64::from(occurs);
        }
    }
    println!("{strategies:?} {counts:?}");
    // The drawn plans must cover the space.
    assert!(strategies.values().all(|n| *n > 5), "{strategies:?}");
    assert!(counts.values().all(|n| *n > 5), "{counts:?}");
    let blocks = || models.iter().flat_map(|model| &model.blocks);
    for product in GatedProduct::ALL {
        assert!(blocks().any(|block| block.product == product), "{product:?}");
    }
}

fn is_cast(instr: &Instr) -> bool {
    instr.action == Action::Fused(FusedOp::Cast)
}

fn is_rounded(program: &Program) -> bool {
    program.instructions().any(is_cast)
}

fn is_rounded_in_buckets(program: &Program) -> bool {
    program.stages.iter().any(|stage| stage.step[..stage.bucket_reductions()].iter().any(is_cast))
}

fn has_gather_buckets(program: &Program) -> bool {
    program.stages.iter().any(|stage| !stage.gather_buckets.is_empty())
}

fn large() -> Program {
    let model = presets::find("cola-7b").expect("a preset");
    let context = Context::new(
        Mesh { tensor: 4, pipeline: 1, data: 2, context: 1 },
        Workload { global_batch: 32, sequence_length: 4096, micro_batch: 4 },
        Precision::MixedBf16,
        Zero::One,
    );
    let mut rng = TestRng::new(7);
    let plan = (0..50).find_map(|_| draw_plan(&mut rng, &model, context)).expect("a plan");
    narrows_plan::lower(&plan.resolve(&model).expect("it resolves"))
}

#[test]
fn a_large_program_is_checked_within_a_second() {
    let program = large();
    let instructions: usize = program.instructions().count();
    let fastest = (0..3)
        .map(|_| {
            let copy = program.clone();
            let start = Instant::now();
            CheckedProgram::check(copy).unwrap_or_else(|errors| panic!("{errors}"));
            start.elapsed()
        })
        .min()
        .expect("three runs");
    println!("{instructions} instructions in {fastest:?}");
    // A release build takes a few milliseconds; the bound allows for a busy machine.
    assert!(fastest.as_millis() < 1000, "{fastest:?}");
}

/// The first error of the large program after a change.
fn first_error(change: impl Fn(&mut Program)) -> String {
    let mut program = large();
    change(&mut program);
    let errors = CheckedProgram::check(program).expect_err("an invalid program");
    errors.to_string().lines().next().unwrap_or_default().to_string()
}

#[test]
fn errors_name_place_and_reason() {
    let first_all_reduce = |program: &Program| {
        program.stages[0].chunks[0]
            .forward
            .iter()
            .position(|instr| instr.action.name() == "all_reduce")
            .expect("the program has an all-reduce")
    };
    let doubled = first_error(|program| {
        let at = first_all_reduce(program);
        let again = program.stages[0].chunks[0].forward[at].clone();
        program.stages[0].chunks[0].forward.insert(at, again);
    });
    for part in ["stage 0, forward instruction", "which is whole already", "4 times", "(try: "] {
        assert!(doubled.contains(part), "{part}: {doubled}");
    }
    let removed = first_error(|program| {
        let at = first_all_reduce(program);
        program.stages[0].chunks[0].forward.remove(at);
    });
    assert!(removed.contains("each device has only a partial sum"), "{removed}");
    let outside = first_error(|program| program.stages[0].arena.0 /= 2);
    assert!(outside.contains("ends outside the arena"), "{outside}");
    println!("{doubled}\n{removed}\n{outside}");
}

/// With a tensor axis, a gather of sharded weights overlaps with all collectives of a block's pass, which overlap with
/// computation in turn. It may not overlap with a part of such a group, nor with a collective on its own stream.
#[test]
fn collectives_over_the_data_axis_overlap_with_those_over_others() {
    let model = presets::find("cola-tiny").unwrap();
    let mesh = Mesh { tensor: 2, pipeline: 1, data: 2, context: 1 };
    let workload = Workload { global_batch: 4, sequence_length: 64, micro_batch: 2 };
    let context = Context {
        overlap_grad_reduce: true,
        overlap_tensor_collectives: true,
        ..Context::new(mesh, workload, Precision::Fp32, Zero::Three)
    };
    let plan = draw_plan(&mut TestRng::new(3), &model, context).unwrap();
    let program = lower(&plan.resolve(&model).unwrap());
    let backward = &program.stages[0].chunks[0].backward;
    let first = backward.iter().position(Instr::overlaps_collectives).expect("a gather");
    let beside = |first: usize| first + 1..=first + backward[first].overlapped_instrs;
    // A gather and a reduction, and an activation gradient's collective with a GEMM beside them.
    let (first, [next, inner]) = (first..backward.len())
        .filter(|at| backward[*at].overlaps_collectives())
        .find_map(|first| {
            let next = backward[first].collectives_in_sequence(&backward[first + 1..]);
            let overlapped = |at: &usize| *at > first + next && backward[*at].overlapped_instrs > 0;
            let inner = beside(first).find(overlapped).filter(|_| next > 0)?;
            Some((first, [first + next, inner]))
        })
        .expect("a block with collectives of both kinds");
    assert!(CheckedProgram::check(program.clone()).is_ok());
    let error = |at: usize, overlapped_instrs: usize| {
        let mut program = program.clone();
        program.stages[0].chunks[0].backward[at].overlapped_instrs = overlapped_instrs;
        CheckedProgram::check(program).expect_err("a program with a race").to_string()
    };
    let divided = error(next, inner - next);
    assert!(divided.contains("but not with all that overlaps with it"), "{divided}");
    let unordered = error(first, backward[first].overlapped_instrs - 1);
    assert!(unordered.contains("which is communication too"), "{unordered}");
}

/// Plans may be resolved without the planner, so resolution checks the limit.
#[test]
fn sequences_longer_than_the_model_supports_are_refused() {
    let mut model = presets::find("cola-tiny").unwrap();
    let mesh = Mesh { tensor: 2, pipeline: 1, data: 1, context: 1 };
    let workload = Workload { global_batch: 2, sequence_length: 64, micro_batch: 2 };
    let context = Context::new(mesh, workload, Precision::Fp32, Zero::Off);
    let plan = draw_plan(&mut TestRng::new(3), &model, context).unwrap();
    model.max_sequence_length = 64;
    plan.resolve(&model).unwrap();
    model.max_sequence_length = 63;
    let defects = plan.resolve(&model).unwrap_err();
    assert_eq!(defects.0.len(), 1);
    assert_eq!(defects.0[0].field, "workload.sequence_length");
    assert!(defects.to_string().contains("64 tokens are more than the 63"), "{defects}");
}

/// A forward pass reads weights, ids, and what it has written itself: forward passes alone, without the passes between them,
/// compute the loss of a step.
#[test]
fn forward_passes_read_nothing_of_other_passes() {
    let models = drawable_models();
    let mut rng = TestRng::new(2);
    for index in 0..count() / 2 {
        let drawn = draw_case(&mut rng, &models);
        let program = drawn.program();
        for stage in &program.stages {
            for at in stage.chunk_phases().filter(|at| at.phase == Phase::Forward) {
                let mut written = BTreeSet::new();
                for instr in stage.instructions(at) {
                    for access in &instr.reads {
                        let role = stage.buffer(access.buffer).role;
                        let is_given = matches!(
                            role,
                            BufferRole::Weight | BufferRole::Tokens | BufferRole::Targets
                        );
                        assert!(
                            is_given || written.contains(&access.buffer.0),
                            "plan {index}: {} reads {role:?} {}\n{}",
                            instr.origin,
                            access.buffer.0,
                            to_json(&drawn.plan)
                        );
                    }
                    written.extend(instr.writes.iter().map(|access| access.buffer.0));
                }
            }
        }
    }
}
