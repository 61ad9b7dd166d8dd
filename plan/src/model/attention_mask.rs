//! The keys that a query attends to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The keys that a query attends to: none that follow it.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum AttentionMask {
    /// All keys up to the query.
    #[default]
    Full,
    /// At most this many keys, of which the query's own is the last (Mistral).
    SlidingWindow(u64),
}

impl AttentionMask {
    /// Keys of a query at most, in sequences of `length` tokens; `None` where all of them are visible.
    pub fn window(self, length: u64) -> Option<u64> {
        match self {
            AttentionMask::SlidingWindow(window) if window < length => Some(window),
            _ => None,
        }
    }
}
