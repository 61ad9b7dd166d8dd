//! Values of a stage's forward pass: a hash-consed graph of operations.
//!
//! A value is a term: an operation on values. A reshard changes the layout of a value and not its
//! identity, and recomputation on equal inputs gives the same value. The backward pass is checked against
//! this graph: the gradient of a value is a set of contributions, one of each use of the value, and is
//! complete when every use has contributed. [`ForwardGraph::sum`] refuses a second contribution of a use.

use std::collections::HashMap;

use crate::model::{Activation, GatedProduct};

use super::error::{CheckResult, ensure, fault};
use super::lattice::{AbstractValue, ForwardValueId};

/// Largest number of operations that use a value: contributions to its gradient are one bit each.
const USES_MAX: usize = 64;

/// An operation of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ForwardOpId(u32);

/// Function of an operation. Operations of equal kind and inputs are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ForwardOpKind {
    /// x, W → x·W.
    Gemm { batch: u64 },
    /// x, γ → x·ρ·γ.
    Normed,
    /// x, γ → x⊙γ, with the division by the root mean square pending.
    Scaled,
    /// x → Σx². Its gradient is contributed to x together with that of the scaled x.
    Statistic,
    /// The gradient of a normed value → Σ dy⊙γ⊙x.
    NormSum,
    /// h → φ(h), one output per section.
    Latent { activation: Activation },
    /// h, s → φ(ρ·h).
    Recover { activation: Activation },
    /// v, parameters → φ(LayerNorm(v)).
    LatentNorm { activation: Activation },
    /// h, parameters → Uᵀ·H·V.
    TensorGate { a: u64, b: u64 },
    /// x, b → x + b, with b added to every row.
    Bias,
    /// x, scales → x with the heads in its first `queries` + `keys` features normed.
    QkNorm { head_dim: u64, queries: u64, keys: u64 },
    /// x → x with its first `width` features rotated.
    Rope { width: u64, head_dim: u64 },
    /// q, k, v in one to three values → output, log-sum-exp, with at most `window` keys of a query.
    Attention { window: Option<u64> },
    /// gate, up in one or two values → their product.
    Gated { product: GatedProduct },
    /// x, y → x + y.
    Add,
    /// tokens, table → rows of the table.
    Gather,
    /// logits → maxima.
    LossMaximum,
    /// logits, maxima, targets → sums.
    LossSum,
    /// logits → loss.
    Loss,
    /// x, sent to the next stage.
    Send,
}

impl ForwardOpKind {
    /// Whether the operation contributes to the gradient of its input at this port.
    fn differentiates(self, port: usize) -> bool {
        match self {
            ForwardOpKind::Statistic
            | ForwardOpKind::NormSum
            | ForwardOpKind::LossMaximum
            | ForwardOpKind::LossSum => false,
            ForwardOpKind::Gather => port == 1,
            ForwardOpKind::Loss => port == 0,
            _ => true,
        }
    }
}

struct ForwardOp {
    kind: ForwardOpKind,
    inputs: Vec<ForwardValueId>,
    outputs: Vec<ForwardValueId>,
}

struct ForwardValue {
    producer: Option<ForwardOpId>,
    uses: Vec<(ForwardOpId, usize)>,
    name: String,
    /// The microbatch that the value belongs to, counted from the first of its pass; `None` for what all share.
    microbatch: Option<u64>,
}

/// All values of a stage.
#[derive(Default)]
pub(super) struct ForwardGraph {
    ops: Vec<ForwardOp>,
    values: Vec<ForwardValue>,
    op_ids: HashMap<(ForwardOpKind, Vec<ForwardValueId>), ForwardOpId>,
    /// Set for the backward pass, which may only recompute forward operations.
    pub recompute_only: bool,
}

impl ForwardGraph {
    /// Adds a value that the stage does not compute: a weight, token ids, a received tensor.
    pub fn add_input(&mut self, name: &str, microbatch: Option<u64>) -> ForwardValueId {
        self.add_value(None, name, microbatch)
    }

    fn add_value(
        &mut self,
        producer: Option<ForwardOpId>,
        name: &str,
        microbatch: Option<u64>,
    ) -> ForwardValueId {
        let name = name.to_string();
        self.values.push(ForwardValue { producer, uses: vec![], name, microbatch });
        ForwardValueId(self.values.len() as u32 - 1)
    }

