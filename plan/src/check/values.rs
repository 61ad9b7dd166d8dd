//! Values of a stage's forward pass: a hash-consed graph of operations.
//!
//! A value is a term, an operation on values. Reshards change the layout of a value and not its
//! identity; recomputing an operation on equal inputs gives the same value. The backward pass is
//! checked against this graph: a gradient belongs to a value, sums the contributions of the value's
//! uses, and is complete when every use has contributed once.

use std::collections::HashMap;

use crate::model::{Activation, GatedProduct};

use super::error::{CheckResult, fault};
use super::lattice::{AbstractValue, SymbolId};

/// An operation of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ForwardOpId(u32);

/// The function that an operation computes: operations of equal kind and inputs are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ForwardOpKind {
    /// x, W.
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
    /// Rotates the first features.
    Rope { width: u64, head_dim: u64 },
    /// q, k, v in one to three values → output, log-sum-exp.
    Attention,
    /// gate, up in one or two values.
    Gated { product: GatedProduct },
    /// x, y.
    Add,
    /// tokens, table.
    Gather,
    /// logits → maxima.
    LossMaximum,
    /// logits, maxima, targets → sums.
    LossSum,
    /// logits → loss.
    Loss,
    /// To the next stage.
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
    inputs: Vec<SymbolId>,
    outputs: Vec<SymbolId>,
}

struct Symbol {
    producer: Option<ForwardOpId>,
    uses: Vec<(ForwardOpId, usize)>,
    name: String,
}

/// All values of a stage.
#[derive(Default)]
pub(super) struct SymbolTable {
    nodes: Vec<ForwardOp>,
    values: Vec<Symbol>,
    known: HashMap<(ForwardOpKind, Vec<SymbolId>), ForwardOpId>,
    /// Set for the backward pass, which may only recompute forward operations.
    pub closed: bool,
}

impl SymbolTable {
    /// Adds a value from outside: a weight, token ids, a received tensor.
    pub fn add_input(&mut self, name: &str) -> SymbolId {
        self.fresh(None, name)
    }

    fn fresh(&mut self, producer: Option<ForwardOpId>, name: &str) -> SymbolId {
        self.values.push(Symbol { producer, uses: vec![], name: name.to_string() });
        SymbolId(self.values.len() as u32 - 1)
    }

    /// The outputs of an operation, equal for equal inputs. `names` are the buffers
    /// they are written to, for messages.
    pub fn apply(
        &mut self,
        kind: ForwardOpKind,
        inputs: Vec<SymbolId>,
        names: &[&str],
    ) -> CheckResult<Vec<SymbolId>> {
        if let Some(node) = self.known.get(&(kind, inputs.clone())) {
            let outputs = &self.nodes[node.0 as usize].outputs;
            if outputs.len() != names.len() {
                return fault(format!(
                    "has {} results, but the same operation had {} before",
                    names.len(),
                    outputs.len()
                ));
            }
            return Ok(outputs.clone());
        }
        if self.closed && kind != ForwardOpKind::NormSum {
            let names: Vec<String> = inputs.iter().map(|v| self.name(*v)).collect();
            return fault(format!(
                "computes a value from {} that the forward pass did not compute",
                names.join(", ")
            ));
        }
        let node = ForwardOpId(self.nodes.len() as u32);
        for (port, input) in inputs.iter().enumerate() {
            if kind.differentiates(port) {
                self.values[input.0 as usize].uses.push((node, port));
            }
        }
        let outputs: Vec<SymbolId> =
            names.iter().map(|name| self.fresh(Some(node), name)).collect();
        self.known.insert((kind, inputs.clone()), node);
        self.nodes.push(ForwardOp { kind, inputs, outputs: outputs.clone() });
        Ok(outputs)
    }

    /// The operation of this kind on these inputs, if any.
    pub fn find(&self, kind: ForwardOpKind, inputs: &[SymbolId]) -> Option<ForwardOpId> {
        self.known.get(&(kind, inputs.to_vec())).copied()
    }

    pub fn name(&self, value: SymbolId) -> String {
        format!("`{}`", self.values[value.0 as usize].name)
    }

    pub fn describe(&self, meaning: AbstractValue) -> String {
        match meaning {
            AbstractValue::Zero => "zeros".into(),
            AbstractValue::Value(value) => self.name(value),
            AbstractValue::Gradient { of, uses } => {
                let all = self.values[of.0 as usize].uses.len();
                format!(
                    "the gradient of {} with {} of {all} contributions",
                    self.name(of),
                    uses.count_ones()
                )
            }
        }
    }

    pub fn kind(&self, node: ForwardOpId) -> ForwardOpKind {
        self.nodes[node.0 as usize].kind
    }

    pub fn inputs(&self, node: ForwardOpId) -> &[SymbolId] {
        &self.nodes[node.0 as usize].inputs
    }

