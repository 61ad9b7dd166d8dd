//! Attention, forward and backward, on ragged shapes.
//!
//! The tolerance of bf16 is derived for each element. Scores, probabilities, sums over keys and D are f32 on both sides.
//! Only operands of a second matmul are rounded, with a relative error of at most 2⁻⁸: P before P·v and Pᵀ·dout, dS
//! before dS·k and dSᵀ·q. So each result may differ by 2⁻⁸ of its sum over absolute values, and by 2⁻⁸ of itself for its
//! own rounding. f32 adds a few 2⁻²⁴ of these sums, in proportion to the scores, whose errors are in an exponent.

mod reference;

use std::ops::Range;

use narrows_cpu::kernels::AttentionShape;
use narrows_cuda::{Argument, Launches};
use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::program::Action;
use narrows_plan::{ContextAttention, DType};
use narrows_runtime::session::PositionRuns;

use super::case::KernelCase;
use super::formats::{random_values, rounded};
use reference::{error_terms, reference};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
/// Maximum relative error of rounding to bf16.
const UNIT: f64 = 1.0 / 256.0;

/// Which of q, k and v share an operand.
#[derive(Clone, Copy, Debug)]
enum OperandSharing {
    All,
    KeysAndValues,
    None,
    QueriesAndKeys,
}

const OPERAND_SHARINGS: [OperandSharing; 4] = [
    OperandSharing::All,
    OperandSharing::KeysAndValues,
    OperandSharing::None,
    OperandSharing::QueriesAndKeys,
];

/// An attention op and the layout of its operands.
#[derive(Clone, Debug)]
struct AttentionProblem {
    op: Attention,
    /// KV heads in the operands; more than the op's where several devices use the same ones.
    local_kv_heads: u64,
    /// Number of devices, and index of this one.
    devices: (u64, u64),
    /// Place on a context axis of `op.query_parts` devices.
    place: u64,
    /// Layout of q, k and v.
    operands: OperandSharing,
    /// Scale of q and k.
    scale: f32,
}

fn problem(
    (sequences, length): (u64, u64),
    (heads, kv_heads, head_dim): (u64, u64, u64),
    input: DType,
) -> AttentionProblem {
    let direction = Direction::Forward;
    let window = None;
    let op = Attention {
        direction,
        sequences,
        length,
        heads,
        kv_heads,
        head_dim,
        input,
        window,
        query_parts: 1,
        ring: None,
    };
    AttentionProblem {
        op,
        local_kv_heads: kv_heads,
        devices: (1, 0),
        place: 0,
        operands: OperandSharing::All,
        scale: 3.0,
    }
}

/// Values of q, k and v side by side, and of the gradient of the output.
struct Values {
    all: Vec<f32>,
    dout: Vec<f32>,
}

impl AttentionProblem {
    fn tokens(&self) -> u64 {
        self.op.sequences * self.op.length
    }

    /// Rows of queries.
    fn query_rows(&self) -> u64 {
        self.op.sequences * self.op.queries()
    }

    fn positions(&self) -> PositionRuns {
        let context = self.case(Direction::Forward).context;
        PositionRuns::at_place(&context, self.place as usize)
    }

    /// Selects the rows of the queries of a matrix with a row for each token.
    fn select_queries(&self, matrix: Vec<f32>) -> Vec<f32> {
        let width = matrix.len() / self.tokens() as usize;
        let positions: Vec<usize> = self.positions().runs().flatten().collect();
        let sequences = matrix.chunks(width * self.op.length as usize);
        let rows = sequences.flat_map(|sequence| {
            positions.iter().flat_map(move |position| &sequence[position * width..][..width])
        });
        rows.copied().collect()
    }

    fn shape(&self) -> AttentionShape {
        let Attention { sequences, length, heads, kv_heads, head_dim, .. } = self.op;
        let [sequences, length, heads, kv_heads, head_dim] =
            [sequences, length, heads, kv_heads, head_dim].map(|size| size as usize);
        let window = self.op.window.map_or(length, |window| window as usize);
        let queries = self.positions();
        AttentionShape { sequences, length, queries, heads, kv_heads, head_dim, window }
    }

