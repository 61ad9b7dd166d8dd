use narrows_runtime::session::PositionRuns;

use super::{
    AttentionGradients, AttentionSaved, AttentionShape, attention_backward, attention_forward,
};
use crate::kernels::matrix::{MatrixView, MatrixViewMut};
use crate::kernels::parallel::Parallel;
use crate::kernels::testing::{assert_close, assert_close_f32, random, widen};

/// out, lse, dq, dk and dv by definition in f64, one score after the other.
fn reference(shape: AttentionShape, [q, k, v, dout]: [&[f64]; 4]) -> [Vec<f64>; 5] {
    let AttentionShape { sequences, length, heads, kv_heads, head_dim, window, .. } = shape;
    let scale = 1.0 / (head_dim as f64).sqrt();
    let mut results = [q, q, q, k, v].map(|operand| vec![0.0; operand.len()]);
    results[1] = vec![0.0; shape.query_rows() * heads];
    let [out, lse, dq, dk, dv] = &mut results;
    for (sequence, head) in (0..sequences).flat_map(|s| (0..heads).map(move |h| (s, h))) {
        let key_head = head / (heads / kv_heads);
        let q_index = |t: usize| ((sequence * length + t) * heads + head) * head_dim;
        let k_index = |t: usize| ((sequence * length + t) * kv_heads + key_head) * head_dim;
        let dot = |a: &[f64], i: usize, b: &[f64], j: usize| -> f64 {
            (0..head_dim).map(|f| a[i + f] * b[j + f]).sum()
        };
        for i in 0..length {
            let keys = (i + 1).saturating_sub(window)..=i;
            let scores: Vec<f64> =
                keys.clone().map(|j| scale * dot(q, q_index(i), k, k_index(j))).collect();
            let total: f64 = scores.iter().map(|s| s.exp()).sum();
            lse[(sequence * length + i) * heads + head] = total.ln();
            let p: Vec<f64> = scores.iter().map(|s| s.exp() / total).collect();
            let dp: Vec<f64> = keys.clone().map(|j| dot(dout, q_index(i), v, k_index(j))).collect();
            let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            let keys = keys.zip(p.into_iter().zip(dp));
            for ((j, (p, dp)), f) in keys.flat_map(|key| (0..head_dim).map(move |f| (key, f))) {
                let ds = scale * p * (dp - mean);
                out[q_index(i) + f] += p * v[k_index(j) + f];
                dv[k_index(j) + f] += p * dout[q_index(i) + f];
                dq[q_index(i) + f] += ds * k[k_index(j) + f];
                dk[k_index(j) + f] += ds * q[q_index(i) + f];
            }
        }
    }
    results
}

fn shape(
    [sequences, length]: [usize; 2],
    [heads, kv_heads, head_dim]: [usize; 3],
) -> AttentionShape {
    let queries = PositionRuns::consecutive(0, length);
    AttentionShape { sequences, length, queries, heads, kv_heads, head_dim, window: length }
}

struct Outputs {
    out: Vec<f32>,
    lse: Vec<f32>,
    gradients: Vec<f32>,
}

/// Runs forward and backward with q, k and v side by side in one matrix, and their gradients in another.
fn run(shape: AttentionShape, qkv: &[f32], dout: &[f32], parallel: Parallel) -> Outputs {
    let (tokens, hidden) = (shape.query_rows(), shape.heads * shape.head_dim);
    let keys = shape.kv_heads * shape.head_dim;
    let width = hidden + 2 * keys;
    let view = MatrixView::new(qkv, tokens, width);
    let q = view.column_range(0, hidden);
    let (k, v) = (view.column_range(hidden, keys), view.column_range(hidden + keys, keys));
    let (mut out, mut lse) =
        (vec![f32::NAN; tokens * hidden], vec![f32::NAN; tokens * shape.heads]);
    let mut scratch = vec![f32::NAN; shape.scratch_elements(parallel)];
    let views = (
        MatrixViewMut::new(&mut out, tokens, hidden),
        MatrixViewMut::new(&mut lse, tokens, shape.heads),
    );
    attention_forward(shape, (q, k, v), views, &mut scratch, parallel);
    let mut gradients = vec![f32::NAN; qkv.len()];
    let (dq, rest) = MatrixViewMut::new(&mut gradients, tokens, width).split_columns(hidden);
    let (dk, dv) = rest.split_columns(keys);
    let lse_view = MatrixView::new(&lse, tokens, shape.heads);
    let (out_view, dout) =
        (MatrixView::new(&out, tokens, hidden), MatrixView::new(dout, tokens, hidden));
    let saved = AttentionSaved { q, k, v, out: out_view, lse: lse_view, dout };
    attention_backward(shape, saved, AttentionGradients { dq, dk, dv }, &mut scratch, parallel);
    Outputs { out, lse, gradients }
}

