//! Builds the segments of a model.

use crate::model::{
    Activation, Block, CrossingForm, CrossingGate, FactorPair, Linear, LinearKind, Model,
    Positions, Weight, WeightId,
};

use super::shape::crossing;
use super::{
    AttentionOp, BlockShape, Grouping, LatentOp, LinearForm, LinearMember, LinearOp, Op, OpId,
    OpNode, QkvHeads, Segment, SegmentKind, Value, ValueId,
};

/// The embedding: tokens to hidden state.
pub fn embedding_segment(model: &Model) -> Segment {
    let mut builder = SegmentBuilder::default();
    let op = Op::Embedding { vocab: model.vocab, width: model.hidden };
    let output = builder.op("embedding", op, &[], &[("x", vec![model.hidden])])[0];
    builder.outputs.push(output);
    builder.finish(SegmentKind::Embedding)
}

/// Final norm, head and loss.
pub fn head_segment(model: &Model) -> Segment {
    let mut builder = SegmentBuilder::default();
    let input = builder.input("x", model.hidden);
    let norm = Op::Norm { width: model.hidden, scale: WeightId::FinalNorm };
    let normed = builder.op("final_norm", norm, &[input], &[("n", vec![model.hidden])])[0];
    let head = LinearOp::single(WeightId::Head, model.hidden, model.vocab);
    let logits =
        builder.op("head", Op::Linear(head), &[normed], &[("logits", vec![model.vocab])])[0];
    builder.op("loss", Op::Loss { vocab: model.vocab }, &[logits], &[]);
    builder.finish(SegmentKind::Head)
}

/// One block. Members of a group that does not apply (mixed dense and factored linears, different φ,
/// crossing latents) are separate ops.
pub fn block_segment(model: &Model, shape: &BlockShape, grouping: Grouping) -> Segment {
    let mut builder = SegmentBuilder::default();
    let (block, hidden) = (&shape.block, model.hidden);
    let x = builder.input("x", hidden);
    let sites = LinearSite::all(shape).map(|site| LinearSite {
        previous: site
            .incoming_rank
            .map(|rank| builder.input(&format!("previous.{}", site.kind), rank)),
        ..site
    });
    let [q, k, v, o, gate, up, down] = sites;

    let norm = Op::Norm { width: hidden, scale: WeightId::Norm1 };
    let n1 = builder.op("norm1", norm, &[x], &[("n1", vec![hidden])])[0];
    let rotary: &[LinearKind] = match block.positions {
        Positions::Rotary => &[LinearKind::Q, LinearKind::K],
        Positions::None => &[],
    };
    let heads = HeadLayout { head_dim: Some(model.head_dim), rotary };
    let mut qkv = builder.linears(n1, "qkv", &[q, k, v], grouping.qkv, &heads);
    if block.qkv_bias {
        qkv = qkv.into_iter().map(|output| builder.bias(output, model.head_dim)).collect();
    }
    if block.qk_norm {
        qkv = qkv.into_iter().map(|output| builder.qk_norm(output, model.head_dim)).collect();
    }
    let attention = AttentionOp::of(model, block);
    let width = model.heads * model.head_dim;
    let attended =
        builder.op("attention", Op::Attention(attention), &qkv, &[("attended", vec![width])])[0];
    let o = builder.linears(attended, "o", &[o], false, &HeadLayout::NONE);
    let x1 = builder.op("add1", Op::Add { width: hidden }, &[x, o[0]], &[("x1", vec![hidden])])[0];

    let norm = Op::Norm { width: hidden, scale: WeightId::Norm2 };
    let n2 = builder.op("norm2", norm, &[x1], &[("n2", vec![hidden])])[0];
    let gate_up = builder.linears(n2, "gate_up", &[gate, up], grouping.gate_up, &HeadLayout::NONE);
    let d_ff = block.up.d_out;
    let product = Op::GatedProduct { width: d_ff, product: block.product };
    let gated = builder.op("product", product, &gate_up, &[("product", vec![d_ff])])[0];
    let down = builder.linears(gated, "down", &[down], false, &HeadLayout::NONE);
    let x2 =
        builder.op("add2", Op::Add { width: hidden }, &[x1, down[0]], &[("x2", vec![hidden])])[0];
    builder.outputs.insert(0, x2);
    builder.finish(SegmentKind::Block)
}

