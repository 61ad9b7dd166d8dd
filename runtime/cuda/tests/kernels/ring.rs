//! Ring attention: all devices of a ring, whose results together are those of the CPU backend for whole sequences.
//!
//! Results of steps are rounded to the format of the program, and summed in f32.

use std::ops::Range;

use narrows_cpu::kernels::{
    AttentionGradients, AttentionSaved, AttentionShape, MatrixView, MatrixViewMut, Parallel,
    attention_backward, attention_forward,
};
use narrows_cuda::{RingAttention, RingShift};
use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::program::{Action, BufferId};
use narrows_plan::{Axis, ContextAttention, DType, DeviceGroup};
use narrows_runtime::session::PositionRuns;

use super::case::{CaseMemory, KernelCase, Outcome, ring_launches};
use super::formats::{random_values, rounded};
use super::shim::ExecutionOrder;
use super::shim_collectives::run_shift;

/// A ring, and the layout of its operands.
#[derive(Clone, Copy, Debug)]
struct RingProblem {
    places: u64,
    sequences: u64,
    /// Positions of a chunk, of which a device has two.
    chunk: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    dtype: DType,
    /// Whether q, k and v are columns of one operand.
    is_grouped: bool,
    /// KV heads in the operands, and the first of them that is attended to.
    stored_kv_heads: u64,
    first_kv_head: u64,
}

/// Matrices of whole sequences, a row for each token: q, k, v, the output and its gradient, the log-sum-exp, and the
/// gradients of q, k and v.
struct Whole {
    inputs: [Vec<f32>; 3],
    out: Vec<f32>,
    dout: Vec<f32>,
    lse: Vec<f32>,
    gradients: [Vec<f32>; 3],
}

/// Results of all devices of a ring.
#[derive(PartialEq)]
struct RingResults(Vec<Vec<Vec<f32>>>);

impl RingProblem {
    fn length(&self) -> u64 {
        2 * self.chunk * self.places
    }

    fn tokens(&self) -> usize {
        (self.sequences * self.length()) as usize
    }

    /// Columns of q, and of k or v.
    fn widths(&self) -> [usize; 2] {
        [self.heads, self.kv_heads].map(|heads| (heads * self.head_dim) as usize)
    }

    /// Selects the rows of a device of a matrix with a row for each token.
    fn of_place(&self, matrix: &[f32], place: u64) -> Vec<f32> {
        let width = matrix.len() / self.tokens();
        let chunk_elements = self.chunk as usize * width;
        let sequences = matrix.chunks(width * self.length() as usize);
        let chunks = [place, 2 * self.places - 1 - place].map(|chunk| chunk as usize);
        let rows = sequences.flat_map(|sequence| {
            chunks
                .into_iter()
                .flat_map(move |at| &sequence[at * chunk_elements..][..chunk_elements])
        });
        rows.copied().collect()
    }

    /// Results of the CPU backend for whole sequences. The backward pass reads the output in the format of the program.
    fn whole(&self) -> Whole {
        let tokens = self.tokens();
        let [of_q, of_k] = self.widths();
        let random = |columns: usize, seed: u64, scale: f32| {
            let values = random_values(seed, (tokens * columns) as u64);
            rounded(self.dtype, values.iter().map(|x| x * scale).collect())
        };
        let (q, k, v) = (random(of_q, 1, 3.0), random(of_k, 2, 3.0), random(of_k, 3, 1.0));
        let dout = random(of_q, 4, 1.0);
        let shape = AttentionShape {
            sequences: self.sequences as usize,
            length: self.length() as usize,
            queries: PositionRuns::consecutive(0, self.length() as usize),
            heads: self.heads as usize,
            kv_heads: self.kv_heads as usize,
            head_dim: self.head_dim as usize,
            window: self.length() as usize,
        };
        let mut scratch = vec![0.0; shape.scratch_elements(Parallel::SERIAL)];
        let (mut out, mut lse) = (vec![0.0; tokens * of_q], vec![0.0; tokens * shape.heads]);
        let views = [(&q, of_q), (&k, of_k), (&v, of_k)];
        let [qv, kv, vv] = views.map(|(matrix, columns)| MatrixView::new(matrix, tokens, columns));
        let results = (
            MatrixViewMut::new(&mut out, tokens, of_q),
            MatrixViewMut::new(&mut lse, tokens, shape.heads),
        );
        attention_forward(shape, (qv, kv, vv), results, &mut scratch, Parallel::SERIAL);
        let saved_out = rounded(self.dtype, out.clone());
        let saved = AttentionSaved {
            q: qv,
            k: kv,
            v: vv,
            out: MatrixView::new(&saved_out, tokens, of_q),
            lse: MatrixView::new(&lse, tokens, shape.heads),
            dout: MatrixView::new(&dout, tokens, of_q),
        };
        let mut gradients = [of_q, of_k, of_k].map(|columns| vec![0.0; tokens * columns]);
        let [dq, dk, dv] = &mut gradients;
        let into = AttentionGradients {
            dq: MatrixViewMut::new(dq, tokens, of_q),
            dk: MatrixViewMut::new(dk, tokens, of_k),
            dv: MatrixViewMut::new(dv, tokens, of_k),
        };
        attention_backward(shape, saved, into, &mut scratch, Parallel::SERIAL);
        Whole { inputs: [q, k, v], out, dout, lse, gradients }
    }