    /// Columns of all queries, and of all keys.
    fn widths(&self) -> [u64; 2] {
        [self.op.heads, self.local_kv_heads].map(|heads| heads * self.op.head_dim)
    }

    /// Columns of q, and of the k and v that are attended to.
    fn columns(&self) -> [Range<usize>; 3] {
        let [queries, keys] = self.widths();
        let (devices, at) = self.devices;
        let first = self.op.heads * at * self.local_kv_heads / (self.op.heads * devices);
        let first =
            if self.local_kv_heads > self.op.kv_heads { first * self.op.head_dim } else { 0 };
        let width = self.op.kv_heads * self.op.head_dim;
        [(0, queries), (queries + first, width), (queries + keys + first, width)]
            .map(|(first, count)| first as usize..(first + count) as usize)
    }

    /// Width of each operand.
    fn parts(&self) -> Vec<u64> {
        let [queries, keys] = self.widths();
        match self.operands {
            OperandSharing::All => vec![queries + 2 * keys],
            OperandSharing::KeysAndValues => vec![queries, 2 * keys],
            OperandSharing::None => vec![queries, keys, keys],
            OperandSharing::QueriesAndKeys => vec![queries + keys, keys],
        }
    }

    fn width(&self) -> u64 {
        self.parts().iter().sum()
    }

    fn values(&self) -> Values {
        let mut all = random_values(self.op.length, self.tokens() * self.width());
        let [.., values] = self.columns();
        let keys_end = (self.width() - self.widths()[1]) as usize;
        assert!(values.start >= keys_end);
        for row in all.chunks_mut(self.width() as usize) {
            row[..keys_end].iter_mut().for_each(|x| *x *= self.scale);
        }
        let dout = random_values(self.op.length + 1, self.query_rows() * self.widths()[0]);
        let [all, dout] = [all, dout].map(|values| rounded(self.op.input, values));
        Values { all, dout }
    }

    fn case(&self, direction: Direction) -> KernelCase {
        let op = Attention { direction, ..self.op.clone() };
        let tokens = (self.op.sequences, self.op.length);
        let mut case = KernelCase::of(Action::Attention(op), self.devices.0, tokens);
        case.tensor = self.devices.1;
        if self.op.query_parts > 1 {
            case.context.mesh.context = self.op.query_parts;
            case.context.context_attention = ContextAttention::Gather;
            case.replica = self.place;
        }
        case
    }

    /// Selects columns of a matrix of q, k and v.
    fn select(&self, all: &[f32], columns: Range<usize>) -> Vec<f32> {
        let rows = all.chunks(self.width() as usize);
        rows.flat_map(|row| row[columns.clone()].to_vec()).collect()
    }

    /// Splits a matrix of q, k and v into operands.
    fn split(&self, all: &[f32]) -> Vec<Vec<f32>> {
        let mut first = 0;
        let part = |width: u64| {
            let columns = first..first + width as usize;
            first = columns.end;
            self.select(all, columns)
        };
        let mut parts: Vec<_> = self.parts().into_iter().map(part).collect();
        parts[0] = self.select_queries(std::mem::take(&mut parts[0]));
        parts
    }

    /// Rows and columns of each operand.
    fn operand_shapes(&self) -> Vec<(u64, u64)> {
        let mut shapes: Vec<_> =
            self.parts().into_iter().map(|width| (self.tokens(), width)).collect();
        shapes[0].0 = self.query_rows();
        shapes
    }
}

#[track_caller]
fn assert_within(name: &str, actual: &[f32], expected: &[f32], allowed: impl Fn(usize) -> f64) {
    assert_eq!(actual.len(), expected.len());
    for (at, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let allowed = allowed(at);
        let error = (f64::from(*actual) - f64::from(*expected)).abs();
        assert!(
            error <= allowed,
            "{name}, element {at}: {actual}, expected {expected} (± {allowed:e})"
        );
    }
}

