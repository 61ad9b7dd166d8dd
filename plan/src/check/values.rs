//! The values of a stage's forward pass: a graph in which equal terms are one value.
//!
//! A value is a term: an operation on values. Reshards change where a value lies and not what it
//! is; redoing an operation on equal inputs makes the same value again. So the backward pass can
//! be held against the forward pass: a gradient is *of* a value and sums contributions of its
//! *uses*, and is complete when every use has contributed, once.

use std::collections::HashMap;

use crate::model::{Activation, GatedProduct};

use super::error::{Checked, fault};
use super::lattice::Meaning;

/// A value of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ValueId(pub u32);

/// An operation of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NodeId(u32);

/// What an operation computes, as far as its terms differ by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// x, W.
    Product { batch: u64 },
    /// x, γ → x·ρ·γ.
    Normed,
    /// x, γ → x⊙γ, the division by the root mean square still owed.
    Scaled,
    /// x → Σx². Its gradient reaches x together with that of the scaled x.
    Statistic,
    /// The gradient of a normed value → Σ dy⊙γ⊙x.
    NormSum,
    /// h → φ(h), one output a section.
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

impl Kind {
    /// Whether a gradient comes back for the input at this port.
    fn differentiates(self, port: usize) -> bool {
        match self {
            Kind::Statistic | Kind::NormSum | Kind::LossMaximum | Kind::LossSum => false,
            Kind::Gather => port == 1,
            Kind::Loss => port == 0,
            _ => true,
        }
    }
}

struct Node {
    kind: Kind,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
}

struct Value {
    producer: Option<NodeId>,
    uses: Vec<(NodeId, usize)>,
    name: String,
}

/// All values of a stage.
#[derive(Default)]
pub(super) struct Values {
    nodes: Vec<Node>,
    values: Vec<Value>,
    known: HashMap<(Kind, Vec<ValueId>), NodeId>,
    /// While the backward pass runs: nothing new may be computed.
    pub closed: bool,
}

impl Values {
    /// A value from outside: a weight, token ids, what was received.
    pub fn given(&mut self, name: &str) -> ValueId {
        self.fresh(None, name)
    }

    fn fresh(&mut self, producer: Option<NodeId>, name: &str) -> ValueId {
        self.values.push(Value { producer, uses: vec![], name: name.to_string() });
        ValueId(self.values.len() as u32 - 1)
    }

    /// The outputs of an operation, the same ones for the same inputs. `names` are the buffers
    /// they are written to, for messages.
    pub fn apply(
        &mut self,
        kind: Kind,
        inputs: Vec<ValueId>,
        names: &[&str],
    ) -> Checked<Vec<ValueId>> {
        if let Some(node) = self.known.get(&(kind, inputs.clone())) {
            let outputs = &self.nodes[node.0 as usize].outputs;
            if outputs.len() != names.len() {
                return fault(format!(
                    "has {} results here and had {} before",
                    names.len(),
                    outputs.len()
                ));
            }
            return Ok(outputs.clone());
        }
        if self.closed && kind != Kind::NormSum {
            let names: Vec<String> = inputs.iter().map(|v| self.name(*v)).collect();
            return fault(format!(
                "computes from {} what the forward pass never computed from them",
                names.join(", ")
            ));
        }
        let node = NodeId(self.nodes.len() as u32);
        for (port, input) in inputs.iter().enumerate() {
            if kind.differentiates(port) {
                self.values[input.0 as usize].uses.push((node, port));
            }
        }
        let outputs: Vec<ValueId> = names.iter().map(|name| self.fresh(Some(node), name)).collect();
        self.known.insert((kind, inputs.clone()), node);
        self.nodes.push(Node { kind, inputs, outputs: outputs.clone() });
        Ok(outputs)
    }

    /// An operation on these inputs, when there is one.
    pub fn find(&self, kind: Kind, inputs: &[ValueId]) -> Option<NodeId> {
        self.known.get(&(kind, inputs.to_vec())).copied()
    }

    pub fn name(&self, value: ValueId) -> String {
        format!("`{}`", self.values[value.0 as usize].name)
    }

    pub fn describe(&self, meaning: Meaning) -> String {
        match meaning {
            Meaning::Zero => "zeros".into(),
            Meaning::Value(value) => self.name(value),
            Meaning::Gradient { of, uses } => {
                let all = self.values[of.0 as usize].uses.len();
                format!(
                    "the gradient of {} with {} of {all} contributions",
                    self.name(of),
                    uses.count_ones()
                )
            }
        }
    }