/// The grouping that takes effect in a block, without groups that do not apply.
pub fn effective_grouping(shape: &BlockShape, grouping: Grouping) -> Grouping {
    let [q, k, v, _, gate, up, _] = LinearSite::all(shape);
    Grouping {
        qkv: grouping.qkv && can_group(&[q, k, v]),
        gate_up: grouping.gate_up && can_group(&[gate, up]),
    }
}

/// A linear of a block with the latents that cross into and out of it.
#[derive(Clone, Copy)]
struct LinearSite<'a> {
    kind: LinearKind,
    linear: &'a Linear,
    /// The rank of the latent that crosses into the linear.
    incoming_rank: Option<u64>,
    /// The latent that crosses into the linear.
    previous: Option<ValueId>,
    /// Whether the latent of the linear crosses into the next block.
    crosses_out: bool,
}

impl LinearSite<'_> {
    fn all(shape: &BlockShape) -> [LinearSite<'_>; 7] {
        let linears = shape.block.linears();
        std::array::from_fn(|at| {
            let (kind, linear) = linears[at];
            let (incoming_rank, crosses_out) = (shape.incoming_ranks[at], shape.crosses_out[at]);
            LinearSite { kind, linear, incoming_rank, previous: None, crosses_out }
        })
    }

    fn crosses(&self) -> bool {
        self.incoming_rank.is_some() || self.crosses_out
    }
}

/// Division of the outputs of linears into attention heads.
struct HeadLayout {
    head_dim: Option<u64>,
    rotary: &'static [LinearKind],
}

impl HeadLayout {
    const NONE: HeadLayout = HeadLayout { head_dim: None, rotary: &[] };
}

impl AttentionOp {
    /// The attention of a block.
    pub fn of(model: &Model, block: &Block) -> AttentionOp {
        let Model { heads, kv_heads, head_dim, .. } = *model;
        AttentionOp { heads, kv_heads, head_dim, mask: block.attention }
    }
}

impl LinearOp {
    fn single(parameter: WeightId, d_in: u64, d_out: u64) -> LinearOp {
        LinearOp {
            members: vec![LinearMember { parameter, d_in, d_out }],
            form: LinearForm::Concatenated,
            head_dim: None,
            rotary_sections: vec![],
            norm: None,
        }
    }
}

#[derive(Default)]
struct SegmentBuilder {
    ops: Vec<OpNode>,
    values: Vec<Value>,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
}

impl SegmentBuilder {
    fn input(&mut self, name: &str, width: u64) -> ValueId {
        let id = self.value(name, vec![width], None);
        self.inputs.push(id);
        id
    }

    fn value(&mut self, name: &str, sections: Vec<u64>, producer: Option<OpId>) -> ValueId {
        self.values.push(Value {
            name: name.into(),
            sections,
            producer,
            consumers: vec![],
            carries_statistic_of: None,
            aliases: None,
        });
        ValueId(self.values.len() as u32 - 1)
    }

    fn op(
        &mut self,
        name: &str,
        op: Op,
        inputs: &[ValueId],
        outputs: &[(&str, Vec<u64>)],
    ) -> Vec<ValueId> {
        let id = OpId(self.ops.len() as u32);
        for (port, input) in inputs.iter().enumerate() {
            self.values[input.0 as usize].consumers.push((id, port));
        }
        let outputs: Vec<ValueId> = outputs
            .iter()
            .map(|(name, sections)| self.value(name, sections.clone(), Some(id)))
            .collect();
        let node =
            OpNode { name: name.into(), op, inputs: inputs.to_vec(), outputs: outputs.clone() };
        self.ops.push(node);
        outputs
    }

