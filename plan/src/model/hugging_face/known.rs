//! Lists of the known fields of a `config.json`.
//!
//! Fields outside these lists are refused, because they could change the function of the model.

use serde_json::Value;

/// Fields without effect on the function of a model in training: bookkeeping, other special tokens, generation,
/// and return values of Python calls.
pub(super) const IGNORED_FIELDS: &[&str] = &[
    // Bookkeeping.
    "$schema",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "_output_attentions",
    "attn_implementation",
    "auto_map",
    "dtype",
    "is_decoder",
    "name_or_path",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    // Special tokens; some of them are lists in newer files.
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sep_token_id",
    "suppress_tokens",
    "unk_token_id",
    // Generation.
    "bad_words_ids",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "use_cache",
    // Heads of other tasks, and return values.
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "problem_type",
    "return_dict",
    "return_dict_in_generate",
    "task_specific_params",
    "tf_legacy_loss",
    "torchscript",
    "use_bfloat16",
];

/// The value of a field that does not change a LLaMA block. `null` never does.
#[derive(Clone, Copy)]
pub(super) enum NeutralValue {
    False,
    Zero,
    One,
    Null,
    /// An empty list or object.
    Empty,
}

/// A field that is accepted with its neutral value only.
pub(super) struct NeutralField {
    pub field: &'static str,
    pub value: NeutralValue,
    /// Reason why other values are refused.
    pub reason: &'static str,
}

const fn neutral_field(
    field: &'static str,
    value: NeutralValue,
    reason: &'static str,
) -> NeutralField {
    NeutralField { field, value, reason }
}

const NO_BIAS: &str = "linears with a bias are not supported";
const NO_DROPOUT: &str = "dropout is not supported";
const DECODER: &str = "only decoders are supported";
const ROPE: &str = "only plain half-rotated RoPE is supported";

/// Fields that change the function unless they are neutral.
pub(super) const NEUTRAL_FIELDS: &[NeutralField] = &[
    neutral_field("add_cross_attention", NeutralValue::False, DECODER),
    neutral_field("attention_bias", NeutralValue::False, NO_BIAS),
    neutral_field("attention_dropout", NeutralValue::Zero, NO_DROPOUT),
    neutral_field("attn_pdrop", NeutralValue::Zero, NO_DROPOUT),
    neutral_field("bias", NeutralValue::False, NO_BIAS),
    neutral_field("chunk_size_feed_forward", NeutralValue::Zero, "a chunked MLP is not supported"),
    neutral_field("compression_config", NeutralValue::Null, "compressed weights are not supported"),
    neutral_field("cross_attention_hidden_size", NeutralValue::Null, DECODER),
    neutral_field("embd_pdrop", NeutralValue::Zero, NO_DROPOUT),
    neutral_field("hidden_dropout", NeutralValue::Zero, NO_DROPOUT),
    neutral_field("is_encoder_decoder", NeutralValue::False, DECODER),
    neutral_field("mlp_bias", NeutralValue::False, NO_BIAS),
    neutral_field(
        "pretraining_tp",
        NeutralValue::One,
        "other values split the GEMMs and sum their parts in another order",
    ),
    neutral_field("pruned_heads", NeutralValue::Empty, "pruned heads are not supported"),
    neutral_field("qkv_bias", NeutralValue::False, NO_BIAS),
    neutral_field(
        "quantization_config",
        NeutralValue::Null,
        "quantised weights cannot be trained here",
    ),
    neutral_field("resid_pdrop", NeutralValue::Zero, NO_DROPOUT),
    neutral_field("rope_interleaved", NeutralValue::False, ROPE),
    neutral_field("tie_encoder_decoder", NeutralValue::False, DECODER),
    neutral_field("use_bias", NeutralValue::False, NO_BIAS),
];

impl NeutralValue {
    pub fn accepts(self, value: &Value) -> bool {
        match (self, value) {
            (_, Value::Null) => true,
            (NeutralValue::False, value) => value == &Value::Bool(false),
            (NeutralValue::Zero, value) => value.as_f64() == Some(0.0),
            (NeutralValue::One, value) => value.as_f64() == Some(1.0),
            (NeutralValue::Null, _) => false,
            (NeutralValue::Empty, Value::Array(list)) => list.is_empty(),
            (NeutralValue::Empty, Value::Object(map)) => map.is_empty(),
            (NeutralValue::Empty, _) => false,
        }
    }

    /// The neutral value as JSON.
    pub fn to_json(self) -> String {
        match self {
            NeutralValue::False => "false".to_owned(),
            NeutralValue::Zero => "0".to_owned(),
            NeutralValue::One => "1".to_owned(),
            NeutralValue::Null => "null".to_owned(),
            NeutralValue::Empty => "{}".to_owned(),
        }
    }
}
