//! Small models and contexts for random plans.

use std::num::NonZeroU64;

use narrows_plan::model::{self, Linear, Model};
use narrows_plan::{Context, Mesh, Precision, Workload};

use crate::plans::{
    TestRng, draw_schedule, draw_zero, drawable_models, peek_bucket_split, peek_context_attention,
    peek_grad_reduce_dtype, peek_microbatch_pairs,
};

/// The drawable models of width 128 or 256, whose plans run in milliseconds.
pub fn small_models() -> Vec<Model> {
    drawable_models().into_iter().filter(|model| model.hidden <= 256).collect()
}

/// A context with up to 16 × 2 × 2 devices and one to six microbatches of at most 32 tokens, with any stage of ZeRO and any
/// schedule.
pub fn small_context(rng: &mut TestRng, precision: Precision) -> Context {
    let mesh = Mesh {
        tensor: [1, 2, 4, 8][rng.below(4)],
        pipeline: 1 + rng.below(2) as u64,
        data: 1 + rng.below(2) as u64,
        context: 1,
    };
    // Four replicas have shard groups of two.
    let data = if mesh.tensor <= 2 && rng.random_bool() { 4 } else { mesh.data };
    let context = [1, 1, 2][rng.below(3)];
    let mesh = Mesh { data, context, ..mesh };
    let micro_batch = [1, 2, 4][rng.below(3)];
    let global_batch = micro_batch * mesh.data * (1 + rng.below(3) as u64);
    let workload = Workload { global_batch, sequence_length: 8, micro_batch };
    let (zero, shard_size) = draw_zero(rng, mesh.replicas());
    let (overlap_grad_reduce, overlap_tensor_collectives) = (rng.random_bool(), rng.random_bool());
    let context = Context {
        grad_reduce_dtype: peek_grad_reduce_dtype(rng, precision),
        last_gradient_bucket: peek_bucket_split(rng, 61),
        first_gather_bucket: peek_bucket_split(rng, 59),
        loro_every: NonZeroU64::new(2),
        overlap_grad_reduce,
        overlap_param_gather: overlap_grad_reduce != overlap_tensor_collectives,
        overlap_tensor_collectives,
        shard_size,
        ..Context::new(mesh, workload, precision, zero)
    };
    let context = draw_schedule(rng, context);
    peek_microbatch_pairs(rng, context)
}

/// As [`small_context`], in f32 with random collectives around attention on the context axis.
pub fn small_cpu_context(rng: &mut TestRng) -> Context {
    let context = small_context(rng, Precision::Fp32);
    Context { context_attention: peek_context_attention(rng), ..context }
}

/// A random element of a list.
pub fn pick_copied<T: Copy>(rng: &mut TestRng, list: &[T]) -> T {
    list[rng.below(list.len())]
}

/// The linears of a block as JSON, with random ranks and activations.
fn linears(rng: &mut TestRng, crossing: &str) -> String {
    let mut parts = vec![];
    for name in ["q", "k", "v", "o", "gate", "up", "down"] {
        let rank = if crossing.contains("identity") || crossing.contains("tensor") {
            12
        } else {
            pick_copied(rng, &[1, 3, 4, 7, 8, 16])
        };
        let activation = pick_copied(rng, &["silu", "identity"]);
        parts.push(match rng.below(6) {
            0 => format!(r#""{name}": "dense""#),
            _ => format!(r#""{name}": {{"rank": {rank}, "activation": "{activation}"{crossing}}}"#),
        });
    }
    parts.join(", ")
}

/// A random model with odd widths, ranks and constants; `None` when the drawn model file is invalid.
pub fn unusual_model(rng: &mut TestRng) -> Option<Model> {
    let (heads, kv_heads) =
        pick_copied(rng, &[(1, 1), (2, 1), (3, 1), (4, 2), (4, 4), (6, 2), (8, 1), (8, 2)]);
    let head_dim = pick_copied(rng, &[2, 4, 6]);
    let hidden = pick_copied(rng, &[5, 8, 12, 16, 24, 31]);
    let d_ff = pick_copied(rng, &[1, 7, 8, 16, 24]);
    let vocab = pick_copied(rng, &[3, 8, 17, 32]);
    let count = pick_copied(rng, &[1, 2, 3, 4]);
    let tied = rng.random_bool();
    let epsilon = pick_copied(rng, &["1e-12", "1e-5", "0.1", "10.0"]);
    let theta = pick_copied(rng, &["1.5", "10000.0", "1e7"]);
    let padding = if vocab == 17 { r#""padding_token": 5,"# } else { "" };
    let rotary = if d_ff == 7 && head_dim > 2 { r#""rotary_dim": 2,"# } else { "" };
    let scaling = match d_ff {
        8 => r#""rope_scaling": {"linear": {"factor": 4.0}},"#,
        16 => {
            r#""rope_scaling": {"yarn": {"factor": 4.0, "beta_fast": 3.0, "beta_slow": 0.5,
            "attention_factor": 1.25, "original_length": 8}},"#
        }
        _ => "",
    };
    let positions = if count == 3 { r#", "positions": "none""# } else { "" };
    // Under a large ε the inputs of linears are tiny: keys and values are their biases in all but the last digits, and
    // the gradients of attention are differences of these digits.
    let has_bias = (hidden % 12 == 0 || hidden == 5) && epsilon != "10.0";
    let bias = if has_bias { r#", "qkv_bias": true"# } else { "" };
    let qk_norm = if hidden >= 16 { r#", "qk_norm": true"# } else { "" };
    let window = if heads == 4 { r#", "attention": {"sliding_window": 3}"# } else { "" };
    let gated_product = pick_copied(rng, &["plain", "swiglu"]);
    let crossing = pick_copied(
        rng,
        &[
            "",
            "",
            r#", "crossing": {"form": "paper", "gate": "identity"}"#,
            r#", "crossing": {"form": "paper", "gate": "dense"}"#,
            r#", "crossing": {"form": "released", "gate": "dense"}"#,
            r#", "crossing": {"form": "released", "gate": "affine"}"#,
            r#", "crossing": {"form": "released", "gate": {"tensor": {"a": 3, "b": 4}}}"#,
        ],
    );
    let block = |block| {
        let positions = if block == 1 { positions } else { "" };
        format!(r#""{block}": {{{}{positions}}}"#, linears(rng, crossing))
    };
    let blocks: Vec<String> = (0..count).map(block).collect();
    let text = format!(
        r#"{{"format": "narrows-model/1", "name": "unusual", "hidden": {hidden}, "vocab": {vocab},
        "heads": {heads}, "kv_heads": {kv_heads}, "head_dim": {head_dim}, "d_ff": {d_ff},
        "tied": {tied}, "norm_epsilon": {epsilon}, "rope_theta": {theta}, {padding}
        {rotary} {scaling}
        "blocks": {{"count": {count}, "default": {{"product": "{gated_product}", "all": "dense"{bias}{qk_norm}{window}}},
        "overrides": {{{}}}}}}}"#,
        blocks.join(", ")
    );
    // Invalid when a dense linear precedes a crossing one, which then has no latent to add.
    let mut model = model::read("unusual", &text).ok()?;
    for block in &mut model.blocks {
        // A norm leaves only the sign of a latent of rank 1, so that the gradient of its first factor is zero.
        let has_rank_1 = |linear: &Linear| linear.rank() == Some(1);
        block.qk_norm &= !has_rank_1(&block.q) && !has_rank_1(&block.k);
    }
    Some(model)
}