    pub fn kind(&self, node: NodeId) -> Kind {
        self.nodes[node.0 as usize].kind
    }

    pub fn inputs(&self, node: NodeId) -> &[ValueId] {
        &self.nodes[node.0 as usize].inputs
    }

    pub fn outputs(&self, node: NodeId) -> &[ValueId] {
        &self.nodes[node.0 as usize].outputs
    }

    pub fn producer(&self, value: ValueId) -> Option<NodeId> {
        self.values[value.0 as usize].producer
    }

    /// The operations that use a value, with the port.
    pub fn uses(&self, value: ValueId) -> &[(NodeId, usize)] {
        &self.values[value.0 as usize].uses
    }

    /// The contribution of one operation to the gradient of its input.
    pub fn contribution(&self, node: NodeId, port: usize) -> Meaning {
        let of = self.nodes[node.0 as usize].inputs[port];
        let at = self.uses(of).iter().position(|u| *u == (node, port)).unwrap_or(63);
        Meaning::Gradient { of, uses: 1 << at.min(63) }
    }

    fn all_uses(&self, value: ValueId) -> u64 {
        match self.uses(value).len() {
            n @ 0..64 => (1 << n) - 1,
            _ => u64::MAX,
        }
    }

    /// Which contributions to the gradient of `value` a meaning is, if it is any: the complete
    /// gradient of a sum is a contribution to the gradient of each summand.
    pub fn as_gradient_of(&self, meaning: Meaning, value: ValueId) -> Option<u64> {
        let Meaning::Gradient { of, uses } = meaning else { return None };
        if of == value {
            return Some(uses);
        }
        let node = self.producer(of)?;
        let adds = self.kind(node) == Kind::Add && uses == self.all_uses(of);
        let port = self.inputs(node).iter().position(|input| *input == value)?;
        match self.contribution(node, port) {
            Meaning::Gradient { uses, .. } if adds => Some(uses),
            _ => None,
        }
    }

    /// Whether a meaning is the whole gradient of a value.
    pub fn is_complete(&self, meaning: Meaning, value: ValueId) -> bool {
        self.as_gradient_of(meaning, value) == Some(self.all_uses(value))
    }

    /// The values that a meaning may be a gradient of: its own, and when that is a sum, each
    /// summand.
    fn gradient_of(&self, meaning: Meaning) -> impl Iterator<Item = ValueId> + '_ {
        let own = match meaning {
            Meaning::Gradient { of, .. } => Some(of),
            _ => None,
        };
        let node = own.and_then(|of| self.producer(of));
        let summands = node.map_or(&[][..], |node| self.inputs(node));
        own.into_iter().chain(summands.iter().copied())
    }

    /// The values whose whole gradient a meaning is.
    pub fn completed(&self, meaning: Meaning) -> impl Iterator<Item = ValueId> + '_ {
        self.gradient_of(meaning).filter(move |value| self.is_complete(meaning, *value))
    }

    /// The operation of this kind whose first output's whole gradient a meaning is.
    pub fn made(&self, meaning: Meaning, fits: impl Fn(Kind) -> bool) -> Option<NodeId> {
        let mut nodes = self.completed(meaning).filter_map(|value| self.producer(value));
        nodes.find(|node| fits(self.kind(*node)))
    }

    /// The sum of two gradients.
    pub fn sum(&self, first: Meaning, second: Meaning) -> Checked<Meaning> {
        if first == Meaning::Zero {
            return Ok(second);
        }
        if second == Meaning::Zero {
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
                return Ok(Meaning::Gradient { of: value, uses: one | two });
            }
        }
        fault(format!(
            "adds {} and {}, which are not gradients of one value",
            self.describe(first),
            self.describe(second)
        ))
    }

    /// The operation of this kind whose output's gradient is complete in `meaning`, among the uses
    /// of `value` at `port`.
    pub fn user(
        &self,
        value: ValueId,
        port: usize,
        meaning: Meaning,
        fits: impl Fn(Kind) -> bool,
    ) -> Checked<NodeId> {
        let found = self.uses(value).iter().find(|(node, at)| {
            *at == port
                && fits(self.kind(*node))
                && self.is_complete(meaning, self.outputs(*node)[0])
        });
        match found {
            Some((node, _)) => Ok(*node),
            None => fault(format!(
                "reads {}, which is the complete gradient of nothing that the forward pass made \
                 from {}",
                self.describe(meaning),
                self.name(value)
            )),
        }
    }
}
