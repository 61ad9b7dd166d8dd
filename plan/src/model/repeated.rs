//! Reports repeated keys of JSON objects, of which readers silently take the first or the last.

use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::{Defect, Defects};

/// Reports every repeated key of a JSON text.
pub fn check(text: &str) -> Result<(), Defects> {
    let mut paths = vec![];
    let walk = RepeatedKeyVisitor { path: String::new(), paths: &mut paths };
    // The caller reports a syntax error.
    let _ = walk.deserialize(&mut serde_json::Deserializer::from_str(text));
    let mut defects = Defects::default();
    for field in paths {
        defects.push(Defect::new(field, "is repeated").hint("remove all but one"));
    }
    defects.into_result(())
}

/// Visits a value and collects the paths of repeated keys.
struct RepeatedKeyVisitor<'a> {
    path: String,
    paths: &'a mut Vec<String>,
}

impl RepeatedKeyVisitor<'_> {
    fn at(&mut self, key: &str) -> RepeatedKeyVisitor<'_> {
        let path =
            if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        RepeatedKeyVisitor { path, paths: self.paths }
    }
}

impl<'de> DeserializeSeed<'de> for RepeatedKeyVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for RepeatedKeyVisitor<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut seen: HashSet<String> = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = self.at(&key);
            if seen.contains(&key) && !value.paths.contains(&value.path) {
                value.paths.push(value.path);
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            map.next_value_seed(value)?;
            seen.insert(key);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut at = 0;
        while let Some(()) = seq.next_element_seed(RepeatedKeyVisitor {
            path: format!("{}[{at}]", self.path),
            paths: &mut *self.paths,
        })? {
            at += 1;
        }
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}
