//! CPU kernels at the sizes of CoLA-60M: d 512, d_ff 1376, r 128, 8 heads, 4 sequences of 256
//! tokens; each with one thread and with two.
//!
//! `items/s` of GEMMs and attention are floating-point operations, as the cost model counts them;
//! `B/s` of fused ops are the bytes that they must read and write.
//!
//! `cargo bench -p narrows-cpu -- gemm` runs the benchmarks with `gemm` in their names.

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use narrows_cpu::kernels::{
    self, AdamWStep, AttentionGradients, AttentionSaved, AttentionShape, GemmMode, MatrixView,
    MatrixViewMut, Parallel, ParameterState, ReducedStatistics, RmsNorm, RmsNormGradients,
    RmsNormSaved, RopeTable, WriteMode,
};
use narrows_plan::model::{Activation, GatedProduct, Rope};
use narrows_runtime::GemmDtype;
use narrows_runtime::session::PositionRuns;

const TOKENS: usize = 1024;
const LENGTH: usize = 256;
const D: usize = 512;
const D_FF: usize = 1376;
const R: usize = 128;
const VOCABULARY: usize = 32_000;
const SHAPE: AttentionShape = AttentionShape {
    sequences: TOKENS / LENGTH,
    length: LENGTH,
    queries: PositionRuns::consecutive(0, LENGTH),
    heads: 8,
    kv_heads: 8,
    head_dim: 64,
    window: LENGTH,
};
const RMS: RmsNorm = RmsNorm { width: D, epsilon: 1e-5 };
const THREADS: [usize; 2] = [1, 2];

fn main() {
    divan::main();
}

