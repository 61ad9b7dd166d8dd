//! Queries on a plan that the exporters share.

use std::collections::BTreeMap;
use std::fmt;

use narrows_plan::graph::{Grouping, Op, Segment, Value};
use narrows_plan::model::{Block, Model};
use narrows_plan::strategy::{Baseline, Save, Strategy};
use narrows_plan::{Context, Layout, Plan, ResolvedBlock, ResolvedPlan};

use crate::compare::virtual_stage_blocks;

/// A plan with its model.
#[derive(Clone, Copy, Debug)]
pub struct ExportedPlan<'a> {
    /// The model.
    pub model: &'a Model,
    /// The plan as written.
    pub plan: &'a Plan,
    /// The plan with its graphs.
    pub resolved: &'a ResolvedPlan,
}

/// Placement of the ops of blocks on the tensor axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// There is no tensor axis.
    OneDevice,
    /// Every op of every block, and the hidden state, as a published baseline has them.
    Published(Baseline),
    /// Something else: the ops that the nearest baseline has elsewhere, each with its strategy.
    Other {
        /// The baseline with the fewest differences.
        nearest: Baseline,
        /// Up to three differences.
        differences: Vec<String>,
    },
}

/// Activations that the backward pass recomputes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recomputation {
    /// None in any block.
    Nothing,
    /// All of some blocks, none of the others.
    WholeBlocks(Vec<StageRecomputation>),
    /// Some of them.
    Activations {
        /// The recomputed values of all blocks, by name.
        values: BTreeMap<String, ValueKind>,
        /// The blocks that recompute any.
        stages: Vec<StageRecomputation>,
    },
}

/// Kinds of values in a block that frameworks can recompute on their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// The output of a norm.
    Norm,
    /// Gate and up, or one of them.
    GateOrUp,
    /// The gated product.
    GatedProduct,
    /// Any other value.
    Other,
}

/// Recomputation in a virtual stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageRecomputation {
    /// Blocks that recompute.
    pub blocks: u64,
    /// All blocks.
    pub of: u64,
    /// Whether the blocks that recompute come first.
    pub first: bool,
}

impl Recomputation {
    /// Whether every block recomputes everything.
    pub fn is_everything(&self) -> bool {
        matches!(self, Recomputation::WholeBlocks(stages) if stages.iter().all(|s| s.blocks == s.of))
    }
}

impl ValueKind {
    fn of(segment: &Segment, value: &Value) -> ValueKind {
        let is_gated_product = |op| matches!(segment.op(op).op, Op::GatedProduct { .. });
        match value.producer {
            Some(op) if matches!(segment.op(op).op, Op::Norm { .. }) => ValueKind::Norm,
            Some(op) if is_gated_product(op) => ValueKind::GatedProduct,
            _ if value.consumers.iter().any(|&(op, _)| is_gated_product(op)) => ValueKind::GateOrUp,
            _ => ValueKind::Other,
        }
    }
}