/// Compares both directions with the CPU; `None` where kernels cannot be compiled for the CPU.
fn check(problem: &AttentionProblem) -> Option<()> {
    let values = problem.values();
    let expected = reference(problem, &values);
    let terms = error_terms(problem, &values, &expected);
    let dtype = problem.op.input;
    let unit = if dtype == DType::Bf16 { UNIT } else { 0.0 };
    let of_f32 = f64::from(f32::EPSILON) * (16.0 + 4.0 * terms.exponent);
    let allowed = |rounded: &[f64], summed: &[f64], expected: &[f32], at: usize| {
        unit * (rounded[at] + f64::from(expected[at].abs()))
            + (of_f32 + unit * unit) * summed[at]
            + 1e-9
    };
    let (query_rows, [queries, _]) = (problem.query_rows(), problem.widths());

    let mut case = problem.case(Direction::Forward);
    let parts = problem.split(&values.all);
    let inputs: Vec<_> = problem
        .operand_shapes()
        .into_iter()
        .zip(&parts)
        .map(|(shape, values)| case.buffer(shape, dtype, Some(values)))
        .collect();
    let out = case.buffer((query_rows, queries), dtype, None);
    let lse = case.buffer((query_rows, problem.op.heads), DType::F32, None);
    case.reads(&inputs).writes(&[out, lse]);
    let outcome = case.run()?;
    assert_within("output", &outcome.elements(out), &expected.out, |at| {
        allowed(&terms.out, &terms.out, &expected.out, at)
    });
    assert_within("log-sum-exp", &outcome.elements(lse), &expected.lse, |_| of_f32);

    let mut case = problem.case(Direction::Backward);
    let mut reads: Vec<_> = problem
        .operand_shapes()
        .into_iter()
        .zip(&parts)
        .map(|(shape, values)| case.buffer(shape, dtype, Some(values)))
        .collect();
    reads.push(case.buffer((query_rows, queries), dtype, Some(&expected.out)));
    reads.push(case.buffer((query_rows, problem.op.heads), DType::F32, Some(&expected.lse)));
    reads.push(case.buffer((query_rows, queries), dtype, Some(&values.dout)));
    let shapes = problem.operand_shapes().into_iter();
    let gradients: Vec<_> = shapes.map(|shape| case.buffer(shape, dtype, None)).collect();
    case.reads(&reads).writes(&gradients);
    let outcome = case.run()?;
    let mut gradients: Vec<Vec<f32>> =
        gradients.iter().map(|buffer| outcome.elements(*buffer)).collect();
    // Gradients of the queries alone have fewer rows than tokens; they are compared first.
    if problem.op.query_parts > 1 {
        let expected = &expected.gradients[0];
        assert_within("gradient of q", &gradients[0], expected, |number| {
            allowed(&terms.rounded[0], &terms.summed[0], expected, number)
        });
        gradients[0] = vec![0.0; (problem.tokens() * queries) as usize];
    }
    let rows = (0..problem.tokens() as usize).flat_map(|row| {
        gradients.iter().zip(problem.parts()).flat_map(move |(part, width)| {
            part[row * width as usize..][..width as usize].iter().copied()
        })
    });
    let all: Vec<f32> = rows.collect();
    let compared = usize::from(problem.op.query_parts > 1);
    for (at, columns) in problem.columns().into_iter().enumerate().skip(compared) {
        let name = ["gradient of q", "gradient of k", "gradient of v"][at];
        let expected = &expected.gradients[at];
        assert_within(name, &problem.select(&all, columns), expected, |number| {
            allowed(&terms.rounded[at], &terms.summed[at], expected, number)
        });
    }
    // KV heads that are not attended to have zero gradients.
    let attended = problem.columns();
    for (at, number) in all.iter().enumerate() {
        let column = at % problem.width() as usize;
        let unused = attended.iter().all(|columns| !columns.contains(&column));
        assert!(!unused || *number == 0.0, "column {column} is {number}");
    }
    Some(())
}

/// Widths of the tiles that are copied in vectors.
const WIDTHS: [u64; 3] = [32, 64, 128];

/// Every length with one width, and every width with a third of the lengths.
#[test]
fn ragged_lengths_match_the_cpu() {
    check_ragged_lengths(|at, width| at % WIDTHS.len() == width);
}

#[test]
#[ignore = "second level: the other pairs of a length and a width"]
fn ragged_lengths_of_the_other_widths_match_the_cpu() {
    check_ragged_lengths(|at, width| at % WIDTHS.len() != width);
}

