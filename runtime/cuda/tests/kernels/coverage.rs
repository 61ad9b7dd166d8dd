//! Every fused op of every program has kernels, which stay within their operands.

use std::collections::{BTreeMap, BTreeSet};

use narrows_cuda::{KernelFamily, Launches, kernel_launches, ring_attention};
use narrows_plan::model::{self, Activation, presets};
use narrows_plan::program::{Action, FusedOp, Program, QkHeads};
use narrows_plan::{Axis, Context, Dim, Mesh, Precision, Workload, Zero, lower};

use super::bounds_check::check_launches;
use super::case::{for_each_instruction, ring_launches};
use super::shim;
use narrows_test_support::plans::{
    TestRng, draw_plan, draw_zero, drawable_models, peek_context_attention, peek_grad_reduce_dtype,
};
use narrows_test_support::small_models::{pick_copied, small_context, unusual_model};

/// One fused op of each kind.
fn fused_ops() -> Vec<FusedOp> {
    use FusedOp::*;
    let (activation, product) = (Activation::Silu, model::GatedProduct::Plain);
    let dim = Dim::Feature;
    vec![
        NormForward,
        NormStatistic,
        NormApply,
        NormOnline,
        NormScale,
        NormBackward,
        NormBackwardStatistic,
        NormBackwardApply,
        NormOnlineBackward,
        LatentForward { activation },
        LatentRecover { activation },
        LatentBackward { activation },
        LatentRecoverBackward { activation },
        LatentNorm { activation },
        LatentNormBackward { activation },
        TensorGate { a: 1, b: 1 },
        TensorGateBackward { a: 1, b: 1 },
        Bias,
        BiasBackward,
        QkNorm(QkHeads { head_dim: 2, queries: 1, keys: 1 }),
        QkNormBackward(QkHeads { head_dim: 2, queries: 1, keys: 1 }),
        Rope { head_dim: 2 },
        RopeBackward { head_dim: 2 },
        GatedProduct { product },
        GatedProductBackward { product },
        Add,
        AddInto,
        Cast,
        Fill,
        Gather,
        ScatterAdd,
        LossMaximum,
        LossSum,
        LossGradient,
        Pack { dim, axis: Axis::Tensor },
        Unpack { dim, axis: Axis::Tensor },
        Slice { dim },
        SquareSum,
        AdamW,
    ]
}

fn context(rng: &mut TestRng, precision: Precision) -> Context {
    let mesh = Mesh {
        tensor: [1, 2, 4][rng.below(3)],
        pipeline: 1 + rng.below(2) as u64,
        data: 1 + rng.below(3) as u64,
        context: [1, 1, 2, 4][rng.below(4)],
    };
    let micro_batch = [1, 2, 4][rng.below(3)];
    let workload = Workload {
        global_batch: micro_batch * mesh.data * (1 + rng.below(2) as u64),
        sequence_length: [8, 64][rng.below(2)],
        micro_batch,
    };
    let (zero, shard_size) = draw_zero(rng, mesh.replicas());
    let grad_reduce_dtype = peek_grad_reduce_dtype(rng, precision);
    Context {
        context_attention: peek_context_attention(rng),
        grad_reduce_dtype,
        shard_size,
        ..Context::new(mesh, workload, precision, zero)
    }
}

/// Fused ops and kernels of the programs that were checked.
#[derive(Default)]
struct KernelCoverage {
    fused_ops: BTreeSet<&'static str>,
    kernels: BTreeMap<KernelFamily, BTreeSet<String>>,
    attentions: usize,
    /// Attentions of the queries of some positions with the keys of all.
    gathered: usize,
    /// Attentions whose keys and values rotate.
    rings: usize,
    programs: usize,
}

impl KernelCoverage {
    /// Adds the launches of all devices of a program.
    fn add(&mut self, program: &Program) {
        self.programs += 1;
        for_each_instruction(program, |device, scheduled| {
            let action = &scheduled.instr.action;
            match action {
                Action::Fused(op) => self.fused_ops.insert(op.describe().0),
                Action::Attention(attention) => {
                    self.attentions += 1;
                    let rotates = attention.rotation().is_some();
                    self.rings += usize::from(rotates);
                    self.gathered += usize::from(attention.query_parts > 1 && !rotates);
                    self.fused_ops.insert(action.name())
                }
                _ => return,
            };
            let ring = ring_attention(device, scheduled).unwrap_or_else(|error| panic!("{error}"));
            let launches = match &ring {
                Some(ring) => {
                    let launches = ring_launches(ring);
                    Launches { launches, scratch_bytes: ring.scratch_bytes }
                }
                None => {
                    kernel_launches(device, scheduled).unwrap_or_else(|error| panic!("{error}"))
                }
            };
            let accessed = check_launches(device, scheduled, &launches);
            let accessed = accessed.unwrap_or_else(|error| panic!("{error}"));
            // Every kernel writes. A square sum that another device counts has no launches.
            assert!(accessed.written > 0 || launches.launches.is_empty());
            // Prices count one launch for all parameters of a segment, and no segment has more than a launch holds.
            if *action == Action::Fused(FusedOp::AdamW) {
                assert_eq!(launches.launches.len(), 1);
            }
            for launch in launches.launches {
                self.kernels.entry(launch.family).or_default().insert(launch.kernel);
            }
        });
    }
}