fn check(shape: AttentionShape, threads: usize) {
    let (tokens, hidden) = (shape.query_rows(), shape.heads * shape.head_dim);
    let keys = shape.kv_heads * shape.head_dim;
    let width = hidden + 2 * keys;
    let qkv: Vec<f32> = random(1, tokens * width).iter().map(|x| 3.0 * x).collect();
    let dout = random(2, tokens * hidden);
    let outputs = run(shape, &qkv, &dout, Parallel::new(threads));
    let columns = |operand: &[f32], first: usize, count: usize| -> Vec<f32> {
        operand.chunks(width).flat_map(|row| row[first..first + count].to_vec()).collect()
    };
    let parts = [(0, hidden), (hidden, keys), (hidden + keys, keys)];
    let [q, k, v] = parts.map(|(first, count)| widen(&columns(&qkv, first, count)));
    let expected = reference(shape, [&q, &k, &v, &widen(&dout)]);
    assert_close(&outputs.out, &expected[0], 3e-6);
    assert_close(&outputs.lse, &expected[1], 3e-6);
    for ((first, count), expected) in parts.into_iter().zip(&expected[2..]) {
        assert_close(&columns(&outputs.gradients, first, count), expected, 1e-5);
    }
}

#[test]
fn lengths_around_tile_sizes_equal_the_definition() {
    for length in [1, 2, 63, 64, 65, 130, 255, 256, 257, 321] {
        check(shape([1, length], [2, 2, 6]), 1);
    }
}

#[test]
fn query_heads_that_share_key_heads_equal_the_definition() {
    for (heads, kv_heads) in [(4, 1), (4, 2), (6, 2)] {
        check(shape([3, 70], [heads, kv_heads, 16]), 1);
    }
}

#[test]
fn division_by_sequences_and_by_heads_equals_the_definition() {
    for (sequences, heads, kv_heads, threads) in
        [(4, 2, 1, 2), (1, 4, 2, 2), (3, 4, 4, 2), (1, 3, 3, 8)]
    {
        check(shape([sequences, 100], [heads, kv_heads, 8]), threads);
    }
}

#[test]
fn sliding_windows_equal_the_definition() {
    for window in [2, 63, 64, 65, 100, 255, 256, 257, 320, 321, 400] {
        check(AttentionShape { window, ..shape([1, 321], [2, 1, 6]) }, 1);
    }
    check(AttentionShape { window: 40, ..shape([3, 100], [4, 2, 8]) }, 2);
}

/// Scores of several hundred of both signs, in rows of several tiles.
#[test]
fn large_scores_do_not_overflow() {
    let shape = shape([1, 600], [1, 1, 4]);
    let qkv: Vec<f32> = random(5, 600 * 12).iter().map(|x| 40.0 * x).collect();
    let outputs = run(shape, &qkv, &random(6, 600 * 4), Parallel::SERIAL);
    let columns = |first: usize| -> Vec<f64> {
        qkv.chunks(12).flat_map(|row| widen(&row[first..first + 4])).collect()
    };
    let (q, k, v) = (columns(0), columns(4), columns(8));
    let dot = |i: usize, j: usize| -> f64 { (0..4).map(|f| q[4 * i + f] * k[4 * j + f]).sum() };
    for i in [0, 300, 599] {
        let scores: Vec<f64> = (0..=i).map(|j| 0.5 * dot(i, j)).collect();
        let largest = scores.iter().fold(f64::NEG_INFINITY, |largest, s| largest.max(*s));
        let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
        let out: Vec<f64> = (0..4)
            .map(|f| (0..=i).map(|j| (scores[j] - largest).exp() / total * v[4 * j + f]).sum())
            .collect();
        assert_close(&outputs.out[4 * i..4 * i + 4], &out, 1e-4);
        assert_close(&outputs.lse[i..=i], &[largest + total.ln()], 1e-6);
    }
    assert!(outputs.gradients.iter().all(|x| x.is_finite()));
}

