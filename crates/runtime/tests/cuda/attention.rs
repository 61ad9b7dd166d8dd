//! Attention, forward and backward, on ragged shapes.
//!
//! What bf16 may differ by is derived, number by number. Scores, probabilities, sums over keys and
//! D are f32 on both sides; only what goes into a second product is rounded, by 2⁻⁸ of itself at
//! most: P before P·v and Pᵀ·dout, dS before dS·k and dSᵀ·q. So each result may differ by 2⁻⁸ of
//! its sum over absolute values, and by 2⁻⁸ of itself for its own rounding. f32 adds a few 2⁻²⁴ of
//! those sums, as many more as scores are large, whose errors are in an exponent.

use std::ops::Range;

use narrows_plan::DType;
use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::program::Action;
use narrows_runtime::cpu::kernels::attention::{Gradients, Saved, Shape, backward, forward};
use narrows_runtime::cpu::kernels::{Parallel, View, ViewMut};
use narrows_runtime::cuda::Launches;

use super::case::Case;
use super::numbers::{random, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;
/// The largest error of rounding to bf16, of the number.
const UNIT: f64 = 1.0 / 256.0;

/// What is attended to, and how it lies in operands.
#[derive(Clone, Debug)]
struct Problem {
    op: Attention,
    /// Key heads in the operands; more than the op's where devices share them.
    held: u64,
    /// Devices, and this one.
    devices: (u64, u64),
    /// q, k and v in one, two or three operands.
    operands: usize,
    /// Factor on q and k.
    size: f32,
}

fn problem(
    (sequences, length): (u64, u64),
    (heads, kv_heads, head_dim): (u64, u64, u64),
    input: DType,
) -> Problem {
    let direction = Direction::Forward;
    let op = Attention { direction, sequences, length, heads, kv_heads, head_dim, input };
    Problem { op, held: kv_heads, devices: (1, 0), operands: 1, size: 3.0 }
}

/// Numbers of q, k and v side by side, and of the gradient of the output.
struct Numbers {
    all: Vec<f32>,
    dout: Vec<f32>,
}

impl Problem {
    fn tokens(&self) -> u64 {
        self.op.sequences * self.op.length
    }

    fn shape(&self) -> Shape {
        let Attention { sequences, length, heads, kv_heads, head_dim, .. } = self.op;
        let [sequences, length, heads, kv_heads, head_dim] =
            [sequences, length, heads, kv_heads, head_dim].map(|size| size as usize);
        Shape { sequences, length, heads, kv_heads, head_dim }
    }

    /// Columns of all queries, and of all keys that are held.
    fn widths(&self) -> [u64; 2] {
        [self.op.heads, self.held].map(|heads| heads * self.op.head_dim)
    }

    /// Columns of q, k and v that are attended to.
    fn columns(&self) -> [Range<usize>; 3] {
        let [queries, keys] = self.widths();
        let (devices, at) = self.devices;
        let first = self.op.heads * at * self.held / (self.op.heads * devices);
        let first = if self.held > self.op.kv_heads { first * self.op.head_dim } else { 0 };
        let width = self.op.kv_heads * self.op.head_dim;
        [(0, queries), (queries + first, width), (queries + keys + first, width)]
            .map(|(first, count)| first as usize..(first + count) as usize)
    }

    /// Columns of the operands.
    fn parts(&self) -> Vec<u64> {
        let [queries, keys] = self.widths();
        match self.operands {
            1 => vec![queries + 2 * keys],
            2 => vec![queries, 2 * keys],
            _ => vec![queries, keys, keys],
        }
    }

    fn width(&self) -> u64 {
        self.parts().iter().sum()
    }

    fn numbers(&self) -> Numbers {
        let mut all = random(self.op.length, self.tokens() * self.width());
        let [.., values] = self.columns();
        let keys_end = (self.width() - self.widths()[1]) as usize;
        assert!(values.start >= keys_end);
        for row in all.chunks_mut(self.width() as usize) {
            row[..keys_end].iter_mut().for_each(|x| *x *= self.size);
        }
        let dout = random(self.op.length + 1, self.tokens() * self.widths()[0]);
        let [all, dout] = [all, dout].map(|numbers| rounded(self.op.input, numbers));
        Numbers { all, dout }
    }

    fn case(&self, direction: Direction) -> Case {
        let op = Attention { direction, ..self.op.clone() };
        let tokens = (self.op.sequences, self.op.length);
        let mut case = Case::of(Action::Attention(op), self.devices.0, tokens);
        case.tensor = self.devices.1;
        case
    }

    /// Some columns of a matrix of q, k and v.
    fn cut(&self, all: &[f32], columns: Range<usize>) -> Vec<f32> {
        let rows = all.chunks(self.width() as usize);
        rows.flat_map(|row| row[columns.clone()].to_vec()).collect()
    }

    /// A matrix of q, k and v in operands.
    fn split(&self, all: &[f32]) -> Vec<Vec<f32>> {
        let mut first = 0;
        let part = |width: u64| {
            let columns = first..first + width as usize;
            first = columns.end;
            self.cut(all, columns)
        };
        self.parts().into_iter().map(part).collect()
    }
}

/// What the processor makes.
struct Wanted {
    out: Vec<f32>,
    lse: Vec<f32>,
    /// Of q, k and v.
    gradients: [Vec<f32>; 3],
}

fn wanted(problem: &Problem, numbers: &Numbers) -> Wanted {
    let shape = problem.shape();
    let tokens = problem.tokens() as usize;
    let all = View::new(&numbers.all, tokens, problem.width() as usize);
    let [q, k, v] = problem.columns().map(|columns| all.column_range(columns.start, columns.len()));
    let (queries, keys) = (q.columns(), k.columns());
    let mut out = vec![0.0; tokens * queries];
    let mut lse = vec![0.0; tokens * shape.heads];
    let mut scratch = vec![0.0; shape.scratch(SERIAL)];
    let made =
        (ViewMut::new(&mut out, tokens, queries), ViewMut::new(&mut lse, tokens, shape.heads));
    forward(shape, (q, k, v), made, &mut scratch, SERIAL);
    // What backward reads is in the format of the program.
    let kept = rounded(problem.op.input, out.clone());
    let saved = Saved {
        q,
        k,
        v,
        out: View::new(&kept, tokens, queries),
        lse: View::new(&lse, tokens, shape.heads),
        dout: View::new(&numbers.dout, tokens, queries),
    };
    let [mut dq, mut dk, mut dv] = [queries, keys, keys].map(|width| vec![0.0; tokens * width]);
    let made = Gradients {
        dq: ViewMut::new(&mut dq, tokens, queries),
        dk: ViewMut::new(&mut dk, tokens, keys),
        dv: ViewMut::new(&mut dv, tokens, keys),
    };
    backward(shape, saved, made, &mut scratch, SERIAL);
    Wanted { out, lse, gradients: [dq, dk, dv] }
}

/// Sums over absolute values: for each result what is rounded by a unit, and what is summed in f32.
struct Sums {
    out: Vec<f64>,
    /// Of q, k and v.
    rounded: [Vec<f64>; 3],
    summed: [Vec<f64>; 3],
    /// The largest Σ|q·k|·scale, which an error of a probability grows with.
    exponent: f64,
}

fn sums(problem: &Problem, numbers: &Numbers, wanted: &Wanted) -> Sums {
    let Shape { sequences, length, heads, kv_heads, head_dim } = problem.shape();
    let [q, k, v] = problem.columns().map(|columns| problem.cut(&numbers.all, columns));
    let scale = 1.0 / (head_dim as f64).sqrt();
    let zeros = || [&q, &k, &v].map(|of| vec![0.0; of.len()]);
    let (mut rounded, mut summed) = (zeros(), zeros());
    let mut out = vec![0.0; q.len()];
    let mut exponent = 0.0f64;
    let dot = |x: &[f32], y: &[f32], of: fn(f64) -> f64| -> f64 {
        x.iter().zip(y).map(|(x, y)| of(f64::from(*x) * f64::from(*y))).sum()
    };
    for (sequence, head) in (0..sequences).flat_map(|s| (0..heads).map(move |h| (s, h))) {
        let key_head = head * kv_heads / heads;
        let row_of = |token: usize, heads: usize, head: usize| {
            let first = ((sequence * length + token) * heads + head) * head_dim;
            first..first + head_dim
        };
        for i in 0..length {
            let at_i = row_of(i, heads, head);
            let (q_i, dout_i) = (&q[at_i.clone()], &numbers.dout[at_i.clone()]);
            let out_i = &wanted.out[at_i.clone()];
            let lse = f64::from(wanted.lse[(sequence * length + i) * heads + head]);
            let (d, d_sum) = (dot(out_i, dout_i, |x| x), dot(out_i, dout_i, f64::abs));
            for j in 0..=i {
                let at_j = row_of(j, kv_heads, key_head);
                let (k_j, v_j) = (&k[at_j.clone()], &v[at_j.clone()]);
                let p = (scale * dot(q_i, k_j, |x| x) - lse).exp();
                exponent = exponent.max(scale * dot(q_i, k_j, f64::abs));
                let ds = (scale * p * (dot(dout_i, v_j, |x| x) - d)).abs();
                let ds_sum = scale * p * (dot(dout_i, v_j, f64::abs) + d_sum);
                for f in 0..head_dim {
                    let [q, k, v, dout] = [q_i, k_j, v_j, dout_i].map(|of| f64::from(of[f]).abs());
                    let (i, j) = (at_i.start + f, at_j.start + f);
                    out[i] += p * v;
                    rounded[0][i] += ds * k;
                    summed[0][i] += ds_sum * k;
                    rounded[1][j] += ds * q;
                    summed[1][j] += ds_sum * q;
                    rounded[2][j] += p * dout;
                    summed[2][j] += p * dout;
                }
            }
        }
    }
    Sums { out, rounded, summed, exponent }
}

#[track_caller]
fn assert_within(what: &str, got: &[f32], wanted: &[f32], allowed: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), wanted.len());
    for (at, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let allowed = allowed(at);
        let error = (f64::from(*got) - f64::from(*wanted)).abs();
        assert!(error <= allowed, "{what}, number {at}: {got}, wanted {wanted} (± {allowed:e})");
    }
}

