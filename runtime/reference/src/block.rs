//! Forward and backward pass of one pre-norm block (DESIGN §3.1).

use narrows_plan::model::{Block, Linear, LinearKind, Model, ParameterId, Positions, WeightId};

use super::attention::{self, BatchShape};
use super::linear::{self, LinearBackwardInput};
use super::linear_id::LinearId;
use super::rope::{RotationDirection, rotate};
use super::{Float, Matrix, Parameters, gated_product, norm};

/// A block, its parameters, and its input from the previous block.
#[derive(Clone, Copy)]
pub(super) struct BlockInput<'a, T> {
    pub model: &'a Model,
    pub index: usize,
    pub shape: BatchShape,
    pub parameters: &'a Parameters<T>,
    /// Tapes of the linears of the previous block.
    pub previous: Option<&'a [linear::LinearTape<T>; 7]>,
}

/// The intermediate values that the backward pass of a block reads. q and k are rotated.
pub(super) struct BlockTape<T> {
    x: Matrix<T>,
    normed1: Matrix<T>,
    /// Queries and keys before their heads are normed, in blocks that do so.
    unnormed: [Option<Matrix<T>>; 2],
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

/// A latent, or the gradient of one, for each linear of a block.
pub(super) type Latents<T> = [Option<Matrix<T>>; 7];

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const O: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

impl<T: Float> BlockInput<'_, T> {
    fn block(&self) -> &Block {
        &self.model.blocks[self.index]
    }

    fn parameter_id(&self, weight: WeightId) -> ParameterId {
        ParameterId { block: Some(self.index as u64), weight }
    }

    fn linear_at(&self, slot: usize) -> (LinearId, &Linear) {
        let (kind, linear) = self.block().linears()[slot];
        (LinearId { block: self.index as u64, kind }, linear)
    }

    fn norm(&self, scale: WeightId, x: &Matrix<T>) -> Matrix<T> {
        let scale = self.parameters.checked(self.parameter_id(scale));
        norm::rms_forward(x, scale, self.model.norm_epsilon)
    }

    /// Rotates queries or keys, in blocks where these depend on their positions.
    fn rotate(&self, x: &mut Matrix<T>, direction: RotationDirection) {
        if self.block().positions == Positions::None {
            return;
        }
        rotate(x, self.shape.length, self.shape.head_dim, &self.model.rope, direction);
    }

    /// Adds the bias of q, k or v to its output, in blocks that have one.
    fn add_bias(&self, slot: usize, y: &mut Matrix<T>) {
        if self.block().qkv_bias {
            let (id, _) = self.linear_at(slot);
            y.add_to_rows(self.parameters.checked(id.parameter(WeightId::Bias)));
        }
    }

    /// Norms every head of q or k, in blocks that do so. Also returns what was normed.
    fn norm_heads(&self, kind: LinearKind, x: Matrix<T>) -> (Matrix<T>, Option<Matrix<T>>) {
        match self.block().qk_norm {
            true => (self.norm(WeightId::QkNorm(kind), &x), Some(x)),
            false => (x, None),
        }
    }

    fn linear(&self, slot: usize, x: &Matrix<T>) -> (Matrix<T>, linear::LinearTape<T>) {
        let (id, linear) = self.linear_at(slot);
        let previous = self.previous.and_then(|previous| previous[slot].sent());
        let epsilon = self.model.latent_norm_epsilon;
        linear::forward(linear, id, self.parameters, x, previous, epsilon)
    }

    /// The output of the block for the input x.
    pub(super) fn forward(&self, x: Matrix<T>) -> (Matrix<T>, BlockTape<T>) {
        let normed1 = self.norm(WeightId::Norm1, &x);
        let (mut q, q_tape) = self.linear(Q, &normed1);
        let (mut k, k_tape) = self.linear(K, &normed1);
        let (mut v, v_tape) = self.linear(V, &normed1);
        self.add_bias(Q, &mut q);
        self.add_bias(K, &mut k);
        self.add_bias(V, &mut v);
        let (mut q, unnormed_q) = self.norm_heads(LinearKind::Q, q);
        let (mut k, unnormed_k) = self.norm_heads(LinearKind::K, k);
        self.rotate(&mut q, RotationDirection::Forward);
        self.rotate(&mut k, RotationDirection::Forward);
        let attended = attention::forward(self.shape, &q, &k, &v);
        let (o, o_tape) = self.linear(O, &attended);
        let x1 = x.plus(&o);

        let normed2 = self.norm(WeightId::Norm2, &x1);
        let (gate, gate_tape) = self.linear(GATE, &normed2);
        let (up, up_tape) = self.linear(UP, &normed2);
        let product = gated_product::forward(self.block().product, &gate, &up);
        let (down, down_tape) = self.linear(DOWN, &product);
        let x2 = x1.plus(&down);

        let linears = [q_tape, k_tape, v_tape, o_tape, gate_tape, up_tape, down_tape];
        let tape = BlockTape {
            x,
            normed1,
            unnormed: [unnormed_q, unnormed_k],
            q,
            k,
            v,
            attended,
            x1,
            normed2,
            gate,
            up,
            product,
            linears,
        };
        (x2, tape)
    }

