//! Hugging Face `config.json`: LLaMA, Mistral, Phi-3, InternLM2, SmolLM3, Qwen2 and Qwen3 (dense), and CoLA, CoLA-M and BOOST (factor
//! pairs).
//!
//! CoLA has two dialects. The CoLA code has `rank` (default: a quarter of the width) and `only_lr_act`
//! (true: no activation on the gate); CoLA-M has the same fields. BOOST has `attn_rank` and `mlp_rank`
//! (default: 1024) for the two halves of a block, and `both_act` (true: an activation on the gate as well).
//! In both, φ is `hidden_act`: the classes of CoLA read `lr_act_type` and do not use it, which is a warning
//! where it differs. `cola_act` sets φ alone. A config with any rank is CoLA, whatever its `model_type`.
//!
//! The dense architectures compute the same function, but their classes have defaults of their own, also for the blocks
//! that attend within a sliding window.
//!
//! `initializer_range` is the initial standard deviation of dense weights, except in BOOST, whose classes
//! ignore it. `pad_token_id` is the padding token; like PyTorch, a negative one counts from the end of the
//! vocabulary. `bos_token_id` and `eos_token_id` are kept for other programs.
//!
//! A config is converted to a [`ModelFile`] with one default block, so that sizes are checked in one
//! place; defects then get the name of the field of the config.

mod architecture;
mod fields;
mod known;
mod positions;
mod rope;
mod unsupported;
mod window;
mod write;

use serde_json::{Map, Value};

pub use self::write::ConfigClass;
pub(super) use self::write::config;

use self::architecture::Architecture;
use self::fields::ConfigFields;
use super::file::{
    BlockFile, BlocksFile, DEFAULT_INITIAL_STD, DEFAULT_LATENT_NORM_EPSILON, LinearFile, ModelFile,
    ModelFormat, PairFile,
};
use super::{Activation, GatedProduct, Model, SpecialTokens};
use crate::defect::{Defect, Defects};

/// Default of `attn_rank` and `mlp_rank` in BOOST's classes.
const BOOST_RANK: u64 = 1024;

/// Resolves the fields of a `config.json`, with a warning for each field that the original code ignores.
///
/// # Errors
/// Every defect, each with its field in the config.
pub(super) fn resolve(
    name: String,
    map: &Map<String, Value>,
) -> Result<(Model, Vec<Defect>), Defects> {
    // Other defects of a refused architecture would not help.
    if let Some(defect) =
        map.get("model_type").and_then(Value::as_str).and_then(unsupported::defect)
    {
        return Err(defect.into());
    }
    let mut fields = ConfigFields::new(map);
    let architecture = architecture::architecture(&mut fields);
    let file = model_file(name, architecture, &mut fields);
    let rank_field = |field| if fields.is_present(field) { field } else { "rank" };
    let (attention, mlp) = (rank_field("attn_rank"), rank_field("mlp_rank"));
    let readable = fields.well_typed;
    let warnings = std::mem::take(&mut fields.warnings);
    let mut defects = fields.finish();
    match file.resolve() {
        Ok(model) => defects.into_result((model, warnings)),
        Err(_) if !readable => Err(defects),
        Err(of_file) => {
            for defect in of_file.0 {
                let field = config_field(&defect.field, attention, mlp);
                let defect = Defect { field, ..defect };
                // One field may be the rank of several linears.
                if !defects.0.contains(&defect) {
                    defects.push(defect);
                }
            }
            Err(defects)
        }
    }
}