/// Both directions against the processor; `None` where no compiler makes kernels for processors.
fn check(problem: &Problem) -> Option<()> {
    let numbers = problem.numbers();
    let wanted = wanted(problem, &numbers);
    let sums = sums(problem, &numbers, &wanted);
    let dtype = problem.op.input;
    let unit = if dtype == DType::Bf16 { UNIT } else { 0.0 };
    let of_f32 = f64::from(f32::EPSILON) * (16.0 + 4.0 * sums.exponent);
    let allowed = |rounded: &[f64], summed: &[f64], wanted: &[f32], at: usize| {
        unit * (rounded[at] + f64::from(wanted[at].abs()))
            + (of_f32 + unit * unit) * summed[at]
            + 1e-9
    };
    let (tokens, [queries, _]) = (problem.tokens(), problem.widths());

    let mut case = problem.case(Direction::Forward);
    let parts = problem.split(&numbers.all);
    let inputs: Vec<_> = problem
        .parts()
        .into_iter()
        .zip(&parts)
        .map(|(width, numbers)| case.buffer((tokens, width), dtype, Some(numbers)))
        .collect();
    let out = case.buffer((tokens, queries), dtype, None);
    let lse = case.buffer((tokens, problem.op.heads), DType::F32, None);
    case.reads(&inputs).writes(&[out, lse]);
    let outcome = case.run()?;
    assert_within("output", &outcome.numbers(out), &wanted.out, |at| {
        allowed(&sums.out, &sums.out, &wanted.out, at)
    });
    assert_within("log-sum-exp", &outcome.numbers(lse), &wanted.lse, |_| of_f32);

    let mut case = problem.case(Direction::Backward);
    let mut reads: Vec<_> = problem
        .parts()
        .into_iter()
        .zip(&parts)
        .map(|(width, numbers)| case.buffer((tokens, width), dtype, Some(numbers)))
        .collect();
    reads.push(case.buffer((tokens, queries), dtype, Some(&wanted.out)));
    reads.push(case.buffer((tokens, problem.op.heads), DType::F32, Some(&wanted.lse)));
    reads.push(case.buffer((tokens, queries), dtype, Some(&numbers.dout)));
    let parts = problem.parts().into_iter();
    let made: Vec<_> = parts.map(|width| case.buffer((tokens, width), dtype, None)).collect();
    case.reads(&reads).writes(&made);
    let outcome = case.run()?;
    let made: Vec<Vec<f32>> = made.iter().map(|buffer| outcome.numbers(*buffer)).collect();
    let rows = (0..tokens as usize).flat_map(|row| {
        made.iter().zip(problem.parts()).flat_map(move |(part, width)| {
            part[row * width as usize..][..width as usize].iter().copied()
        })
    });
    let all: Vec<f32> = rows.collect();
    for (at, columns) in problem.columns().into_iter().enumerate() {
        let name = ["gradient of q", "gradient of k", "gradient of v"][at];
        let wanted = &wanted.gradients[at];
        assert_within(name, &problem.cut(&all, columns), wanted, |number| {
            allowed(&sums.rounded[at], &sums.summed[at], wanted, number)
        });
    }
    // Keys that are held but not attended to have no gradient.
    let attended = problem.columns();
    for (at, number) in all.iter().enumerate() {
        let column = at % problem.width() as usize;
        let unused = attended.iter().all(|columns| !columns.contains(&column));
        assert!(!unused || *number == 0.0, "column {column} is {number}");
    }
    Some(())
}