    /// Rows of q, k and v side by side in the operands of a device; unused KV heads are NaN.
    fn operands(&self, [q, k, v]: &[Vec<f32>; 3]) -> Vec<Vec<f32>> {
        let rows = (2 * self.chunk * self.sequences) as usize;
        let [of_q, of_k] = self.widths();
        let stored = (self.stored_kv_heads * self.head_dim) as usize;
        let first = (self.first_kv_head * self.head_dim) as usize;
        let padded = |matrix: &[f32]| -> Vec<f32> {
            let mut all = vec![f32::NAN; rows * stored];
            for (to, from) in all.chunks_mut(stored).zip(matrix.chunks(of_k)) {
                to[first..first + of_k].copy_from_slice(from);
            }
            all
        };
        let (k, v) = (padded(k), padded(v));
        if !self.is_grouped {
            return vec![q.clone(), k, v];
        }
        let matrices = [(q, of_q), (&k, stored), (&v, stored)];
        let of_row = |row: usize| {
            matrices.into_iter().flat_map(move |(matrix, width)| &matrix[row * width..][..width])
        };
        vec![(0..rows).flat_map(of_row).copied().collect()]
    }

    /// Gradients of q, k and v in the operands of a device, in which those of unused KV heads are zero.
    fn split_gradients(&self, operands: &[Vec<f32>]) -> [Vec<f32>; 3] {
        let [of_q, of_k] = self.widths();
        let stored = (self.stored_kv_heads * self.head_dim) as usize;
        let first = (self.first_kv_head * self.head_dim) as usize;
        let widths =
            if self.is_grouped { vec![of_q + 2 * stored] } else { vec![of_q, stored, stored] };
        let columns = |start: usize, used: Range<usize>, width: usize| -> Vec<f32> {
            let (mut operand, mut start) = (0, start);
            while start >= widths[operand] {
                start -= widths[operand];
                operand += 1;
            }
            let rows = operands[operand].chunks(widths[operand]);
            let rows = rows.map(|row| &row[start..start + width]);
            let split = rows.flat_map(|row| {
                let zeros = row[..used.start].iter().chain(&row[used.end..]);
                assert!(zeros.into_iter().all(|x| *x == 0.0), "gradients of unused heads");
                &row[used.clone()]
            });
            split.copied().collect()
        };
        let used = first..first + of_k;
        [
            columns(0, 0..of_q, of_q),
            columns(of_q, used.clone(), stored),
            columns(of_q + stored, used, stored),
        ]
    }

    /// The instruction on a device, and the buffers of its results.
    fn case(&self, direction: Direction, place: u64, whole: &Whole) -> (KernelCase, Vec<BufferId>) {
        let ring = DeviceGroup { axis: Axis::Context, size: self.places, stride: 1 };
        let attention = Attention {
            direction,
            sequences: self.sequences,
            length: self.length(),
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            input: self.dtype,
            window: None,
            query_parts: self.places,
            ring: Some(ring),
        };
        let scratch = attention.ring_scratch().expect("a ring");
        let action = Action::Attention(attention);
        let tensor = if self.stored_kv_heads > self.kv_heads { self.stored_kv_heads } else { 1 };
        let mut case = KernelCase::of(action, tensor, (self.sequences, self.length()));
        case.context.mesh.context = self.places;
        case.context.context_attention = ContextAttention::Ring;
        case.tensor = self.first_kv_head;
        case.replica = place;
        let rows = 2 * self.chunk * self.sequences;
        let mut place_matrix = |matrix: &[f32], dtype: DType| {
            let matrix = self.of_place(matrix, place);
            case.buffer((rows, matrix.len() as u64 / rows), dtype, Some(&matrix))
        };
        let of_results = match direction {
            Direction::Forward => vec![],
            Direction::Backward => vec![
                place_matrix(&rounded(self.dtype, whole.out.clone()), self.dtype),
                place_matrix(&whole.lse, DType::F32),
                place_matrix(&whole.dout, self.dtype),
            ],
        };
        let inputs = whole.inputs.each_ref().map(|matrix| self.of_place(matrix, place));
        let operands = self.operands(&inputs);
        let shapes = operands.iter().map(|operand| (rows, operand.len() as u64 / rows));
        let shapes: Vec<(u64, u64)> = shapes.collect();
        let mut reads: Vec<BufferId> = shapes
            .iter()
            .zip(&operands)
            .map(|(shape, operand)| case.buffer(*shape, self.dtype, Some(operand)))
            .collect();
        reads.extend(of_results);
        let results: Vec<BufferId> = match direction {
            Direction::Forward => vec![
                case.buffer((rows, self.heads * self.head_dim), self.dtype, None),
                case.buffer((rows, self.heads), DType::F32, None),
            ],
            Direction::Backward => {
                shapes.iter().map(|shape| case.buffer(*shape, self.dtype, None)).collect()
            }
        };
        let scratch = [scratch.parts, scratch.sums]
            .map(|extent| case.buffer((extent.rows, extent.columns), extent.dtype, None));
        case.reads(&reads).writes(&[&results[..], &scratch].concat());
        (case, results)
    }

