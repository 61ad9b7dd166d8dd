//! Builds the segments of a model.

use crate::model::{Activation, Block, FactorPair, Linear, Model, Weight};

use super::{
    AttentionOp, Grouping, LatentOp, LinearForm, LinearOp, Member, Op, OpId, OpNode, Segment,
    SegmentKind, Value, ValueId,
};

/// The embedding: tokens to hidden state.
pub fn embedding_segment(model: &Model) -> Segment {
    let mut builder = Builder::default();
    let op = Op::Embedding { vocab: model.vocab, width: model.hidden };
    let output = builder.op("embedding", op, &[], &[("x", vec![model.hidden])])[0];
    builder.finish(SegmentKind::Embedding, None, Some(output))
}

/// Final norm, head and loss.
pub fn head_segment(model: &Model) -> Segment {
    let mut builder = Builder::default();
    let input = builder.value("x", vec![model.hidden], None);
    let norm = Op::Norm { width: model.hidden };
    let normed = builder.op("final_norm", norm, &[input], &[("n", vec![model.hidden])])[0];
    let head = LinearOp::single("head", model.hidden, model.vocab);
    let logits =
        builder.op("head", Op::Linear(head), &[normed], &[("logits", vec![model.vocab])])[0];
    builder.op("loss", Op::Loss { vocab: model.vocab }, &[logits], &[]);
    builder.finish(SegmentKind::Head, Some(input), None)
}

/// One block, with or without its factors grouped. Where a grouping does not apply (mixed dense and
/// factored linears, different φ) the members stay separate.
pub fn block_segment(model: &Model, block: &Block, grouping: Grouping) -> Segment {
    let mut b = Builder::default();
    let hidden = model.hidden;
    let x = b.value("x", vec![hidden], None);

    let n1 = b.op("norm1", Op::Norm { width: hidden }, &[x], &[("n1", vec![hidden])])[0];
    let projections = [("q", &block.q), ("k", &block.k), ("v", &block.v)];
    let heads = Heads { head_dim: Some(model.head_dim), rotary: &["q", "k"] };
    let qkv = b.fan(n1, "qkv", &projections, grouping.qkv, &heads);
    let attention =
        AttentionOp { heads: model.heads, kv_heads: model.kv_heads, head_dim: model.head_dim };
    let width = model.heads * model.head_dim;
    let attended =
        b.op("attention", Op::Attention(attention), &qkv, &[("attended", vec![width])])[0];
    let o = b.fan(attended, "o", &[("o", &block.o)], false, &Heads::NONE);
    let x1 = b.op("add1", Op::Add { width: hidden }, &[x, o[0]], &[("x1", vec![hidden])])[0];

    let n2 = b.op("norm2", Op::Norm { width: hidden }, &[x1], &[("n2", vec![hidden])])[0];
    let ways = [("gate", &block.gate), ("up", &block.up)];
    let gate_up = b.fan(n2, "gate_up", &ways, grouping.gate_up, &Heads::NONE);
    let d_ff = block.up.d_out;
    let product = Op::GatedProduct { width: d_ff, product: block.product };
    let gated = b.op("product", product, &gate_up, &[("product", vec![d_ff])])[0];
    let down = b.fan(gated, "down", &[("down", &block.down)], false, &Heads::NONE);
    let x2 = b.op("add2", Op::Add { width: hidden }, &[x1, down[0]], &[("x2", vec![hidden])])[0];
    b.finish(SegmentKind::Block, Some(x), Some(x2))
}

/// What is known of linears whose outputs are attention heads.
struct Heads {
    head_dim: Option<u64>,
    rotary: &'static [&'static str],
}

impl Heads {
    const NONE: Heads = Heads { head_dim: None, rotary: &[] };
}

impl LinearOp {
    fn single(parameter: &str, d_in: u64, d_out: u64) -> LinearOp {
        LinearOp {
            members: vec![Member { parameter: parameter.into(), d_in, d_out }],
            form: LinearForm::Concatenated,
            head_dim: None,
            rotary_sections: vec![],
            norm: None,
        }
    }
}

#[derive(Default)]
struct Builder {
    ops: Vec<OpNode>,
    values: Vec<Value>,
}

