//! The optimizer.

use narrows_cpu::kernels::{
    AdamWStep, Parallel, ParameterState, adamw_update, gradient_square_sum,
};
use narrows_cuda::launch::coefficients;
use narrows_plan::emit::WeightSplit;
use narrows_plan::program::{Access, Extent, FusedOp, Phase, Region, Shard};
use narrows_plan::strategy::Zero;
use narrows_plan::{DType, Precision};
use narrows_runtime::Optimizer;

use super::case::{Case, Outcome};
use super::numbers::{assert_near, random, rounded};

const SERIAL: Parallel = Parallel::SERIAL;

#[test]
fn square_sums_are_the_processors() {
    for count in [1, 30, 4097, 16_384, 70_001] {
        let gradient = random(1, count);
        for (whole, device) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
            let mut case = Case::new(FusedOp::SquareSum, 2, (1, 1));
            case.phase = Phase::Step;
            case.tensor = device;
            let of = case.buffer((1, count), DType::F32, Some(&gradient));
            let split = if whole { WeightSplit::Whole } else { WeightSplit::Rows };
            let shard = Shard { members: vec![], split, offset_stride: vec![] };
            case.stage.buffers[0].shard = Some(shard);
            let total = case.buffer((1, 1), DType::F32, Some(&[0.25]));
            case.reads(&[of, total]).writes(&[total]);
            let Some(outcome) = case.run() else { return };
            let counted = !whole || device == 0;
            let squares = if counted { gradient_square_sum(&gradient, SERIAL) } else { 0.0 };
            assert_near(DType::F32, &outcome.numbers(total), &[0.25 + squares as f32], 1e-6);
        }
    }
}

/// Weights of which a replica updates its part: how many, which replica, of how many.
const PARTS: [(u64, u64, u64); 5] =
    [(1, 0, 1), (1027, 0, 1), (64, 1, 2), (333, 2, 3), (2048, 0, 1)];

struct Updated {
    outcome: Outcome,
    weights: Vec<f32>,
    gradient: Vec<f32>,
    moments: [Vec<f32>; 2],
    master: Option<Vec<f32>>,
}

/// What the kernel makes of random numbers, in the third step.
fn update(
    dtype: DType,
    (count, replica, replicas): (u64, u64, u64),
    squares: f32,
    decays: bool,
    options: &Optimizer,
) -> Option<Updated> {
    let mut case = Case::new(FusedOp::AdamW, 1, (1, 1));
    case.context.mesh.data = replicas;
    case.context.zero = if replicas > 1 { Zero::One } else { Zero::Off };
    if dtype == DType::F32 {
        case.context.precision = Precision::Full32;
    }
    (case.phase, case.data) = (Phase::Step, replica);
    case.coefficients = coefficients(options, 3);
    let whole = count * replicas;
    let master = random(1, whole);
    let part = (count * replica) as usize..(count * (replica + 1)) as usize;
    let weight = case.buffer((1, whole), dtype, Some(&rounded(dtype, master.clone())));
    let gradient = case.buffer((1, whole), DType::F32, Some(&random(2, whole)));
    let [first, second] = [(3, 0.1), (4, 0.01)].map(|(seed, scale)| {
        let numbers: Vec<f32> = random(seed, count).iter().map(|x| (scale * x).abs()).collect();
        case.buffer((1, count), DType::F32, Some(&numbers))
    });
    let copy =
        (dtype == DType::Bf16).then(|| case.buffer((1, count), DType::F32, Some(&master[part])));
    let sum = case.buffer((1, 1), DType::F32, Some(&[squares]));
    for (buffer, region) in
        [(weight, Region::Weight), (gradient, Region::Gradient), (sum, Region::Input)]
    {
        case.stage.buffers[buffer.0 as usize].region = region;
    }
    case.stage.buffers[sum.0 as usize].name = "square sum".into();
    case.decays.insert(weight, decays);
    let mine = |buffer, dtype| Access { buffer, extent: Extent::flat(count, dtype) };
    let states: Vec<_> =
        [Some(first), Some(second), copy].into_iter().flatten().map(|b| case.whole(b)).collect();
    let mut reads = vec![mine(gradient, DType::F32)];
    reads.extend(&states);
    reads.extend((dtype == DType::F32).then(|| mine(weight, dtype)));
    let mut writes = vec![mine(weight, dtype), case.whole(gradient)];
    writes.extend(&states);
    case.accesses(reads, writes);
    let outcome = case.run()?;
    let numbers = |buffer| outcome.numbers(buffer);
    Some(Updated {
        weights: numbers(weight),
        gradient: numbers(gradient),
        moments: [numbers(first), numbers(second)],
        master: copy.map(numbers),
        outcome,
    })
}

#[test]
fn updates_are_the_processors() {
    let options = Optimizer { clip_norm: 0.5, ..Optimizer::new(1e-2, 4, 100) };
    for (parts, dtype) in PARTS.into_iter().flat_map(|p| [(p, DType::Bf16), (p, DType::F32)]) {
        let (count, replica, replicas) = parts;
        for (squares, decays) in [(0.01, true), (4.0, false), (9.0, true)] {
            let Some(made) = update(dtype, parts, squares, decays, &options) else { return };
            let part = (count * replica) as usize..(count * (replica + 1)) as usize;
            let mut weights = random(1, count * replicas)[part.clone()].to_vec();
            let mut gradient = random(2, count * replicas);
            let mut first: Vec<f32> = random(3, count).iter().map(|x| (0.1 * x).abs()).collect();
            let mut second: Vec<f32> = random(4, count).iter().map(|x| (0.01 * x).abs()).collect();
            let numbers = AdamWStep {
                gradient_factor: options.clip_factor(f64::from(squares).sqrt()) as f32,
                learning_rate: options.coefficients(3).learning_rate as f32,
                beta1: options.beta1 as f32,
                beta2: options.beta2 as f32,
                epsilon: options.epsilon as f32,
                weight_decay: if decays { options.weight_decay as f32 } else { 0.0 },
                step: 3,
            };
            let parameter = ParameterState {
                weights: &mut weights,
                first_moment: &mut first,
                second_moment: &mut second,
            };
            adamw_update(parameter, &mut gradient, part.clone(), numbers, SERIAL);
            let mut all = rounded(dtype, random(1, count * replicas));
            all[part].copy_from_slice(&weights);
            assert_near(dtype, &made.weights, &all, 1e-6);
            assert_eq!(made.gradient, gradient);
            assert_near(DType::F32, &made.moments[0], &first, 1e-6);
            assert_near(DType::F32, &made.moments[1], &second, 1e-6);
            if let Some(master) = made.master {
                assert_near(DType::F32, &master, &weights, 1e-6);
            }
        }
    }
}

/// What is not finite updates nothing, and every device sees the same sum.
#[test]
fn sums_that_are_not_finite_change_nothing() {
    let options = Optimizer::new(1e-2, 4, 100);
    for squares in [f32::NAN, f32::INFINITY] {
        let Some(made) = update(DType::Bf16, (333, 2, 3), squares, true, &options) else { return };
        assert_eq!(made.weights, rounded(DType::Bf16, random(1, 999)));
        assert_eq!(made.gradient, random(2, 999));
        assert_eq!(made.master.unwrap(), random(1, 999)[666..]);
        assert_eq!(made.outcome.loss, 1.0);
    }
}