    pub fn outputs(&self, node: ForwardOpId) -> &[SymbolId] {
        &self.nodes[node.0 as usize].outputs
    }

    pub fn producer(&self, value: SymbolId) -> Option<ForwardOpId> {
        self.values[value.0 as usize].producer
    }

    /// The operations that use a value, with their ports.
    pub fn uses(&self, value: SymbolId) -> &[(ForwardOpId, usize)] {
        &self.values[value.0 as usize].uses
    }

    /// The contribution of one operation to the gradient of its input.
    pub fn contribution(&self, node: ForwardOpId, port: usize) -> AbstractValue {
        let of = self.nodes[node.0 as usize].inputs[port];
        let at = self.uses(of).iter().position(|u| *u == (node, port)).unwrap_or(63);
        AbstractValue::Gradient { of, uses: 1 << at.min(63) }
    }

    fn all_uses(&self, value: SymbolId) -> u64 {
        match self.uses(value).len() {
            n @ 0..64 => (1 << n) - 1,
            _ => u64::MAX,
        }
    }

    /// The contributions to the gradient of `value` that `meaning` contains, if any. The complete
    /// gradient of a sum is a contribution to the gradient of each summand.
    pub fn as_gradient_of(&self, meaning: AbstractValue, value: SymbolId) -> Option<u64> {
        let AbstractValue::Gradient { of, uses } = meaning else { return None };
        if of == value {
            return Some(uses);
        }
        let node = self.producer(of)?;
        let adds = self.kind(node) == ForwardOpKind::Add && uses == self.all_uses(of);
        let port = self.inputs(node).iter().position(|input| *input == value)?;
        match self.contribution(node, port) {
            AbstractValue::Gradient { uses, .. } if adds => Some(uses),
            _ => None,
        }
    }

    /// Whether `meaning` is the complete gradient of a value.
    pub fn is_complete(&self, meaning: AbstractValue, value: SymbolId) -> bool {
        self.as_gradient_of(meaning, value) == Some(self.all_uses(value))
    }

    /// The values that `meaning` may be a gradient of: its own value and, for a sum, each summand.
    fn gradient_of(&self, meaning: AbstractValue) -> impl Iterator<Item = SymbolId> + '_ {
        let own = match meaning {
            AbstractValue::Gradient { of, .. } => Some(of),
            _ => None,
        };
        let node = own.and_then(|of| self.producer(of));
        let summands = node.map_or(&[][..], |node| self.inputs(node));
        own.into_iter().chain(summands.iter().copied())
    }

    /// The values whose complete gradient `meaning` is.
    pub fn completed(&self, meaning: AbstractValue) -> impl Iterator<Item = SymbolId> + '_ {
        self.gradient_of(meaning).filter(move |value| self.is_complete(meaning, *value))
    }

    /// The operation of this kind, the complete gradient of whose output `meaning` is.
    pub fn op_of_gradient(
        &self,
        meaning: AbstractValue,
        fits: impl Fn(ForwardOpKind) -> bool,
    ) -> Option<ForwardOpId> {
        let mut nodes = self.completed(meaning).filter_map(|value| self.producer(value));
        nodes.find(|node| fits(self.kind(*node)))
    }

    /// The sum of two gradients.
    pub fn sum(&self, first: AbstractValue, second: AbstractValue) -> CheckResult<AbstractValue> {
        if first == AbstractValue::Zero {
            return Ok(second);
        }
        if second == AbstractValue::Zero {
            return Ok(first);
        }
        for value in self.gradient_of(first).chain(self.gradient_of(second)) {
            let parts = (self.as_gradient_of(first, value), self.as_gradient_of(second, value));
            if let (Some(one), Some(two)) = parts {
                if one & two != 0 {
                    return fault(format!(
                        "counts a contribution to the gradient of {} twice",
                        self.name(value)
                    ));
                }
                return Ok(AbstractValue::Gradient { of: value, uses: one | two });
            }
        }
        fault(format!(
            "adds {} and {}, which are gradients of different values",
            self.describe(first),
            self.describe(second)
        ))
    }

    /// The operation of this kind that uses `value` at `port` and the complete gradient of whose output
    /// is `meaning`.
    pub fn user(
        &self,
        value: SymbolId,
        port: usize,
        meaning: AbstractValue,
        fits: impl Fn(ForwardOpKind) -> bool,
    ) -> CheckResult<ForwardOpId> {
        let found = self.uses(value).iter().find(|(node, at)| {
            *at == port
                && fits(self.kind(*node))
                && self.is_complete(meaning, self.outputs(*node)[0])
        });
        match found {
            Some((node, _)) => Ok(*node),
            None => fault(format!(
                "reads {}, which is not the complete gradient of a forward result of {}",
                self.describe(meaning),
                self.name(value)
            )),
        }
    }
}
