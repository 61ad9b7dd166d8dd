//! The model format `narrows-model/1`.
//!
//! A linear of a block is merged from layers, each of which may set any part of it and takes precedence
//! over the layers before: `blocks.default.all`, `blocks.default.q`, then, for every override whose key
//! covers the block, in the order of the file, `blocks.overrides.KEY.all` and `blocks.overrides.KEY.q`.
//!
//! ```
//! let model = narrows_plan::model::read("tiny.json", r#"{
//!   "format": "narrows-model/1",
//!   "hidden": 64, "vocab": 256, "heads": 4, "d_ff": 172,
//!   "blocks": {
//!     "count": 6,
//!     "default": {"product": "plain", "all": {"rank": 16, "activation": "silu"}},
//!     "overrides": {"3": {"q": {"rank": 7}}, "4-5": {"down": "dense"}}
//!   }
//! }"#).unwrap();
//! assert_eq!(model.blocks[3].q.rank(), Some(7));
//! assert_eq!(model.blocks[3].k.rank(), Some(16));
//! assert_eq!(model.blocks[5].down.rank(), None);
//! ```
//!
//! Activation and product have no default, because published models differ in them. ε, θ and the initial
//! standard deviation default to the values of LLaMA, and latents do not cross by default.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use indexmap::IndexMap;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::json;

use super::{
    Activation, AttentionMask, GatedProduct, LatentCrossing, Positions, RopeScaling, SpecialTokens,
};

/// ε of the LayerNorm over a crossed latent unless a file sets it: that of the released LaX.
pub(super) const DEFAULT_LATENT_NORM_EPSILON: f64 = 1e-6;

/// Initial standard deviation of dense weights unless a file sets it: that of LLaMA.
pub(super) const DEFAULT_INITIAL_STD: f64 = 0.02;

/// A model file, not yet checked: [`ModelFile::resolve`] returns the [`Model`](super::Model).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Narrows model")]
pub struct ModelFile {
    /// Location of the JSON Schema of this file, for editors.
    #[serde(rename = "$schema", default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// The format and its version.
    pub format: ModelFormat,
    /// Name of the model, for messages and file names; by default the name of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Free text, ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Width of the residual stream.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub hidden: u64,
    /// Tokens in the vocabulary.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub vocab: u64,
    /// Query heads.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub heads: u64,
    /// Key and value heads, a divisor of `heads`; by default as many as `heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub kv_heads: Option<u64>,
    /// Features of one head, an even number; by default `hidden` / `heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 16_777_216))]
    pub head_dim: Option<u64>,
    /// Inner width of the MLP, unless a block sets its own.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub d_ff: u64,
    /// Longest supported sequence, in tokens.
    #[serde(default = "default_max_sequence_length")]
    #[schemars(range(min = 1, max = 1_073_741_824))]
    pub max_sequence_length: u64,
    /// ε of every RMSNorm.
    #[serde(default = "default_norm_epsilon")]
    pub norm_epsilon: f64,
    /// ε of the LayerNorm over a crossed latent, in the released form of LaX.
    #[serde(
        default = "default_latent_norm_epsilon",
        skip_serializing_if = "is_default_latent_norm_epsilon"
    )]
    pub latent_norm_epsilon: f64,
    /// Base θ of the rotary position embedding.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Features of a head that RoPE rotates, the first ones; by default all. Even.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 16_777_216))]
    pub rotary_dim: Option<u64>,
    /// Scaling of the frequencies of RoPE; by default none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Initial standard deviation of embedding, head and dense linears. That of factors follows from
    /// their shapes.
    #[serde(default = "default_initial_std", skip_serializing_if = "is_default_initial_std")]
    pub initial_std: f64,
    /// Strength α of the latent residual of DLR, which is part of the initial factors B; by default none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub latent_residual: Option<f64>,
    /// Token whose embedding starts at zero and gets no gradient from the lookup, as PyTorch's
    /// `padding_idx`; by default none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 16_777_215))]
    pub padding_token: Option<u64>,
    /// Tokens at which texts begin and end, for programs that generate text; by default unknown.
    #[serde(default, skip_serializing_if = "SpecialTokens::is_empty")]
    pub special_tokens: SpecialTokens,
    /// Whether embedding and head are one weight.
    #[serde(default)]
    pub tied: bool,
    /// The blocks.
    pub blocks: BlocksFile,
}

/// Name and version of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ModelFormat {
    /// Version 1.
    #[serde(rename = "narrows-model/1")]
    V1,
}

/// The blocks: their number, a default, and overrides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlocksFile {
    /// Number of blocks.
    #[schemars(range(min = 1, max = 4096))]
    pub count: u64,
    /// Default of all blocks.
    pub default: BlockFile,
    /// Overrides by block, counted from 0: `"3"` is one block, `"3-7"` are five. Later entries take
    /// precedence.
    #[serde(
        default,
        deserialize_with = "json::without_repeated_keys",
        skip_serializing_if = "IndexMap::is_empty"
    )]
    pub overrides: IndexMap<String, BlockFile>,
}

