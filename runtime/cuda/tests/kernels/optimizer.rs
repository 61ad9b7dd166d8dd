//! The optimizer.

use std::num::NonZeroU64;

use narrows_cpu::kernels::{
    AdamWStep, Parallel, ParameterState, adamw_update, adamw_update_and_zero, gradient_square_sum,
};
use narrows_cuda::optimizer_coefficients;
use narrows_plan::program::{Access, BufferRole, Extent, FusedOp, ParameterShard, Phase};
use narrows_plan::{DType, Precision, WeightSplit, Zero};
use narrows_runtime::session::OptimizerUpdate;
use narrows_runtime::{DecayedWeights, FactorRateScale, Loro, Optimizer, UpdateGroup};

use super::case::{KernelCase, Outcome};
use super::formats::{assert_near, random_values, rounded};

const SERIAL: Parallel = Parallel::SERIAL;

#[test]
fn square_sums_match_the_cpu() {
    for count in [1, 30, 4097, 16_384, 70_001] {
        let gradient = random_values(1, count);
        for (whole, device) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
            let mut case = KernelCase::new(FusedOp::SquareSum, 2, (1, 1));
            case.phase = Phase::Step;
            case.tensor = device;
            let of = case.buffer((1, count), DType::F32, Some(&gradient));
            let split = if whole { WeightSplit::Whole } else { WeightSplit::Rows };
            let shard =
                ParameterShard { block: None, members: vec![], split, offset_stride: vec![] };
            case.stage.buffers[0].shard = Some(shard);
            let total = case.buffer((1, 1), DType::F32, Some(&[0.25]));
            case.reads(&[of, total]).writes(&[total]);
            let Some(outcome) = case.run() else { return };
            let counted = !whole || device == 0;
            let squares = if counted { gradient_square_sum(&gradient, SERIAL) } else { 0.0 };
            assert_near(DType::F32, &outcome.elements(total), &[0.25 + squares as f32], 1e-6);
        }
    }
}

/// Weights per replica, the replica, and the number of replicas.
const PARTS: [(u64, u64, u64); 5] =
    [(1, 0, 1), (1027, 0, 1), (64, 1, 2), (333, 2, 3), (2048, 0, 1)];

struct Updated {
    outcome: Outcome,
    weights: Vec<f32>,
    gradient: Vec<f32>,
    moments: [Vec<f32>; 2],
    master: Option<Vec<f32>>,
}

/// Result of the kernel on random values, in the third step.
fn update(
    dtype: DType,
    (count, replica, replicas): (u64, u64, u64),
    squares: f32,
    (group, zeroes): (UpdateGroup, bool),
    options: &OptimizerUpdate,
) -> Option<Updated> {
    let mut case = KernelCase::new(FusedOp::AdamW, 1, (1, 1));
    case.context.mesh.data = replicas;
    case.context.zero = if replicas > 1 { Zero::One } else { Zero::Off };
    case.context.shard_size = replicas;
    if dtype == DType::F32 {
        case.context.precision = Precision::Fp32;
    }
    (case.phase, case.replica) = (Phase::Step, replica);
    case.coefficients = optimizer_coefficients(options);
    let whole = count * replicas;
    let master = random_values(1, whole);
    let part = (count * replica) as usize..(count * (replica + 1)) as usize;
    let weight = case.buffer((1, whole), dtype, Some(&rounded(dtype, master.clone())));
    let gradient = case.buffer((1, whole), DType::F32, Some(&random_values(2, whole)));
    let [first, second] = [(3, 0.1), (4, 0.01)].map(|(seed, scale)| {
        let values: Vec<f32> =
            random_values(seed, count).iter().map(|x| (scale * x).abs()).collect();
        case.buffer((1, count), DType::F32, Some(&values))
    });
    let copy =
        (dtype == DType::Bf16).then(|| case.buffer((1, count), DType::F32, Some(&master[part])));
    let sum = case.buffer((1, 1), DType::F32, Some(&[squares]));
    for (buffer, role) in [
        (weight, BufferRole::Weight),
        (gradient, BufferRole::WeightGradient),
        (sum, BufferRole::SquareSum),
    ] {
        case.stage.buffers[buffer.0 as usize].role = role;
    }
    case.update_groups.insert(weight, group);
    let access = |buffer, dtype| Access { buffer, extent: Extent::flat(count, dtype) };
    let states: Vec<_> = [Some(first), Some(second), copy]
        .into_iter()
        .flatten()
        .map(|b| case.whole_buffer(b))
        .collect();
    let mut reads = vec![access(gradient, DType::F32)];
    reads.extend(&states);
    reads.extend((dtype == DType::F32).then(|| access(weight, dtype)));
    let mut writes = vec![access(weight, dtype)];
    writes.extend(zeroes.then(|| case.whole_buffer(gradient)));
    writes.extend(&states);
    case.accesses(reads, writes);
    let outcome = case.run()?;
    let values = |buffer| outcome.elements(buffer);
    Some(Updated {
        weights: values(weight),
        gradient: values(gradient),
        moments: [values(first), values(second)],
        master: copy.map(values),
        outcome,
    })
}

