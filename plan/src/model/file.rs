//! `narrows-model/1`: our own way to write a model down.
//!
//! The file is made of layers, so that a small difference is a small text. A block's linear is what
//! is left after four layers, each of which may name any part of it:
//! `blocks.default.all`, `blocks.default.q`, then, for every override whose key covers the block and
//! in the order they are written, `blocks.overrides.KEY.all` and `blocks.overrides.KEY.q`.
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
//! What changes the function (activation, product, crossing) has no default and must be said once;
//! what LLaMA fixed for everyone (ε, θ) has.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use indexmap::IndexMap;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Activation, GatedProduct, LatentCrossing};

/// A model as it is written, not yet checked: [`ModelFile::resolve`] makes it a
/// [`Model`](super::Model).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Narrows model")]
pub struct ModelFile {
    /// Where an editor finds the JSON Schema of this file.
    #[serde(rename = "$schema", default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// The format and its version.
    pub format: ModelFormat,
    /// A short name for messages and file names; without it, the file's own name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Anything worth saying about the model; never read.
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
    /// Key and value heads, a divisor of `heads`; without it, as many as `heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub kv_heads: Option<u64>,
    /// Features of one head, even; without it, `hidden` / `heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 16_777_216))]
    pub head_dim: Option<u64>,
    /// Inner width of the MLP; a block may differ.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub d_ff: u64,
    /// Longest sequence the model is meant for, in tokens.
    #[serde(default = "default_max_sequence_length")]
    #[schemars(range(min = 1, max = 1_073_741_824))]
    pub max_sequence_length: u64,
    /// ε of every RMSNorm.
    #[serde(default = "default_norm_epsilon")]
    pub norm_epsilon: f64,
    /// Base θ of the rotary position embedding.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Whether embedding and head are one weight.
    #[serde(default)]
    pub tied: bool,
    /// The blocks.
    pub blocks: BlocksFile,
}

/// The format's name and version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ModelFormat {
    /// The only version there is.
    #[serde(rename = "narrows-model/1")]
    V1,
}

/// The blocks: how many, what they have in common, and where they differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlocksFile {
    /// Number of blocks.
    #[schemars(range(min = 1, max = 4096))]
    pub count: u64,
    /// What holds for every block that says nothing else.
    pub default: BlockFile,
    /// What differs, by block: `"3"` is the fourth block, `"3-7"` are five blocks. Later entries
    /// win over earlier ones.
    #[serde(
        default,
        deserialize_with = "without_repeated_keys",
        skip_serializing_if = "IndexMap::is_empty"
    )]
    pub overrides: IndexMap<String, BlockFile>,
}

/// One layer of what a block is. What is not said is left as it was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BlockFile {
    /// Inner width of the MLP, when it is not the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub d_ff: Option<u64>,
    /// How gate and up are multiplied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product: Option<GatedProduct>,
    /// All seven linears at once; the named ones below are applied after it.
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

/// One layer of what a linear is: the word `"dense"`, or a (part of a) factor pair.
#[derive(Clone, Debug, PartialEq)]
pub enum LinearFile {
    /// One matrix.
    Dense,
    /// A factor pair, or what changes in it.
    Pair(PairFile),
}

/// One layer of what a factor pair is. What is not said is left as it was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PairFile {
    /// The inner width r.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub rank: Option<u64>,
    /// What is applied to the latent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation: Option<Activation>,
    /// The crossing from the previous block's latent; block 0 never has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crossing: Option<CrossingFile>,
}

/// The word `"none"`, or a crossing.
#[derive(Clone, Debug, PartialEq)]
pub enum CrossingFile {
    /// No crossing, where an earlier layer asked for one.
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

/// The JSON Schema of [`ModelFile`], for editors and for `models/*.json`.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ModelFile).to_value()
}

impl BlockFile {
    /// What this layer says of the seven linears, in the order of [`Block::linears`]; `all` apart.
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

/// `"word"` or a map. Written by hand because an untagged enum would answer every mistake inside
/// the map with "did not match any variant", without its place.
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

/// A map in which writing a key twice is an error; JSON alone would keep the last in silence.
fn without_repeated_keys<'de, D, T>(deserializer: D) -> Result<IndexMap<String, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct UniqueKeys<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for UniqueKeys<T> {
        type Value = IndexMap<String, T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut unique = IndexMap::new();
            while let Some((key, value)) = map.next_entry::<String, T>()? {
                if unique.contains_key(&key) {
                    return Err(A::Error::custom(format_args!("`{key}` is written twice")));
                }
                unique.insert(key, value);
            }
            Ok(unique)
        }
    }
    deserializer.deserialize_map(UniqueKeys(PhantomData))
}

/// Serde and schema of an enum that is one word or one object.
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
    "A linear: dense, or a factor pair (or what changes in it)."
);
word_or_object!(
    CrossingFile,
    "none",
    None,
    Some(LatentCrossing),
    "A crossing, or none where an earlier layer asked for one."
);
