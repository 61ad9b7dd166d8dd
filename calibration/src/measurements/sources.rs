//! Reads the sources of a file: JSON allows a key twice, and the last would silently win.

use std::fmt;

use indexmap::IndexMap;
use indexmap::map::Entry;
use serde::Deserializer;
use serde::de::{Error, MapAccess, Visitor};

use super::Citation;

struct UniqueSources;

impl<'de> Visitor<'de> for UniqueSources {
    type Value = IndexMap<String, Citation>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sources by their names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut sources = IndexMap::new();
        while let Some((name, source)) = map.next_entry::<String, Citation>()? {
            match sources.entry(name) {
                Entry::Occupied(taken) => {
                    let problem =
                        format!("`{}` is there twice; name one of them otherwise", taken.key());
                    return Err(Error::custom(problem));
                }
                Entry::Vacant(free) => {
                    free.insert(source);
                }
            }
        }
        Ok(sources)
    }
}

/// Reads them.
///
/// # Errors
/// A name that is there twice.
pub fn each_once<'de, D>(deserializer: D) -> Result<IndexMap<String, Citation>, D::Error>
where
    D: Deserializer<'de>,
{
    deserializer.deserialize_map(UniqueSources)
}