/// Lengths around every tile size: 16, 32, 64 and 128 tokens. `includes` selects by the numbers of the length and the
/// width.
fn check_ragged_lengths(includes: fn(usize, usize) -> bool) {
    let lengths = [1, 2, 15, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 177, 200];
    let heads = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)];
    for (at, length) in lengths.into_iter().enumerate() {
        let (heads, kv_heads) = heads[at % heads.len()];
        let widths = (0..WIDTHS.len()).filter(|width| includes(at, *width));
        let widths: Vec<u64> = widths.map(|width| WIDTHS[width]).collect();
        for (dtype, head_dim) in
            FORMATS.into_iter().flat_map(|f| widths.iter().map(move |w| (f, *w)))
        {
            let sequences = 1 + (at as u64 + head_dim / 64) % 2;
            let mut problem = problem((sequences, length), (heads, kv_heads, head_dim), dtype);
            problem.operands = OPERAND_SHARINGS[at % 4];
            if check(&problem).is_none() {
                return;
            }
        }
    }
}

/// Heads narrower than their tiles, in vectors of 16 bytes and in single elements.
#[test]
fn heads_of_any_width_match_the_cpu() {
    let sizes = [2, 4, 6, 8, 12, 16, 20, 24, 34, 36, 48, 72, 80, 96, 100, 112, 130, 160, 256];
    let (lengths, heads) = ([33, 70, 9, 129], [(2, 1), (3, 3), (4, 2)]);
    for (at, head_dim) in sizes.into_iter().enumerate() {
        for dtype in FORMATS {
            let (heads, kv_heads) = heads[at % heads.len()];
            let tokens = (1 + at as u64 % 2, lengths[at % lengths.len()]);
            let mut problem = problem(tokens, (heads, kv_heads, head_dim), dtype);
            problem.operands = OPERAND_SHARINGS[at % 4];
            if check(&problem).is_none() {
                return;
            }
        }
    }
}

/// Which heads use vectors and tensor cores, and which do not.
#[test]
fn heads_use_the_narrowest_tiles_that_hold_them() {
    let cases = [
        (2, "bf16_w32_v1", "f32_w32_v1"),
        (4, "bf16_w32_v1", "f32_w32_v1"),
        (16, "bf16_w64", "f32_w32_v1"),
        (32, "bf16_w64", "f32_w32_v1"),
        (36, "bf16_w256_v1", "f32_w128"),
        (48, "bf16_w64", "f32_w128"),
        (80, "bf16_w128", "f32_w128"),
        (128, "bf16_w128", "f32_w128"),
        (136, "bf16_w256_v1", "f32_w256_v1"),
    ];
    for (head_dim, bf16, f32) in cases {
        for (dtype, name) in [(DType::Bf16, bf16), (DType::F32, f32)] {
            let problem = problem((1, 8), (2, 1, head_dim), dtype);
            let names = |direction| -> Vec<String> {
                let gradients = launches(&problem, direction).unwrap().launches;
                gradients.into_iter().map(|launch| launch.kernel).collect()
            };
            assert_eq!(names(Direction::Forward), [format!("attention_{name}")]);
            let backward = ["sums", "dq", "dkv"].map(|of| format!("attention_{of}_{name}"));
            assert_eq!(names(Direction::Backward), backward);
        }
    }
}

/// Four devices with two KV heads: each uses the one of its queries, and its gradient of the other is zero.
#[test]
fn devices_can_share_kv_heads() {
    for (at, dtype) in (0..4).flat_map(|at| FORMATS.map(|dtype| (at, dtype))) {
        let mut problem = problem((2, 70), (2, 1, 64), dtype);
        (problem.local_kv_heads, problem.devices) = (2, (4, at));
        problem.operands = OPERAND_SHARINGS[1 + at as usize % 3];
        if check(&problem).is_none() {
            return;
        }
    }
}