/// Lengths around every tile: 16, 32, 64 and 128 tokens.
#[test]
fn ragged_lengths_are_the_processors() {
    let lengths = [1, 2, 15, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 177, 200];
    let heads = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)];
    for (at, length) in lengths.into_iter().enumerate() {
        let (heads, kv_heads) = heads[at % heads.len()];
        for (dtype, head_dim) in FORMATS.into_iter().flat_map(|f| [64, 128].map(|w| (f, w))) {
            let sequences = 1 + (at as u64 + head_dim / 64) % 2;
            let mut problem = problem((sequences, length), (heads, kv_heads, head_dim), dtype);
            problem.operands = 1 + at % 3;
            if check(&problem).is_none() {
                return;
            }
        }
    }
}

/// Four devices with two key heads: each uses the one of its queries, and owes nothing to the other.
#[test]
fn devices_share_keys() {
    for (at, dtype) in (0..4).flat_map(|at| FORMATS.map(|dtype| (at, dtype))) {
        let mut problem = problem((2, 70), (2, 1, 64), dtype);
        (problem.held, problem.devices) = (2, (4, at));
        problem.operands = 2 + at as usize % 2;
        if check(&problem).is_none() {
            return;
        }
    }
}

/// Scores in the thousands: without the running maximum every power would be 0 or ∞.
#[test]
fn large_scores_do_not_overflow() {
    for dtype in FORMATS {
        let mut problem = problem((1, 90), (2, 1, 64), dtype);
        problem.size = 30.0;
        if check(&problem).is_none() {
            return;
        }
    }
}

