//! Whole programs, executed by the schedules of all devices through the shim, compute what the reference interpreter
//! does.
//!
//! The formats alternate: of two models that differ in tying the head only, one runs in f32 and the other in bf16.

use narrows_plan::Precision;
use narrows_test_support::conformance::{self, CASES};

use super::shim_engine;

/// Numbers of the models that run in the first level, among which every kind of block occurs in one of the formats.
const IN_F32: [usize; 7] = [0, 4, 6, 8, 12, 16, 18];
/// Emulated tensor cores take long.
const IN_BF16: [usize; 3] = [1, 9, 13];

#[test]
fn f32_programs_match_the_reference() {
    conformance::check_cases(Precision::Fp32, IN_F32, shim_engine::session);
}

#[test]
fn bf16_programs_match_the_reference() {
    conformance::check_cases(Precision::MixedBf16, IN_BF16, shim_engine::session);
}

#[test]
#[ignore = "second level: the other models in f32"]
fn f32_programs_of_the_other_models_match_the_reference() {
    let others = (0..CASES).step_by(2).filter(|number| !IN_F32.contains(number));
    conformance::check_cases(Precision::Fp32, others, shim_engine::session);
}

#[test]
#[ignore = "second level: the other models in bf16"]
fn bf16_programs_of_the_other_models_match_the_reference() {
    let others = (1..CASES).step_by(2).filter(|number| !IN_BF16.contains(number));
    conformance::check_cases(Precision::MixedBf16, others, shim_engine::session);
}