/// Windows of fewer and more keys than the tiles have, over sequences of several tiles.
#[test]
fn sliding_windows_match_the_cpu() {
    let windows = [1, 2, 15, 16, 33, 63, 64, 65, 100, 128, 150, 199];
    for (at, window) in windows.into_iter().enumerate() {
        let (heads, kv_heads) = [(1, 1), (4, 2), (2, 1)][at % 3];
        for dtype in FORMATS {
            // Tiles of matrix instructions and of single elements.
            let head_dim = [64, 128, 18][at % 3];
            let mut problem = problem((1, 200), (heads, kv_heads, head_dim), dtype);
            problem.op.window = Some(window);
            problem.operands = OPERAND_SHARINGS[at % 4];
            if check(&problem).is_none() {
                return;
            }
        }
    }
}

/// Scores in the thousands: without the running maximum every exponential would be 0 or ∞.
#[test]
fn large_scores_do_not_overflow() {
    for dtype in FORMATS {
        let mut problem = problem((1, 90), (2, 1, 64), dtype);
        problem.scale = 30.0;
        if check(&problem).is_none() {
            return;
        }
    }
}

fn launches(problem: &AttentionProblem, direction: Direction) -> Result<Launches, String> {
    let mut case = problem.case(direction);
    let (query_rows, dtype) = (problem.query_rows(), problem.op.input);
    let [queries, _] = problem.widths();
    let shapes = problem.operand_shapes();
    let buffers = |case: &mut KernelCase| -> Vec<_> {
        shapes.iter().map(|shape| case.buffer(*shape, dtype, None)).collect()
    };
    let (mut reads, gradients) = (buffers(&mut case), buffers(&mut case));
    let [out, dout] = [(); 2].map(|()| case.buffer((query_rows, queries), dtype, None));
    let lse = case.buffer((query_rows, problem.op.heads), DType::F32, None);
    match direction {
        Direction::Forward => case.reads(&reads).writes(&[out, lse]),
        Direction::Backward => {
            reads.extend([out, lse, dout]);
            case.reads(&reads).writes(&gradients)
        }
    };
    case.launches()
}

/// Shared memory per block fits GPUs with 99 KiB, except for heads above 128 features. Scratch memory is two f32 per
/// query of whole tiles.
#[test]
fn shared_and_scratch_memory_have_the_documented_sizes() {
    let sizes = [6, 32, 64, 128, 256];
    for (dtype, head_dim) in FORMATS.into_iter().flat_map(|f| sizes.map(|w| (f, w))) {
        let limit = if head_dim > 128 { 163 * 1024 } else { 99 * 1024 };
        let problem = problem((2, 100), (4, 2, head_dim), dtype);
        let forward = launches(&problem, Direction::Forward).unwrap();
        let backward = launches(&problem, Direction::Backward).unwrap();
        assert_eq!((forward.scratch_bytes, backward.scratch_bytes), (0, 2 * 4 * 128 * 8));
        assert_eq!((forward.launches.len(), backward.launches.len()), (1, 3));
        for launch in forward.launches.iter().chain(&backward.launches) {
            assert!(launch.shared_bytes <= limit, "{launch:?}");
            println!("{}: {} bytes of shared memory", launch.kernel, launch.shared_bytes);
        }
    }
}

#[test]
fn unsupported_heads_are_reported() {
    let unsupported = |change: fn(&mut AttentionProblem), expected: &str| {
        let mut problem = problem((1, 8), (4, 2, 64), DType::Bf16);
        change(&mut problem);
        for direction in [Direction::Forward, Direction::Backward] {
            let error = launches(&problem, direction).expect_err(expected);
            assert!(error.contains(expected) && error.contains("a test"), "{error}");
        }
    };
    unsupported(|p| p.op.head_dim = 258, "heads of 258 features exceed the widest tile, 256");
    unsupported(|p| p.op.kv_heads = 3, "4 query heads do not share 3 KV heads evenly");
    unsupported(|p| p.local_kv_heads = 1, "do not fit 4 query and 2 KV heads");
}

/// A problem of the queries at a place of a context axis, with the keys of all positions.
fn gathered(
    (parts, place, chunk): (u64, u64, u64),
    heads: (u64, u64, u64),
    input: DType,
) -> AttentionProblem {
    let mut gathered = problem((1, 2 * parts * chunk), heads, input);
    gathered.op.query_parts = parts;
    (gathered.place, gathered.operands) = (place, OperandSharing::None);
    gathered
}

