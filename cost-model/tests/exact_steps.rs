//! Prices of exact steps of LORO.

use std::num::NonZeroU64;

use narrows_cost_model::profile::{self, HostSpec, Provenance, ProvenanceKind};
use narrows_cost_model::{ExactStepTime, Profile};
use narrows_plan::model::presets;
use narrows_plan::program::{Program, StageProgram};
use narrows_plan::{Bytes, Context, Mesh, Precision, Workload, Zero, lower};
use narrows_test_support::plans::{TestRng, draw_plan};

/// A program of svd-60m with exact steps every 500 steps.
fn program(mesh: Mesh, zero: Zero) -> Program {
    let model = presets::find("svd-60m").unwrap();
    let workload = Workload { global_batch: 8, sequence_length: 64, micro_batch: 1 };
    let loro_every = NonZeroU64::new(500);
    let context =
        Context { loro_every, ..Context::new(mesh, workload, Precision::MixedBf16, zero) };
    let mut rng = TestRng::new(1);
    let plan = (0..50).find_map(|_| draw_plan(&mut rng, &model, context)).expect("a plan");
    lower(&plan.resolve(&model).unwrap())
}

fn mesh(tensor: u64, pipeline: u64, data: u64) -> Mesh {
    Mesh { tensor, context: 1, pipeline, data }
}

/// A profile whose host needs no time but for what is given.
fn with_host(threads: u64, [flops, copy, network]: [f64; 3]) -> Profile {
    let mut file = profile::preset("a100-80gb").unwrap().file().clone();
    file.host = Some(HostSpec {
        threads_per_device: threads,
        flops_per_s: flops,
        copy_bytes_per_s: copy,
        network_bytes_per_s: network,
        provenance: Provenance {
            kind: ProvenanceKind::Measured,
            source: "test".into(),
            date: "2026-11-27".into(),
            assumed: vec![],
        },
    });
    file.resolve().unwrap()
}

const FAST: f64 = 1e16;

fn close(actual: f64, expected: f64) -> bool {
    (actual / expected - 1.0).abs() < 1e-4
}

#[test]
fn decompositions_are_spread_over_threads_and_devices() {
    // Eight blocks with four pairs of 512 to 512, and three of 512 and 1376, of rank 128.
    let flops = |d_in: f64, d_out: f64| {
        (21.0 * d_in + 17.0 * d_out) * 128.0_f64.powi(2) + 130.0 / 3.0 * 128.0_f64.powi(3)
    };
    let (narrow, wide) = (flops(512.0, 512.0), flops(1376.0, 512.0));
    let block = 4.0 * narrow + 2.0 * flops(512.0, 1376.0) + wide;
    let time = |mesh, threads| {
        let profile = with_host(threads, [1e9, FAST, FAST]);
        ExactStepTime::of(&program(mesh, Zero::Off), &profile).unwrap()
    };
    let one = time(mesh(1, 1, 1), 1);
    assert!(close(one.flops.0, 8.0 * block), "{one:?}");
    assert!(close(one.time.0, 8.0 * block / 1e9), "{one:?}");
    assert_eq!((one.every, one.rates), (500, ProvenanceKind::Measured));
    assert!(close(one.per_step().0 * 500.0, one.time.0));
    // Two blocks at once, in the time of the longest pair.
    let waves = |blocks: usize| blocks.div_ceil(2) as f64 * wide / 1e9;
    assert!(close(time(mesh(1, 1, 1), 64).time.0, waves(8)));
    // Both stages at the same time, of which the longer one counts.
    let pairs = |stage: &StageProgram| stage.exact_step.pairs.len() / 7;
    let blocks = program(mesh(1, 2, 1), Zero::Off).stages.iter().map(pairs).max().unwrap();
    assert!(blocks < 8 && close(time(mesh(1, 2, 1), 64).time.0, waves(blocks)));
    // All blocks at once: each of eight devices has seven pairs.
    let eight = time(mesh(2, 1, 4), 1).time.0;
    assert!(eight > block / 1e9 && eight < 7.0 * wide / 1e9, "{eight}");
}

#[test]
fn copies_and_sums_count_the_bytes_of_a_device() {
    // Elements of all pairs.
    let elements = 8.0 * 128.0 * (4.0 * 1024.0 + 3.0 * (512.0 + 1376.0));
    let step =
        |mesh, zero, rates| ExactStepTime::of(&program(mesh, zero), &with_host(1, rates)).unwrap();
    // Master copies and both moments leave the device; weights in bf16 and master copies return.
    let copied = step(mesh(1, 1, 1), Zero::Off, [FAST, 1e9, FAST]);
    assert_eq!(copied.copied, Bytes((elements * 18.0) as u64));
    assert!(close(copied.time.0, elements * 18.0 / 1e9), "{copied:?}");
    // With ZeRO-3, each replica copies its part.
    let part = step(mesh(1, 1, 4), Zero::Three, [FAST, 1e9, FAST]);
    assert!(close(part.time.0, elements * 18.0 / 4.0 / 1e9), "{part:?}");
    assert_eq!(part.copied, copied.copied);
    // Factors and directions over two replicas with ZeRO, and new factors also without.
    for (zero, bytes) in [(Zero::Off, 4.0), (Zero::One, 12.0)] {
        let summed = step(mesh(1, 1, 2), zero, [FAST, FAST, 1e9]);
        assert!(close(summed.time.0, elements * bytes / 1e9), "{summed:?}");
    }
    // Over the tensor axis, 3/4 of the bytes twice.
    let summed = step(mesh(4, 1, 1), Zero::Off, [FAST, FAST, 1e9]);
    assert!(close(summed.time.0, elements * 18.0 / 1e9), "{summed:?}");
}

#[test]
fn programs_for_adamw_have_no_exact_steps() {
    let mut program = program(mesh(1, 1, 1), Zero::Off);
    program.context.loro_every = None;
    assert_eq!(ExactStepTime::of(&program, &with_host(1, [1e9; 3])), None);
}