/// Elements between −1 and 1, none of them tiny.
fn elements(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Times `work` in a pool of `threads` threads.
fn run(bencher: Bencher<'_, '_>, threads: usize, mut work: impl FnMut(Parallel) + Send) {
    let parallel = Parallel::new(threads);
    if threads == 1 {
        return bencher.bench_local(|| work(parallel));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads start");
    bencher.bench_local(|| pool.install(|| work(parallel)));
}

/// `(d_in, d_out)` of the GEMMs of CoLA-60M: factors A and B of the attention linears and of the MLP
/// linears, a grouped one, and the head.
const SIZES: [(usize, usize); 6] =
    [(D, R), (D, 3 * R), (R, D), (R, D_FF), (D_FF, R), (D, VOCABULARY)];

/// The GEMMs in each format that this processor multiplies.
fn gemms() -> impl Iterator<Item = (usize, usize, GemmDtype)> {
    let dtypes = [GemmDtype::F32, GemmDtype::Bf16];
    let dtypes = &dtypes[..if kernels::supports_bf16() { 2 } else { 1 }];
    let gemms = SIZES.iter().flat_map(|size| dtypes.iter().map(|dtype| (size.0, size.1, *dtype)));
    gemms.collect::<Vec<_>>().into_iter()
}

#[divan::bench(args = gemms(), consts = THREADS)]
fn gemm_forward<const N: usize>(
    bencher: Bencher<'_, '_>,
    (d_in, d_out, dtype): (usize, usize, GemmDtype),
) {
    let (x, w) = (elements(TOKENS * d_in), elements(d_in * d_out));
    let mut y = vec![0.0; TOKENS * d_out];
    run(bencher.counter(ItemsCount::new(2 * TOKENS * d_in * d_out)), N, |parallel| {
        let (x, w) = (MatrixView::new(&x, TOKENS, d_in), MatrixView::new(&w, d_in, d_out));
        let y = MatrixViewMut::new(&mut y, TOKENS, d_out);
        kernels::gemm_forward(x, w, y, 1, WriteMode::Replace, GemmMode { parallel, dtype });
    });
}

#[divan::bench(args = gemms(), consts = THREADS)]
fn gemm_input_gradient<const N: usize>(
    bencher: Bencher<'_, '_>,
    (d_in, d_out, dtype): (usize, usize, GemmDtype),
) {
    let (dy, w) = (elements(TOKENS * d_out), elements(d_in * d_out));
    let mut dx = vec![0.0; TOKENS * d_in];
    run(bencher.counter(ItemsCount::new(2 * TOKENS * d_in * d_out)), N, |parallel| {
        let (dy, w) = (MatrixView::new(&dy, TOKENS, d_out), MatrixView::new(&w, d_in, d_out));
        let dx = MatrixViewMut::new(&mut dx, TOKENS, d_in);
        kernels::gemm_input_gradient(
            dy,
            w,
            dx,
            1,
            WriteMode::Replace,
            GemmMode { parallel, dtype },
        );
    });
}

#[divan::bench(args = gemms(), consts = THREADS)]
fn gemm_weight_gradient<const N: usize>(
    bencher: Bencher<'_, '_>,
    (d_in, d_out, dtype): (usize, usize, GemmDtype),
) {
    let (dy, x) = (elements(TOKENS * d_out), elements(TOKENS * d_in));
    let mut dw = vec![0.0; d_in * d_out];
    run(bencher.counter(ItemsCount::new(2 * TOKENS * d_in * d_out)), N, |parallel| {
        let (dy, x) = (MatrixView::new(&dy, TOKENS, d_out), MatrixView::new(&x, TOKENS, d_in));
        let dw = MatrixViewMut::new(&mut dw, d_in, d_out);
        kernels::gemm_weight_gradient(x, dy, dw, 1, WriteMode::Add, GemmMode { parallel, dtype });
    });
}

/// Attention scores on and under the diagonal.
const SCORES: usize = SHAPE.sequences * SHAPE.heads * LENGTH * (LENGTH + 1) / 2;

#[divan::bench(consts = THREADS)]
fn attention_forward<const N: usize>(bencher: Bencher<'_, '_>) {
    let [q, k, v] = [1, 2, 3].map(|_| elements(TOKENS * D));
    let (mut out, mut lse) = (vec![0.0; TOKENS * D], vec![0.0; TOKENS * SHAPE.heads]);
    let mut scratch = vec![0.0; SHAPE.scratch_elements(Parallel::new(N))];
    run(bencher.counter(ItemsCount::new(4 * 64 * SCORES)), N, |parallel| {
        let read = [&q, &k, &v].map(|of| MatrixView::new(of, TOKENS, D));
        let out = MatrixViewMut::new(&mut out, TOKENS, D);
        let lse = MatrixViewMut::new(&mut lse, TOKENS, SHAPE.heads);
        kernels::attention_forward(SHAPE, read.into(), (out, lse), &mut scratch, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn attention_backward<const N: usize>(bencher: Bencher<'_, '_>) {
    let [q, k, v, out, dout] = [1, 2, 3, 4, 5].map(|_| elements(TOKENS * D));
    let lse = vec![6.0; TOKENS * SHAPE.heads];
    let mut gradients = vec![0.0; 3 * TOKENS * D];
    let mut scratch = vec![0.0; SHAPE.scratch_elements(Parallel::new(N))];
    run(bencher.counter(ItemsCount::new(10 * 64 * SCORES)), N, |parallel| {
        let [q, k, v, out, dout] =
            [&q, &k, &v, &out, &dout].map(|of| MatrixView::new(of, TOKENS, D));
        let lse = MatrixView::new(&lse, TOKENS, SHAPE.heads);
        let (dq, rest) = MatrixViewMut::new(&mut gradients, TOKENS, 3 * D).split_columns(D);
        let (dk, dv) = rest.split_columns(D);
        let saved = AttentionSaved { q, k, v, out, lse, dout };
        let gradients = AttentionGradients { dq, dk, dv };
        kernels::attention_backward(SHAPE, saved, gradients, &mut scratch, parallel);
    });
}

/// Bytes of a fused op with `operands` operands `[tokens, width]`.
fn fused_bytes(operands: usize, width: usize) -> BytesCount {
    BytesCount::new(4 * operands * TOKENS * width)
}

#[divan::bench(consts = THREADS)]
fn rms_norm_forward<const N: usize>(bencher: Bencher<'_, '_>) {
    let (x, scale) = (elements(TOKENS * D), elements(D));
    let (mut y, mut s) = (vec![0.0; TOKENS * D], vec![0.0; TOKENS]);
    run(bencher.counter(fused_bytes(2, D)), N, |parallel| {
        let y = MatrixViewMut::new(&mut y, TOKENS, D);
        kernels::rms_norm_forward(MatrixView::new(&x, TOKENS, D), &scale, RMS, y, &mut s, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn rms_norm_backward<const N: usize>(bencher: Bencher<'_, '_>) {
    let (x, dy, scale) = (elements(TOKENS * D), elements(TOKENS * D), elements(D));
    let (s, mut dx, mut dscale) = (vec![1.0; TOKENS], vec![0.0; TOKENS * D], vec![0.0; D]);
    let mut scratch = vec![0.0; Parallel::new(N).reduction_scratch_elements(D)];
    run(bencher.counter(fused_bytes(3, D)), N, |parallel| {
        let (dy, x) = (MatrixView::new(&dy, TOKENS, D), MatrixView::new(&x, TOKENS, D));
        let gradients = RmsNormGradients {
            dx: MatrixViewMut::new(&mut dx, TOKENS, D),
            write: WriteMode::Replace,
            dscale: &mut dscale,
            scratch: &mut scratch,
        };
        kernels::rms_norm_backward(
            RmsNormSaved { dy, x, scale: &scale },
            &s,
            RMS,
            gradients,
            parallel,
        );
    });
}

#[divan::bench(consts = THREADS)]
fn latent_recover_silu<const N: usize>(bencher: Bencher<'_, '_>) {
    let (h, s, mut z) = (elements(TOKENS * R), vec![500.0; TOKENS], vec![0.0; TOKENS * R]);
    run(bencher.counter(fused_bytes(2, R)), N, |parallel| {
        let (h, z) = (MatrixView::new(&h, TOKENS, R), MatrixViewMut::new(&mut z, TOKENS, R));
        kernels::latent_recover(h, &s, RMS, Activation::Silu, z, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn latent_backward_silu<const N: usize>(bencher: Bencher<'_, '_>) {
    let (h, dz, mut dh) = (elements(TOKENS * R), elements(TOKENS * R), vec![0.0; TOKENS * R]);
    run(bencher.counter(fused_bytes(3, R)), N, |parallel| {
        let (dz, h) = (MatrixView::new(&dz, TOKENS, R), MatrixView::new(&h, TOKENS, R));
        kernels::latent_backward(
            dz,
            h,
            Activation::Silu,
            MatrixViewMut::new(&mut dh, TOKENS, R),
            parallel,
        );
    });
}

#[divan::bench(consts = THREADS)]
fn gated_product_swiglu<const N: usize>(bencher: Bencher<'_, '_>) {
    let (both, mut y) = (elements(TOKENS * 2 * D_FF), vec![0.0; TOKENS * D_FF]);
    run(bencher.counter(fused_bytes(3, D_FF)), N, |parallel| {
        let both = MatrixView::new(&both, TOKENS, 2 * D_FF);
        let (gate, up) = (both.column_range(0, D_FF), both.column_range(D_FF, D_FF));
        let y = MatrixViewMut::new(&mut y, TOKENS, D_FF);
        kernels::gated_product_forward(gate, up, GatedProduct::SwiGlu, y, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn gated_product_swiglu_backward<const N: usize>(bencher: Bencher<'_, '_>) {
    let (mut both, dy) = (elements(TOKENS * 2 * D_FF), elements(TOKENS * D_FF));
    run(bencher.counter(fused_bytes(5, D_FF)), N, |parallel| {
        let (gate, up) = MatrixViewMut::new(&mut both, TOKENS, 2 * D_FF).split_columns(D_FF);
        let dy = MatrixView::new(&dy, TOKENS, D_FF);
        kernels::gated_product_backward(dy, GatedProduct::SwiGlu, gate, up, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn rope_forward<const N: usize>(bencher: Bencher<'_, '_>) {
    let mut x = elements(TOKENS * D);
    let table = RopeTable::new(LENGTH, 64, &Rope::plain(10_000.0, 64));
    let positions = PositionRuns::consecutive(0, LENGTH);
    run(bencher.counter(fused_bytes(2, D)), N, |parallel| {
        kernels::rope_forward(MatrixViewMut::new(&mut x, TOKENS, D), &table, positions, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn add<const N: usize>(bencher: Bencher<'_, '_>) {
    let (x, y, mut sum) = (elements(TOKENS * D), elements(TOKENS * D), vec![0.0; TOKENS * D]);
    run(bencher.counter(fused_bytes(3, D)), N, |parallel| {
        kernels::add(&x, &y, &mut sum, parallel);
    });
}

#[divan::bench(consts = THREADS)]
fn embedding_scatter_add<const N: usize>(bencher: Bencher<'_, '_>) {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7919 % VOCABULARY as u32).collect();
    let (dy, mut dtable) = (elements(TOKENS * D), vec![0.0; VOCABULARY * D]);
    run(bencher.counter(fused_bytes(3, D)), N, |parallel| {
        let dtable = MatrixViewMut::new(&mut dtable, VOCABULARY, D);
        kernels::embedding_scatter_add(
            kernels::LookupTokens { ids: &tokens, padding: None },
            MatrixView::new(&dy, TOKENS, D),
            0,
            dtable,
            parallel,
        );
    });
}

/// Maximum, sum and gradient: the logits are read three times and written once.
#[divan::bench(consts = THREADS)]
fn loss<const N: usize>(bencher: Bencher<'_, '_>) {
    let mut logits = elements(TOKENS * VOCABULARY);
    let targets: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7919 % VOCABULARY as u32).collect();
    let (mut maximum, mut packed) = (vec![0.0; TOKENS], vec![0.0; 2 * TOKENS]);
    run(bencher.counter(fused_bytes(4, VOCABULARY)), N, |parallel| {
        let view = MatrixView::new(&logits, TOKENS, VOCABULARY);
        kernels::loss_maximum(view, &mut maximum, parallel);
        kernels::loss_sum(view, &maximum, &targets, 0, &mut packed, parallel);
        let reduced = ReducedStatistics {
            maximum: &maximum,
            packed: &packed,
            targets: &targets,
            first_id: 0,
            factor: 1.0 / TOKENS as f32,
        };
        divan::black_box(kernels::loss_gradient(
            MatrixViewMut::new(&mut logits, TOKENS, VOCABULARY),
            reduced,
            parallel,
        ));
    });
}

/// Weight and two moments are read and written, the gradient is read.
#[divan::bench(consts = THREADS)]
fn adamw<const N: usize>(bencher: Bencher<'_, '_>) {
    let count = D * VOCABULARY;
    let [mut weights, gradient] = [elements(count), elements(count)];
    let [mut first_moment, mut second_moment] = [vec![0.0; count], vec![0.0; count]];
    let hyperparameters = AdamWStep {
        gradient_factor: 1.0,
        rate_scale: 1.0,
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 10,
    };
    run(bencher.counter(BytesCount::new(7 * 4 * count)), N, |parallel| {
        let parameter = ParameterState {
            weights: &mut weights,
            first_moment: &mut first_moment,
            second_moment: &mut second_moment,
        };
        kernels::adamw_update(parameter, &gradient, hyperparameters, parallel);
    });
}
