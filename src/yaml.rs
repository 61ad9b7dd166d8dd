//! YAML as JSON values: mappings, sequences and plain scalars, without anchors, aliases and tags.
//!
//! The parser gives events, from which values are built without recursion, so that no text exhausts the stack; without
//! aliases, no small text becomes a large value. Of a repeated key the last value counts, as it does for the training codes.

use narrows_plan::Defect;
use serde_json::{Map, Number, Value};
use yaml_rust2::Yaml;
use yaml_rust2::parser::{Event, Parser};
use yaml_rust2::scanner::{Marker, TScalarStyle};

/// Deepest nesting.
const DEPTH_MAX: usize = 32;

/// A mapping or sequence whose end is still to come.
enum Open {
    Mapping(Map<String, Value>, Option<String>),
    Sequence(Vec<Value>),
}

/// Reads one document.
///
/// # Errors
/// The first defect, with its line as the field.
pub fn read(text: &str) -> Result<Value, Defect> {
    let mut parser = Parser::new_from_str(text);
    let mut open: Vec<Open> = vec![];
    let mut document = None;
    loop {
        let (event, marker) = parser
            .next_token()
            .map_err(|error| at(error.marker(), format!("is not YAML: {}", error.info())))?;
        let value = match event {
            Event::StreamEnd => return Ok(document.unwrap_or(Value::Null)),
            Event::DocumentStart if document.is_some() => {
                return Err(at(&marker, "is a second document, and one is read"));
            }
            Event::Nothing | Event::StreamStart | Event::DocumentStart | Event::DocumentEnd => {
                continue;
            }
            Event::Alias(_) => return Err(at(&marker, "aliases are not supported")),
            Event::MappingStart(0, None) => {
                open.push(Open::Mapping(Map::new(), None));
                None
            }
            Event::SequenceStart(0, None) => {
                open.push(Open::Sequence(vec![]));
                None
            }
            Event::Scalar(text, style, 0, None) => Some(scalar(text, style)),
            Event::MappingStart(..) | Event::SequenceStart(..) | Event::Scalar(..) => {
                return Err(at(&marker, "anchors and tags are not supported"));
            }
            Event::MappingEnd | Event::SequenceEnd => open.pop().map(|closed| match closed {
                Open::Mapping(map, _) => Value::Object(map),
                Open::Sequence(list) => Value::Array(list),
            }),
        };
        if open.len() > DEPTH_MAX {
            return Err(at(&marker, format!("is nested deeper than {DEPTH_MAX} levels")));
        }
        let Some(value) = value else { continue };
        match open.last_mut() {
            None => document = Some(value),
            Some(Open::Sequence(list)) => list.push(value),
            Some(Open::Mapping(map, key)) => match key.take() {
                Some(key) => drop(map.insert(key, value)),
                None => match value {
                    Value::String(name) => *key = Some(name),
                    other => *key = Some(other.to_string()),
                },
            },
        }
    }
}

/// A plain scalar has the type that it looks like; a quoted one is a string.
fn scalar(text: String, style: TScalarStyle) -> Value {
    if style != TScalarStyle::Plain {
        return Value::String(text);
    }
    match Yaml::from_str(&text) {
        Yaml::Integer(number) => number.into(),
        Yaml::Real(number) => {
            let number = number.parse().ok().and_then(Number::from_f64);
            number.map_or(Value::String(text), Value::Number)
        }
        Yaml::Boolean(flag) => flag.into(),
        Yaml::Null => Value::Null,
        _ => Value::String(text),
    }
}

fn at(marker: &Marker, problem: impl Into<String>) -> Defect {
    Defect::new(format!("line {}", marker.line()), problem)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn mappings_sequences_and_scalars_are_read() {
        let text = "a:\n  b: 1.0e-06 # a comment\n  c: null\n  d: [1, x, 'true']\ne: true\nf:\n- 2\n- {g: y}\n";
        let expected = json!({"a": {"b": 1e-6, "c": null, "d": [1, "x", "true"]}, "e": true, "f": [2, {"g": "y"}]});
        assert_eq!(read(text).unwrap(), expected);
        assert_eq!(read("").unwrap(), Value::Null);
        assert_eq!(read("a: 1\na: 2\n").unwrap(), json!({"a": 2}));
    }

    #[test]
    fn texts_that_could_grow_or_mislead_are_refused_with_their_line() {
        let [deep, deepest] = [100, 100_000].map(|depth| "[".repeat(depth));
        for (text, line, part) in [
            ("a: &x 1\nb: *x\n", "line 1", "anchors"),
            ("a: !!python/object x\n", "line 1", "tags"),
            ("a: 1\n---\nb: 2\n", "line 2", "second document"),
            ("a: [1\n", "line", "is not YAML"),
            (&deep, "line 1", "nested deeper"),
            (&deepest, "line 1", ""),
        ] {
            let defect = read(text).unwrap_err();
            assert!(defect.field.starts_with(line) && defect.problem.contains(part), "{defect:?}");
        }
    }

    #[test]
    fn any_text_is_read_or_refused() {
        let seed = "a:\n  - b: [1, {c: 'x'}]\n    d: |\n      text\n  - \"e\": ~\n";
        arbtest::arbtest(|u| {
            let mut bytes = seed.as_bytes().to_vec();
            for _ in 0..u.int_in_range(1..=6)? {
                let at = u.choose_index(bytes.len())?;
                match u.int_in_range(0..=1)? {
                    0 => bytes[at] = u.arbitrary()?,
                    _ => bytes.insert(at, *u.choose(b"{}[]-:,&*!|>\"'# \n\t?%@")?),
                }
            }
            let _ = read(&String::from_utf8_lossy(&bytes));
            Ok(())
        })
        .budget_ms(300);
    }
}
