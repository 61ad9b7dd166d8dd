//! Resolves a [`ModelFile`] to a [`Model`], and reports every defect at once.

use super::defect_report::DefectReport;
use super::file::{CrossingFile, LinearFile, ModelFile};
use super::layers::{BlockDraft, BlockOverride, LinearDraft, layers};
use super::limits::{MAX_BLOCKS, MAX_PARAMETERS, MAX_SEQUENCE_LENGTH, MAX_WIDTH};
use super::{
    AttentionMask, Block, CrossingGate, FactorPair, GatedProduct, LatentCrossing, Linear,
    LinearKind, Model, Positions, Rope, RopeScaling, Weight,
};
use crate::defect::{Defect, Defects};

/// Widths of the inputs and outputs of the linears.
struct BlockWidths {
    hidden: u64,
    query: u64,
    key_value: u64,
}

impl ModelFile {
    /// Resolves the file to a model with all blocks.
    ///
    /// # Errors
    /// Every defect. A field such as `blocks.default.all.rank` is one of the file; a field such as
    /// `blocks[3].q.crossing` is one of the model, to which several fields of the file contribute.
    pub fn resolve(self) -> Result<Model, Defects> {
        let mut report = DefectReport::default();
        let attention = self.check_attention(&mut report);
        let rotary_dim = attention.and_then(|(_, head_dim)| self.check_rope(head_dim, &mut report));
        self.check_scalars(&mut report);
        let blocks = self.check_blocks(&mut report);
        report.take().into_result(())?;

        let missing = || Defects::single(Defect::new("", "the model could not be resolved"));
        let (kv_heads, head_dim) = attention.ok_or_else(missing)?;
        let rotary_dim = rotary_dim.ok_or_else(missing)?;
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
            latent_norm_epsilon: self.latent_norm_epsilon,
            rope: Rope { theta: self.rope_theta, dim: rotary_dim, scaling: self.rope_scaling },
            initial_std: self.initial_std,
            latent_residual: self.latent_residual,
            padding_token: self.padding_token,
            special_tokens: self.special_tokens,
            max_sequence_length: self.max_sequence_length,
            tied: self.tied,
            blocks: blocks.into_iter().map(|block| block.finish(&widths)).collect(),
        };
        check_parameter_count(&model)?;
        if model.latent_residual.is_some() && !model.is_low_rank() {
            let problem = "has no effect: no linear of the model is a factor pair";
            let defect = Defect::new("latent_residual", problem).hint("remove it");
            return Err(Defects::single(defect));
        }
        Ok(model)
    }

    /// (`kv_heads`, `head_dim`); `None` after a defect.
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
                format!("{heads} query heads do not divide into groups for {kv_heads} KV heads"),
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

    /// Number of rotated features of a head; `None` after a defect.
    fn check_rope(&self, head_dim: u64, report: &mut DefectReport) -> Option<u64> {
        let dim = self.rotary_dim.unwrap_or(head_dim);
        if self.rotary_dim.is_some() && (dim < 2 || dim > head_dim || !dim.is_multiple_of(2)) {
            let problem =
                format!("is {dim}: RoPE rotates pairs of the {head_dim} features of a head");
            report.hint("rotary_dim", problem, format!("an even number from 2 to {head_dim}"));
            return None;
        }
        if let Some(scaling) = &self.rope_scaling {
            check_rope_scaling(scaling, dim / 2, report);
            if matches!(scaling, RopeScaling::Yarn { .. }) && self.rope_theta <= 1.0 {
                let problem = format!("is {}, with which no frequency is low", self.rope_theta);
                report.hint("rope_theta", problem, "more than 1");
            }
        }
        Some(dim)
    }

    fn check_scalars(&self, report: &mut DefectReport) {
        report.size("vocab", self.vocab, MAX_WIDTH);
        report.size("d_ff", self.d_ff, MAX_WIDTH);
        report.size("max_sequence_length", self.max_sequence_length, MAX_SEQUENCE_LENGTH);
        report.positive("norm_epsilon", self.norm_epsilon);
        report.positive("latent_norm_epsilon", self.latent_norm_epsilon);
        report.positive("rope_theta", self.rope_theta);
        report.positive("initial_std", self.initial_std);
        if let Some(alpha) = self.latent_residual {
            report.positive("latent_residual", alpha);
        }
        if let Some(token) = self.padding_token
            && token >= self.vocab
        {
            report.hint(
                "padding_token",
                format!("is {token}, but the vocabulary has {} tokens", self.vocab),
                format!("a token below {}", self.vocab),
            );
        }
        if self.name.as_deref() == Some("") {
            report.hint("name", "is empty", "remove it: the name of the file is used");
        }
    }

    /// All blocks, merged and checked against the previous block; weights are absent after a defect.
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
            let previous = blocks.last();
            let weights = std::array::from_fn(|slot| {
                let location = LinearLocation { block: index, name: LinearKind::ALL[slot].name() };
                let previous = previous.map(|previous| previous.weights[slot].as_ref());
                check_linear(&draft.linears[slot], location, previous, report)
            });
            blocks.push(CheckedBlock {
                d_ff: draft.d_ff.unwrap_or(self.d_ff),
                product: draft.product.unwrap_or(GatedProduct::SwiGlu),
                positions: draft.positions.unwrap_or_default(),
                attention: draft.attention.unwrap_or_default(),
                qkv_bias: draft.qkv_bias.unwrap_or(false),
                qk_norm: draft.qk_norm.unwrap_or(false),
                weights,
            });
        }
        blocks
    }
}

