//! The list of cases that every backend is held against the reference in: some of it on the stand-ins, whose time is
//! a processor's; on a GPU a case of every model.

use std::time::Duration;

use narrows_plan::Precision;

use super::devices;
use super::support::{each, folder, options};
use narrows_test_support::conformance::{Case, Deviation, cases_on};

/// GPUs of the stand-ins.
const STAND_INS: u64 = 4;

/// Of the stand-ins' models, every so many are run in one precision.
const EVERY: usize = 5;

fn hold(case: &Case) -> Deviation {
    let folder = folder();
    let offs = each(
        (&case.model, &case.plan),
        Duration::from_secs(120),
        |rank| options(&folder, devices::ordinal(rank), false),
        |session, _| case.hold(&mut session.unwrap_or_else(|error| panic!("{error}"))),
    );
    joined(offs)
}

fn joined(offs: impl IntoIterator<Item = Deviation>) -> Deviation {
    offs.into_iter().fold(Deviation::default(), |mut worst, off| {
        worst.join(off);
        worst
    })
}

fn walk(test: &str, precision: Precision, first: usize) {
    // On this machine's GPUs the cases are those that fit on them.
    let wanted = if devices::real() { 1 } else { STAND_INS };
    devices::seeded(test, 1, wanted, |_| {
        let cases = cases_on(precision, devices::devices_max());
        let (first, every) = if devices::real() { (0, 1) } else { (first, EVERY) };
        let offs: Vec<Deviation> = cases.iter().skip(first).step_by(every).map(hold).collect();
        assert!(!offs.is_empty());
        println!("{} programs: {}", offs.len(), joined(offs));
    });
}

#[test]
fn in_f32_they_are_the_reference() {
    walk("walk::in_f32_they_are_the_reference", Precision::Full32, 0);
}

#[test]
fn in_bf16_they_are_near_the_reference() {
    walk("walk::in_bf16_they_are_near_the_reference", Precision::MixedBf16, 2);
}
