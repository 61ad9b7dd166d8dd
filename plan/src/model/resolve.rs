//! Resolves a [`ModelFile`] to a [`Model`], and reports every defect at once.

use super::defect_report::DefectReport;
use super::file::{CrossingFile, LinearFile, ModelFile};
use super::layers::{BlockDraft, BlockOverride, LinearDraft, layers};
use super::limits::{MAX_BLOCKS, MAX_PARAMETERS, MAX_SEQUENCE_LENGTH, MAX_WIDTH};
use super::{
    Block, CrossingGate, FactorPair, GatedProduct, LatentCrossing, Linear, LinearKind, Model,
    Weight,
};
use crate::defect::{Defect, Defects};

/// The widths a block's linears are made of.
struct BlockWidths {
    hidden: u64,
    query: u64,
    key_value: u64,
}

impl ModelFile {
    /// Checks everything and fills in every block.
    ///
    /// # Errors
    /// Every defect at once. A path such as `blocks.default.all.rank` is a place in the file; one
    /// such as `blocks[3].q.crossing` is a place in the model that several parts of the file make.
    pub fn resolve(self) -> Result<Model, Defects> {
        let mut report = DefectReport::default();
        let attention = self.check_attention(&mut report);
        self.check_scalars(&mut report);
        let blocks = self.check_blocks(&mut report);
        report.take().into_result(())?;

        let missing = || Defects::single(Defect::new("", "the model could not be resolved"));
        let (kv_heads, head_dim) = attention.ok_or_else(missing)?;
        let widths = BlockWidths {
            hidden: self.hidden,
            query: self.heads * head_dim,
            key_value: kv_heads * head_dim,
        };
        let model = Model {
            name: self.name.unwrap_or_else(|| "model".to_owned()),
            hidden: self.hidden,
            vocab: self.vocab,
            heads: self.heads,
            kv_heads,
            head_dim,
            norm_epsilon: self.norm_epsilon,
            rope_theta: self.rope_theta,
            max_sequence_length: self.max_sequence_length,
            tied: self.tied,
            blocks: blocks.into_iter().map(|block| block.finish(&widths)).collect(),
        };
        check_parameter_count(&model)?;
        Ok(model)
    }

    /// Heads and their sizes: (`kv_heads`, `head_dim`) when they fit together.
    fn check_attention(&self, report: &mut DefectReport) -> Option<(u64, u64)> {
        let hidden = report.size("hidden", self.hidden, MAX_WIDTH);
        let heads = report.size("heads", self.heads, MAX_WIDTH);
        let kv_heads = match self.kv_heads {
            Some(kv_heads) => report.size("kv_heads", kv_heads, MAX_WIDTH),
            None => heads,
        };
        if let (Some(heads), Some(kv_heads)) = (heads, kv_heads)
            && !heads.is_multiple_of(kv_heads)
        {
            report.hint(
                "kv_heads",
                format!("{heads} query heads do not divide over {kv_heads} key/value heads"),
                format!("a divisor of {heads}"),
            );
        }
        let head_dim = match (self.head_dim, hidden, heads) {
            (Some(head_dim), _, _) => report.size("head_dim", head_dim, MAX_WIDTH)?,
            (None, Some(hidden), Some(heads)) if hidden.is_multiple_of(heads) => hidden / heads,
            (None, Some(hidden), Some(heads)) => {
                report.hint(
                    "heads",
                    format!("a width of {hidden} does not divide into {heads} heads"),
                    "a divisor of hidden, or set head_dim",
                );
                return None;
            }
            _ => return None,
        };
        if !head_dim.is_multiple_of(2) {
            report.defect(
                "head_dim",
                format!("is {head_dim}, which is odd: RoPE rotates pairs of features"),
            );
        }
        if heads? * head_dim > MAX_WIDTH {
            report.defect(
                "head_dim",
                format!("{} heads of {head_dim} are wider than {MAX_WIDTH}", heads?),
            );
        }
        Some((kv_heads?, head_dim))
    }