/// Checks a scaling of the frequencies of `pairs` pairs.
fn check_rope_scaling(scaling: &RopeScaling, pairs: u64, report: &mut DefectReport) {
    let place = |kind: &str, name: &str| format!("rope_scaling.{kind}.{name}");
    let mut ordered = |kind: &str, low: (&str, f64), high: (&str, f64)| {
        if low.1 >= high.1 {
            let problem = format!("is {}, which is not below {} of {}", low.1, high.0, high.1);
            report.hint(place(kind, low.0), problem, format!("less than {}", high.1));
        }
    };
    let (kind, values, original_length) = match scaling {
        RopeScaling::Linear { factor } => ("linear", vec![("factor", *factor)], None),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_length } => {
            let (low, high) =
                (("low_freq_factor", *low_freq_factor), ("high_freq_factor", *high_freq_factor));
            ordered("llama3", low, high);
            ("llama3", vec![("factor", *factor), low, high], Some(*original_length))
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, original_length } => {
            let (slow, fast) = (("beta_slow", *beta_slow), ("beta_fast", *beta_fast));
            ordered("yarn", slow, fast);
            let attention_factor = ("attention_factor", *attention_factor);
            let values = vec![("factor", *factor), fast, slow, attention_factor];
            ("yarn", values, Some(*original_length))
        }
        RopeScaling::LongRope { short, long, attention_factor, original_length } => {
            let mut values = vec![("attention_factor", *attention_factor)];
            for (name, divisors) in [("short", short), ("long", long)] {
                values.extend(divisors.iter().map(|divisor| (name, *divisor)));
                if divisors.len() as u64 != pairs {
                    let problem = format!(
                        "has {} divisors for {pairs} pairs of rotated features",
                        divisors.len()
                    );
                    report.defect(place("long_rope", name), problem);
                }
            }
            ("long_rope", values, Some(*original_length))
        }
    };
    values.into_iter().for_each(|(name, value)| report.positive(&place(kind, name), value));
    if let Some(length) = original_length {
        report.size(&place(kind, "original_length"), length, MAX_SEQUENCE_LENGTH);
    }
}

/// A checked block; a weight is `None` after a defect.
struct CheckedBlock {
    d_ff: u64,
    product: GatedProduct,
    positions: Positions,
    attention: AttentionMask,
    qkv_bias: bool,
    qk_norm: bool,
    weights: [Option<Weight>; 7],
}

