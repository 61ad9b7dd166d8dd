//! Writes a model as the `config.json` of a published class.
//!
//! [`resolve`](super::resolve) reads the file as an equal model. A class has one shape for all blocks; what it
//! cannot express is refused with the linear or block and the reason.

use serde_json::{Value, json};

use crate::defect::Defect;
use crate::model::{
    Activation, AttentionMask, Block, FactorPair, GatedProduct, LinearKind, Model, Positions,
    RopeScaling, SpecialTokens, Weight,
};

/// A published class, whose constructor takes a `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigClass {
    /// `ColaForCausalLM` of the CoLA repository.
    Cola,
    /// `LlamaForCausalLM` of Hugging Face transformers, `MistralForCausalLM` with a sliding window, `Qwen2ForCausalLM` with
    /// biases of q, k and v, or `Qwen3ForCausalLM` with norms of the heads of q and k.
    Llama,
    /// Nanotron: BOOST's `ColaLlamaForTraining`, or `LlamaForTraining` for a dense model.
    Nanotron,
}

/// The linears of attention, and those of the MLP.
const HALVES: [&[LinearKind]; 2] = [
    &[LinearKind::Q, LinearKind::K, LinearKind::V, LinearKind::O],
    &[LinearKind::Gate, LinearKind::Up, LinearKind::Down],
];

/// The `config.json` of a model for a class.
///
/// # Errors
/// The first property of the model that the class does not have.
pub(in crate::model) fn config(model: &Model, class: ConfigClass) -> Result<Value, Defect> {
    let block = uniform_block(model)?;
    let rope_scaling = rope_scaling(model, class)?;
    if let Some(extra) = block.vectors_beside_linears().filter(|_| class != ConfigClass::Llama) {
        let problem = format!("has {extra}, which the class does not have");
        let hint = "--to llama, which writes Qwen's classes";
        return Err(with_hint_of_llama(Defect::new("layer 0", problem), model, hint));
    }
    if let Some((index, window)) = first_window(model).filter(|_| class != ConfigClass::Llama) {
        let problem =
            format!("attends within a window of {window} keys, which the class does not have");
        let hint = "--to llama, which writes Mistral's and Qwen's classes";
        return Err(with_hint_of_llama(
            Defect::new(format!("layer {index}"), problem),
            model,
            hint,
        ));
    }
    let mut config = shared_fields(model, block);
    add_special_tokens(&mut config, &model.special_tokens, class);
    let own = match class {
        ConfigClass::Llama => llama_fields(model, block)?,
        ConfigClass::Cola => cola_fields(model, block)?,
        ConfigClass::Nanotron if model.is_low_rank() => boost_fields(block)?,
        ConfigClass::Nanotron => {
            llama_fields(model, block)?;
            json!({"hidden_act": "silu", "is_llama_config": true, "rope_interleaved": false})
        }
    };
    if let (Value::Object(config), Value::Object(mut own)) = (&mut config, own) {
        config.append(&mut own);
        config.extend(rope_scaling.map(|scaling| ("rope_scaling".to_owned(), scaling)));
    }
    Ok(config)
}

/// A defect with a hint of the classes that `llama` writes, if one of them has the model or its folded counterpart.
fn with_hint_of_llama(defect: Defect, model: &Model, hint: &str) -> Defect {
    let folded = model.folded().and_then(|folded| config(&folded, ConfigClass::Llama));
    if folded.is_ok() { defect.hint(hint) } else { defect }
}

/// Block 0, which all others must equal.
fn uniform_block(model: &Model) -> Result<&Block, Defect> {
    for (index, block) in model.blocks.iter().enumerate() {
        for (kind, linear) in block.linears() {
            if matches!(&linear.weight, Weight::Pair(FactorPair { crossing: Some(_), .. })) {
                let problem = "has a latent crossing, which no class has";
                return Err(Defect::new(format!("layer {index} {kind}"), problem));
            }
            if linear != model.blocks[0].linear(kind) {
                let problem = "differs from layer 0, and a config.json has one shape for all";
                return Err(Defect::new(format!("layer {index} {kind}"), problem));
            }
        }
        let vectors = |block: &Block| (block.qkv_bias, block.qk_norm);
        if vectors(block) != vectors(&model.blocks[0]) {
            let problem = "has other biases or norms of heads than layer 0, and a config.json has one shape for all";
            return Err(Defect::new(format!("layer {index}"), problem));
        }
        if block.positions == Positions::None {
            return Err(Defect::new(format!("layer {index}"), "has no RoPE, which no class lacks"));
        }
        if block.product != model.blocks[0].product {
            let problem = "has another product of gate and up than layer 0";
            return Err(Defect::new(format!("layer {index}"), problem));
        }
    }
    Ok(&model.blocks[0])
}