    /// The outputs of an operation, which are equal for equal inputs. `names` are the names of the buffers
    /// that they are written to, for messages.
    pub fn apply(
        &mut self,
        kind: ForwardOpKind,
        inputs: Vec<ForwardValueId>,
        names: &[&str],
    ) -> CheckResult<Vec<ForwardValueId>> {
        if let Some(node) = self.op_ids.get(&(kind, inputs.clone())) {
            let outputs = &self.ops[node.0 as usize].outputs;
            if outputs.len() != names.len() {
                return fault(format!(
                    "has {} results, but the same operation had {} before",
                    names.len(),
                    outputs.len()
                ));
            }
            return Ok(outputs.clone());
        }
        if self.recompute_only && kind != ForwardOpKind::NormSum {
            let names: Vec<String> = inputs.iter().map(|v| self.name(*v)).collect();
            return fault(format!(
                "computes a value from {} that the forward pass did not compute",
                names.join(", ")
            ));
        }
        let microbatch = self.common_microbatch(&inputs)?;
        let node = ForwardOpId(self.ops.len() as u32);
        for (port, input) in inputs.iter().enumerate() {
            if kind.differentiates(port) {
                ensure(self.uses(*input).len() < USES_MAX, || {
                    format!("is one of more than {USES_MAX} uses of {}", self.name(*input))
                })?;
                self.values[input.0 as usize].uses.push((node, port));
            }
        }
        let outputs: Vec<ForwardValueId> =
            names.iter().map(|name| self.add_value(Some(node), name, microbatch)).collect();
        self.op_ids.insert((kind, inputs.clone()), node);
        self.ops.push(ForwardOp { kind, inputs, outputs: outputs.clone() });
        Ok(outputs)
    }

    /// The microbatch of the inputs of an operation.
    fn common_microbatch(&self, inputs: &[ForwardValueId]) -> CheckResult<Option<u64>> {
        let mut known: Option<(ForwardValueId, u64)> = None;
        for input in inputs {
            let Some(microbatch) = self.microbatch(*input) else { continue };
            let (first, expected) = *known.get_or_insert((*input, microbatch));
            ensure(expected == microbatch, || {
                format!(
                    "reads {} and {}, which belong to different microbatches of the pass",
                    self.name(first),
                    self.name(*input)
                )
            })?;
        }
        Ok(known.map(|(_, microbatch)| microbatch))
    }

    /// The microbatch that a value belongs to, counted from the first of its pass; `None` for what all share.
    pub fn microbatch(&self, value: ForwardValueId) -> Option<u64> {
        self.values[value.0 as usize].microbatch
    }

    /// The microbatches whose losses are computed.
    pub fn microbatches_of_losses(&self) -> Vec<Option<u64>> {
        let losses = self.ops.iter().filter(|op| op.kind == ForwardOpKind::Loss);
        losses.flat_map(|op| &op.outputs).map(|loss| self.microbatch(*loss)).collect()
    }

    /// The operation of this kind on these inputs, if any.
    pub fn find(&self, kind: ForwardOpKind, inputs: &[ForwardValueId]) -> Option<ForwardOpId> {
        self.op_ids.get(&(kind, inputs.to_vec())).copied()
    }

    pub fn name(&self, value: ForwardValueId) -> String {
        format!("`{}`", self.values[value.0 as usize].name)
    }

    pub fn describe(&self, value: AbstractValue) -> String {
        match value {
            AbstractValue::Zero => "zeros".into(),
            AbstractValue::Value(value) => self.name(value),
            AbstractValue::Gradient { of, uses } => {
                let total = self.values[of.0 as usize].uses.len();
                format!(
                    "the gradient of {} with {} of {total} contributions",
                    self.name(of),
                    uses.count_ones()
                )
            }
        }
    }

    pub fn kind(&self, node: ForwardOpId) -> ForwardOpKind {
        self.ops[node.0 as usize].kind
    }

    pub fn inputs(&self, node: ForwardOpId) -> &[ForwardValueId] {
        &self.ops[node.0 as usize].inputs
    }

    pub fn outputs(&self, node: ForwardOpId) -> &[ForwardValueId] {
        &self.ops[node.0 as usize].outputs
    }

    pub fn producer(&self, value: ForwardValueId) -> Option<ForwardOpId> {
        self.values[value.0 as usize].producer
    }

    /// The operations that use a value, with their ports.
    pub fn uses(&self, value: ForwardValueId) -> &[(ForwardOpId, usize)] {
        &self.values[value.0 as usize].uses
    }

    /// The contribution of one operation to the gradient of its input.
    pub fn contribution(&self, node: ForwardOpId, port: usize) -> AbstractValue {
        let value = self.ops[node.0 as usize].inputs[port];
        let uses = self.uses(value).iter().zip(0..);
        let uses = uses.filter(|(at, _)| **at == (node, port)).map(|(_, bit)| 1_u64 << bit).sum();
        AbstractValue::Gradient { of: value, uses }
    }