#[test]
fn a_head_alone_on_a_device_equals_the_head_among_others() {
    let whole = shape([2, 65], [2, 2, 8]);
    let (qkv, dout) = (random(1, 130 * 48), random(2, 130 * 16));
    let all = run(whole, &qkv, &dout, Parallel::SERIAL);
    for head in 0..2 {
        let shard: Vec<f32> = qkv
            .chunks(48)
            .flat_map(|row| [0, 16, 32].map(|part| row[part + 8 * head..][..8].to_vec()).concat())
            .collect();
        let of_head = |operand: &[f32]| -> Vec<f32> {
            operand.chunks(16).flat_map(|row| row[8 * head..][..8].to_vec()).collect()
        };
        let single = AttentionShape { heads: 1, kv_heads: 1, ..whole };
        let outputs = run(single, &shard, &of_head(&dout), Parallel::SERIAL);
        assert_close_f32(&outputs.out, &of_head(&all.out), 1e-6);
    }
}

/// The queries of each device of a context axis with all keys: rows of the whole output, and summands of the gradients.
#[test]
fn queries_of_two_chunks_are_rows_of_whole_attention() {
    for (places, chunk, window, threads) in
        [(1, 4, 60, 1), (2, 96, 2, 2), (3, 70, 33, 1), (4, 130, 300, 3), (4, 130, 1040, 1)]
    {
        let length = 2 * places * chunk;
        let whole = AttentionShape { window, ..shape([2, length], [4, 2, 6]) };
        let (width, hidden, keys) = (48, 24, 12);
        let (qkv, dout) = (random(1, 2 * length * width), random(2, 2 * length * hidden));
        let expected = run(whole, &qkv, &dout, Parallel::SERIAL);
        let kv = MatrixView::new(&qkv, 2 * length, width);
        let (k, v) = (kv.column_range(hidden, keys), kv.column_range(hidden + keys, keys));
        let mut key_gradients = vec![0.0; 2 * length * 2 * keys];
        for place in 0..places {
            let gap = 2 * (places - 1 - place) * chunk;
            let (first, count) = (place * chunk, 2 * chunk);
            let queries = PositionRuns { first, count, second_row: chunk, gap };
            let shape = AttentionShape { queries, ..whole };
            let rows: Vec<usize> = (0..2 * count)
                .map(|row| row / count * length + queries.position(row % count))
                .collect();
            let of = |operand: &[f32], stride: usize, columns: usize| -> Vec<f32> {
                rows.iter().flat_map(|row| operand[row * stride..][..columns].to_vec()).collect()
            };
            let (q, dout) = (of(&qkv, width, hidden), of(&dout, hidden, hidden));
            let matrix = |operand| MatrixView::new(operand, rows.len(), hidden);
            let parallel = Parallel::new(threads);
            let mut scratch = vec![f32::NAN; shape.scratch_elements(parallel)];
            let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; 4 * rows.len()]);
            let outputs = (
                MatrixViewMut::new(&mut out, rows.len(), hidden),
                MatrixViewMut::new(&mut lse, rows.len(), 4),
            );
            attention_forward(shape, (matrix(&q), k, v), outputs, &mut scratch, parallel);
            assert_close_f32(&out, &of(&expected.out, hidden, hidden), 1e-5);
            assert_close_f32(&lse, &of(&expected.lse, 4, 4), 1e-5);
            let lse = MatrixView::new(&lse, rows.len(), 4);
            let (q, dout) = (matrix(&q), matrix(&dout));
            let saved = AttentionSaved { q, k, v, out: matrix(&out), lse, dout };
            let mut dq = vec![f32::NAN; rows.len() * hidden];
            let mut summand = vec![f32::NAN; key_gradients.len()];
            let gradient = MatrixViewMut::new(&mut summand, 2 * length, 2 * keys);
            let (dk, dv) = gradient.split_columns(keys);
            let dq_view = MatrixViewMut::new(&mut dq, rows.len(), hidden);
            let gradients = AttentionGradients { dq: dq_view, dk, dv };
            attention_backward(shape, saved, gradients, &mut scratch, parallel);
            assert_close_f32(&dq, &of(&expected.gradients, width, hidden), 1e-5);
            key_gradients.iter_mut().zip(&summand).for_each(|(sum, summand)| *sum += summand);
        }
        let expected: Vec<f32> =
            expected.gradients.chunks(width).flat_map(|row| row[hidden..].to_vec()).collect();
        assert_close_f32(&key_gradients, &expected, 1e-5);
    }
}
