//! One pre-norm block, for the new tokens of a sequence.

use narrows_plan::model::{LinearKind, Positions, WeightId};
use narrows_runtime::session::PositionRuns;

use super::block_context::BlockContext;
use super::cache::KvCache;
use super::linear::{self, Latents};
use super::norm::norm;
use crate::kernels::{
    CachedAttention, MatrixView, MatrixViewMut, add_into, attention_cached,
    cached_attention_scratch_elements, gated_product_forward, rope_forward,
};

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const O: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

impl BlockContext<'_> {
    /// The output `[tokens, hidden]` for the input x of the same shape. Adds keys and values to the cache, and replaces
    /// the latents of the previous block by those of this one.
    pub(super) fn forward(
        &self,
        mut x: Vec<f32>,
        cache: &mut KvCache,
        latents: &mut Latents,
    ) -> Vec<f32> {
        let mut linear =
            |slot: usize, x: &[f32]| linear::forward(self, slot, x, &mut latents[slot]);
        let epsilon = self.model.norm_epsilon;
        let normed = norm(&x, self.weight(WeightId::Norm1), epsilon, self.parallel);
        let (mut q, mut k, mut v) = (linear(Q, &normed), linear(K, &normed), linear(V, &normed));
        self.add_bias(LinearKind::Q, &mut q);
        self.add_bias(LinearKind::K, &mut k);
        self.add_bias(LinearKind::V, &mut v);
        let mut q = self.norm_heads(LinearKind::Q, q);
        let mut k = self.norm_heads(LinearKind::K, k);
        self.rotate(&mut q);
        self.rotate(&mut k);
        cache.keys.extend(k);
        cache.values.extend(v);
        let attended = self.attention(&q, cache);
        add_into(&linear(O, &attended), &mut x, self.parallel);

        let normed = norm(&x, self.weight(WeightId::Norm2), epsilon, self.parallel);
        let product = self.product(&linear(GATE, &normed), &linear(UP, &normed));
        add_into(&linear(DOWN, &product), &mut x, self.parallel);
        x
    }

    /// Adds the bias of q, k or v to its output, in blocks that have one.
    fn add_bias(&self, kind: LinearKind, y: &mut [f32]) {
        if !self.model.blocks[self.index].qkv_bias {
            return;
        }
        linear::add_to_rows(self.weight(WeightId::Bias(kind)), y);
    }

    /// Norms every head of q or k, in blocks that do so.
    fn norm_heads(&self, kind: LinearKind, x: Vec<f32>) -> Vec<f32> {
        if !self.model.blocks[self.index].qk_norm {
            return x;
        }
        let scale = self.weight(WeightId::QkNorm(kind));
        norm(&x, scale, self.model.norm_epsilon, self.parallel)
    }

    /// Rotates queries or keys, in blocks where these depend on their positions.
    fn rotate(&self, x: &mut [f32]) {
        if self.model.blocks[self.index].positions == Positions::None {
            return;
        }
        let positions = PositionRuns::consecutive(self.first_position, self.tokens);
        let columns = x.len() / self.tokens;
        let x = MatrixViewMut::new(x, self.tokens, columns);
        rope_forward(x, self.rope, positions, self.parallel);
    }

    /// Attention of the new queries to all tokens of the cache.
    fn attention(&self, q: &[f32], cache: &KvCache) -> Vec<f32> {
        let (head_dim, parallel) = (self.model.head_dim as usize, self.parallel);
        let width = self.model.kv_heads as usize * head_dim;
        let cached = cache.tokens(width);
        let keys = MatrixView::new(&cache.keys, cached, width);
        let values = MatrixView::new(&cache.values, cached, width);
        let mut output = vec![0.0; q.len()];
        let columns = q.len() / self.tokens;
        let q = MatrixView::new(q, self.tokens, columns);
        let y = MatrixViewMut::new(&mut output, self.tokens, columns);
        let mut scratch =
            vec![0.0; cached_attention_scratch_elements(self.tokens, cached, parallel)];
        let window = self.model.blocks[self.index].attention.window(cached as u64);
        let window = window.map_or(cached, |window| window as usize);
        let shape = CachedAttention { head_dim, window };
        attention_cached(shape, q, (keys, values), y, &mut scratch, parallel);
        output
    }

    fn product(&self, gate: &[f32], up: &[f32]) -> Vec<f32> {
        let (tokens, columns) = (self.tokens, gate.len() / self.tokens);
        let mut output = vec![0.0; gate.len()];
        let y = MatrixViewMut::new(&mut output, tokens, columns);
        let (gate, up) =
            (MatrixView::new(gate, tokens, columns), MatrixView::new(up, tokens, columns));
        let product = self.model.blocks[self.index].product;
        gated_product_forward(gate, up, product, y, self.parallel);
        output
    }
}