    /// The gradients of the input of the block and of the latents of the previous block, given the
    /// gradients of its output and of its own latents from the next block.
    pub(super) fn backward(
        &self,
        tape: &BlockTape<T>,
        dx2: Matrix<T>,
        dsent: &Latents<T>,
        gradients: &mut Parameters<T>,
    ) -> (Matrix<T>, Latents<T>) {
        let mut back =
            BlockBackward { context: self, tape, dsent, gradients, dprevious: Default::default() };
        let dproduct = back.linear(DOWN, &tape.product, &dx2);
        let (dgate, dup) =
            gated_product::backward(self.block().product, &tape.gate, &tape.up, &dproduct);
        let mut dnormed2 = back.linear(GATE, &tape.normed2, &dgate);
        dnormed2.add(&back.linear(UP, &tape.normed2, &dup));
        let dx1 = dx2.plus(&back.norm(WeightId::Norm2, &tape.x1, &dnormed2));

        let dattended = back.linear(O, &tape.attended, &dx1);
        let qkv = [&tape.q, &tape.k, &tape.v];
        let [mut dq, mut dk, dv] = attention::backward(self.shape, qkv, &dattended);
        self.rotate(&mut dq, RotationDirection::Back);
        self.rotate(&mut dk, RotationDirection::Back);
        let [q, k] = &tape.unnormed;
        let dq = back.norm_heads(LinearKind::Q, q.as_ref(), dq);
        let dk = back.norm_heads(LinearKind::K, k.as_ref(), dk);
        back.bias(Q, &dq);
        back.bias(K, &dk);
        back.bias(V, &dv);
        let mut dnormed1 = back.linear(Q, &tape.normed1, &dq);
        dnormed1.add(&back.linear(K, &tape.normed1, &dk));
        dnormed1.add(&back.linear(V, &tape.normed1, &dv));
        let dx = dx1.plus(&back.norm(WeightId::Norm1, &tape.x, &dnormed1));
        (dx, back.dprevious)
    }
}

/// State of the backward pass of a block.
struct BlockBackward<'a, T> {
    context: &'a BlockInput<'a, T>,
    tape: &'a BlockTape<T>,
    dsent: &'a Latents<T>,
    gradients: &'a mut Parameters<T>,
    dprevious: Latents<T>,
}

impl<T: Float> BlockBackward<'_, T> {
    /// The gradient of the input x of a linear.
    fn linear(&mut self, slot: usize, x: &Matrix<T>, dy: &Matrix<T>) -> Matrix<T> {
        let context = self.context;
        let (id, linear) = context.linear_at(slot);
        let input = LinearBackwardInput {
            x,
            previous: context.previous.and_then(|previous| previous[slot].sent()),
            tape: &self.tape.linears[slot],
            dy,
            dsent: self.dsent[slot].as_ref(),
            norm_epsilon: context.model.latent_norm_epsilon,
        };
        let (dx, dprevious) =
            linear::backward(linear, id, context.parameters, self.gradients, input);
        self.dprevious[slot] = dprevious;
        dx
    }

    /// Adds the gradient of the bias of q, k or v.
    fn bias(&mut self, slot: usize, dy: &Matrix<T>) {
        if self.context.block().qkv_bias {
            let (id, _) = self.context.linear_at(slot);
            self.gradients.add(id.parameter(WeightId::Bias), &dy.row_sum());
        }
    }

    /// The gradient of q or k before its heads are normed, if they are.
    fn norm_heads(&mut self, kind: LinearKind, x: Option<&Matrix<T>>, dy: Matrix<T>) -> Matrix<T> {
        match x {
            Some(x) => self.norm(WeightId::QkNorm(kind), x, &dy),
            None => dy,
        }
    }

    /// The gradient of the input x of a norm.
    fn norm(&mut self, scale: WeightId, x: &Matrix<T>, dy: &Matrix<T>) -> Matrix<T> {
        let id = self.context.parameter_id(scale);
        let scale = self.context.parameters.checked(id);
        let (dx, dscale) = norm::rms_backward(x, scale, self.context.model.norm_epsilon, dy);
        self.gradients.add(id, &dscale);
        dx
    }
}