#[test]
fn random_programs_have_kernels_within_bounds() {
    let models = drawable_models();
    let mut coverage = KernelCoverage::default();
    for seed in 0..160 {
        let mut rng = TestRng::new(seed);
        let model = &models[seed as usize % models.len()];
        let precision = [Precision::MixedBf16, Precision::Fp32][usize::from(seed % 5 == 4)];
        let context = context(&mut rng, precision);
        if let Some(plan) = draw_plan(&mut rng, model, context) {
            coverage.add(&lower(&plan.resolve(model).unwrap()));
        }
    }
    assert!(coverage.programs > 100, "{} programs", coverage.programs);
    let missing: Vec<_> = fused_ops()
        .iter()
        .map(|op| op.describe().0)
        .filter(|name| !coverage.fused_ops.contains(name))
        .collect();
    assert!(missing.is_empty(), "no program has {missing:?}");
    let KernelCoverage { attentions, gathered, rings, .. } = coverage;
    let of_each = [attentions - gathered - rings, gathered, rings];
    assert!(of_each.iter().all(|count| *count > 100), "{of_each:?}");
    assert_kernels_exist(&coverage);
}

/// Odd widths, narrow heads, and ranks without common divisors.
#[test]
fn programs_of_unusual_models_have_kernels() {
    let (mut rng, mut coverage) = (TestRng::new(61), KernelCoverage::default());
    while coverage.programs < 80 {
        let Some(model) = unusual_model(&mut rng) else { continue };
        let precision = pick_copied(&mut rng, &[Precision::MixedBf16, Precision::Fp32]);
        let mut context = small_context(&mut rng, precision);
        context.mesh.pipeline = context.mesh.pipeline.min(model.blocks.len() as u64);
        if let Some(plan) = draw_plan(&mut rng, &model, context) {
            coverage.add(&lower(&plan.resolve(&model).unwrap()));
        }
    }
    assert_kernels_exist(&coverage);
}

fn assert_kernels_exist(coverage: &KernelCoverage) {
    for (family, names) in &coverage.kernels {
        let Some(kernels) = shim::kernels(*family) else { return };
        let missing: Vec<_> = names.iter().filter(|name| !kernels.has(name)).collect();
        assert!(missing.is_empty(), "{family:?} has no {missing:?}");
    }
}

/// Shared memory, grids and 32-bit sizes suffice for the largest presets.
#[test]
fn programs_of_the_largest_presets_have_kernels() {
    let mut coverage = KernelCoverage::default();
    for (seed, name) in [(1, "cola-7b"), (2, "llama-40b"), (3, "lax-7b"), (4, "cola-30b")] {
        let model = presets::find(name).unwrap();
        let mesh = Mesh { tensor: 4, pipeline: 1, data: 2, context: 1 };
        let workload = Workload { global_batch: 8, sequence_length: 4096, micro_batch: 4 };
        let precision = Precision::MixedBf16;
        let context = Context::new(mesh, workload, precision, Zero::One);
        let mut rng = TestRng::new(seed);
        let plan = (0..20).find_map(|_| draw_plan(&mut rng, &model, context));
        let plan = plan.unwrap_or_else(|| panic!("no plan for {name} was drawn"));
        coverage.add(&lower(&plan.resolve(&model).unwrap()));
    }
    assert!(coverage.attentions > 0);
    // These operands are aligned, so every kernel with a vectorised instance uses it.
    let narrow = |name: &&String| name.ends_with("_v1") && !name.starts_with("tensor_gate");
    let narrow: Vec<_> = coverage.kernels.values().flatten().filter(narrow).collect();
    let others: Vec<_> = narrow.iter().filter(|name| name.as_str() != "fill_f32_v1").collect();
    assert!(others.is_empty(), "{others:?}");
    assert_kernels_exist(&coverage);
}

/// Each of 24 blocks and the head has at least ten parameters, except the head with two: 242 launches or more of each kernel
/// where they are launched one by one.
#[test]
fn the_optimizer_has_three_launches_for_each_segment() {
    let model = presets::find("cola-1b").unwrap();
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 };
    let workload = Workload { global_batch: 4, sequence_length: 4096, micro_batch: 4 };
    let context = Context::new(mesh, workload, Precision::MixedBf16, Zero::Off);
    let mut rng = TestRng::new(1);
    let plan = (0..20).find_map(|_| draw_plan(&mut rng, &model, context)).unwrap();
    let program = lower(&plan.resolve(&model).unwrap());
    let mut launches: BTreeMap<String, usize> = BTreeMap::new();
    for_each_instruction(&program, |device, scheduled| {
        if let Action::Fused(FusedOp::SquareSum | FusedOp::AdamW) = scheduled.instr.action {
            for launch in kernel_launches(device, scheduled).unwrap().launches {
                *launches.entry(launch.kernel).or_default() += 1;
            }
        }
    });
    // The head has the tied weight; the embedding has no parameter of its own.
    let segments = model.blocks.len() + 1;
    assert_eq!(segments, 25);
    let expected = ["adamw_bf16", "square_sum", "square_total"];
    assert_eq!(launches, expected.map(|kernel| (kernel.to_string(), segments)).into());
}