/// The update of step 3.
fn update_of(optimizer: &Optimizer, gradient_scale: f64) -> OptimizerUpdate<'_> {
    let coefficients = optimizer.coefficients(3);
    OptimizerUpdate { optimizer, coefficients, step: 3, gradient_scale }
}

#[test]
fn updates_match_the_cpu() {
    let options = Optimizer { clip_norm: 0.5, ..Optimizer::new(1e-2, 4, 100) };
    let all = Optimizer { decayed: DecayedWeights::All, ..options };
    let loro = |exact_every, rate_scale| {
        let exact_every = NonZeroU64::new(exact_every).unwrap();
        Optimizer { loro: Some(Loro { exact_every, refresh_every: 2, rate_scale }), ..options }
    };
    let (matrix, vector) = (UpdateGroup::Matrix, UpdateGroup::Vector);
    let factor = UpdateGroup::Factor { rank_ratio: 0.375 };
    for (parts, dtype) in PARTS.into_iter().flat_map(|p| [(p, DType::Bf16), (p, DType::F32)]) {
        let (count, replica, replicas) = parts;
        for (squares, (group, zeroes), options, gradient_scale) in [
            (0.01, (matrix, true), options, 1.0),
            (4.0, (vector, false), options, 1.0),
            (9.0, (matrix, true), options, 1.0),
            (0.01, (vector, true), all, 1.5),
            (0.16, (factor, false), all, 1.5),
            (0.16, (factor, true), loro(4, FactorRateScale::RankOverHidden), 1.0),
            (0.16, (factor, true), loro(4, FactorRateScale::Constant(0.5)), 1.0),
            (0.16, (factor, true), loro(3, FactorRateScale::RankOverHidden), 1.0),
            (0.16, (matrix, true), loro(3, FactorRateScale::RankOverHidden), 1.0),
        ] {
            let step = update_of(&options, gradient_scale);
            let Some(updated) = update(dtype, parts, squares, (group, zeroes), &step) else {
                return;
            };
            let coefficients = step.coefficients;
            let part = (count * replica) as usize..(count * (replica + 1)) as usize;
            let mut weights = random_values(1, count * replicas)[part.clone()].to_vec();
            let mut gradient = random_values(2, count * replicas);
            let mut first: Vec<f32> =
                random_values(3, count).iter().map(|x| (0.1 * x).abs()).collect();
            let mut second: Vec<f32> =
                random_values(4, count).iter().map(|x| (0.01 * x).abs()).collect();
            let values = AdamWStep {
                gradient_factor: step.gradient_factor(f64::from(squares).sqrt()) as f32,
                learning_rate: coefficients.learning_rate as f32,
                rate_scale: coefficients.rate_scale(group),
                beta1: options.beta1 as f32,
                beta2: options.beta2 as f32,
                epsilon: coefficients.epsilon as f32,
                weight_decay: coefficients.decay_of(group) as f32,
                step: coefficients.moment_steps as u32,
            };
            let parameter = ParameterState {
                weights: &mut weights,
                first_moment: &mut first,
                second_moment: &mut second,
            };
            if zeroes {
                adamw_update_and_zero(parameter, &mut gradient, part.clone(), values, SERIAL);
            } else {
                adamw_update(parameter, &gradient[part.clone()], values, SERIAL);
            }
            let mut all = rounded(dtype, random_values(1, count * replicas));
            all[part].copy_from_slice(&weights);
            assert_near(dtype, &updated.weights, &all, 1e-6);
            assert_eq!(updated.gradient, gradient);
            assert_near(DType::F32, &updated.moments[0], &first, 1e-6);
            assert_near(DType::F32, &updated.moments[1], &second, 1e-6);
            if let Some(master) = updated.master {
                assert_near(DType::F32, &master, &weights, 1e-6);
            }
        }
    }
}

/// Every device sees the same sum, so that all skip the update.
#[test]
fn non_finite_square_sums_skip_the_update() {
    let options = Optimizer::new(1e-2, 4, 100);
    let step = update_of(&options, 1.0);
    for squares in [f32::NAN, f32::INFINITY] {
        let Some(updated) =
            update(DType::Bf16, (333, 2, 3), squares, (UpdateGroup::Matrix, true), &step)
        else {
            return;
        };
        assert_eq!(updated.weights, rounded(DType::Bf16, random_values(1, 999)));
        assert_eq!(updated.gradient, random_values(2, 999));
        assert_eq!(updated.master.unwrap(), random_values(1, 999)[666..]);
        assert_eq!(updated.outcome.loss, 1.0);
    }
}