impl Builder {
    fn value(&mut self, name: &str, sections: Vec<u64>, producer: Option<OpId>) -> ValueId {
        self.values.push(Value {
            name: name.into(),
            sections,
            producer,
            consumers: vec![],
            carries_statistic_of: None,
            storage_of: None,
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

    /// The linears that read `input`: grouped where asked and possible, else one by one.
    /// Returns the values that together hold their outputs, in order.
    fn fan(
        &mut self,
        input: ValueId,
        group: &str,
        linears: &[(&'static str, &Linear)],
        grouped: bool,
        heads: &Heads,
    ) -> Vec<ValueId> {
        let norm = self.values[input.0 as usize]
            .producer
            .filter(|op| matches!(self.ops[op.0 as usize].op, Op::Norm { .. }));
        let first_latent = self.values.len();
        let outputs = if grouped && linears.len() > 1 && can_group(linears) {
            self.chain(input, group, linears, heads, norm)
        } else {
            linears
                .iter()
                .flat_map(|&(name, linear)| self.chain(input, name, &[(name, linear)], heads, norm))
                .collect()
        };
        if norm.is_some()
            && let Some(latent) =
                self.values[first_latent..].iter_mut().find(|v| v.name.starts_with("h."))
        {
            latent.carries_statistic_of = norm;
        }
        outputs
    }

    /// One linear, or several as one group.
    fn chain(
        &mut self,
        input: ValueId,
        name: &str,
        linears: &[(&'static str, &Linear)],
        heads: &Heads,
        norm: Option<OpId>,
    ) -> Vec<ValueId> {
        let Some(pairs) = factor_pairs(linears) else {
            let names: Vec<&str> = linears.iter().map(|(name, _)| *name).collect();
            let op = linear_op(linears, "", |l| (l.d_in, l.d_out), heads);
            let sections = linears.iter().map(|(_, l)| l.d_out).collect();
            return self.op(name, Op::Linear(op), &[input], &[(&names.join("_"), sections)]);
        };
        let mut a = linear_op(linears, ".a", |l| (l.d_in, rank(l)), &Heads::NONE);
        a.norm = norm;
        let ranks: Vec<u64> = pairs.iter().map(|pair| pair.rank).collect();
        let op_a = format!("{name}.a");
        let h = self.op(&op_a, Op::Linear(a), &[input], &[(&format!("h.{name}"), ranks.clone())]);

        let runs = equal_runs(linears);
        let activation = pairs[0].activation;
        let outputs: Vec<(String, Vec<u64>)> = runs
            .iter()
            .map(|run| (format!("z.{}", run_name(run)), run.iter().map(|(_, l)| rank(l)).collect()))
            .collect();
        let borrowed: Vec<(&str, Vec<u64>)> =
            outputs.iter().map(|(name, sections)| (name.as_str(), sections.clone())).collect();
        let latent = Op::Latent(LatentOp { sections: ranks, activation, norm });
        let z = self.op(&format!("{name}.latent"), latent, &[h[0]], &borrowed);
        if activation == Activation::Identity && z.len() == 1 {
            self.values[z[0].0 as usize].storage_of = Some(h[0]);
        }
        let mut made = vec![];
        for (run, z) in runs.iter().zip(z) {
            let mut op = linear_op(run, ".b", |l| (rank(l), l.d_out), heads);
            op.form = if run.len() > 1 { LinearForm::Batched } else { LinearForm::Concatenated };
            let sections = run.iter().map(|(_, l)| l.d_out).collect();
            let run_name = run_name(run);
            let op_name = format!("{run_name}.b");
            made.extend(self.op(&op_name, Op::Linear(op), &[z], &[(&run_name, sections)]));
        }
        made
    }

    fn finish(self, kind: SegmentKind, input: Option<ValueId>, output: Option<ValueId>) -> Segment {
        Segment { kind, ops: self.ops, values: self.values, input, output }
    }
}

fn run_name(run: &[(&'static str, &Linear)]) -> String {
    run.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("_")
}

fn rank(linear: &Linear) -> u64 {
    linear.rank().unwrap_or(0)
}

/// The pairs of all linears, or `None` when they are dense.
fn factor_pairs<'a>(linears: &[(&'static str, &'a Linear)]) -> Option<Vec<&'a FactorPair>> {
    linears
        .iter()
        .map(|(_, linear)| match &linear.weight {
            Weight::Pair(pair) => Some(pair),
            Weight::Dense => None,
        })
        .collect()
}

/// A group is all dense, or all pairs with one φ.
fn can_group(linears: &[(&'static str, &Linear)]) -> bool {
    let dense = linears.iter().filter(|(_, linear)| linear.rank().is_none()).count();
    match factor_pairs(linears) {
        Some(pairs) => pairs.windows(2).all(|two| two[0].activation == two[1].activation),
        None => dense == linears.len(),
    }
}

/// Splits linears into runs whose second factors have equal shapes and can be batched.
fn equal_runs<'a>(linears: &[(&'static str, &'a Linear)]) -> Vec<Vec<(&'static str, &'a Linear)>> {
    let shape = |linear: &Linear| (linear.rank(), linear.d_out);
    let mut runs: Vec<Vec<(&'static str, &'a Linear)>> = vec![];
    for &(name, linear) in linears {
        match runs.last_mut() {
            Some(run) if shape(run[0].1) == shape(linear) => run.push((name, linear)),
            _ => runs.push(vec![(name, linear)]),
        }
    }
    runs
}

fn linear_op(
    linears: &[(&'static str, &Linear)],
    factor: &str,
    shape: impl Fn(&Linear) -> (u64, u64),
    heads: &Heads,
) -> LinearOp {
    let members = linears
        .iter()
        .map(|(name, linear)| {
            let (d_in, d_out) = shape(linear);
            Member { parameter: format!("{name}{factor}"), d_in, d_out }
        })
        .collect();
    let rotary_sections = linears
        .iter()
        .enumerate()
        .filter(|(_, (name, _))| heads.rotary.contains(name))
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
