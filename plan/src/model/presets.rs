//! Preset models by name.
//!
//! Five families in the published sizes: `llama` is dense; `cola` has SiLU in the latents and a plain
//! product; `svd` has no activation in the latents and LLaMA's SwiGLU; `lax` is `cola` with a latent
//! crossing; `dlr` has SiLU in the latents, a latent residual of strength 1, and LLaMA's SwiGLU, as in DLR's code. CoLA's 60M and 130M keep the SiLU on the gate, so their product is SwiGLU.
//!
//! The shapes of 60M, 130M and 350M are CoLA's, those from 1B up BOOST's: tied embeddings, and 5472 inner
//! features in 1B, where CoLA has 5461 and an untied head. No preset has a padding token, whereas all
//! configs of CoLA have token 0: `models/cola-7b.config.json` is CoLA's own 7B, and
//! `models/boost-cola-7b.config.json` the preset.
//!
//! The crossing of `lax` is the released code's form (LayerNorm and φ after the sum) with the
//! identity gate, which the paper uses for equal ranks, as all presets have. The released vision
//! configurations use a tensor gate; no language model was released. `models/lax-1b.json` shows the field
//! of the gate.

use super::file::{
    BlockFile, BlocksFile, CrossingFile, DEFAULT_INITIAL_STD, DEFAULT_LATENT_NORM_EPSILON,
    LinearFile, ModelFile, ModelFormat, PairFile,
};
use super::{
    Activation, CrossingForm, CrossingGate, GatedProduct, LatentCrossing, Model, SpecialTokens,
};
use crate::defect::Defect;

/// The shape that all families have in one size.
struct ModelSize {
    name: &'static str,
    layers: u64,
    hidden: u64,
    d_ff: u64,
    heads: u64,
    rank: u64,
    vocab: u64,
    tied: bool,
    /// Whether CoLA trains this size with SiLU on the gate as well.
    gate_activation: bool,
}

const fn size(name: &'static str, [layers, hidden, d_ff, heads, rank]: [u64; 5]) -> ModelSize {
    let (vocab, tied, gate_activation) = (32_000, true, false);
    ModelSize { name, layers, hidden, d_ff, heads, rank, vocab, tied, gate_activation }
}

const SIZES: &[ModelSize] = &[
    ModelSize { tied: false, gate_activation: true, ..size("60m", [8, 512, 1376, 8, 128]) },
    ModelSize { tied: false, gate_activation: true, ..size("130m", [12, 768, 2048, 12, 256]) },
    ModelSize { tied: false, ..size("350m", [24, 1024, 2736, 16, 256]) },
    size("1b", [24, 2048, 5472, 32, 512]),
    size("3b", [28, 3072, 8192, 24, 768]),
    size("7b", [32, 4096, 11_008, 32, 1024]),
    size("13b", [40, 5120, 13_824, 40, 1280]),
    size("30b", [36, 8192, 22_016, 64, 2048]),
    size("40b", [48, 8192, 22_016, 64, 2048]),
];

/// A model for a laptop. The vocabulary is the 256 bytes, without special tokens.
const TINY: ModelSize = ModelSize { vocab: 256, tied: false, ..size("tiny", [4, 256, 688, 8, 64]) };

/// Longest sequence of every preset, in tokens: the length of the published measurements.
const SEQUENCE_LENGTH: u64 = 4096;

#[derive(Clone, Copy, PartialEq)]
enum ModelFamily {
    Llama,
    Cola,
    Svd,
    Lax,
    Dlr,
}

const FAMILIES: [(&str, ModelFamily); 5] = [
    ("llama", ModelFamily::Llama),
    ("cola", ModelFamily::Cola),
    ("svd", ModelFamily::Svd),
    ("lax", ModelFamily::Lax),
    ("dlr", ModelFamily::Dlr),
];

/// The names of all presets, by family and size.
pub fn names() -> Vec<String> {
    let tiny = std::iter::once("cola-tiny".to_owned());
    let sized = FAMILIES
        .iter()
        .flat_map(|(family, _)| SIZES.iter().map(move |size| format!("{family}-{}", size.name)));
    sized.chain(tiny).collect()
}

/// The preset with this name, case-insensitively.
///
/// # Errors
/// A defect with the nearest names when there is no such preset.
///
/// ```
/// let cola = narrows_plan::model::presets::find("cola-7b").unwrap();
/// assert_eq!(cola.blocks.len(), 32);
/// let defect = narrows_plan::model::presets::find("cola-7").unwrap_err();
/// assert!(defect.hint.unwrap().contains("cola-7b"));
/// ```
pub fn find(name: &str) -> Result<Model, Defect> {
    // Tests resolve every preset, so this error does not occur.
    find_file(name)?.resolve().map_err(|defects| Defect::new("model", defects.to_string()))
}

