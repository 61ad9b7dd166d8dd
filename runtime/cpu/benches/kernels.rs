//! The processor's kernels at the sizes of CoLA-60M: d 512, d_ff 1376, r 128, 8 heads, 4 sequences
//! of 256 tokens. Each with one thread and with two.
//!
//! `items/s` of products and attention are floating-point operations, as the cost model counts
//! them; `B/s` of passes are the bytes that a fused pass must read and write.
//!
//! `cargo bench -p narrows-runtime -- product`: only what has that in its name.

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use narrows_cpu::kernels::attention::{self, AttentionShape};
use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, WriteMode, elementwise, embedding, gated, latent, loss,
    norm, optimizer, product, rotary,
};
use narrows_plan::model::{Activation, GatedProduct};

const TOKENS: usize = 1024;
const LENGTH: usize = 256;
const D: usize = 512;
const D_FF: usize = 1376;
const R: usize = 128;
const VOCABULARY: usize = 32_000;
const SHAPE: AttentionShape = AttentionShape {
    sequences: TOKENS / LENGTH,
    length: LENGTH,
    heads: 8,
    kv_heads: 8,
    head_dim: 64,
};
const RMS: norm::Rms = norm::Rms { width: D, epsilon: 1e-5 };
const THREADS: [usize; 2] = [1, 2];

fn main() {
    divan::main();
}