/// One layer of a block. Absent fields keep the values of earlier layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BlockFile {
    /// Inner width of the MLP; by default that of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub d_ff: Option<u64>,
    /// Product of gate and up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product: Option<GatedProduct>,
    /// Dependence of queries and keys on their positions; by default RoPE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub positions: Option<Positions>,
    /// The keys that a query attends to; by default all up to the query.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<AttentionMask>,
    /// Whether biases are added to the outputs of q, k and v; by default not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qkv_bias: Option<bool>,
    /// Whether every head of q and k has an RMSNorm before it is rotated; by default not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_norm: Option<bool>,
    /// All seven linears; fields of single linears take precedence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all: Option<LinearFile>,
    /// Query projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub q: Option<LinearFile>,
    /// Key projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k: Option<LinearFile>,
    /// Value projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v: Option<LinearFile>,
    /// Output projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub o: Option<LinearFile>,
    /// Gate projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate: Option<LinearFile>,
    /// Up projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub up: Option<LinearFile>,
    /// Down projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub down: Option<LinearFile>,
}

/// One layer of a linear: the string `"dense"`, or some fields of a factor pair.
#[derive(Clone, Debug, PartialEq)]
pub enum LinearFile {
    /// One matrix.
    Dense,
    /// A factor pair, or its changed fields.
    Pair(PairFile),
}

/// One layer of a factor pair. Absent fields keep the values of earlier layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PairFile {
    /// The inner width r.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub rank: Option<u64>,
    /// The activation φ of the latent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation: Option<Activation>,
    /// The crossing from the previous block's latent; block 0 never has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crossing: Option<CrossingFile>,
}

/// The string `"none"`, or a crossing.
#[derive(Clone, Debug, PartialEq)]
pub enum CrossingFile {
    /// No crossing, where an earlier layer has one.
    None,
    /// A crossing.
    Some(LatentCrossing),
}

fn default_max_sequence_length() -> u64 {
    2048
}

fn default_norm_epsilon() -> f64 {
    1e-6
}

fn default_rope_theta() -> f64 {
    10_000.0
}

fn default_latent_norm_epsilon() -> f64 {
    DEFAULT_LATENT_NORM_EPSILON
}

fn is_default_latent_norm_epsilon(epsilon: &f64) -> bool {
    *epsilon == DEFAULT_LATENT_NORM_EPSILON
}

fn default_initial_std() -> f64 {
    DEFAULT_INITIAL_STD
}

fn is_default_initial_std(std: &f64) -> bool {
    *std == DEFAULT_INITIAL_STD
}

/// The JSON Schema of [`ModelFile`].
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ModelFile).to_value()
}

impl BlockFile {
    /// The seven linears of this layer without `all`, in the order of [`Block::linears`].
    ///
    /// [`Block::linears`]: super::Block::linears
    pub fn linears(&self) -> [(&'static str, Option<&LinearFile>); 7] {
        [
            ("q", self.q.as_ref()),
            ("k", self.k.as_ref()),
            ("v", self.v.as_ref()),
            ("o", self.o.as_ref()),
            ("gate", self.gate.as_ref()),
            ("up", self.up.as_ref()),
            ("down", self.down.as_ref()),
        ]
    }

    pub(super) fn linears_mut(&mut self) -> [&mut Option<LinearFile>; 7] {
        [
            &mut self.q,
            &mut self.k,
            &mut self.v,
            &mut self.o,
            &mut self.gate,
            &mut self.up,
            &mut self.down,
        ]
    }
}

/// Visitor of a string or an object. An untagged enum would report every error within the object as "did
/// not match any variant", without its field.
struct WordOrMap<T> {
    word: &'static str,
    map: PhantomData<T>,
}

fn word_or_map<'de, D, T>(deserializer: D, word: &'static str) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_any(WordOrMap { word, map: PhantomData })
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for WordOrMap<T> {
    type Value = Option<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" or an object", self.word)
    }

    fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<Option<T>, E> {
        if word == self.word {
            Ok(None)
        } else {
            Err(E::invalid_value(serde::de::Unexpected::Str(word), &self))
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Option<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }
}

/// Implements serde and the schema of an enum that is a string or an object.
macro_rules! word_or_object {
    ($name:ident, $word:literal, $unit:ident, $object:ident($inner:ty), $about:literal) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                match self {
                    $name::$unit => serializer.serialize_str($word),
                    $name::$object(inner) => inner.serialize(serializer),
                }
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Ok(word_or_map(deserializer, $word)?.map_or($name::$unit, $name::$object))
            }
        }
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(generator: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "description": $about,
                    "anyOf": [{"const": $word}, generator.subschema_for::<$inner>()]
                })
            }
        }
    };
}
word_or_object!(
    LinearFile,
    "dense",
    Dense,
    Pair(PairFile),
    "A linear: dense, or a factor pair (or its changed fields)."
);
word_or_object!(
    CrossingFile,
    "none",
    None,
    Some(LatentCrossing),
    "A crossing, or none where an earlier layer has one."
);