    fn check_scalars(&self, report: &mut DefectReport) {
        report.size("vocab", self.vocab, MAX_WIDTH);
        report.size("d_ff", self.d_ff, MAX_WIDTH);
        report.size("max_sequence_length", self.max_sequence_length, MAX_SEQUENCE_LENGTH);
        report.positive("norm_epsilon", self.norm_epsilon);
        report.positive("rope_theta", self.rope_theta);
        if self.name.as_deref() == Some("") {
            report.hint("name", "is empty", "leave it out: the file's own name is used");
        }
    }

    /// Every block, merged and checked against the one before; empty parts only beside a defect.
    fn check_blocks(&self, report: &mut DefectReport) -> Vec<CheckedBlock> {
        let layers = layers(&self.blocks, report);
        layers.iter().for_each(|layer| check_layer_fields(layer, report));
        let Some(count) = report.size("blocks.count", self.blocks.count, MAX_BLOCKS) else {
            return Vec::new();
        };
        let mut blocks: Vec<CheckedBlock> = Vec::new();
        for index in 0..count {
            let draft = BlockDraft::new(index, &layers);
            if draft.product.is_none() {
                report.hint(
                    "blocks.default.product",
                    "is missing: the product of gate and up must be stated",
                    "\"swiglu\" as in LLaMA, or \"plain\" as in CoLA",
                );
            }
            let before = blocks.last();
            let weights = std::array::from_fn(|slot| {
                let at = LinearLocation { block: index, name: LinearKind::ALL[slot].name() };
                let before = before.map(|before| before.weights[slot].as_ref());
                check_linear(&draft.linears[slot], at, before, report)
            });
            blocks.push(CheckedBlock {
                d_ff: draft.d_ff.unwrap_or(self.d_ff),
                product: draft.product.unwrap_or(GatedProduct::SwiGlu),
                weights,
            });
        }
        blocks
    }
}

/// A block whose weights are known; `None` where a defect was reported.
struct CheckedBlock {
    d_ff: u64,
    product: GatedProduct,
    weights: [Option<Weight>; 7],
}

impl CheckedBlock {
    fn finish(self, widths: &BlockWidths) -> Block {
        let BlockWidths { hidden, query, key_value } = *widths;
        let d_ff = self.d_ff;
        let [q, k, v, o, gate, up, down] = self.weights.map(|weight| {
            // Without defects every weight is there.
            weight.unwrap_or(Weight::Dense)
        });
        let linear = |d_in, d_out, weight| Linear { d_in, d_out, weight };
        Block {
            q: linear(hidden, query, q),
            k: linear(hidden, key_value, k),
            v: linear(hidden, key_value, v),
            o: linear(query, hidden, o),
            gate: linear(hidden, d_ff, gate),
            up: linear(hidden, d_ff, up),
            down: linear(d_ff, hidden, down),
            product: self.product,
        }
    }
}

/// Checks one layer alone, and reports defects at its own fields.
fn check_layer_fields(layer: &BlockOverride<'_>, report: &mut DefectReport) {
    if let Some(d_ff) = layer.file.d_ff {
        report.size(&format!("{}.d_ff", layer.field), d_ff, MAX_WIDTH);
    }
    let all = ("all", layer.file.all.as_ref());
    for (name, says) in layer.file.linears().into_iter().chain([all]) {
        let Some(LinearFile::Pair(pair)) = says else { continue };
        let place = format!("{}.{name}", layer.field);
        if let Some(rank) = pair.rank {
            report.size(&format!("{place}.rank"), rank, MAX_WIDTH);
        }
        let Some(CrossingFile::Some(crossing)) = &pair.crossing else { continue };
        if layer.last == 0 {
            report.hint(
                format!("{place}.crossing"),
                "block 0 has no previous block to cross from",
                "set it in blocks.default: it applies from block 1",
            );
        }
        if let CrossingGate::Tensor { a, b } = crossing.gate {
            let gate = format!("{place}.crossing.gate.tensor");
            report.size(&format!("{gate}.a"), a, MAX_WIDTH);
            report.size(&format!("{gate}.b"), b, MAX_WIDTH);
        }
    }
}

