//! The formats of weights.

use std::fmt;

use super::fused;

/// Names and layouts of a model's weights in the files of one training code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// LLaMA's names in Hugging Face transformers, with CoLA's `cola_a` and `cola_b` for the factors of a
    /// pair. Checkpoints of this program have it too.
    HuggingFace,
    /// CoLA-M: factors lie in the modules between which activations are checkpointed.
    ColaM,
    /// LORO: LLaMA's names, with `weight_in` and the transpose `weight_out` for the factors of a pair.
    Loro,
    /// Nanotron: q, k and v, and gate and up, in one tensor. BOOST has one for both factors of such a
    /// group.
    Nanotron,
    /// Phi-3 and Phi-4 in Hugging Face transformers: q, k and v, and gate and up, in one tensor.
    Phi3,
    /// InternLM2: names of its own, and q, k and v in one tensor, interleaved by KV heads.
    InternLm2,
}

impl WeightFormat {
    /// Recognises the format of files with tensors of these names.
    pub(super) fn of_names<'a>(names: impl IntoIterator<Item = &'a str>) -> WeightFormat {
        let recognise = |name: &str| {
            if name.contains(".pp_block.") {
                Some(WeightFormat::Nanotron)
            } else if name.contains(".pre_attn.") {
                Some(WeightFormat::ColaM)
            } else if name.ends_with(".weight_in") {
                Some(WeightFormat::Loro)
            } else if name.ends_with(".qkv_proj.weight") || name.ends_with(".gate_up_proj.weight") {
                Some(WeightFormat::Phi3)
            } else if name.ends_with(".attention.wqkv.weight") || name == fused::TOKEN_EMBEDDINGS {
                Some(WeightFormat::InternLm2)
            } else {
                None
            }
        };
        names.into_iter().find_map(recognise).unwrap_or(WeightFormat::HuggingFace)
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            WeightFormat::HuggingFace => "Hugging Face",
            WeightFormat::ColaM => "CoLA-M",
            WeightFormat::Loro => "LORO",
            WeightFormat::Nanotron => "Nanotron",
            WeightFormat::Phi3 => "Phi-3",
            WeightFormat::InternLm2 => "InternLM2",
        })
    }
}
