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

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

const SERIAL: Parallel = Parallel::SERIAL;

/// More gradients than one launch holds, of sizes with and without whole vectors and parts. Of every third, the devices of the
/// tensor axis hold all.
#[test]
fn square_sums_match_the_cpu() {
    let sizes = [1, 30, 4097, 8192, 16_384, 70_001].into_iter().chain(vec![5; 50]);
    let gradients: Vec<Vec<f32>> =
        sizes.zip(1..).map(|(count, seed)| random_values(seed, count)).collect();
    for (device, counted) in [(0, gradients.len()), (1, gradients.len()), (0, 6), (1, 3)] {
        let mut case = KernelCase::new(FusedOp::SquareSum, 2, (1, 1));
        case.phase = Phase::Step;
        case.tensor = device;
        let gradients = &gradients[..counted];
        let mut operands = vec![];
        for (at, gradient) in gradients.iter().enumerate() {
            let of = case.buffer((1, gradient.len() as u64), DType::F32, Some(gradient));
            let split = if at % 3 == 2 { WeightSplit::Whole } else { WeightSplit::Rows };
            let shard =
                ParameterShard { block: None, members: vec![], split, offset_stride: vec![] };
            case.stage.buffers[of.0 as usize].shard = Some(shard);
            operands.push(of);
        }
        let total = case.buffer((1, 1), DType::F32, Some(&[0.25]));
        operands.push(total);
        case.reads(&operands).writes(&[total]);
        let is_counted = |at: &usize| device == 0 || at % 3 != 2;
        let launches = 2 * (0..counted).filter(is_counted).count().div_ceil(48);
        assert_eq!(case.launches().unwrap().launches.len(), launches);
        let Some(outcome) = case.run() else { return };
        let squares = (0..counted)
            .filter(is_counted)
            .map(|at| gradient_square_sum(&gradients[at], SERIAL))
            .sum::<f64>();
        assert_near(DType::F32, &outcome.elements(total), &[0.25 + squares as f32], 1e-6);
    }
}

/// A device that counts none of the gradients launches nothing.
#[test]
fn gradients_that_the_first_device_counts_need_no_launch() {
    let mut case = KernelCase::new(FusedOp::SquareSum, 2, (1, 1));
    (case.phase, case.tensor) = (Phase::Step, 1);
    let of = case.buffer((1, 9), DType::F32, None);
    let split = WeightSplit::Whole;
    let shard = ParameterShard { block: None, members: vec![], split, offset_stride: vec![] };
    case.stage.buffers[0].shard = Some(shard);
    let total = case.buffer((1, 1), DType::F32, None);
    case.reads(&[of, total]).writes(&[total]);
    assert_eq!(case.launches().unwrap().launches, []);
}

/// Weights per replica.
const COUNTS: [u64; 5] = [1, 1027, 64, 333, 8192];

/// The replica, and the number of replicas.
const REPLICAS: [(u64, u64); 3] = [(0, 1), (1, 2), (2, 3)];

#[derive(Clone, Copy, Debug)]
struct Parameter {
    /// Weights per replica.
    count: u64,
    group: UpdateGroup,
    zeroes: bool,
    seed: u64,
}

impl Parameter {
    fn master(&self, replicas: u64) -> Vec<f32> {
        random_values(self.seed, self.count * replicas)
    }

    fn gradient(&self, replicas: u64) -> Vec<f32> {
        random_values(self.seed + 1, self.count * replicas)
    }

    fn moments(&self) -> [Vec<f32>; 2] {
        [(2, 0.1), (3, 0.01)].map(|(seed, scale)| {
            let values = random_values(self.seed + seed, self.count);
            values.iter().map(|x| (scale * x).abs()).collect()
        })
    }
}

/// More parameters than one launch holds: every size in every group, with gradients that are zeroed and others.
fn parameters() -> Vec<Parameter> {
    let factor = UpdateGroup::Factor { rank_ratio: 0.375 };
    let groups = [UpdateGroup::Matrix, UpdateGroup::Vector, factor];
    let kinds = groups.into_iter().flat_map(|group| [(group, true), (group, false)]);
    let all =
        kinds.flat_map(|kind| COUNTS.into_iter().chain(COUNTS).map(move |count| (kind, count)));
    let seeds = (1..).step_by(10);
    all.zip(seeds)
        .map(|(((group, zeroes), count), seed)| Parameter { count, group, zeroes, seed })
        .collect()
}

struct Updated {
    weights: Vec<f32>,
    gradient: Vec<f32>,
    moments: [Vec<f32>; 2],
    master: Option<Vec<f32>>,
}