/// Numbers between −1 and 1, none of them tiny.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Runs `work` in a pool of as many threads.
fn run(bencher: Bencher<'_, '_>, threads: usize, mut work: impl FnMut(Parallel) + Send) {
    let parallel = Parallel::new(threads);
    if threads == 1 {
        return bencher.bench_local(|| work(parallel));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads start");
    bencher.bench_local(|| pool.install(|| work(parallel)));
}

/// Rows, inner size and columns of the products that CoLA-60M has: A and B of attention's linears,
/// of the MLP's, grouped, and the head.
const PRODUCTS: [(usize, usize); 6] =
    [(D, R), (D, 3 * R), (R, D), (R, D_FF), (D_FF, R), (D, VOCABULARY)];

#[divan::bench(args = PRODUCTS, consts = THREADS)]
fn product_forward<const N: usize>(bencher: Bencher<'_, '_>, (d_in, d_out): (usize, usize)) {
    let (x, w) = (numbers(TOKENS * d_in), numbers(d_in * d_out));
    let mut y = vec![0.0; TOKENS * d_out];
    run(bencher.counter(ItemsCount::new(2 * TOKENS * d_in * d_out)), N, |parallel| {
        let (x, w) = (MatrixView::new(&x, TOKENS, d_in), MatrixView::new(&w, d_in, d_out));
        let y = MatrixViewMut::new(&mut y, TOKENS, d_out);
        product::forward(x, w, y, 1, WriteMode::Replace, parallel);
    });
}

#[divan::bench(args = PRODUCTS, consts = THREADS)]
fn product_input_gradient<const N: usize>(bencher: Bencher<'_, '_>, (d_in, d_out): (usize, usize)) {
    let (dy, w) = (numbers(TOKENS * d_out), numbers(d_in * d_out));
    let mut dx = vec![0.0; TOKENS * d_in];
    run(bencher.counter(ItemsCount::new(2 * TOKENS * d_in * d_out)), N, |parallel| {
        let (dy, w) = (MatrixView::new(&dy, TOKENS, d_out), MatrixView::new(&w, d_in, d_out));
        let dx = MatrixViewMut::new(&mut dx, TOKENS, d_in);
        product::input_gradient(dy, w, dx, 1, WriteMode::Replace, parallel);
    });
}

#[divan::bench(args = PRODUCTS, consts = THREADS)]
fn product_weight_gradient<const N: usize>(
    bencher: Bencher<'_, '_>,
    (d_in, d_out): (usize, usize),
) {
    let (dy, x) = (numbers(TOKENS * d_out), numbers(TOKENS * d_in));
    let mut dw = vec![0.0; d_in * d_out];
    run(bencher.counter(ItemsCount::new(2 * TOKENS * d_in * d_out)), N, |parallel| {
        let (dy, x) = (MatrixView::new(&dy, TOKENS, d_out), MatrixView::new(&x, TOKENS, d_in));
        let dw = MatrixViewMut::new(&mut dw, d_in, d_out);
        product::weight_gradient(x, dy, dw, 1, WriteMode::Add, parallel);
    });
}

/// Scores on and under the diagonal.
const SCORES: usize = SHAPE.sequences * SHAPE.heads * LENGTH * (LENGTH + 1) / 2;

#[divan::bench(consts = THREADS)]
fn attention_forward<const N: usize>(bencher: Bencher<'_, '_>) {
    let [q, k, v] = [1, 2, 3].map(|_| numbers(TOKENS * D));
    let (mut out, mut lse) = (vec![0.0; TOKENS * D], vec![0.0; TOKENS * SHAPE.heads]);
    let mut scratch = vec![0.0; SHAPE.scratch(Parallel::new(N))];
    run(bencher.counter(ItemsCount::new(4 * 64 * SCORES)), N, |parallel| {
        let read = [&q, &k, &v].map(|of| MatrixView::new(of, TOKENS, D));
        let out = MatrixViewMut::new(&mut out, TOKENS, D);
        let lse = MatrixViewMut::new(&mut lse, TOKENS, SHAPE.heads);
        attention::forward(SHAPE, read.into(), (out, lse), &mut scratch, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn attention_backward<const N: usize>(bencher: Bencher<'_, '_>) {
    let [q, k, v, out, dout] = [1, 2, 3, 4, 5].map(|_| numbers(TOKENS * D));
    let lse = vec![6.0; TOKENS * SHAPE.heads];
    let mut made = vec![0.0; 3 * TOKENS * D];
    let mut scratch = vec![0.0; SHAPE.scratch(Parallel::new(N))];
    run(bencher.counter(ItemsCount::new(10 * 64 * SCORES)), N, |parallel| {
        let [q, k, v, out, dout] =
            [&q, &k, &v, &out, &dout].map(|of| MatrixView::new(of, TOKENS, D));
        let lse = MatrixView::new(&lse, TOKENS, SHAPE.heads);
        let (dq, rest) = MatrixViewMut::new(&mut made, TOKENS, 3 * D).split_columns(D);
        let (dk, dv) = rest.split_columns(D);
        let saved = attention::AttentionSaved { q, k, v, out, lse, dout };
        let made = attention::AttentionGradients { dq, dk, dv };
        attention::backward(SHAPE, saved, made, &mut scratch, parallel);
    });
}

/// Bytes of a pass that reads and writes so many `[tokens, width]`.
fn passes(operands: usize, width: usize) -> BytesCount {
    BytesCount::new(4 * operands * TOKENS * width)
}

#[divan::bench(consts = THREADS)]
fn norm_forward<const N: usize>(bencher: Bencher<'_, '_>) {
    let (x, scale) = (numbers(TOKENS * D), numbers(D));
    let (mut y, mut s) = (vec![0.0; TOKENS * D], vec![0.0; TOKENS]);
    run(bencher.counter(passes(2, D)), N, |parallel| {
        let y = MatrixViewMut::new(&mut y, TOKENS, D);
        norm::forward(MatrixView::new(&x, TOKENS, D), &scale, RMS, y, &mut s, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn norm_backward<const N: usize>(bencher: Bencher<'_, '_>) {
    let (x, dy, scale) = (numbers(TOKENS * D), numbers(TOKENS * D), numbers(D));
    let (s, mut dx, mut dscale) = (vec![1.0; TOKENS], vec![0.0; TOKENS * D], vec![0.0; D]);
    let mut scratch = vec![0.0; Parallel::new(N).sums_scratch(D)];
    run(bencher.counter(passes(3, D)), N, |parallel| {
        let (dy, x) = (MatrixView::new(&dy, TOKENS, D), MatrixView::new(&x, TOKENS, D));
        let made = norm::NormGradients {
            dx: MatrixViewMut::new(&mut dx, TOKENS, D),
            write: WriteMode::Replace,
            dscale: &mut dscale,
            scratch: &mut scratch,
        };
        norm::backward(norm::NormSaved { dy, x, scale: &scale }, &s, RMS, made, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn latent_recover_silu<const N: usize>(bencher: Bencher<'_, '_>) {
    let (h, s, mut z) = (numbers(TOKENS * R), vec![500.0; TOKENS], vec![0.0; TOKENS * R]);
    run(bencher.counter(passes(2, R)), N, |parallel| {
        let (h, z) = (MatrixView::new(&h, TOKENS, R), MatrixViewMut::new(&mut z, TOKENS, R));
        latent::recover(h, &s, RMS, Activation::Silu, z, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn latent_backward_silu<const N: usize>(bencher: Bencher<'_, '_>) {
    let (h, dz, mut dh) = (numbers(TOKENS * R), numbers(TOKENS * R), vec![0.0; TOKENS * R]);
    run(bencher.counter(passes(3, R)), N, |parallel| {
        let (dz, h) = (MatrixView::new(&dz, TOKENS, R), MatrixView::new(&h, TOKENS, R));
        latent::backward(dz, h, Activation::Silu, MatrixViewMut::new(&mut dh, TOKENS, R), parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn gated_product_swiglu<const N: usize>(bencher: Bencher<'_, '_>) {
    let (both, mut y) = (numbers(TOKENS * 2 * D_FF), vec![0.0; TOKENS * D_FF]);
    run(bencher.counter(passes(3, D_FF)), N, |parallel| {
        let both = MatrixView::new(&both, TOKENS, 2 * D_FF);
        let (gate, up) = (both.column_range(0, D_FF), both.column_range(D_FF, D_FF));
        let y = MatrixViewMut::new(&mut y, TOKENS, D_FF);
        gated::forward(gate, up, GatedProduct::SwiGlu, y, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn gated_product_swiglu_backward<const N: usize>(bencher: Bencher<'_, '_>) {
    let (both, dy) = (numbers(TOKENS * 2 * D_FF), numbers(TOKENS * D_FF));
    let mut made = vec![0.0; TOKENS * 2 * D_FF];
    run(bencher.counter(passes(5, D_FF)), N, |parallel| {
        let both = MatrixView::new(&both, TOKENS, 2 * D_FF);
        let (gate, up) = (both.column_range(0, D_FF), both.column_range(D_FF, D_FF));
        let (dgate, dup) = MatrixViewMut::new(&mut made, TOKENS, 2 * D_FF).split_columns(D_FF);
        let saved = gated::GatedSaved { dy: MatrixView::new(&dy, TOKENS, D_FF), gate, up };
        gated::backward(saved, GatedProduct::SwiGlu, dgate, dup, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn rotary<const N: usize>(bencher: Bencher<'_, '_>) {
    let mut x = numbers(TOKENS * D);
    let table = rotary::RotaryTable::new(LENGTH, 64, 10_000.0);
    let positions = rotary::Positions { first: 0, count: LENGTH };
    run(bencher.counter(passes(2, D)), N, |parallel| {
        rotary::forward(MatrixViewMut::new(&mut x, TOKENS, D), &table, positions, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn add<const N: usize>(bencher: Bencher<'_, '_>) {
    let (x, y, mut sum) = (numbers(TOKENS * D), numbers(TOKENS * D), vec![0.0; TOKENS * D]);
    run(bencher.counter(passes(3, D)), N, |parallel| {
        elementwise::add(&x, &y, &mut sum, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn scatter_add<const N: usize>(bencher: Bencher<'_, '_>) {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7919 % VOCABULARY as u32).collect();
    let (dy, mut dtable) = (numbers(TOKENS * D), vec![0.0; VOCABULARY * D]);
    run(bencher.counter(passes(3, D)), N, |parallel| {
        let dtable = MatrixViewMut::new(&mut dtable, VOCABULARY, D);
        embedding::scatter_add(&tokens, MatrixView::new(&dy, TOKENS, D), 0, dtable, parallel);
    });
}

/// Maximum, sum and gradient: logits read three times, written once.
#[divan::bench(consts = THREADS)]
fn loss_three_passes<const N: usize>(bencher: Bencher<'_, '_>) {
    let mut logits = numbers(TOKENS * VOCABULARY);
    let targets: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7919 % VOCABULARY as u32).collect();
    let (mut maximum, mut packed) = (vec![0.0; TOKENS], vec![0.0; 2 * TOKENS]);
    run(bencher.counter(passes(4, VOCABULARY)), N, |parallel| {
        let view = MatrixView::new(&logits, TOKENS, VOCABULARY);
        loss::maximum(view, &mut maximum, parallel);
        loss::sum(view, &maximum, &targets, 0, &mut packed, parallel);
        let reduced = loss::ReducedStatistics {
            maximum: &maximum,
            packed: &packed,
            targets: &targets,
            first: 0,
            factor: 1.0 / TOKENS as f32,
        };
        divan::black_box(loss::gradient(
            MatrixViewMut::new(&mut logits, TOKENS, VOCABULARY),
            reduced,
            parallel,
        ));
    });
}

/// Weight, gradient and two moments, read and written.
#[divan::bench(consts = THREADS)]
fn adamw<const N: usize>(bencher: Bencher<'_, '_>) {
    let count = D * VOCABULARY;
    let [mut weights, mut gradient] = [numbers(count), numbers(count)];
    let [mut first_moment, mut second_moment] = [vec![0.0; count], vec![0.0; count]];
    let numbers = optimizer::AdamWStep {
        gradient_factor: 1.0,
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 10,
    };
    run(bencher.counter(BytesCount::new(8 * 4 * count)), N, |parallel| {
        let parameter = optimizer::ParameterState {
            weights: &mut weights,
            first_moment: &mut first_moment,
            second_moment: &mut second_moment,
        };
        optimizer::adamw(parameter, &mut gradient, 0..count, numbers, parallel);
    });
}