    /// The results of each device. A shift runs before or after what runs beside it.
    fn run(&self, direction: Direction, whole: &Whole, shifts_first: bool) -> Option<RingResults> {
        let cases: Vec<_> = (0..self.places).map(|at| self.case(direction, at, whole)).collect();
        let rings: Vec<RingAttention> =
            cases.iter().map(|(case, _)| case.ring().unwrap_or_else(|e| panic!("{e}"))).collect();
        let mut memories: Vec<CaseMemory> = cases
            .iter()
            .zip(&rings)
            .map(|((case, _), ring)| case.memory(ring.scratch_bytes))
            .collect();
        let order =
            if shifts_first { ExecutionOrder::Ascending } else { ExecutionOrder::Descending };
        for step in 0..rings[0].steps.len() {
            let steps: Vec<_> = rings.iter().map(|ring| &ring.steps[step]).collect();
            let devices = || cases.iter().zip(&steps);
            for (((case, _), step), memory) in devices().zip(&mut memories) {
                case.execute(&step.before, memory, order)?;
            }
            let shifts: Option<Vec<RingShift>> =
                steps.iter().map(|step| step.shift.clone()).collect();
            if let Some(shifts) = shifts.as_ref().filter(|_| shifts_first) {
                run_shift(shifts, arenas(&mut memories));
            }
            for (((case, _), step), memory) in devices().zip(&mut memories) {
                case.execute(&step.beside, memory, order)?;
            }
            if let Some(shifts) = shifts.as_ref().filter(|_| !shifts_first) {
                run_shift(shifts, arenas(&mut memories));
            }
            for (((case, _), step), memory) in devices().zip(&mut memories) {
                case.execute(&step.after, memory, order)?;
            }
        }
        let results =
            cases.iter().zip(&rings).zip(memories).map(|(((case, results), ring), memory)| {
                let outcome: Outcome = case.outcome(memory);
                let shifts = ring.steps.iter().filter_map(|step| step.shift.as_ref());
                let arrived: Vec<Range<u64>> =
                    shifts.flat_map(|shift| &shift.operands).map(|(_, to)| to.clone()).collect();
                case.assert_untouched(&ring_launches(ring), &arrived, &outcome);
                results.iter().map(|result| outcome.elements(*result)).collect()
            });
        Some(RingResults(results.collect()))
    }
}

fn arenas(memories: &mut [CaseMemory]) -> Vec<&mut [u8]> {
    memories.iter_mut().map(|memory| memory.arena.as_mut_slice()).collect()
}

/// Relative difference of two matrices in the Frobenius norm.
fn difference(actual: &[f32], expected: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| -> f64 { values.map(|x| x * x).sum() };
    let expected_f64 = || expected.iter().map(|x| f64::from(*x));
    let error = square(&mut actual.iter().zip(expected_f64()).map(|(x, y)| f64::from(*x) - y));
    (error / square(&mut expected_f64())).sqrt()
}

