//! The architecture of a config: by `model_type`, by class, and by the fields that only CoLA and BOOST have.

use serde_json::Value;

use super::fields::{ConfigFields, excerpt};
use crate::defect::Defect;

/// Architecture of a config.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Architecture {
    Llama,
    Mistral,
    Phi3,
    InternLm2,
    SmolLm3,
    /// Qwen1.5, Qwen2 and Qwen2.5.
    Qwen2,
    Qwen3,
    /// CoLA and CoLA-M, which differ in what they recompute.
    Cola,
    Boost,
}

impl Architecture {
    fn is_low_rank(self) -> bool {
        matches!(self, Architecture::Cola | Architecture::Boost)
    }

    /// Fields that a config must have, because the default of the class is not that of LLaMA; with this default
    /// and a value to try.
    fn required_fields(self) -> &'static [(&'static str, &'static str, &'static str)] {
        match self {
            Architecture::Mistral => &[
                ("num_key_value_heads", "8", "8"),
                ("max_position_embeddings", "131072", "131072"),
                ("sliding_window", "4096", "null, if the model has no window"),
            ],
            Architecture::Phi3 => &[
                ("max_position_embeddings", "4096", "4096"),
                ("rms_norm_eps", "1e-05", "1e-05"),
                ("pad_token_id", "32000", "32000"),
            ],
            Architecture::InternLm2 => &[
                ("bias", "true", "false, if the linears have no bias"),
                ("pad_token_id", "0", "null, without padding"),
            ],
            Architecture::SmolLm3 => &[
                ("num_key_value_heads", "4", "4"),
                ("max_position_embeddings", "32768", "32768"),
                ("rope_theta", "2000000.0", "2000000.0"),
                ("pad_token_id", "128004", "128004"),
                ("tie_word_embeddings", "true", "true"),
            ],
            Architecture::Qwen2 => &[
                ("num_key_value_heads", "32", "the number of `num_attention_heads`"),
                ("max_position_embeddings", "32768", "32768"),
            ],
            Architecture::Qwen3 => &[
                ("num_key_value_heads", "32", "the number of `num_attention_heads`"),
                ("max_position_embeddings", "32768", "32768"),
            ],
            Architecture::Llama | Architecture::Cola | Architecture::Boost => &[],
        }
    }

    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "LLaMA",
            Architecture::Mistral => "Mistral",
            Architecture::Phi3 => "Phi-3",
            Architecture::InternLm2 => "InternLM2",
            Architecture::SmolLm3 => "SmolLM3",
            Architecture::Qwen2 => "Qwen2",
            Architecture::Qwen3 => "Qwen3",
            Architecture::Cola => "CoLA",
            Architecture::Boost => "BOOST",
        }
    }
}

/// Supported model types.
const MODEL_TYPES: [(&str, Architecture); 9] = [
    ("llama", Architecture::Llama),
    ("mistral", Architecture::Mistral),
    ("phi3", Architecture::Phi3),
    ("internlm2", Architecture::InternLm2),
    ("smollm3", Architecture::SmolLm3),
    ("qwen2", Architecture::Qwen2),
    ("qwen3", Architecture::Qwen3),
    ("cola", Architecture::Cola),
    ("cola_m", Architecture::Cola),
];

/// The supported model types, as a hint.
pub(super) fn supported() -> String {
    let names = MODEL_TYPES.map(|(name, _)| name);
    let [others @ .., last] = &names;
    format!("{} or {last}; or write the model as narrows-model/1", others.join(", "))
}

/// Supported classes in lower case, since their capitalisation varies.
const ARCHITECTURES: [(&str, Architecture); 13] = [
    ("llamaforcausallm", Architecture::Llama),
    ("mistralforcausallm", Architecture::Mistral),
    ("phi3forcausallm", Architecture::Phi3),
    ("internlm2forcausallm", Architecture::InternLm2),
    ("smollm3forcausallm", Architecture::SmolLm3),
    ("qwen2forcausallm", Architecture::Qwen2),
    ("qwen3forcausallm", Architecture::Qwen3),
    ("colaforcausallm", Architecture::Cola),
    ("colamforcausallm", Architecture::Cola),
    ("colallamaforcausallm", Architecture::Cola),
    ("colallamafortraining", Architecture::Boost),
    ("basiccolallamafortraining", Architecture::Boost),
    ("vanillacolallamafortraining", Architecture::Boost),
];

/// Requires the fields whose default is that of the class.
pub(super) fn require_fields(architecture: Architecture, fields: &mut ConfigFields<'_>) {
    for &(field, default, hint) in architecture.required_fields() {
        if !fields.is_present(field) {
            let problem = format!("is missing, and {}'s default is {default}", architecture.name());
            fields.defects.push(Defect::new(field, problem).hint(hint));
        }
    }
}

/// The architecture; reports unsupported types and classes, and those that contradict each other.
pub(super) fn architecture(fields: &mut ConfigFields<'_>) -> Architecture {
    let has = |fields: &mut ConfigFields<'_>, field| fields.get(field).is_some();
    let boost_ranks = ["attn_rank", "mlp_rank"].map(|field| has(fields, field)).contains(&true);
    let has_rank = has(fields, "rank") || boost_ranks;
    let boost = fields.flag("is_cola_llama_config") == Some(true) || boost_ranks;
    let nanotron = fields.flag("is_llama_config") == Some(true);
    let by_type = fields.string("model_type").map(|name| {
        let known = MODEL_TYPES.iter().find(|(known, _)| *known == name);
        known.map(|(_, architecture)| *architecture).ok_or(name)
    });
    if let Some(Err(other)) = by_type {
        let problem = format!("unsupported model type `{other}`");
        fields.defects.push(Defect::new("model_type", problem).hint(supported()));
    }
    let by_class = architecture_by_class(fields);
    if by_type.is_none() && by_class.is_none() && !boost && !nanotron && !has_rank {
        let hint = "\"llama\", \"mistral\" or \"cola\"";
        fields.defects.push(Defect::new("model_type", "is missing").hint(hint));
    }
    let by_type = by_type.and_then(Result::ok);
    if let (Some(by_type), Some(by_class)) = (by_type, by_class)
        && by_type != by_class
        && !(by_type.is_low_rank() && by_class.is_low_rank())
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
        Some(
            declared @ (Architecture::Mistral
            | Architecture::Phi3
            | Architecture::InternLm2
            | Architecture::SmolLm3
            | Architecture::Qwen2
            | Architecture::Qwen3),
        ) if has_rank || boost => {
            let problem = format!("{} models with ranks are not supported", declared.name());
            fields.defects.push(Defect::new("model_type", problem).hint("\"cola\""));
            Architecture::Cola
        }
        _ if boost || by_class == Some(Architecture::Boost) => Architecture::Boost,
        _ if has_rank => Architecture::Cola,
        declared => declared.unwrap_or(Architecture::Llama),
    }
}

/// The architecture by class; reports unsupported classes.
fn architecture_by_class(fields: &mut ConfigFields<'_>) -> Option<Architecture> {
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