fn launches(problem: &Problem, direction: Direction) -> Result<Launches, String> {
    let mut case = problem.case(direction);
    let (tokens, dtype) = (problem.tokens(), problem.op.input);
    let [queries, _] = problem.widths();
    let parts = problem.parts();
    let buffers = |case: &mut Case| -> Vec<_> {
        parts.iter().map(|width| case.buffer((tokens, *width), dtype, None)).collect()
    };
    let (mut reads, made) = (buffers(&mut case), buffers(&mut case));
    let [out, dout] = [(); 2].map(|()| case.buffer((tokens, queries), dtype, None));
    let lse = case.buffer((tokens, problem.op.heads), DType::F32, None);
    match direction {
        Direction::Forward => case.reads(&reads).writes(&[out, lse]),
        Direction::Backward => {
            reads.extend([out, lse, dout]);
            case.reads(&reads).writes(&made)
        }
    };
    case.launches()
}

/// A block's shared memory is what GPUs of both generations grant, also those beyond the A100 that
/// have 99 KiB; and scratch memory is two numbers for each query of whole tiles.
#[test]
fn memory_is_what_it_is_said_to_be() {
    for (dtype, head_dim) in FORMATS.into_iter().flat_map(|f| [64, 128].map(|w| (f, w))) {
        let problem = problem((2, 100), (4, 2, head_dim), dtype);
        let forward = launches(&problem, Direction::Forward).unwrap();
        let backward = launches(&problem, Direction::Backward).unwrap();
        assert_eq!((forward.scratch_bytes, backward.scratch_bytes), (0, 2 * 4 * 128 * 8));
        assert_eq!((forward.launches.len(), backward.launches.len()), (1, 3));
        for launch in forward.launches.iter().chain(&backward.launches) {
            assert!(launch.shared_bytes <= 99 * 1024, "{launch:?}");
            println!("{}: {} bytes of shared memory", launch.kernel, launch.shared_bytes);
        }
    }
}

#[test]
fn what_no_kernel_does_is_refused_by_name() {
    let refused = |change: fn(&mut Problem), said: &str| {
        let mut problem = problem((1, 8), (4, 2, 64), DType::Bf16);
        change(&mut problem);
        for direction in [Direction::Forward, Direction::Backward] {
            let error = launches(&problem, direction).expect_err(said);
            assert!(error.contains(said) && error.contains("a test"), "{error}");
        }
    };
    refused(|p| p.op.head_dim = 96, "heads of 96 features: kernels are for 64 and 128");
    refused(|p| p.op.kv_heads = 3, "4 query heads of 3 key heads");
    refused(|p| p.held = 1, "are not those of 4 and 2 heads");
}
