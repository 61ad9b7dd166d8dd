//! Attention, forward and backward, on ragged shapes.
//!
//! The tolerance of bf16 is derived for each element. Scores, probabilities, sums over keys and D are f32 on both sides.
//! Only operands of a second matmul are rounded, with a relative error of at most 2⁻⁸: P before P·v and Pᵀ·dout, dS
//! before dS·k and dSᵀ·q. So each result may differ by 2⁻⁸ of its sum over absolute values, and by 2⁻⁸ of itself for its
//! own rounding. f32 adds a few 2⁻²⁴ of these sums, in proportion to the scores, whose errors are in an exponent.

mod launches;
mod problem;
mod reference;

use narrows_plan::DType;
use narrows_plan::kernel::Direction;

use problem::{AttentionProblem, FORMATS, OPERAND_SHARINGS, OperandSharing, gathered, problem};
use reference::{error_terms, reference};

/// Maximum relative error of rounding to bf16.
const UNIT: f64 = 1.0 / 256.0;

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
