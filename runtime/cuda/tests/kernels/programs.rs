//! Every pass of every program has kernels, and they stay within their operands.

use std::collections::{BTreeMap, BTreeSet};

use narrows_cuda::{KernelFamily, bounds, launch};
use narrows_plan::lower::lower;
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::{self, Activation, presets};
use narrows_plan::program::{Action, FusedOp, Program};
use narrows_plan::strategy::{Context, Zero};
use narrows_plan::{Dim, Precision};

use super::case::each_moment;
use super::shim;
use narrows_test_support::plans::{TestRng, draw_plan, drawable_models};
use narrows_test_support::small::{pick_copied, small_context, unusual_model};

/// One of each pass.
fn passes() -> Vec<FusedOp> {
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
        Rope { head_dim: 2 },
        RopeBackward { head_dim: 2 },
        GatedProduct { product },
        GatedProductBackward { product },
        Add,
        AddInto,
        Fill,
        Gather,
        ScatterAdd,
        LossMaximum,
        LossSum,
        LossGradient,
        Pack { dim },
        Unpack { dim },
        Slice { dim },
        SquareSum,
        AdamW,
    ]
}

fn context(dice: &mut TestRng, precision: Precision) -> Context {
    let mesh = Mesh {
        tensor: [1, 2, 4][dice.below(3)],
        pipeline: 1 + dice.below(2) as u64,
        data: 1 + dice.below(3) as u64,
    };
    let micro_batch = [1, 2, 4][dice.below(3)];
    let workload = Workload {
        global_batch: micro_batch * mesh.data * (1 + dice.below(2) as u64),
        sequence_length: [8, 64][dice.below(2)],
        micro_batch,
    };
    let zero = [Zero::Off, Zero::One][dice.below(2)];
    Context { mesh, workload, precision, zero }
}

/// Names of the passes met, and of the kernels they are.
#[derive(Default)]
struct Met {
    passes: BTreeSet<&'static str>,
    kernels: BTreeMap<KernelFamily, BTreeSet<String>>,
    attentions: usize,
    programs: usize,
}

impl Met {
    /// The launches of all devices of a program.
    fn program(&mut self, program: &Program) {
        self.programs += 1;
        each_moment(program, |device, moment| {
            let action = &moment.instr.action;
            match action {
                Action::Fused(op) => self.passes.insert(op.describe().0),
                Action::Attention(_) => {
                    self.attentions += 1;
                    self.passes.insert(action.name())
                }
                _ => return,
            };
            let made = launch::pass(device, moment).unwrap_or_else(|error| panic!("{error}"));
            let touched = bounds::check(device, moment, &made);
            let touched = touched.unwrap_or_else(|error| panic!("{error}"));
            // Every kernel writes, but for a square sum that another device counts.
            assert!(touched.written > 0 || made.launches.is_empty());
            for launch in made.launches {
                self.kernels.entry(launch.family).or_default().insert(launch.kernel);
            }
        });
    }
}

#[test]
fn all_passes_of_drawn_programs_are_within_bounds() {
    let models = drawable_models();
    let mut met = Met::default();
    for seed in 0..160 {
        let mut dice = TestRng(seed);
        let model = &models[seed as usize % models.len()];
        let precision = [Precision::MixedBf16, Precision::Full32][usize::from(seed % 5 == 4)];
        let context = context(&mut dice, precision);
        if let Some(plan) = draw_plan(&mut dice, model, context) {
            met.program(&lower(&plan.resolve(model).unwrap()));
        }
    }
    assert!(met.programs > 100, "{} programs", met.programs);
    let missing: Vec<_> = passes()
        .iter()
        .map(|pass| pass.describe().0)
        .filter(|name| !met.passes.contains(name))
        .collect();
    assert!(missing.is_empty(), "no drawn program has {missing:?}");
    assert!(met.attentions > 100, "{}", met.attentions);
    assert_kernels_exist(&met);
}

/// Odd widths, heads of few features, ranks that divide nothing.
#[test]
fn programs_of_unusual_models_have_kernels() {
    let (mut dice, mut met) = (TestRng(61), Met::default());
    while met.programs < 80 {
        let Some(model) = unusual_model(&mut dice) else { continue };
        let precision = pick_copied(&mut dice, &[Precision::MixedBf16, Precision::Full32]);
        let mut context = small_context(&mut dice, precision);
        context.mesh.pipeline = context.mesh.pipeline.min(model.blocks.len() as u64);
        if let Some(plan) = draw_plan(&mut dice, &model, context) {
            met.program(&lower(&plan.resolve(&model).unwrap()));
        }
    }
    assert_kernels_exist(&met);
}

fn assert_kernels_exist(met: &Met) {
    for (family, names) in &met.kernels {
        let Some(kernels) = shim::kernels(*family) else { return };
        let missing: Vec<_> = names.iter().filter(|name| !kernels.has(name)).collect();
        assert!(missing.is_empty(), "{family:?} has no {missing:?}");
    }
}

/// Sizes that matter: the memory of a row, grids and 32 bits suffice for the largest presets.
#[test]
fn the_largest_presets_fit() {
    let mut met = Met::default();
    for (seed, name) in [(1, "cola-7b"), (2, "llama-40b"), (3, "lax-7b"), (4, "cola-30b")] {
        let model = presets::find(name).unwrap();
        let mesh = Mesh { tensor: 4, pipeline: 1, data: 2 };
        let workload = Workload { global_batch: 8, sequence_length: 4096, micro_batch: 4 };
        let precision = Precision::MixedBf16;
        let context = Context { mesh, workload, precision, zero: Zero::One };
        let mut dice = TestRng(seed);
        let plan = (0..20).find_map(|_| draw_plan(&mut dice, &model, context));
        let plan = plan.unwrap_or_else(|| panic!("no plan of {name} was drawn"));
        met.program(&lower(&plan.resolve(&model).unwrap()));
    }
    assert!(met.attentions > 0);
    // Where operands are as aligned as these, every kernel that has vectors uses them.
    let narrow = |name: &&String| name.ends_with("_v1") && !name.starts_with("tensor_gate");
    let narrow: Vec<_> = met.kernels.values().flatten().filter(narrow).collect();
    let statistics = ["fill_f32_v1", "square_sum_f32_v1", "adamw_bf16_v1"];
    let others: Vec<_> =
        narrow.iter().filter(|name| !statistics.contains(&name.as_str())).collect();
    assert!(others.is_empty(), "{others:?}");
    assert_kernels_exist(&met);
}
