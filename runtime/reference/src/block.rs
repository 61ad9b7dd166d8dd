//! One pre-norm block (DESIGN §3.1): what it computes, and the same backwards.

use narrows_plan::model::{Block, Model};

use super::attention::{self, BatchShape};
use super::linear::{self, LinearGradientInput};
use super::rope::{RotationDirection, rotate};
use super::{Float, Matrix, Parameters, gated_product, norm};

/// A block with what its computation depends on.
#[derive(Clone, Copy)]
pub(super) struct BlockContext<'a, T> {
    pub model: &'a Model,
    pub index: usize,
    pub shape: BatchShape,
    pub parameters: &'a Parameters<T>,
    /// The traces of the previous block's linears.
    pub before: Option<&'a [linear::LinearTape<T>; 7]>,
}

/// What the backward pass of a block needs. q and k are rotated.
pub(super) struct BlockTape<T> {
    x: Matrix<T>,
    normed1: Matrix<T>,
    q: Matrix<T>,
    k: Matrix<T>,
    v: Matrix<T>,
    attended: Matrix<T>,
    x1: Matrix<T>,
    normed2: Matrix<T>,
    gate: Matrix<T>,
    up: Matrix<T>,
    product: Matrix<T>,
    /// In the order of [`Block::linears`].
    pub linears: [linear::LinearTape<T>; 7],
}

/// A latent, or its gradient, for each of a block's linears.
pub(super) type Latents<T> = [Option<Matrix<T>>; 7];

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const O: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

impl<T: Float> BlockContext<'_, T> {
    fn block(&self) -> &Block {
        &self.model.blocks[self.index]
    }

    fn name(&self, of: &str) -> String {
        format!("layer {} {of}", self.index)
    }

    fn norm(&self, name: &str, x: &Matrix<T>) -> Matrix<T> {
        norm::rms_forward(x, self.parameters.of(&self.name(name)), self.model.norm_epsilon)
    }

    fn rotate(&self, x: &mut Matrix<T>, turn: RotationDirection) {
        rotate(x, self.shape.length, self.shape.head_dim, self.model.rope_theta, turn);
    }

    fn linear(&self, slot: usize, x: &Matrix<T>) -> (Matrix<T>, linear::LinearTape<T>) {
        let (kind, linear) = self.block().linears()[slot];
        let before = self.before.and_then(|before| before[slot].sent());
        linear::forward(linear, &self.name(kind.name()), self.parameters, x, before)
    }

    /// The block's output for the input x.
    pub(super) fn forward(&self, x: Matrix<T>) -> (Matrix<T>, BlockTape<T>) {
        let normed1 = self.norm("norm1", &x);
        let (mut q, q_trace) = self.linear(Q, &normed1);
        let (mut k, k_trace) = self.linear(K, &normed1);
        let (v, v_trace) = self.linear(V, &normed1);
        self.rotate(&mut q, RotationDirection::Forward);
        self.rotate(&mut k, RotationDirection::Forward);
        let attended = attention::forward(self.shape, &q, &k, &v);
        let (o, o_trace) = self.linear(O, &attended);
        let x1 = x.plus(&o);

        let normed2 = self.norm("norm2", &x1);
        let (gate, gate_trace) = self.linear(GATE, &normed2);
        let (up, up_trace) = self.linear(UP, &normed2);
        let product = gated_product::forward(self.block().product, &gate, &up);
        let (down, down_trace) = self.linear(DOWN, &product);
        let x2 = x1.plus(&down);

        let linears = [q_trace, k_trace, v_trace, o_trace, gate_trace, up_trace, down_trace];
        let trace =
            BlockTape { x, normed1, q, k, v, attended, x1, normed2, gate, up, product, linears };
        (x2, trace)
    }

    /// The gradients of the block's input and of the latents that the previous block sent, given
    /// those of its output and of the latents it sent itself.
    pub(super) fn backward(
        &self,
        trace: &BlockTape<T>,
        dx2: Matrix<T>,
        dsent: &Latents<T>,
        gradients: &mut Parameters<T>,
    ) -> (Matrix<T>, Latents<T>) {
        let mut back =
            BlockBackward { site: self, trace, dsent, gradients, dbefore: Default::default() };
        let dproduct = back.linear(DOWN, &trace.product, &dx2);
        let (dgate, dup) =
            gated_product::backward(self.block().product, &trace.gate, &trace.up, &dproduct);
        let mut dnormed2 = back.linear(GATE, &trace.normed2, &dgate);
        dnormed2.add(&back.linear(UP, &trace.normed2, &dup));
        let dx1 = dx2.plus(&back.norm("norm2", &trace.x1, &dnormed2));

        let dattended = back.linear(O, &trace.attended, &dx1);
        let qkv = [&trace.q, &trace.k, &trace.v];
        let [mut dq, mut dk, dv] = attention::backward(self.shape, qkv, &dattended);
        self.rotate(&mut dq, RotationDirection::Back);
        self.rotate(&mut dk, RotationDirection::Back);
        let mut dnormed1 = back.linear(Q, &trace.normed1, &dq);
        dnormed1.add(&back.linear(K, &trace.normed1, &dk));
        dnormed1.add(&back.linear(V, &trace.normed1, &dv));
        let dx = dx1.plus(&back.norm("norm1", &trace.x, &dnormed1));
        (dx, back.dbefore)
    }
}

/// The backward pass of a block under way.
struct BlockBackward<'a, T> {
    site: &'a BlockContext<'a, T>,
    trace: &'a BlockTape<T>,
    dsent: &'a Latents<T>,
    gradients: &'a mut Parameters<T>,
    dbefore: Latents<T>,
}

impl<T: Float> BlockBackward<'_, T> {
    /// The gradient of a linear's input x.
    fn linear(&mut self, slot: usize, x: &Matrix<T>, dy: &Matrix<T>) -> Matrix<T> {
        let site = self.site;
        let (kind, linear) = site.block().linears()[slot];
        let known = LinearGradientInput {
            x,
            before: site.before.and_then(|before| before[slot].sent()),
            trace: &self.trace.linears[slot],
            dy,
            dsent: self.dsent[slot].as_ref(),
        };
        let name = site.name(kind.name());
        let (dx, dbefore) = linear::backward(linear, &name, site.parameters, self.gradients, known);
        self.dbefore[slot] = dbefore;
        dx
    }

    /// The gradient of a norm's input x.
    fn norm(&mut self, name: &str, x: &Matrix<T>, dy: &Matrix<T>) -> Matrix<T> {
        let name = self.site.name(name);
        let scale = self.site.parameters.of(&name);
        let (dx, dscale) = norm::rms_backward(x, scale, self.site.model.norm_epsilon, dy);
        self.gradients.add(&name, &dscale);
        dx
    }
}