/// Result of the kernel in the third step, of every parameter, and the loss.
fn update(
    dtype: DType,
    (replica, replicas): (u64, u64),
    squares: f32,
    parameters: &[Parameter],
    options: &OptimizerUpdate,
) -> Option<(Vec<Updated>, f64)> {
    let mut case = KernelCase::new(FusedOp::AdamW, 1, (1, 1));
    case.context.mesh.data = replicas;
    case.context.zero = if replicas > 1 { Zero::One } else { Zero::Off };
    case.context.shard_size = replicas;
    if dtype == DType::F32 {
        case.context.precision = Precision::Fp32;
    }
    (case.phase, case.replica) = (Phase::Step, replica);
    case.coefficients = optimizer_coefficients(options);
    let sum = case.buffer((1, 1), DType::F32, Some(&[squares]));
    case.stage.buffers[sum.0 as usize].role = BufferRole::SquareSum;
    let (mut reads, mut writes, mut buffers) = (vec![], vec![], vec![]);
    for parameter in parameters {
        let Parameter { count, group, zeroes, .. } = *parameter;
        let whole = count * replicas;
        let part = (count * replica) as usize..(count * (replica + 1)) as usize;
        let master = parameter.master(replicas);
        let weight = case.buffer((1, whole), dtype, Some(&rounded(dtype, master.clone())));
        let gradient = case.buffer((1, whole), DType::F32, Some(&parameter.gradient(replicas)));
        let moments =
            parameter.moments().map(|values| case.buffer((1, count), DType::F32, Some(&values)));
        let copy = (dtype == DType::Bf16)
            .then(|| case.buffer((1, count), DType::F32, Some(&master[part])));
        case.stage.buffers[weight.0 as usize].role = BufferRole::Weight;
        case.stage.buffers[gradient.0 as usize].role = BufferRole::WeightGradient;
        case.update_groups.insert(weight, group);
        let access = |buffer, dtype| Access { buffer, extent: Extent::flat(count, dtype) };
        let states = moments.into_iter().chain(copy).map(|state| case.whole_buffer(state));
        let states: Vec<Access> = states.collect();
        reads.push(access(gradient, DType::F32));
        reads.extend(&states);
        reads.extend((dtype == DType::F32).then(|| access(weight, dtype)));
        writes.push(access(weight, dtype));
        writes.extend(zeroes.then(|| case.whole_buffer(gradient)));
        writes.extend(&states);
        buffers.push((weight, gradient, moments, copy));
    }
    case.accesses(reads, writes);
    let launches = case.launches().unwrap().launches;
    assert_eq!(launches.len(), parameters.len().div_ceil(48));
    let outcome = case.run()?;
    let values = |buffer| outcome.elements(buffer);
    let updated = buffers.into_iter().map(|(weight, gradient, moments, copy)| Updated {
        weights: values(weight),
        gradient: values(gradient),
        moments: moments.map(values),
        master: copy.map(values),
    });
    Some((updated.collect(), outcome.loss))
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
    let parameters = parameters();
    for (replica, dtype) in REPLICAS.into_iter().flat_map(|r| [(r, DType::Bf16), (r, DType::F32)]) {
        for (squares, options, gradient_scale) in [
            (0.01, options, 1.0),
            (4.0, options, 1.0),
            (0.01, all, 1.5),
            (0.16, all, 1.5),
            (0.16, loro(4, FactorRateScale::RankOverHidden), 1.0),
            (0.16, loro(4, FactorRateScale::Constant(0.5)), 1.0),
            (0.16, loro(3, FactorRateScale::RankOverHidden), 1.0),
        ] {
            let step = update_of(&options, gradient_scale);
            let Some((updated, _)) = update(dtype, replica, squares, &parameters, &step) else {
                return;
            };
            for (parameter, updated) in parameters.iter().zip(updated) {
                assert_updated(&updated, parameter, dtype, replica, squares, &step);
            }
        }
    }
}

/// Compares an update with that of the CPU.
fn assert_updated(
    updated: &Updated,
    parameter: &Parameter,
    dtype: DType,
    (replica, replicas): (u64, u64),
    squares: f32,
    step: &OptimizerUpdate,
) {
    let Parameter { count, group, zeroes, .. } = *parameter;
    let part = (count * replica) as usize..(count * (replica + 1)) as usize;
    let mut weights = parameter.master(replicas)[part.clone()].to_vec();
    let mut gradient = parameter.gradient(replicas);
    let [mut first, mut second] = parameter.moments();
    let values = AdamWStep::new(step, group, squares);
    let state = ParameterState {
        weights: &mut weights,
        first_moment: &mut first,
        second_moment: &mut second,
    };
    if zeroes {
        adamw_update_and_zero(state, &mut gradient, part.clone(), values, SERIAL);
    } else {
        adamw_update(state, &gradient[part.clone()], values, SERIAL);
    }
    let mut all = rounded(dtype, parameter.master(replicas));
    all[part].copy_from_slice(&weights);
    assert_near(dtype, &updated.weights, &all, 1e-6);
    assert_eq!(updated.gradient, gradient, "{parameter:?}");
    assert_near(DType::F32, &updated.moments[0], &first, 1e-6);
    assert_near(DType::F32, &updated.moments[1], &second, 1e-6);
    if let Some(master) = &updated.master {
        assert_near(DType::F32, master, &weights, 1e-6);
    }
}

/// Every device sees the same sum, so that all skip the update.
#[test]
fn non_finite_square_sums_skip_the_update() {
    let options = Optimizer::new(1e-2, 4, 100);
    let step = update_of(&options, 1.0);
    let parameters = parameters();
    for squares in [f32::NAN, f32::INFINITY] {
        let Some((updated, loss)) = update(DType::Bf16, (2, 3), squares, &parameters, &step) else {
            return;
        };
        assert_eq!(loss, 1.0);
        for (parameter, updated) in parameters.iter().zip(updated) {
            let part = 2 * parameter.count as usize;
            assert_eq!(updated.weights, rounded(DType::Bf16, parameter.master(3)));
            assert_eq!(updated.gradient, parameter.gradient(3));
            assert_eq!(updated.master.unwrap(), parameter.master(3)[part..]);
        }
    }
}
