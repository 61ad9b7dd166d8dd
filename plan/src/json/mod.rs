//! Parses JSON text into typed values, with errors that name the field.

use std::fmt;
use std::marker::PhantomData;

use indexmap::IndexMap;
use serde::de::{DeserializeOwned, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::Defect;

mod words;

/// The text without a byte order mark, which some editors write and no format here allows.
pub fn without_byte_order_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// Parses a JSON document of one value, which may follow a byte order mark.
///
/// # Errors
/// The first defect: a syntax error, a wrong type, an unknown or missing field, or text after the value.
/// The field is a path such as `blocks.default.all`, empty for the document itself.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, Defect> {
    read_bytes(without_byte_order_mark(text).as_bytes())
}

/// Parses a JSON document of one value from bytes that may not be UTF-8.
///
/// # Errors
/// As [`read`].
pub fn read_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Defect> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        // serde_path_to_error writes the document itself as ".", and a name that is not complete as "?".
        let path = path.trim_end_matches('?');
        let field = cut_in_the_middle(path.strip_suffix('.').unwrap_or(path));
        // In a text that is JSON, this error of syntax is serde's answer to an enum of another type.
        let is_of_enum = error.inner().to_string().starts_with("expected value ")
            && serde_json::from_slice::<IgnoredAny>(bytes).is_ok();
        match is_of_enum {
            true => words::defect_of_enum(field, error.inner()),
            false => words::defect(field, error.inner()),
        }
    })?;
    deserializer.end().map_err(|error| words::defect(String::new(), &error))?;
    Ok(value)
}

/// Longest path that a message shows, in characters.
const PATH_MAX: usize = 160;

/// A path with its first and its last characters, where it is longer than a message shows, as that of deeply nested lists.
fn cut_in_the_middle(path: &str) -> String {
    let count = path.chars().count();
    if count <= PATH_MAX {
        return path.to_owned();
    }
    let first: String = path.chars().take(PATH_MAX / 2).collect();
    let last: String = path.chars().skip(count - PATH_MAX / 2).collect();
    format!("{first}…{last}")
}

/// A problem without the line and column that [`read`] adds, for texts that no user wrote.
pub fn without_position(problem: &str) -> &str {
    problem.rsplit_once(" (line ").map_or(problem, |(problem, _)| problem)
}

/// The defect of a document of one line, whose line its file knows.
pub fn defect_of_line(error: &serde_json::Error) -> Defect {
    let defect = words::defect(String::new(), error);
    let problem = without_position(&defect.problem);
    let problem = match (error.line(), error.column()) {
        (1, column @ 1..) => format!("{problem} (column {column})"),
        _ => problem.to_owned(),
    };
    Defect { problem, ..defect }
}

/// Deserializes a map and reports repeated keys, of which serde would keep the last.
///
/// # Errors
/// A repeated key, or an error of a value.
pub fn without_repeated_keys<'de, D, T, M>(deserializer: D) -> Result<M, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
    M: FromIterator<(String, T)>,
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
                    return Err(A::Error::custom(format_args!("key `{key}` is repeated")));
                }
                unique.insert(key, value);
            }
            Ok(unique)
        }
    }
    deserializer.deserialize_map(UniqueKeys(PhantomData)).map(M::from_iter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_field() {
        #[derive(Debug, Deserialize)]
        #[allow(dead_code, reason = "read for its errors")]
        struct Outer {
            items: Vec<u8>,
        }
        let field = |text: &str| read::<Outer>(text).unwrap_err().field;
        assert_eq!(field(r#"{"items": [1, -2]}"#), "items[1]");
        assert_eq!(field("[]"), "");
        assert_eq!(field("{"), "");
        assert_eq!(field(r#"{"items": []} {}"#), "");
        let deep = read::<serde_json::Value>(&"[".repeat(1000)).unwrap_err().field;
        assert_eq!(deep, format!("{}…{}", &"[0]".repeat(60)[..80], &"[0]".repeat(60)[100..]));
        assert!(read::<Outer>("\u{feff}{\"items\": []}").is_ok());
    }
}