/// The field of a scaling of RoPE, where the model has one.
fn rope_scaling(model: &Model, class: ConfigClass) -> Result<Option<Value>, Defect> {
    if model.rope.dim != model.head_dim {
        let (dim, head_dim) = (model.rope.dim, model.head_dim);
        let problem = format!("is {dim}, and the class rotates all {head_dim} features of a head");
        return Err(Defect::new("rotary_dim", problem));
    }
    let Some(scaling) = &model.rope.scaling else { return Ok(None) };
    if class != ConfigClass::Llama {
        return Err(Defect::new("rope_scaling", "scales RoPE, which the class does not"));
    }
    Ok(Some(match scaling {
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_length } => {
            json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_length,
            })
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, original_length } => {
            json!({
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
                "original_max_position_embeddings": original_length,
            })
        }
        RopeScaling::LongRope { short, long, attention_factor, original_length } => json!({
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": attention_factor,
            "original_max_position_embeddings": original_length,
        }),
    }))
}

fn shared_fields(model: &Model, block: &Block) -> Value {
    json!({
        "hidden_size": model.hidden,
        "intermediate_size": block.up.d_out,
        "num_hidden_layers": model.blocks.len(),
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope.theta,
        "initializer_range": model.initial_std,
        "pad_token_id": model.padding_token,
        "tie_word_embeddings": model.tied,
        "torch_dtype": "float32",
    })
}

/// Adds the tokens at which texts begin and end, where they are known: else the class has its own.
fn add_special_tokens(config: &mut Value, tokens: &SpecialTokens, class: ConfigClass) {
    if let Some(bos) = tokens.bos {
        config["bos_token_id"] = json!(bos);
    }
    match tokens.eos.as_slice() {
        [] => {}
        [eos] => config["eos_token_id"] = json!(eos),
        // Nanotron has one.
        [eos, ..] if class == ConfigClass::Nanotron => config["eos_token_id"] = json!(eos),
        all => config["eos_token_id"] = json!(all),
    }
}

fn llama_fields(model: &Model, block: &Block) -> Result<Value, Defect> {
    if let Some((kind, _)) = block.linears().into_iter().find(|(_, l)| l.rank().is_some()) {
        let problem = "is a factor pair, and LLaMA's linears are dense";
        return Err(Defect::new(format!("layer 0 {kind}"), problem));
    }
    let hidden_act = match block.product {
        GatedProduct::SwiGlu => "silu",
        GatedProduct::Plain => {
            let problem = "has a plain product of gate and up, and LLaMA has SiLU on the gate";
            return Err(Defect::new("layer 0", problem));
        }
    };
    let window = common_window(model)?;
    let layer_types: Vec<&str> = model.blocks.iter().map(layer_type).collect();
    // Older versions of transformers read the first block with a window, and no list.
    let first = layer_types.iter().position(|kind| *kind == "sliding_attention");
    let max_window_layers =
        first.filter(|first| layer_types[*first..].iter().all(|kind| *kind == "sliding_attention"));
    if let Some(index) = layer_types.iter().position(|kind| *kind == "full_attention")
        && window.is_some()
        && !(block.qkv_bias || block.qk_norm)
    {
        let problem = "has no window, and Mistral's class has one in all layers";
        return Err(Defect::new(format!("layer {index}"), problem));
    }
    let mut config = match (block.qkv_bias, block.qk_norm) {
        (false, false) if window.is_some() => json!({
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_act": hidden_act,
            "sliding_window": window,
        }),
        (false, false) => json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": hidden_act,
            "attention_bias": false,
            "mlp_bias": false,
        }),
        (true, false) => json!({
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": hidden_act,
        }),
        (false, true) => json!({
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": hidden_act,
            "attention_bias": false,
        }),
        (true, true) => {
            let problem = "has both biases of q, k and v and norms of heads, which no class has";
            return Err(Defect::new("layer 0", problem));
        }
    };
    if block.qkv_bias || block.qk_norm {
        let windows = json!({
            "use_sliding_window": window.is_some(),
            "sliding_window": window,
            "max_window_layers": max_window_layers,
            "layer_types": layer_types,
        });
        if let (Value::Object(config), Value::Object(mut windows)) = (&mut config, windows) {
            config.append(&mut windows);
        }
    }
    Ok(config)
}