/// The field of a config that a field of [`ModelFile`] is read from; `attention` and `mlp` are the fields of
/// the ranks.
fn config_field(field: &str, attention: &str, mlp: &str) -> String {
    // A config has no object for the kind of a scaling.
    if let Some((_, name)) = field.strip_prefix("rope_scaling.").and_then(|of| of.split_once('.')) {
        return match name {
            "short" | "long" => format!("rope_scaling.{name}_factor"),
            "original_length" => "rope_scaling.original_max_position_embeddings".to_owned(),
            other => format!("rope_scaling.{other}"),
        };
    }
    if field.ends_with(".attention.sliding_window") {
        return "sliding_window".to_owned();
    }
    let name = match field {
        "hidden" => "hidden_size",
        "vocab" => "vocab_size",
        "heads" => "num_attention_heads",
        "kv_heads" => "num_key_value_heads",
        "d_ff" => "intermediate_size",
        "max_sequence_length" => "max_position_embeddings",
        "norm_epsilon" => "rms_norm_eps",
        "initial_std" => "initializer_range",
        "rotary_dim" => "partial_rotary_factor",
        "padding_token" => "pad_token_id",
        "blocks.count" => "num_hidden_layers",
        "blocks.default.all.rank" => attention,
        "blocks.default.gate.rank" | "blocks.default.up.rank" | "blocks.default.down.rank" => mlp,
        other => other,
    };
    name.to_owned()
}

fn model_file(
    name: String,
    architecture: Architecture,
    fields: &mut ConfigFields<'_>,
) -> ModelFile {
    architecture::require_fields(architecture, fields);
    let hidden = fields.required_size("hidden_size");
    let default = match architecture {
        Architecture::Llama
        | Architecture::Mistral
        | Architecture::Phi3
        | Architecture::InternLm2
        | Architecture::SmolLm3
        | Architecture::Qwen2
        | Architecture::Qwen3 => BlockFile {
            product: Some(llama_product(fields)),
            all: Some(LinearFile::Dense),
            qkv_bias: (architecture == Architecture::Qwen2).then_some(true),
            qk_norm: (architecture == Architecture::Qwen3).then_some(true),
            ..Default::default()
        },
        Architecture::Cola | Architecture::Boost => cola_block(hidden, architecture, fields),
    };
    // Configs of GaLore and its successors have the length under this name.
    let trained_length = fields.size("max_sequence_length");
    let count = fields.required_size("num_hidden_layers");
    let max_sequence_length =
        fields.size("max_position_embeddings").or(trained_length).unwrap_or(2048);
    let vocab = fields.required_size("vocab_size");
    let heads = fields.required_size("num_attention_heads");
    let default_head_dim = (architecture == Architecture::Qwen3).then_some(128);
    let head_dim = fields.size("head_dim").or(default_head_dim);
    let rope = {
        let head_dim = head_dim.unwrap_or(hidden / heads.max(1));
        rope::rope(max_sequence_length, head_dim, fields)
    };
    let initial_std = fields.number("initializer_range");
    let overrides = match architecture {
        Architecture::SmolLm3 => positions::overrides(count, fields),
        _ => Default::default(),
    };
    let mut blocks = BlocksFile { count, default, overrides };
    window::set_masks(&mut blocks, architecture, fields);
    ModelFile {
        schema: None,
        format: ModelFormat::V1,
        name: Some(name),
        description: None,
        hidden,
        vocab,
        heads,
        kv_heads: fields.size("num_key_value_heads"),
        head_dim,
        d_ff: fields.required_size("intermediate_size"),
        max_sequence_length,
        norm_epsilon: fields.number("rms_norm_eps").unwrap_or(1e-6),
        latent_norm_epsilon: DEFAULT_LATENT_NORM_EPSILON,
        rope_theta: rope.theta,
        rotary_dim: rope.rotary_dim,
        rope_scaling: rope.scaling,
        initial_std: initial_std
            .filter(|_| architecture != Architecture::Boost)
            .unwrap_or(DEFAULT_INITIAL_STD),
        latent_residual: None,
        padding_token: padding_token(vocab, fields),
        special_tokens: special_tokens(fields),
        tied: fields.flag("tie_word_embeddings").unwrap_or(false),
        blocks,
    }
}

/// The row that `padding_idx` of PyTorch's embedding freezes: negative ids count from the end.
fn padding_token(vocab: u64, fields: &mut ConfigFields<'_>) -> Option<u64> {
    let id = fields.integer("pad_token_id")?;
    let token = if id < 0 { vocab.checked_sub(id.unsigned_abs()) } else { Some(id as u64) };
    if token.is_none() {
        let problem = format!("is {id}, but the vocabulary has {vocab} tokens");
        fields.defects.push(Defect::new("pad_token_id", problem).hint("null, without padding"));
    }
    token
}