/// Two runs of queries of whole tiles, and runs that begin and end within tiles, at every place of the context axis.
#[test]
fn gathered_keys_match_the_cpu() {
    let mut at = 0;
    for (parts, chunk) in [(2, 64), (3, 64), (2, 33), (3, 5)] {
        for place in 0..parts {
            let (heads, kv_heads) = [(1, 1), (4, 2), (2, 1)][at % 3];
            let head_dim = [64, 18, 128, 48][at % 4];
            at += 1;
            for dtype in FORMATS {
                let of_device = (parts, place, chunk);
                let mut problem = gathered(of_device, (heads, kv_heads, head_dim), dtype);
                problem.op.sequences = 1 + u64::from(at % 2 == 0);
                if at.is_multiple_of(2) {
                    problem.operands = OperandSharing::KeysAndValues;
                }
                if check(&problem).is_none() {
                    return;
                }
            }
        }
    }
}

/// Windows within a chunk, across chunks, and of one key.
#[test]
fn gathered_keys_within_windows_match_the_cpu() {
    // With 65, 66 and 130 keys at place 0, the second chunk of keys is seen by no query of the second run, by one, by many.
    let cases = [
        (1, 0, 64),
        (50, 1, 64),
        (65, 0, 21),
        (130, 1, 64),
        (65, 0, 64),
        (66, 0, 64),
        (130, 0, 64),
    ];
    for (at, (window, place, chunk)) in cases.into_iter().enumerate() {
        for dtype in FORMATS {
            let head_dim = [64, 128, 64][at % 3];
            let mut problem = gathered((2, place, chunk), (2, 1, head_dim), dtype);
            problem.op.window = Some(window).filter(|window| *window < problem.op.length);
            if check(&problem).is_none() {
                return;
            }
        }
    }
}

/// Two KV heads and four devices along the tensor axis, each with the queries of a place.
#[test]
fn devices_with_gathered_keys_can_share_kv_heads() {
    for (at, dtype) in [(1, DType::Bf16), (2, DType::F32)] {
        let mut problem = gathered((2, at % 2, 64), (2, 1, 64), dtype);
        (problem.local_kv_heads, problem.devices) = (2, (4, at));
        if check(&problem).is_none() {
            return;
        }
    }
}

/// Each run of queries has a launch that ends at its own keys, so that no tile of later keys is computed. Tensor cores
/// compute runs of whole tiles.
#[test]
fn each_run_of_queries_has_its_own_launch() {
    for (chunk, head_dim, kernel, dkv) in [
        (64, 64, "bf16_w64", "general_dkv"),
        (128, 128, "bf16_w128", "general_dkv"),
        (48, 64, "bf16_w256_v1", "dkv"),
    ] {
        let problem = gathered((2, 1, chunk), (2, 1, head_dim), DType::Bf16);
        let forward = launches(&problem, Direction::Forward).unwrap().launches;
        let backward = launches(&problem, Direction::Backward).unwrap().launches;
        let names: Vec<&str> = forward.iter().chain(&backward).map(|l| &*l.kernel).collect();
        let kernels = ["", "", "sums_", "dq_", "dq_", &format!("{dkv}_")];
        assert_eq!(names, kernels.map(|name| format!("attention_{name}{kernel}")));
        // Rows of keys and of queries of a sequence, its keys, first position and end of the run, and positions
        // without a row before it.
        let runs = [[chunk, 2 * chunk, chunk], [2 * chunk, 3 * chunk, chunk]];
        for (launches, pointers) in [(&forward[..], 5), (&backward[1..3], 6)] {
            for (launch, run) in launches.iter().zip(runs) {
                let sizes: Vec<u64> = launch.arguments[pointers..pointers + 6]
                    .iter()
                    .map(|argument| match argument {
                        Argument::U32(size) => u64::from(*size),
                        other => panic!("{other:?}"),
                    })
                    .collect();
                assert_eq!(sizes[..3], [4, 2, 4].map(|chunks| chunks * chunk));
                assert_eq!(sizes[3..], run, "{}", launch.kernel);
            }
        }
    }
}
