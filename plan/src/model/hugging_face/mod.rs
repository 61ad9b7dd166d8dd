//! Hugging Face `config.json`: LLaMA and Mistral (dense), and CoLA (factor pairs).
//!
//! CoLA has two dialects. The CoLA code has `rank` (default: a quarter of the width), `lr_act_type` (φ;
//! default: SiLU) and `only_lr_act` (true: no SiLU on the gate). BOOST has `attn_rank` and `mlp_rank` for
//! the two halves of a block, and `both_act` (true: SiLU on the gate as well). Both are accepted, and
//! `cola_act` as another name of φ. A config with any rank is CoLA, whatever its `model_type`.
//!
//! A config is converted to a [`ModelFile`] with one default block, so that sizes are checked in one
//! place; defects then get the name of the field of the config.

mod fields;
mod known;
mod rope;

use serde_json::{Map, Value};

use self::fields::{ConfigFields, excerpt};
use super::file::{BlockFile, BlocksFile, LinearFile, ModelFile, ModelFormat, PairFile};
use super::{Activation, GatedProduct, Model};
use crate::defect::{Defect, Defects};

/// Architecture of a config.
#[derive(Clone, Copy, PartialEq)]
enum Architecture {
    Llama,
    Mistral,
    Cola,
}

/// Supported classes in lower case, since their capitalisation varies.
const ARCHITECTURES: [(&str, Architecture); 8] = [
    ("llamaforcausallm", Architecture::Llama),
    ("mistralforcausallm", Architecture::Mistral),
    ("colaforcausallm", Architecture::Cola),
    ("colamforcausallm", Architecture::Cola),
    ("colallamaforcausallm", Architecture::Cola),
    ("colallamafortraining", Architecture::Cola),
    ("basiccolallamafortraining", Architecture::Cola),
    ("vanillacolallamafortraining", Architecture::Cola),
];