    fn all_uses(&self, value: ForwardValueId) -> u64 {
        (0..self.uses(value).len()).map(|bit| 1_u64 << bit).sum()
    }

    /// The values to whose gradients `gradient` contributes, with one bit per contributing use. The complete gradient of
    /// a sum is a contribution to the gradient of each summand, and that of a value with a bias a contribution to the
    /// gradient of the value without, also where that is a summand again.
    fn contributions(&self, gradient: AbstractValue) -> Vec<(ForwardValueId, u64)> {
        let AbstractValue::Gradient { of, uses } = gradient else { return vec![] };
        let mut found = vec![(of, uses)];
        let mut next = 0;
        while let Some(&(value, uses)) = found.get(next) {
            next += 1;
            let is_complete = uses == self.all_uses(value);
            let Some(node) = self.producer(value).filter(|_| is_complete) else { continue };
            let summands = match self.kind(node) {
                ForwardOpKind::Add => self.inputs(node),
                ForwardOpKind::Bias => &self.inputs(node)[..1],
                _ => &[],
            };
            for (port, summand) in summands.iter().enumerate() {
                if let AbstractValue::Gradient { uses, .. } = self.contribution(node, port) {
                    found.push((*summand, uses));
                }
            }
        }
        found
    }

    /// The contributions to the gradient of `value` in `gradient`, one bit per use; `None` for the gradient of another
    /// value.
    pub fn contributions_to(&self, gradient: AbstractValue, value: ForwardValueId) -> Option<u64> {
        let mut contributions = self.contributions(gradient).into_iter();
        contributions.find(|(of, _)| *of == value).map(|(_, uses)| uses)
    }

    /// Whether `gradient` is the complete gradient of a value.
    pub fn is_complete(&self, gradient: AbstractValue, value: ForwardValueId) -> bool {
        self.contributions_to(gradient, value) == Some(self.all_uses(value))
    }

    /// The values of which `gradient` is the complete gradient.
    pub fn completed_values(
        &self,
        gradient: AbstractValue,
    ) -> impl Iterator<Item = ForwardValueId> + '_ {
        let contributions = self.contributions(gradient).into_iter();
        contributions.filter(|(of, uses)| *uses == self.all_uses(*of)).map(|(of, _)| of)
    }

    /// The operation of a matching kind of whose output `gradient` is the complete gradient, if any.
    pub fn op_of_output_gradient(
        &self,
        gradient: AbstractValue,
        matches_kind: impl Fn(ForwardOpKind) -> bool,
    ) -> Option<ForwardOpId> {
        let mut nodes = self.completed_values(gradient).filter_map(|value| self.producer(value));
        nodes.find(|node| matches_kind(self.kind(*node)))
    }

    /// The sum of two gradients of one value.
    ///
    /// # Errors
    /// A contribution that is in both, or gradients of different values.
    pub fn sum(&self, first: AbstractValue, second: AbstractValue) -> CheckResult<AbstractValue> {
        if first == AbstractValue::Zero {
            return Ok(second);
        }
        if second == AbstractValue::Zero {
            return Ok(first);
        }
        let contributions = [first, second].map(|gradient| self.contributions(gradient));
        for (value, _) in contributions.iter().flatten() {
            let to_value = |gradient: &[(ForwardValueId, u64)]| {
                gradient.iter().find(|(of, _)| of == value).map(|(_, uses)| *uses)
            };
            if let (Some(one), Some(two)) =
                (to_value(&contributions[0]), to_value(&contributions[1]))
            {
                if one & two != 0 {
                    return fault(format!(
                        "adds a contribution to the gradient of {} twice",
                        self.name(*value)
                    ));
                }
                return Ok(AbstractValue::Gradient { of: *value, uses: one | two });
            }
        }
        fault(format!(
            "adds {} and {}, which are gradients of different values",
            self.describe(first),
            self.describe(second)
        ))
    }

    /// The operation of a matching kind that reads `value` at `port` and of whose output `gradient` is the
    /// complete gradient: the operation that a backward instruction differentiates.
    pub fn differentiated_op(
        &self,
        value: ForwardValueId,
        port: usize,
        gradient: AbstractValue,
        matches_kind: impl Fn(ForwardOpKind) -> bool,
    ) -> CheckResult<ForwardOpId> {
        let matching = self.uses(value).iter().find(|(node, at)| {
            *at == port
                && matches_kind(self.kind(*node))
                && self.is_complete(gradient, self.outputs(*node)[0])
        });
        match matching {
            Some((node, _)) => Ok(*node),
            None => fault(format!(
                "reads {}, which is not the complete gradient of a forward result of {}",
                self.describe(gradient),
                self.name(value)
            )),
        }
    }
}
