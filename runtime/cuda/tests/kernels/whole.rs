//! Whole programs, every instruction as a device's tape has it, compute what the reference does.
//!
//! The cases take turns: of a model whose head is not tied one format is run, of the same one with a tied
//! head the other.

use narrows_plan::Precision;

use super::machine;
use narrows_test_support::conformance::{self, CASES};

#[test]
fn in_f32_they_are_the_reference() {
    conformance::walk(Precision::Full32, (0..CASES).step_by(2), machine::session);
}

#[test]
fn in_bf16_they_are_near_the_reference() {
    conformance::walk(Precision::MixedBf16, (1..CASES).step_by(2), machine::session);
}
