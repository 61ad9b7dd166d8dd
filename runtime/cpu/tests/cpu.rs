//! Random plans of the search space compute the function of the reference interpreter.

use narrows_plan::Precision;
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
