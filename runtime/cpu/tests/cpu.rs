//! Every plan of the search space computes the same function as the reference interpreter.

use narrows_plan::Precision;
use narrows_test_support::conformance;

#[test]
fn drawn_plans_compute_what_the_reference_does() {
    let count = std::env::var("NARROWS_CPU_PLANS").ok().and_then(|count| count.parse().ok());
    conformance::walk(
        Precision::Full32,
        0..count.unwrap_or(conformance::CASES),
        |model, program| {
            Some(narrows_cpu::session(model, program, 1).unwrap_or_else(|error| panic!("{error}")))
        },
    );
}