impl<'a> ExportedPlan<'a> {
    /// Mesh, workload and formats.
    pub fn context(&self) -> &'a Context {
        &self.resolved.context
    }

    /// The blocks of the virtual stages.
    pub fn stage_blocks(&self) -> Vec<u64> {
        virtual_stage_blocks(self.plan)
    }

    /// The shape of all blocks.
    ///
    /// # Errors
    /// The first difference from block 0, in words.
    pub fn uniform_block(&self) -> Result<&'a Block, String> {
        let first = &self.model.blocks[0];
        for (index, block) in self.model.blocks.iter().enumerate() {
            if block.product != first.product {
                return Err(format!(
                    "block {index} has another product of gate and up than block 0"
                ));
            }
            if block.attention != first.attention {
                return Err(format!("block {index} has another sliding window than block 0"));
            }
            if (block.qkv_bias, block.qk_norm) != (first.qkv_bias, first.qk_norm) {
                return Err(format!(
                    "block {index} has other biases or norms of heads than block 0"
                ));
            }
            for (kind, linear) in block.linears() {
                // Block 0 has no previous latent, so that its pairs have no crossing.
                let shape = |linear: &narrows_plan::model::Linear| {
                    (linear.d_in, linear.d_out, linear.rank())
                };
                if shape(linear) != shape(first.linear(kind)) {
                    return Err(format!(
                        "{kind} of block {index} has another shape than in block 0"
                    ));
                }
            }
        }
        Ok(first)
    }

    fn blocks(&self) -> impl Iterator<Item = &'a ResolvedBlock> {
        self.resolved.stages.iter().flatten()
    }

    /// The grouping of all blocks; `None` where it differs.
    pub fn grouping(&self) -> Option<Grouping> {
        let mut groupings = self.plan.blocks.values().map(|block| block.grouping);
        let first = groupings.next()?;
        groupings.all(|other| other == first).then_some(first)
    }

    /// The placement of blocks on the tensor axis.
    pub fn placement(&self) -> Placement {
        if self.context().tensor_size() == 1 {
            return Placement::OneDevice;
        }
        let is_dense = !self.model.is_low_rank();
        let candidates = Baseline::ALL.into_iter().filter(|baseline| {
            *baseline != Baseline::Auto && baseline.is_for_dense_models() == is_dense
        });
        let differences = candidates.map(|baseline| (baseline, self.differences(baseline)));
        let nearest = differences.min_by_key(|(_, differences)| differences.len());
        match nearest {
            Some((baseline, differences)) if differences.is_empty() => {
                Placement::Published(baseline)
            }
            Some((nearest, mut differences)) => {
                differences.truncate(3);
                Placement::Other { nearest, differences }
            }
            None => Placement::OneDevice,
        }
    }

    /// Ops that a baseline places otherwise.
    fn differences(&self, baseline: Baseline) -> Vec<String> {
        let mut differences = vec![];
        if !baseline.allows_boundary(self.resolved.boundary) {
            differences.push(format!("hidden state: {}", self.resolved.boundary.hidden));
        }
        for block in self.blocks() {
            let nodes = block.plan.segment.ops.iter().zip(&block.plan.choice.ops);
            for (node, option) in nodes {
                let strategy = option.choice.strategy;
                let difference = format!("{}: {}", node.name, strategy.name());
                if !baseline.allows(node, strategy, self.context().tensor_size())
                    && !differences.contains(&difference)
                {
                    differences.push(difference);
                }
            }
        }
        differences
    }

    /// The strategies of ops of one kind in all blocks.
    pub fn strategies(&self, is_kind: impl Fn(&Op) -> bool) -> Vec<Strategy> {
        let mut strategies = vec![];
        for block in self.blocks() {
            for (node, option) in block.plan.segment.ops.iter().zip(&block.plan.choice.ops) {
                if is_kind(&node.op) && !strategies.contains(&option.choice.strategy) {
                    strategies.push(option.choice.strategy);
                }
            }
        }
        strategies
    }

    /// The strategy of the embedding.
    pub fn embedding_strategy(&self) -> Strategy {
        self.resolved.embedding.choice.ops[0].choice.strategy
    }

    /// The strategies of final norm, head and loss.
    pub fn head_strategies(&self) -> [Strategy; 3] {
        let ops = &self.resolved.head.choice.ops;
        [0, 1, 2].map(|op| ops[op].choice.strategy)
    }

    /// The activations that the backward pass recomputes.
    pub fn recomputation(&self) -> Recomputation {
        let mut all_whole = true;
        let mut values = BTreeMap::new();
        let mut stages = vec![];
        for stage in &self.resolved.stages {
            let mut recomputing = vec![];
            for block in stage {
                let segment = &block.plan.segment;
                let recomputed = saved_values(block, Save::Recomputed);
                let recomputed: Vec<_> = recomputed
                    .map(|value| (value.name.clone(), ValueKind::of(segment, value)))
                    .collect();
                recomputing.push(!recomputed.is_empty());
                all_whole &= recomputed.is_empty() || keeps_inputs_only(block);
                values.extend(recomputed);
            }
            let blocks = recomputing.iter().filter(|recomputes| **recomputes).count() as u64;
            let first = recomputing.is_sorted_by(|a, b| a >= b);
            stages.push(StageRecomputation { blocks, of: recomputing.len() as u64, first });
        }
        match (values.is_empty(), all_whole) {
            (true, _) => Recomputation::Nothing,
            (false, true) => Recomputation::WholeBlocks(stages),
            (false, false) => Recomputation::Activations { values, stages },
        }
    }

    /// Whether any block keeps a tensor that was gathered over the tensor axis.
    pub fn keeps_gathered(&self) -> bool {
        self.blocks().any(|block| {
            let segment = &block.plan.segment;
            let mut values = segment.values.iter().zip(&block.plan.choice.flows);
            values.any(|(value, flow)| {
                ValueKind::of(segment, value) == ValueKind::Norm
                    && flow
                        .copies()
                        .into_iter()
                        .zip(&flow.saves)
                        .any(|copy| copy == (Layout::Replicated, &Save::Kept))
            })
        })
    }
}

/// The values of a block with a copy that is saved in this way.
fn saved_values(block: &ResolvedBlock, save: Save) -> impl Iterator<Item = &Value> {
    let values = block.plan.segment.values.iter().zip(&block.plan.choice.flows);
    values.filter(move |(_, flow)| flow.saves.contains(&save)).map(|(value, _)| value)
}

/// Whether a block keeps nothing for its backward pass but its inputs.
fn keeps_inputs_only(block: &ResolvedBlock) -> bool {
    saved_values(block, Save::Kept).all(|value| value.producer.is_none())
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::OneDevice => f.write_str("one device"),
            Placement::Published(baseline) => f.write_str(baseline.name()),
            Placement::Other { .. } => f.write_str("mixed"),
        }
    }
}

impl Placement {
    /// The placement in a sentence: "`fullrank-tp`, except o: replicate".
    pub fn sentence(&self) -> String {
        match self {
            Placement::OneDevice => "no tensor axis".into(),
            Placement::Published(baseline) => format!("`{}`", baseline.name()),
            Placement::Other { nearest, differences } => {
                format!("`{}`, except {}", nearest.name(), differences.join(", "))
            }
        }
    }
}
