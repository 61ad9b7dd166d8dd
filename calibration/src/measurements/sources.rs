//! Sources of measurements. Their deserialization rejects duplicate keys, of which JSON parsers otherwise keep the last.

use std::fmt;

use indexmap::IndexMap;
use indexmap::map::Entry;
use schemars::JsonSchema;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The source of measurements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Citation {
    /// Publication, repository and file, or the person and the run.
    pub citation: String,
    /// Conditions: software, number formats, repetitions, known differences.
    pub conditions: String,
}

struct UniqueSources;

impl<'de> Visitor<'de> for UniqueSources {
    type Value = IndexMap<String, Citation>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object of sources by key")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut sources = IndexMap::new();
        while let Some((name, source)) = map.next_entry::<String, Citation>()? {
            match sources.entry(name) {
                Entry::Occupied(existing) => {
                    let problem = format!("duplicate key `{}`: rename one of them", existing.key());
                    return Err(Error::custom(problem));
                }
                Entry::Vacant(vacant) => {
                    vacant.insert(source);
                }
            }
        }
        Ok(sources)
    }
}

/// Deserializes sources.
///
/// # Errors
/// A duplicate key.
pub(super) fn unique_sources<'de, D>(
    deserializer: D,
) -> Result<IndexMap<String, Citation>, D::Error>
where
    D: Deserializer<'de>,
{
    deserializer.deserialize_map(UniqueSources)
}