/// A linear of a block.
#[derive(Clone, Copy)]
struct LinearLocation {
    block: u64,
    name: &'static str,
}

/// `before` is `None` in block 0, `Some(None)` when the linear before had a defect of its own.
fn check_linear(
    draft: &LinearDraft,
    at: LinearLocation,
    before: Option<Option<&Weight>>,
    report: &mut DefectReport,
) -> Option<Weight> {
    if !draft.is_set {
        report.hint(
            format!("blocks.default.{}", at.name),
            "is missing: the linear is neither dense nor a factor pair",
            "\"dense\" or {\"rank\": …, \"activation\": …}, for it or in blocks.default.all",
        );
        return None;
    }
    if draft.dense {
        return Some(Weight::Dense);
    }
    if draft.rank.is_none() {
        report.defect(format!("{}.rank", draft.field), "is missing");
    }
    if draft.activation.is_none() {
        report.hint(
            format!("{}.activation", draft.field),
            "is missing",
            "\"silu\" as in CoLA, or \"identity\" as in SVD",
        );
    }
    let (rank, activation) = (draft.rank?, draft.activation?);
    let mut crossing = None;
    if let (Some(before), Some(wanted)) = (before, &draft.crossing) {
        check_crossing(wanted, rank, before, draft, at, report);
        crossing = Some(wanted.clone());
    }
    Some(Weight::Pair(FactorPair { rank, activation, crossing }))
}

fn check_crossing(
    crossing: &LatentCrossing,
    rank: u64,
    before: Option<&Weight>,
    draft: &LinearDraft,
    at: LinearLocation,
    report: &mut DefectReport,
) {
    let LinearLocation { block, name } = at;
    if let CrossingGate::Tensor { a, b } = crossing.gate
        && a.checked_mul(b) != Some(rank)
    {
        report.hint(
            format!("{}.gate.tensor", draft.crossing_field),
            format!("a·b = {a}·{b} is not the rank {rank}"),
            near_square(rank),
        );
    }
    let field = format!("blocks[{block}].{name}.crossing");
    let none = format!("\"crossing\": \"none\" in blocks.overrides.{block}.{name}");
    match before {
        None => {}
        Some(Weight::Dense) => report.hint(
            field,
            format!("there is no latent to cross from: {name} of block {} is dense", block - 1),
            none,
        ),
        Some(Weight::Pair(before)) if before.rank != rank => {
            let gate = match crossing.gate {
                CrossingGate::Dense => return,
                CrossingGate::Identity => "an identity gate",
                CrossingGate::Tensor { .. } => "a tensor gate",
            };
            report.hint(
                field,
                format!(
                    "{gate} needs equal ranks, but {name} has rank {} in block {} and {rank} in \
                     block {block}",
                    before.rank,
                    block - 1
                ),
                format!("a dense gate, or {none}"),
            );
        }
        Some(Weight::Pair(_)) => {}
    }
}

/// Two factors of `rank`, as near to each other as they come.
fn near_square(rank: u64) -> String {
    let a = (1..=rank.isqrt()).rev().find(|a| rank.is_multiple_of(*a)).unwrap_or(1);
    format!("{{\"a\": {a}, \"b\": {}}}", rank / a)
}

/// Refuses what [`Model::parameters`] could not count. One block always fits 64 bits (seven linears
/// below 2^50 each), their sum may not.
fn check_parameter_count(model: &Model) -> Result<(), Defects> {
    let blocks = 0..model.blocks.len();
    let total = blocks.map(|index| u128::from(model.block_linear_parameters(index))).sum::<u128>()
        + 2 * u128::from(model.vocab) * u128::from(model.hidden);
    if total > u128::from(MAX_PARAMETERS) {
        let problem = format!("about {total} parameters are more than {MAX_PARAMETERS}");
        return Err(Defect::new("", problem).hint("smaller widths or fewer blocks").into());
    }
    Ok(())
}