impl CheckedBlock {
    fn finish(self, widths: &BlockWidths) -> Block {
        let BlockWidths { hidden, query, key_value } = *widths;
        let d_ff = self.d_ff;
        let [q, k, v, o, gate, up, down] = self.weights.map(|weight| {
            // Without defects every weight is present.
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
            positions: self.positions,
            attention: self.attention,
            qkv_bias: self.qkv_bias,
            qk_norm: self.qk_norm,
        }
    }
}

/// Checks the fields of one layer.
fn check_layer_fields(layer: &BlockOverride<'_>, report: &mut DefectReport) {
    if let Some(d_ff) = layer.file.d_ff {
        report.size(&format!("{}.d_ff", layer.field), d_ff, MAX_WIDTH);
    }
    if let Some(AttentionMask::SlidingWindow(window)) = layer.file.attention {
        let field = format!("{}.attention.sliding_window", layer.field);
        report.size(&field, window, MAX_SEQUENCE_LENGTH);
    }
    let all = ("all", layer.file.all.as_ref());
    for (name, linear) in layer.file.linears().into_iter().chain([all]) {
        let Some(LinearFile::Pair(pair)) = linear else { continue };
        let field = format!("{}.{name}", layer.field);
        if let Some(rank) = pair.rank {
            report.size(&format!("{field}.rank"), rank, MAX_WIDTH);
        }
        let Some(CrossingFile::Some(crossing)) = &pair.crossing else { continue };
        if layer.last == 0 {
            report.hint(
                format!("{field}.crossing"),
                "block 0 has no previous block to cross from",
                "set it in blocks.default, which applies it from block 1 on",
            );
        }
        if let CrossingGate::Tensor { a, b } = crossing.gate {
            let gate = format!("{field}.crossing.gate.tensor");
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

/// Checks a linear and returns its weight, `None` after a defect. `previous` is the weight of the same linear
/// in the previous block: `None` in block 0, `Some(None)` after a defect.
fn check_linear(
    draft: &LinearDraft,
    location: LinearLocation,
    previous: Option<Option<&Weight>>,
    report: &mut DefectReport,
) -> Option<Weight> {
    if !draft.is_set {
        report.hint(
            format!("blocks.default.{}", location.name),
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
    if let (Some(previous), Some(requested)) = (previous, &draft.crossing) {
        check_crossing(requested, rank, previous, draft, location, report);
        crossing = Some(requested.clone());
    }
    Some(Weight::Pair(FactorPair { rank, activation, crossing }))
}

fn check_crossing(
    crossing: &LatentCrossing,
    rank: u64,
    previous: Option<&Weight>,
    draft: &LinearDraft,
    location: LinearLocation,
    report: &mut DefectReport,
) {
    let LinearLocation { block, name } = location;
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
    let disable = format!("\"crossing\": \"none\" in blocks.overrides.{block}.{name}");
    match previous {
        None => {}
        Some(Weight::Dense) => report.hint(
            field,
            format!("there is no latent to cross from: {name} of block {} is dense", block - 1),
            disable,
        ),
        Some(Weight::Pair(previous)) if previous.rank != rank => {
            let gate = match crossing.gate {
                CrossingGate::Dense | CrossingGate::Affine => return,
                CrossingGate::Identity => "an identity gate",
                CrossingGate::Tensor { .. } => "a tensor gate",
            };
            report.hint(
                field,
                format!(
                    "{gate} needs equal ranks, but {name} has rank {} in block {} and {rank} in \
                     block {block}",
                    previous.rank,
                    block - 1
                ),
                format!("a dense or affine gate, or {disable}"),
            );
        }
        Some(Weight::Pair(_)) => {}
    }
}

/// The factorisation a·b of `rank` with the nearest factors, as JSON.
fn near_square(rank: u64) -> String {
    let a = (1..=rank.isqrt()).rev().find(|a| rank.is_multiple_of(*a)).unwrap_or(1);
    format!("{{\"a\": {a}, \"b\": {}}}", rank / a)
}

/// Refuses models whose number of parameters exceeds the limit. That of one block fits 64 bits (seven
/// linears below 2⁵⁰ each), the sum may not.
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