/// The first block with a sliding window, and its keys.
fn first_window(model: &Model) -> Option<(usize, u64)> {
    model.blocks.iter().enumerate().find_map(|(index, block)| match block.attention {
        AttentionMask::SlidingWindow(window) => Some((index, window)),
        AttentionMask::Full => None,
    })
}

/// The window of all blocks that have one; `None` where no block has.
fn common_window(model: &Model) -> Result<Option<u64>, Defect> {
    let Some((first, window)) = first_window(model) else { return Ok(None) };
    for (index, block) in model.blocks.iter().enumerate() {
        if let AttentionMask::SlidingWindow(other) = block.attention
            && other != window
        {
            let problem = format!("has a window of {other} keys, and layer {first} of {window}");
            return Err(Defect::new(format!("layer {index}"), problem));
        }
    }
    Ok(Some(window))
}

fn layer_type(block: &Block) -> &'static str {
    match block.attention {
        AttentionMask::Full => "full_attention",
        AttentionMask::SlidingWindow(_) => "sliding_attention",
    }
}

fn cola_fields(model: &Model, block: &Block) -> Result<Value, Defect> {
    let (rank, activation) = common_pair(block, &LinearKind::ALL)?;
    if model.kv_heads != model.heads {
        let problem = format!(
            "has {} KV heads for {} query heads, and CoLA's projections of keys have as many as \
             queries",
            model.kv_heads, model.heads
        );
        return Err(Defect::new("layer 0 k", problem));
    }
    let (hidden_act, only_latent) = match (activation, block.product) {
        (Activation::Silu, GatedProduct::Plain) => ("silu", true),
        (Activation::Silu, GatedProduct::SwiGlu) => ("silu", false),
        (Activation::Identity, GatedProduct::Plain) => ("linear", true),
        (Activation::Identity, GatedProduct::SwiGlu) => {
            let problem = "has SiLU on the gate and not in the latents, and CoLA's class has one \
                           activation for both";
            let hint = "--to llama, which folds the pairs";
            return Err(with_hint_of_llama(Defect::new("layer 0", problem), model, hint));
        }
    };
    Ok(json!({
        "architectures": ["ColaForCausalLM"],
        "model_type": "cola",
        "hidden_act": hidden_act,
        "lr_act_type": hidden_act,
        "only_lr_act": only_latent,
        "rank": rank,
        "attention_bias": false,
        "mlp_bias": false,
    }))
}

fn boost_fields(block: &Block) -> Result<Value, Defect> {
    let [attention, mlp] = HALVES.map(|half| common_pair(block, half));
    let ((attn_rank, activation), (mlp_rank, mlp_activation)) = (attention?, mlp?);
    for (activation, place) in [(activation, "layer 0 q"), (mlp_activation, "layer 0 gate")] {
        if activation != Activation::Silu {
            let problem = "has no activation between the factors, and BOOST's class has SiLU";
            return Err(Defect::new(place, problem));
        }
    }
    match block.product {
        GatedProduct::Plain => {}
        GatedProduct::SwiGlu => {
            let problem = "has SiLU on the gate, and BOOST's class has a plain product";
            return Err(Defect::new("layer 0", problem));
        }
    }
    Ok(json!({
        "hidden_act": "silu",
        "is_cola_llama_config": true,
        "attn_rank": attn_rank,
        "mlp_rank": mlp_rank,
        "rope_interleaved": false,
    }))
}

/// Rank and activation that linears have in common.
fn common_pair(block: &Block, kinds: &[LinearKind]) -> Result<(u64, Activation), Defect> {
    let mut common: Option<&FactorPair> = None;
    for kind in kinds {
        let place = format!("layer 0 {kind}");
        let Weight::Pair(pair) = &block.linear(*kind).weight else {
            return Err(Defect::new(place, "is dense, and the class has factor pairs only"));
        };
        let first = *common.get_or_insert(pair);
        if pair.rank != first.rank {
            let problem = format!("has rank {}, and {} has {}", pair.rank, kinds[0], first.rank);
            return Err(Defect::new(place, problem));
        }
        if pair.activation != first.activation {
            let problem = format!("has another activation than {}", kinds[0]);
            return Err(Defect::new(place, problem));
        }
    }
    let common = common.ok_or_else(|| Defect::new("layer 0", "has no linears"))?;
    Ok((common.rank, common.activation))
}
