//! Published architectures that are refused, each with the part of it that no model here has.

use super::architecture::supported;
use crate::defect::Defect;

/// Model types, and what they have.
const UNSUPPORTED: &[(&[&str], &str)] = &[
    (
        &["mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "olmoe", "granitemoe", "gpt_oss", "dbrx"],
        "a mixture of experts",
    ),
    (
        &["deepseek_v2", "deepseek_v3", "kimi_k2"],
        "a mixture of experts, and keys and values that are compressed together (MLA)",
    ),
    (&["llama4", "llama4_text"], "a mixture of experts, and attention over chunks of a sequence"),
    (&["qwen"], "biases of q, k and v, and attention scaled by the length of the sequence"),
    (
        &["gemma", "gemma2", "gemma3", "gemma3_text"],
        "scaled embeddings, norms with scales of 1 + w, and GELU on the gate",
    ),
    (&["olmo2", "olmo3"], "norms after attention and MLP, and of q and k"),
    (&["olmo"], "LayerNorm without parameters"),
    (&["stablelm"], "LayerNorm"),
    (&["nemotron"], "LayerNorm with scales of 1 + w, and an MLP with squared ReLU and no gate"),
    (&["cohere", "cohere2"], "LayerNorm, attention and MLP side by side, and scaled logits"),
    (&["granite", "minicpm", "minicpm3"], "factors of embeddings, residuals and logits"),
    (&["baichuan"], "a head with normalised rows (Baichuan 2; its config is that of Baichuan 1)"),
    (
        &["chatglm", "glm", "glm4"],
        "biases of q, k and v, and RoPE of neighbouring features in half of a head",
    ),
    (
        &["phi", "gpt_neox", "gptj", "codegen", "falcon"],
        "LayerNorm, attention and MLP side by side, and an MLP without a gate",
    ),
    (&["starcoder2"], "LayerNorm, biases, and an MLP without a gate"),
    (&["bloom", "mpt"], "ALiBi, LayerNorm, and an MLP without a gate"),
    (
        &["gpt2", "gpt_bigcode", "opt", "gpt_neo"],
        "learned positions, LayerNorm, and an MLP without a gate",
    ),
    (&["mamba", "mamba2", "jamba", "rwkv", "recurrent_gemma"], "recurrent blocks"),
];

/// The defect of a model type that is known and refused.
pub(super) fn defect(model_type: &str) -> Option<Defect> {
    let (_, parts) = UNSUPPORTED.iter().find(|(types, _)| types.contains(&model_type))?;
    let problem = format!("`{model_type}` is not supported: it has {parts}");
    Some(Defect::new("model_type", problem).hint(supported()))
}