    /// Adds the linears that read `input`, as one group where requested and possible. Returns the values
    /// that contain their outputs, in order.
    fn linears(
        &mut self,
        input: ValueId,
        group: &str,
        sites: &[LinearSite],
        grouped: bool,
        heads: &HeadLayout,
    ) -> Vec<ValueId> {
        let norm = self.values[input.0 as usize]
            .producer
            .filter(|op| matches!(self.ops[op.0 as usize].op, Op::Norm { .. }));
        let first_latent = self.values.len();
        let outputs = if grouped && sites.len() > 1 && can_group(sites) {
            self.linear_group(input, group, sites, heads, norm)
        } else {
            sites
                .iter()
                .flat_map(|site| {
                    self.linear_group(
                        input,
                        site.kind.name(),
                        std::slice::from_ref(site),
                        heads,
                        norm,
                    )
                })
                .collect()
        };
        if norm.is_some()
            && let Some(latent) =
                (first_latent..self.values.len()).find(|index| self.is_latent(*index))
        {
            self.values[latent].carries_statistic_of = norm;
        }
        outputs
    }

    /// Whether the value at this index is the output of a first factor.
    fn is_latent(&self, index: usize) -> bool {
        let producer = self.values[index].producer.map(|op| &self.ops[op.0 as usize].op);
        matches!(producer, Some(Op::Linear(linear)) if linear.is_first_factor())
    }

    /// Adds one linear, or several as one group.
    fn linear_group(
        &mut self,
        input: ValueId,
        name: &str,
        sites: &[LinearSite],
        heads: &HeadLayout,
        norm: Option<OpId>,
    ) -> Vec<ValueId> {
        let Some(pairs) = factor_pairs(sites) else {
            let op = linear_op(sites, WeightId::Dense, |l| (l.d_in, l.d_out), heads);
            let sections = sites.iter().map(|site| site.linear.d_out).collect();
            return self.op(name, Op::Linear(op), &[input], &[(&run_name(sites), sections)]);
        };
        let mut a = linear_op(sites, WeightId::FactorA, |l| (l.d_in, rank(l)), &HeadLayout::NONE);
        a.norm = norm;
        let ranks: Vec<u64> = pairs.iter().map(|pair| pair.rank).collect();
        let op_a = format!("{name}.a");
        let h = self.op(&op_a, Op::Linear(a), &[input], &[(&format!("h.{name}"), ranks.clone())]);

        let runs = equal_runs(sites);
        let crossing = sites[0].incoming_rank.and_then(|_| crossing(sites[0].linear));
        // The released form applies φ after the crossing.
        let activation = match crossing.map(|crossing| crossing.form) {
            Some(CrossingForm::Released) => Activation::Identity,
            _ => pairs[0].activation,
        };
        // The latent is named `u` before a crossing is added, `z` when the second factor reads it.
        let kind = if crossing.is_some() { "u" } else { "z" };
        let outputs: Vec<(String, Vec<u64>)> = runs
            .iter()
            .map(|run| {
                let ranks = run.iter().map(|site| rank(site.linear)).collect();
                (format!("{kind}.{}", run_name(run)), ranks)
            })
            .collect();
        let output_refs: Vec<(&str, Vec<u64>)> =
            outputs.iter().map(|(name, sections)| (name.as_str(), sections.clone())).collect();
        let latent = Op::Latent(LatentOp { sections: ranks, activation, norm });
        let mut z = self.op(&format!("{name}.latent"), latent, &[h[0]], &output_refs);
        if activation == Activation::Identity && z.len() == 1 {
            self.values[z[0].0 as usize].aliases = Some(h[0]);
        }
        if let [site] = sites
            && site.crosses()
        {
            z = vec![self.cross(site, z[0])];
        }
        let mut values = vec![];
        for (run, z) in runs.iter().zip(z) {
            let mut op = linear_op(run, WeightId::FactorB, |l| (rank(l), l.d_out), heads);
            op.form = if run.len() > 1 { LinearForm::Batched } else { LinearForm::Concatenated };
            let sections = run.iter().map(|site| site.linear.d_out).collect();
            let run_name = run_name(run);
            let op_name = format!("{run_name}.b");
            values.extend(self.op(&op_name, Op::Linear(op), &[z], &[(&run_name, sections)]));
        }
        values
    }