/// The tokens at which texts begin and end; newer files have a list of those at the end. A negative id names none.
fn special_tokens(fields: &mut ConfigFields<'_>) -> SpecialTokens {
    let bos = fields.tokens("bos_token_id").first().copied();
    SpecialTokens { bos, eos: fields.tokens("eos_token_id") }
}

/// The product with the activation of `hidden_act` on the gate, by default SiLU.
fn llama_product(fields: &mut ConfigFields<'_>) -> GatedProduct {
    match fields.string("hidden_act") {
        None | Some("silu" | "swish") => {}
        Some(activation) => {
            let problem = format!("activation `{activation}` is not supported");
            fields.defects.push(Defect::new("hidden_act", problem).hint("\"silu\""));
        }
    }
    GatedProduct::SwiGlu
}

fn cola_block(hidden: u64, architecture: Architecture, fields: &mut ConfigFields<'_>) -> BlockFile {
    let default_rank = if architecture == Architecture::Boost { BOOST_RANK } else { hidden / 4 };
    let rank = fields.size("rank").unwrap_or(default_rank);
    let attention = fields.size("attn_rank").unwrap_or(rank);
    let mlp = fields.size("mlp_rank").unwrap_or(rank);
    let hidden_activation = activation(fields, "hidden_act").unwrap_or(Activation::Silu);
    let latent = activation(fields, "cola_act").unwrap_or(hidden_activation);
    warn_of_ignored_activation(fields, latent);
    let activation = Some(latent);
    let pair = |rank| LinearFile::Pair(PairFile { rank: Some(rank), activation, crossing: None });
    let mlp = (mlp != attention).then(|| pair(mlp));
    BlockFile {
        product: Some(cola_product(fields, hidden_activation)),
        all: Some(pair(attention)),
        gate: mlp.clone(),
        up: mlp.clone(),
        down: mlp,
        ..Default::default()
    }
}

/// The activation that a field names; `None` when absent or, after a defect, unknown.
fn activation(fields: &mut ConfigFields<'_>, field: &'static str) -> Option<Activation> {
    let name = fields.string(field)?;
    let activation = activation_by_name(name);
    if activation.is_none() {
        let problem = format!("activation `{name}` is not supported in a latent");
        fields.defects.push(Defect::new(field, problem).hint("\"silu\" or \"linear\""));
    }
    activation
}

fn activation_by_name(name: &str) -> Option<Activation> {
    match name {
        "silu" | "swish" => Some(Activation::Silu),
        "linear" | "identity" => Some(Activation::Identity),
        _ => None,
    }
}

/// Warns of an `lr_act_type` other than the activation of the latents. CoLA's layers get `hidden_act` in its
/// place.
fn warn_of_ignored_activation(fields: &mut ConfigFields<'_>, latent: Activation) {
    let Some(name) = fields.string("lr_act_type") else { return };
    if activation_by_name(name) != Some(latent) {
        let problem = format!(
            "is `{name}`, which CoLA's classes ignore: latents have the activation of `hidden_act`"
        );
        let hint = "\"cola_act\" for another activation of the latents";
        fields.warnings.push(Defect::new("lr_act_type", problem).hint(hint));
    }
}

/// The product of gate and up, where an activation on the gate is `hidden_act`.
fn cola_product(fields: &mut ConfigFields<'_>, activation: Activation) -> GatedProduct {
    let only_latent = fields.flag("only_lr_act");
    let both = fields.flag("both_act");
    if let (Some(only_latent), Some(both)) = (only_latent, both)
        && only_latent == both
    {
        let problem = format!("is {both} like `only_lr_act`, which contradicts it");
        fields.defects.push(Defect::new("both_act", problem).hint("one of the two"));
    }
    match (only_latent.unwrap_or(both != Some(true)), activation) {
        (true, _) | (false, Activation::Identity) => GatedProduct::Plain,
        (false, Activation::Silu) => GatedProduct::SwiGlu,
    }
}
