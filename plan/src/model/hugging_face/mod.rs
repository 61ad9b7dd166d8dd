//! Hugging Face `config.json`: LLaMA and Mistral (dense), and CoLA (factor pairs).
//!
//! CoLA is written in two ways. The CoLA code has `rank` (a quarter of the width when absent),
//! `lr_act_type` (φ; `hidden_act` when absent) and `only_lr_act` (true: no SiLU on the gate). BOOST
//! has `attn_rank` and `mlp_rank` for the two halves of a block, and `both_act` (true: SiLU on the
//! gate as well). Both are accepted, together with `cola_act` as another name of φ; a file with any
//! rank in it is CoLA, whatever its `model_type`.
//!
//! Here a `config.json` becomes a [`ModelFile`] with one default block, so that sizes are checked in
//! one place; defects are then named after the field they came from.

mod fields;
mod known;
mod rope;

use serde_json::{Map, Value};

use self::fields::{ConfigFields, excerpt};
use super::file::{BlockFile, BlocksFile, LinearFile, ModelFile, ModelFormat, PairFile};
use super::{Activation, GatedProduct, Model};
use crate::defect::{Defect, Defects};

/// What the file says the model is.
#[derive(Clone, Copy, PartialEq)]
enum Architecture {
    Llama,
    Mistral,
    Cola,
}

/// Names of the classes we know the function of, in lower case: their spelling varied.
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
/// Every defect at once, each at the field's name in the file.
pub(super) fn resolve(name: String, map: &Map<String, Value>) -> Result<Model, Defects> {
    let mut fields = ConfigFields::new(map);
    let kind = resolve_architecture(&mut fields);
    let file = model_file(name, kind, &mut fields);
    let rank_of = |field| if fields.is_present(field) { field } else { "rank" };
    let (attention, mlp) = (rank_of("attn_rank"), rank_of("mlp_rank"));
    let readable = fields.well_typed;
    let mut defects = fields.finish();
    match file.resolve() {
        Ok(model) => defects.into_result(model),
        Err(_) if !readable => Err(defects),
        Err(more) => {
            for defect in more.0 {
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

/// The name in `config.json` of a field of [`ModelFile`], where the ranks of attention and MLP come
/// from the fields `attention` and `mlp`.
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
    let by_type = fields.string("model_type").map(|word| match word {
        "llama" => Ok(Architecture::Llama),
        "mistral" => Ok(Architecture::Mistral),
        "cola" => Ok(Architecture::Cola),
        other => Err(other),
    });
    if let Some(Err(other)) = by_type {
        let problem = format!("`{other}` is a model we do not know");
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
            "{} contradicts `model_type` {}, and no rank says which it is",
            fields.get("architectures").map(excerpt).unwrap_or_default(),
            fields.get("model_type").map(excerpt).unwrap_or_default(),
        );
        let hint = "one kind of model in both; a `rank` makes it CoLA";
        fields.defects.push(Defect::new("architectures", problem).hint(hint));
    }
    let said = by_type.or(by_class);
    match said {
        Some(Architecture::Mistral) if has_rank || boost => {
            let problem = "a Mistral with a rank is not something we know";
            fields.defects.push(Defect::new("model_type", problem).hint("\"cola\""));
            Architecture::Cola
        }
        _ if has_rank || boost => Architecture::Cola,
        said => said.unwrap_or(Architecture::Llama),
    }
}

/// The model's kind by its class; reports a class we do not know.
fn architecture(fields: &mut ConfigFields<'_>) -> Option<Architecture> {
    let classes = match fields.get("architectures")? {
        Value::Array(classes) => classes.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut kind = None;
    for class in classes {
        let lower = class.as_str().map(str::to_ascii_lowercase);
        match ARCHITECTURES.iter().find(|(known, _)| lower.as_deref() == Some(known)) {
            Some((_, found)) => kind = Some(*found),
            None => {
                let problem = format!("{} is a class we do not know", excerpt(class));
                let hint = "LlamaForCausalLM, MistralForCausalLM or ColaForCausalLM";
                fields.defects.push(Defect::new("architectures", problem).hint(hint));
            }
        }
    }
    kind
}

fn model_file(name: String, kind: Architecture, fields: &mut ConfigFields<'_>) -> ModelFile {
    if kind == Architecture::Mistral {
        mistral_defaults(fields);
    }
    let hidden = fields.required_size("hidden_size");
    let default = match kind {
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
    // Files of the GaLore line say the same under a second name.
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

/// Mistral's class fills in what a file leaves out with values of its own, a window among them.
fn mistral_defaults(fields: &mut ConfigFields<'_>) {
    for (field, default, hint) in [
        ("num_key_value_heads", "8", "8"),
        ("max_position_embeddings", "131072", "131072"),
        ("sliding_window", "4096", "null, if the model has no window"),
    ] {
        if !fields.is_present(field) {
            let problem = format!("is missing, where Mistral takes it for {default}");
            fields.defects.push(Defect::new(field, problem).hint(hint));
        }
    }
}

/// Requires the activation called `field` to be SiLU, LLaMA's default.
fn require_silu(fields: &mut ConfigFields<'_>, field: &'static str) {
    if let Some(word) = fields.string(field)
        && !matches!(word, "silu" | "swish")
    {
        let problem = format!("`{word}` is not supported");
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
        let problem = format!("says `{other}`, where `lr_act_type` says `{one}`");
        fields.defects.push(Defect::new("cola_act", problem).hint("one of the two"));
    }
    let Some((field, word)) = both.into_iter().find_map(|(field, word)| Some((field, word?)))
    else {
        return Activation::Silu;
    };
    match word {
        "silu" | "swish" => Activation::Silu,
        "linear" | "identity" => Activation::Identity,
        other => {
            let problem = format!("`{other}` is not supported in a latent");
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
        let problem = format!("is {both}, and so is `only_lr_act`: they contradict each other");
        fields.defects.push(Defect::new("both_act", problem).hint("one of the two"));
    }
    match only_latent.unwrap_or(both != Some(true)) {
        true => GatedProduct::Plain,
        false => GatedProduct::SwiGlu,
    }
}
