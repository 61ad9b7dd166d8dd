//! Random plans of the search space compute the function of the reference interpreter.

use narrows_plan::program::GradientBucket;
use narrows_plan::{CheckedProgram, PipelineSchedule, Plan, Precision, Zero, lower};
use narrows_runtime::Optimizer;
use narrows_runtime::session::{StepInput, TensorKind};
use narrows_test_support::conformance;

#[test]
fn random_plans_agree_with_the_reference() {
    let count = std::env::var("NARROWS_CPU_PLANS").ok().and_then(|count| count.parse().ok());
    conformance::check_cases(
        Precision::Fp32,
        0..count.unwrap_or(conformance::CASES),
        |model, program| {
            Some(narrows_cpu::session(model, program, 1).unwrap_or_else(|error| panic!("{error}")))
        },
    );
}

/// Collectives during the backward pass come earlier in the order of instructions, and weight-gradient passes later.
/// Both change no bit.
#[test]
fn overlap_and_schedules_change_no_bit() {
    check_orders((0..conformance::CASES).step_by(3));
}

#[test]
#[ignore = "second level: six times as many plans"]
fn overlap_and_schedules_change_no_bit_in_more_plans() {
    check_orders((0..3 * conformance::CASES).filter(|number| number % 3 > 0));
}

/// Compares the weights after two steps of the cases with these numbers, with and without overlap and with each
/// schedule.
fn check_orders(numbers: impl Iterator<Item = usize>) {
    let (mut buckets, mut gather_buckets) = (0, 0);
    let (mut overlapped_gemms, mut deferred_gemms, mut paired) = (0, 0, 0);
    for case in conformance::cases(Precision::Fp32, numbers) {
        if case.plan.mesh.devices() == 1 {
            continue;
        }
        let plan_with = |overlaps: bool, schedule: PipelineSchedule| Plan {
            schedule,
            overlap_grad_reduce: overlaps,
            overlap_param_gather: overlaps,
            overlap_tensor_collectives: overlaps,
            overlap_microbatch_pairs: false,
            ..case.plan.clone()
        };
        let mut weights_after = |plan: Plan| {
            let program = lower(&plan.resolve(&case.model).unwrap());
            let of_stages = program.stages.iter().flat_map(|stage| &stage.gradient_buckets);
            buckets +=
                of_stages.map(|bucket: &GradientBucket| bucket.reductions.len()).sum::<usize>();
            let of_stages = program.stages.iter().flat_map(|stage| &stage.gather_buckets);
            gather_buckets += of_stages.count();
            overlapped_gemms +=
                program.instructions().map(|instr| instr.overlapped_instrs).sum::<usize>();
            let chunks = program.stages.iter().flat_map(|stage| &stage.chunks);
            deferred_gemms += chunks.map(|chunk| chunk.weight_gradient.len()).sum::<usize>();
            let program = CheckedProgram::check(program).unwrap();
            let mut session = narrows_cpu::session(&case.model, program, 1).unwrap();
            session.initialise(&case.model, 7).unwrap();
            let ids = (plan.workload.global_batch * plan.workload.sequence_length) as u32;
            let tokens: Vec<u32> = (0..ids).map(|id| id * 7 % case.model.vocab as u32).collect();
            let input = StepInput { tokens: &tokens, targets: &tokens };
            for _ in 0..2 {
                session.step(&Optimizer::new(1e-2, 0, 4), input).unwrap();
            }
            session.gather_tensors(TensorKind::Weights).unwrap()
        };
        // A plan with chunks divides its blocks among them.
        let has_chunks = case.plan.schedule.has_chunks();
        let schedules = PipelineSchedule::ALL.into_iter();
        let schedules: Vec<_> = schedules.filter(|s| s.has_chunks() == has_chunks).collect();
        let in_order = weights_after(plan_with(false, schedules[0]));
        let with_overlap = schedules.iter().map(|schedule| (true, *schedule));
        let without = schedules.iter().skip(1).map(|schedule| (false, *schedule));
        for (overlaps, schedule) in with_overlap.chain(without) {
            let weights = weights_after(plan_with(overlaps, schedule));
            assert!(weights == in_order, "{}: {overlaps}, {schedule:?}", case.model.name);
        }
        // Of plans that can run pairs of microbatches, few have an even number of them.
        let mut plan = Plan {
            zero: Zero::Off,
            shard_size: None,
            overlap_tensor_collectives: false,
            ..case.plan.clone()
        };
        plan.workload.global_batch *= 2;
        // Head and embedding of one stage add to the gradient of a tied weight in another order.
        let is_shared = case.model.tied && plan.mesh.pipeline == 1;
        if plan.context().unwrap().can_pair_microbatches() && !is_shared {
            paired += 1;
            let [alone, in_pairs] = [false, true].map(|overlap_microbatch_pairs| {
                weights_after(Plan { overlap_microbatch_pairs, ..plan.clone() })
            });
            assert!(in_pairs == alone, "{} in pairs of microbatches", case.model.name);
        }
    }
    assert!(buckets > 20 && overlapped_gemms > 20, "{buckets}, {overlapped_gemms}");
    assert!(paired > 2, "{paired} plans in pairs of microbatches");
    assert!(deferred_gemms > 20 && gather_buckets > 20, "{deferred_gemms}, {gather_buckets}");
}