    /// Adds the biases of the linears that compute `output`, whose rotation then follows the addition.
    fn bias(&mut self, output: ValueId, head_dim: u64) -> ValueId {
        self.op_on_heads(output, head_dim, Op::Bias, ["bias", "biased"])
    }

    /// Norms the heads of queries and keys in `output`, if it has any. Their rotation then follows the norm.
    fn qk_norm(&mut self, output: ValueId, head_dim: u64) -> ValueId {
        match self.linears_of(output)[..] {
            [(LinearKind::V, _)] => output,
            _ => self.op_on_heads(output, head_dim, Op::QkNorm, ["norm", "normed"]),
        }
    }

    /// Adds an op on the heads of a value, which rotates them in place of the value's producer.
    fn op_on_heads(
        &mut self,
        output: ValueId,
        head_dim: u64,
        op: fn(QkvHeads) -> Op,
        [op_suffix, value_suffix]: [&str; 2],
    ) -> ValueId {
        let members = self.linears_of(output);
        let producer = self.values[output.0 as usize].producer;
        let rotary_sections = match producer.map(|op| &mut self.ops[op.0 as usize].op) {
            Some(Op::Linear(linear)) => std::mem::take(&mut linear.rotary_sections),
            Some(Op::Bias(heads)) => std::mem::take(&mut heads.rotary_sections),
            _ => vec![],
        };
        let name = joined_names(members.iter().map(|(kind, _)| *kind));
        let sections = members.iter().map(|(_, width)| *width).collect();
        let op = op(QkvHeads { members, head_dim, rotary_sections });
        let value = format!("{name}.{value_suffix}");
        self.op(&format!("{name}.{op_suffix}"), op, &[output], &[(&value, sections)])[0]
    }

    /// The linears whose outputs are side by side in a value, with their widths.
    fn linears_of(&self, output: ValueId) -> Vec<(LinearKind, u64)> {
        let Value { sections, producer, .. } = &self.values[output.0 as usize];
        match producer.map(|op| &self.ops[op.0 as usize].op) {
            Some(Op::Linear(linear)) => {
                let kinds = linear.members.iter().filter_map(|member| match member.parameter {
                    WeightId::Dense(kind) | WeightId::FactorB(kind) => Some(kind),
                    _ => None,
                });
                kinds.zip(sections.iter().copied()).collect()
            }
            Some(Op::Bias(heads)) => heads.members.clone(),
            _ => vec![],
        }
    }