/// Resolves the fields of a `config.json`.
///
/// # Errors
/// Every defect, each with its field in the config.
pub(super) fn resolve(name: String, map: &Map<String, Value>) -> Result<Model, Defects> {
    let mut fields = ConfigFields::new(map);
    let architecture = resolve_architecture(&mut fields);
    let file = model_file(name, architecture, &mut fields);
    let rank_field = |field| if fields.is_present(field) { field } else { "rank" };
    let (attention, mlp) = (rank_field("attn_rank"), rank_field("mlp_rank"));
    let readable = fields.well_typed;
    let mut defects = fields.finish();
    match file.resolve() {
        Ok(model) => defects.into_result(model),
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
    let name = match field {
        "hidden" => "hidden_size",
        "vocab" => "vocab_size",
        "heads" => "num_attention_heads",
        "kv_heads" => "num_key_value_heads",
        "d_ff" => "intermediate_size",
        "max_sequence_length" => "max_position_embeddings",
        "norm_epsilon" => "rms_norm_eps",
        "blocks.count" => "num_hidden_layers",
        "blocks.default.all.rank" => attention,
        "blocks.default.gate.rank" | "blocks.default.up.rank" | "blocks.default.down.rank" => mlp,
        other => other,
    };
    name.to_owned()
}

fn resolve_architecture(fields: &mut ConfigFields<'_>) -> Architecture {
    let ranks = ["rank", "attn_rank", "mlp_rank"];
    let has_rank = ranks.map(|field| fields.get(field).is_some()).contains(&true);
    let boost = fields.flag("is_cola_llama_config") == Some(true);
    let by_type = fields.string("model_type").map(|name| match name {
        "llama" => Ok(Architecture::Llama),
        "mistral" => Ok(Architecture::Mistral),
        "cola" => Ok(Architecture::Cola),
        other => Err(other),
    });
    if let Some(Err(other)) = by_type {
        let problem = format!("unsupported model type `{other}`");
        let hint = "llama, mistral or cola; or write the model as narrows-model/1";
        fields.defects.push(Defect::new("model_type", problem).hint(hint));
    }
    let by_class = architecture(fields);
    if by_type.is_none() && by_class.is_none() && !boost && !has_rank {
        let hint = "\"llama\", \"mistral\" or \"cola\"";
        fields.defects.push(Defect::new("model_type", "is missing").hint(hint));
    }
    let by_type = by_type.and_then(Result::ok);
    if let (Some(by_type), Some(by_class)) = (by_type, by_class)
        && by_type != by_class
        && !(has_rank || boost)
    {
        let problem = format!(
            "{} contradicts `model_type` {}, and no rank decides between them",
            fields.get("architectures").map(excerpt).unwrap_or_default(),
            fields.get("model_type").map(excerpt).unwrap_or_default(),
        );
        let hint = "the same architecture in both; a `rank` selects CoLA";
        fields.defects.push(Defect::new("architectures", problem).hint(hint));
    }
    let declared = by_type.or(by_class);
    match declared {
        Some(Architecture::Mistral) if has_rank || boost => {
            let problem = "Mistral models with ranks are not supported";
            fields.defects.push(Defect::new("model_type", problem).hint("\"cola\""));
            Architecture::Cola
        }
        _ if has_rank || boost => Architecture::Cola,
        declared => declared.unwrap_or(Architecture::Llama),
    }
}

/// The architecture by class; reports unsupported classes.
fn architecture(fields: &mut ConfigFields<'_>) -> Option<Architecture> {
    let classes = match fields.get("architectures")? {
        Value::Array(classes) => classes.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut known_architecture = None;
    for class in classes {
        let lower = class.as_str().map(str::to_ascii_lowercase);
        match ARCHITECTURES.iter().find(|(known, _)| lower.as_deref() == Some(known)) {
            Some((_, architecture)) => known_architecture = Some(*architecture),
            None => {
                let problem = format!("unsupported class {}", excerpt(class));
                let hint = "LlamaForCausalLM, MistralForCausalLM or ColaForCausalLM";
                fields.defects.push(Defect::new("architectures", problem).hint(hint));
            }
        }
    }
    known_architecture
}

fn model_file(
    name: String,
    architecture: Architecture,
    fields: &mut ConfigFields<'_>,
) -> ModelFile {
    if architecture == Architecture::Mistral {
        mistral_defaults(fields);
    }
    let hidden = fields.required_size("hidden_size");
    let default = match architecture {
        Architecture::Llama | Architecture::Mistral => {
            require_silu(fields, "hidden_act");
            BlockFile {
                product: Some(GatedProduct::SwiGlu),
                all: Some(LinearFile::Dense),
                ..Default::default()
            }
        }
        Architecture::Cola => cola_block(hidden, fields),
    };
    // Configs of GaLore and its successors have the length under this name.
    let trained_length = fields.size("max_sequence_length");
    ModelFile {
        schema: None,
        format: ModelFormat::V1,
        name: Some(name),
        description: None,
        hidden,
        vocab: fields.required_size("vocab_size"),
        heads: fields.required_size("num_attention_heads"),
        kv_heads: fields.size("num_key_value_heads"),
        head_dim: fields.size("head_dim"),
        d_ff: fields.required_size("intermediate_size"),
        max_sequence_length: fields
            .size("max_position_embeddings")
            .or(trained_length)
            .unwrap_or(2048),
        norm_epsilon: fields.number("rms_norm_eps").unwrap_or(1e-6),
        rope_theta: rope::theta(fields),
        tied: fields.flag("tie_word_embeddings").unwrap_or(false),
        blocks: BlocksFile {
            count: fields.required_size("num_hidden_layers"),
            default,
            overrides: Default::default(),
        },
    }
}

/// Requires the fields whose defaults Mistral's class sets, a sliding window among them.
fn mistral_defaults(fields: &mut ConfigFields<'_>) {
    for (field, default, hint) in [
        ("num_key_value_heads", "8", "8"),
        ("max_position_embeddings", "131072", "131072"),
        ("sliding_window", "4096", "null, if the model has no window"),
    ] {
        if !fields.is_present(field) {
            let problem = format!("is missing, and Mistral's default is {default}");
            fields.defects.push(Defect::new(field, problem).hint(hint));
        }
    }
}

/// Requires the activation in `field` to be SiLU, the default of LLaMA.
fn require_silu(fields: &mut ConfigFields<'_>, field: &'static str) {
    if let Some(activation) = fields.string(field)
        && !matches!(activation, "silu" | "swish")
    {
        let problem = format!("activation `{activation}` is not supported");
        fields.defects.push(Defect::new(field, problem).hint("\"silu\""));
    }
}

fn cola_block(hidden: u64, fields: &mut ConfigFields<'_>) -> BlockFile {
    let rank = fields.size("rank").unwrap_or(hidden / 4);
    let attention = fields.size("attn_rank").unwrap_or(rank);
    let mlp = fields.size("mlp_rank").unwrap_or(rank);
    let activation = Some(latent_activation(fields));
    let pair = |rank| LinearFile::Pair(PairFile { rank: Some(rank), activation, crossing: None });
    let mlp = (mlp != attention).then(|| pair(mlp));
    BlockFile {
        product: Some(cola_product(fields)),
        all: Some(pair(attention)),
        gate: mlp.clone(),
        up: mlp.clone(),
        down: mlp,
        ..Default::default()
    }
}

fn latent_activation(fields: &mut ConfigFields<'_>) -> Activation {
    require_silu(fields, "hidden_act");
    let both = ["lr_act_type", "cola_act"].map(|field| (field, fields.string(field)));
    if let [(_, Some(one)), (_, Some(other))] = both
        && one != other
    {
        let problem = format!("is `{other}`, but `lr_act_type` is `{one}`");
        fields.defects.push(Defect::new("cola_act", problem).hint("one of the two"));
    }
    let Some((field, name)) = both.into_iter().find_map(|(field, name)| Some((field, name?)))
    else {
        return Activation::Silu;
    };
    match name {
        "silu" | "swish" => Activation::Silu,
        "linear" | "identity" => Activation::Identity,
        other => {
            let problem = format!("activation `{other}` is not supported in a latent");
            let hint = "\"silu\" or \"linear\"";
            fields.defects.push(Defect::new(field, problem).hint(hint));
            Activation::Silu
        }
    }
}

fn cola_product(fields: &mut ConfigFields<'_>) -> GatedProduct {
    let only_latent = fields.flag("only_lr_act");
    let both = fields.flag("both_act");
    if let (Some(only_latent), Some(both)) = (only_latent, both)
        && only_latent == both
    {
        let problem = format!("is {both} like `only_lr_act`, which contradicts it");
        fields.defects.push(Defect::new("both_act", problem).hint("one of the two"));
    }
    match only_latent.unwrap_or(both != Some(true)) {
        true => GatedProduct::Plain,
        false => GatedProduct::SwiGlu,
    }
}