/// Compares the results of a ring with those of the CPU backend, which differ less than 1 % of any result does.
fn check(problem: RingProblem) -> Option<()> {
    let whole = problem.whole();
    let tolerance = if problem.dtype == DType::Bf16 { 5e-3 } else { 2e-6 };
    for direction in [Direction::Forward, Direction::Backward] {
        let results = problem.run(direction, &whole, true)?;
        let shifted_later = problem.run(direction, &whole, false)?;
        assert!(results == shifted_later, "{problem:?}: shifts race with launches");
        for (place, results) in results.0.into_iter().enumerate() {
            let (names, actual, expected) = match direction {
                Direction::Forward => {
                    let expected = [&whole.out, &whole.lse];
                    (vec!["out", "lse"], results, expected.to_vec())
                }
                Direction::Backward => {
                    let expected = whole.gradients.each_ref().to_vec();
                    (vec!["dq", "dk", "dv"], problem.split_gradients(&results).to_vec(), expected)
                }
            };
            for ((name, actual), expected) in names.iter().zip(actual).zip(expected) {
                let expected = problem.of_place(expected, place as u64);
                let difference = difference(&actual, &expected);
                assert!(
                    difference < tolerance,
                    "{name} of device {place} is off by {difference:.1e}: {problem:?}"
                );
            }
        }
    }
    Some(())
}

fn problem(places: u64, chunk: u64, head_dim: u64, dtype: DType) -> RingProblem {
    RingProblem {
        places,
        sequences: 1,
        chunk,
        heads: 2,
        kv_heads: 1,
        head_dim,
        dtype,
        is_grouped: true,
        stored_kv_heads: 1,
        first_kv_head: 0,
    }
}

/// Chunks of whole tiles, for which bf16 has tensor cores, and chunks that begin and end within tiles.
#[test]
fn rings_match_attention_over_whole_sequences() {
    let mut at = 0;
    for (places, chunk) in [(2, 64), (3, 64), (2, 128), (4, 21), (2, 33), (3, 5)] {
        for dtype in [DType::Bf16, DType::F32] {
            let head_dim = [64, 128, 18, 48][at % 4];
            at += 1;
            let ring = RingProblem {
                sequences: 1 + u64::from(chunk < 64 || places == 2),
                is_grouped: at % 3 > 0,
                ..problem(places, chunk, head_dim, dtype)
            };
            if check(ring).is_none() {
                return;
            }
        }
    }
}

/// Devices of a tensor axis that all have both KV heads, and each use one of them.
#[test]
fn devices_of_a_ring_can_share_kv_heads() {
    for (first_kv_head, dtype) in [(0, DType::Bf16), (1, DType::Bf16), (1, DType::F32)] {
        let ring = RingProblem {
            stored_kv_heads: 2,
            first_kv_head,
            is_grouped: first_kv_head == 1,
            ..problem(2, 16, 32, dtype)
        };
        if check(ring).is_none() {
            return;
        }
    }
}

/// Each step has launches for its own keys alone, all sequences at once, and a shift unless it is the last.
#[test]
fn steps_have_the_documented_launches() {
    for sequences in [1, 2] {
        let problem = problem(3, 64, 64, DType::Bf16);
        let ring = RingProblem { sequences, kv_heads: 2, stored_kv_heads: 2, ..problem };
        let whole = ring.whole();
        let (case, _) = ring.case(Direction::Backward, 1, &whole);
        let steps = case.ring().unwrap().steps;
        let names = |launches: &[narrows_cuda::Launch]| -> Vec<String> {
            launches.iter().map(|launch| launch.kernel.clone()).collect()
        };
        let attention =
            ["dq_bf16_w64", "general_dkv_bf16_w64"].map(|name| format!("attention_{name}"));
        assert_eq!(names(&steps[0].before), ["ring_add_bf16_bf16_bf16_v4"; 2]);
        assert_eq!(names(&steps[0].beside)[1..3], attention);
        assert_eq!(names(&steps[0].beside)[3..], ["ring_add_bf16_bf16_f32_v4"]);
        // The keys of device 0: the last step of the earlier chunk of queries, and the first sum of the later one.
        assert_eq!(names(&steps[1].beside)[..2], attention);
        let merges = ["ring_add_bf16_bf16_bf16_v4", "ring_add_bf16_bf16_f32_v4"];
        assert_eq!(names(&steps[1].beside)[2..], merges);
        assert_eq!(names(&steps[1].after), ["ring_add_bf16_f32_f32_v4"]);
        // The keys of device 2, for the later chunk of queries alone.
        assert_eq!(names(&steps[2].beside)[..2], attention);
        let last_merge = ["ring_add_bf16_f32_bf16_v4"];
        assert_eq!(names(&steps[2].beside)[2..], last_merge);
        assert_eq!(names(&steps[3].after), [last_merge; 2].concat());
        let shifted = |step: usize| steps[step].shift.as_ref().map(RingShift::payload_bytes);
        // Keys and values in bf16, and their gradients in f32, of 128 positions on each of three devices.
        let elements = sequences * 3 * 128 * 2 * 2 * 64;
        let shifts = [2, 6, 4, 4].map(|bytes| bytes * elements);
        assert_eq!((0..4).map(shifted).collect::<Vec<_>>(), shifts.map(Some));
    }
}