    /// Adds the crossing from the previous block into the latent u, and the output to the next block.
    /// Returns the latent that the second factor reads.
    fn cross(&mut self, site: &LinearSite, u: ValueId) -> ValueId {
        let crossing = crossing(site.linear).zip(site.previous).zip(site.incoming_rank);
        let Some(((crossing, previous), incoming_rank)) = crossing else {
            self.outputs.push(u);
            return u;
        };
        let (name, width) = (site.kind.name(), rank(site.linear));
        let section = |kind: &str| format!("{kind}.{name}");
        let gate = match crossing.gate {
            CrossingGate::Identity => None,
            CrossingGate::Dense | CrossingGate::Affine => {
                let parameter = WeightId::CrossingGate(site.kind);
                Some(Op::Linear(LinearOp::single(parameter, incoming_rank, width)))
            }
            CrossingGate::Tensor { a, b } => Some(Op::TensorGate { linear: site.kind, a, b }),
        };
        let mut gated = gate.map_or(previous, |op| {
            let op_name = format!("{name}.gate");
            self.op(&op_name, op, &[previous], &[(&section("g"), vec![width])])[0]
        });
        if crossing.gate == CrossingGate::Affine {
            let op = Op::GateBias { linear: site.kind, width };
            let op_name = format!("{name}.gate_bias");
            gated = self.op(&op_name, op, &[gated], &[(&section("biased_g"), vec![width])])[0];
        }
        let released = crossing.form == CrossingForm::Released;
        let crossed = section(if released { "v" } else { "z" });
        let op_name = format!("{name}.cross");
        let op = Op::Cross { width };
        let mut z = self.op(&op_name, op, &[u, gated], &[(&crossed, vec![width])])[0];
        if released {
            let activation = match &site.linear.weight {
                Weight::Pair(pair) => pair.activation,
                Weight::Dense => Activation::Identity,
            };
            let op = Op::LatentNorm { linear: site.kind, width, activation };
            let op_name = format!("{name}.latent_norm");
            z = self.op(&op_name, op, &[z], &[(&section("z"), vec![width])])[0];
        }
        if site.crosses_out {
            // The paper's form passes on the latent before its crossing, the released form after it.
            self.outputs.push(if released { z } else { u });
        }
        z
    }

    fn finish(self, kind: SegmentKind) -> Segment {
        let SegmentBuilder { ops, values, inputs: entries, outputs: exits } = self;
        Segment { kind, ops, values, inputs: entries, outputs: exits }
    }
}

fn run_name(run: &[LinearSite]) -> String {
    joined_names(run.iter().map(|site| site.kind))
}

fn joined_names(linears: impl Iterator<Item = LinearKind>) -> String {
    linears.map(LinearKind::name).collect::<Vec<_>>().join("_")
}

fn rank(linear: &Linear) -> u64 {
    linear.rank().unwrap_or(0)
}

/// The factor pairs of all linears; `None` unless all are factored.
fn factor_pairs<'a>(sites: &[LinearSite<'a>]) -> Option<Vec<&'a FactorPair>> {
    sites
        .iter()
        .map(|site| match &site.linear.weight {
            Weight::Pair(pair) => Some(pair),
            Weight::Dense => None,
        })
        .collect()
}

/// Whether linears can run as a group: all dense, or all factored with the same φ and without crossings.
fn can_group(sites: &[LinearSite]) -> bool {
    let dense = sites.iter().filter(|site| site.linear.rank().is_none()).count();
    match factor_pairs(sites) {
        Some(_) if sites.iter().any(LinearSite::crosses) => false,
        Some(pairs) => pairs.windows(2).all(|two| two[0].activation == two[1].activation),
        None => dense == sites.len(),
    }
}

/// Splits linears into runs with second factors of equal shape, which one batched GEMM computes.
fn equal_runs<'a>(sites: &[LinearSite<'a>]) -> Vec<Vec<LinearSite<'a>>> {
    let shape = |linear: &Linear| (linear.rank(), linear.d_out);
    let mut runs: Vec<Vec<LinearSite<'a>>> = vec![];
    for site in sites {
        match runs.last_mut() {
            Some(run) if shape(run[0].linear) == shape(site.linear) => run.push(*site),
            _ => runs.push(vec![*site]),
        }
    }
    runs
}

fn linear_op(
    sites: &[LinearSite],
    parameter: impl Fn(LinearKind) -> WeightId,
    shape: impl Fn(&Linear) -> (u64, u64),
    heads: &HeadLayout,
) -> LinearOp {
    let members = sites
        .iter()
        .map(|site| {
            let (d_in, d_out) = shape(site.linear);
            LinearMember { parameter: parameter(site.kind), d_in, d_out }
        })
        .collect();
    let rotary_sections = sites
        .iter()
        .enumerate()
        .filter(|(_, site)| heads.rotary.contains(&site.kind))
        .map(|(index, _)| index)
        .collect();
    LinearOp {
        members,
        form: LinearForm::Concatenated,
        head_dim: heads.head_dim,
        rotary_sections,
        norm: None,
    }
}
