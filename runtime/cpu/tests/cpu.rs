//! Random plans of the search space compute the function of the reference interpreter.

use narrows_plan::program::GradientBucket;
use narrows_plan::{CheckedProgram, Precision, lower};
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

/// Collectives beside the backward pass come earlier in the order of instructions, and change no bit.
#[test]
fn overlapped_collectives_change_no_bit() {
    let (mut buckets, mut overlapped_gemms) = (0, 0);
    for case in conformance::cases(Precision::Fp32, 0..conformance::CASES) {
        if case.plan.mesh.data == 1 && case.plan.mesh.tensor == 1 {
            continue;
        }
        let mut weights_after = |overlaps: bool| {
            let mut plan = case.plan.clone();
            plan.overlap_grad_reduce = overlaps;
            plan.overlap_tensor_collectives = overlaps;
            let program = lower(&plan.resolve(&case.model).unwrap());
            let of_stages = program.stages.iter().flat_map(|stage| &stage.gradient_buckets);
            buckets +=
                of_stages.map(|bucket: &GradientBucket| bucket.reductions.len()).sum::<usize>();
            overlapped_gemms +=
                program.instructions().map(|instr| instr.overlapped_instrs).sum::<usize>();
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
        let (overlapped, after) = (weights_after(true), weights_after(false));
        assert!(overlapped == after, "{}", case.model.name);
    }
    assert!(buckets > 20 && overlapped_gemms > 20, "{buckets}, {overlapped_gemms}");
}