/// The file of the preset with this name, case-insensitively.
///
/// # Errors
/// As [`find`].
pub fn find_file(name: &str) -> Result<ModelFile, Defect> {
    let lower = name.to_ascii_lowercase();
    let preset = lower.split_once('-').and_then(|(family, size)| {
        let (_, family) = *FAMILIES.iter().find(|(known, _)| *known == family)?;
        let tiny = Some(&TINY).filter(|_| family == ModelFamily::Cola);
        let size = SIZES.iter().chain(tiny).find(|known| known.name == size)?;
        Some(file(lower.clone(), family, size))
    });
    preset.ok_or_else(|| unknown_preset(name))
}

fn file(name: String, family: ModelFamily, size: &ModelSize) -> ModelFile {
    let pair = |activation, crossing| {
        LinearFile::Pair(PairFile { rank: Some(size.rank), activation: Some(activation), crossing })
    };
    let crossing = LatentCrossing { form: CrossingForm::Released, gate: CrossingGate::Identity };
    let all = match family {
        ModelFamily::Llama => LinearFile::Dense,
        ModelFamily::Svd => pair(Activation::Identity, None),
        ModelFamily::Cola | ModelFamily::Dlr => pair(Activation::Silu, None),
        ModelFamily::Lax => pair(Activation::Silu, Some(CrossingFile::Some(crossing))),
    };
    let product = match family {
        ModelFamily::Llama | ModelFamily::Svd | ModelFamily::Dlr => GatedProduct::SwiGlu,
        ModelFamily::Cola | ModelFamily::Lax if size.gate_activation => GatedProduct::SwiGlu,
        ModelFamily::Cola | ModelFamily::Lax => GatedProduct::Plain,
    };
    let default = BlockFile { product: Some(product), all: Some(all), ..Default::default() };
    ModelFile {
        schema: None,
        format: ModelFormat::V1,
        name: Some(name),
        description: None,
        hidden: size.hidden,
        vocab: size.vocab,
        heads: size.heads,
        kv_heads: None,
        head_dim: None,
        d_ff: size.d_ff,
        max_sequence_length: SEQUENCE_LENGTH,
        norm_epsilon: 1e-6,
        latent_norm_epsilon: DEFAULT_LATENT_NORM_EPSILON,
        rope_theta: 10_000.0,
        rotary_dim: None,
        rope_scaling: None,
        initial_std: DEFAULT_INITIAL_STD,
        latent_residual: (family == ModelFamily::Dlr).then_some(1.0),
        padding_token: None,
        special_tokens: SpecialTokens::default(),
        tied: size.tied,
        blocks: BlocksFile { count: size.layers, default, overrides: Default::default() },
    }
}

/// The name of the dense counterpart: `llama-SIZE` for a preset, `NAME-dense` otherwise.
pub(super) fn dense_name(name: &str) -> String {
    let preset = name.split_once('-').filter(|(family, size)| {
        FAMILIES.iter().any(|(known, _)| known == family) && SIZES.iter().any(|s| s.name == *size)
    });
    match preset {
        Some((_, size)) => format!("llama-{size}"),
        None => format!("{name}-dense"),
    }
}

fn unknown_preset(name: &str) -> Defect {
    let lower = name.to_ascii_lowercase();
    let mut near: Vec<(usize, String)> =
        names().into_iter().map(|known| (strsim::levenshtein(&lower, &known), known)).collect();
    near.sort();
    let best = near[0].0;
    // Names that differ in more than half of the letters are unrelated: the hint lists the families instead.
    let hint = if best <= lower.len().div_ceil(2).min(4) {
        let nearest: Vec<_> =
            near.into_iter().filter(|(distance, _)| *distance == best).take(3).collect();
        let names: Vec<_> = nearest.into_iter().map(|(_, known)| known).collect();
        format!("did you mean {}?", names.join(" or "))
    } else {
        let sizes = SIZES.iter().map(|size| size.name).collect::<Vec<_>>().join(", ");
        format!("llama-, cola-, svd-, lax- or dlr- with {sizes}; or cola-tiny")
    };
    Defect::new("model", format!("there is no preset `{name}`")).hint(hint)
}
