//! Options as shell words, as YAML and as TOML.
//!
//! Paths such as `model.model_config.hidden_size` are joined by dots. Strings and lists are written as in JSON, which both
//! YAML and TOML read.

use serde_json::{Map, Value};

use super::ExportRow;
use crate::text::shell_word;

/// The options of all decisions, in order.
pub fn options(rows: &[ExportRow]) -> impl Iterator<Item = &(&'static str, Value)> {
    rows.iter().flat_map(|row| &row.translation.options)
}

/// An option as words of a command line: `true` is a flag alone, a list is several words.
pub fn flag_words(flag: &str, value: &Value) -> Vec<String> {
    let values = match value {
        Value::Bool(true) => vec![],
        Value::Array(items) => items.iter().map(word).collect(),
        value => vec![word(value)],
    };
    [format!("--{flag}")].into_iter().chain(values).collect()
}

/// A value as one shell word.
fn word(value: &Value) -> String {
    shell_word(&value.as_str().map_or_else(|| scalar(value), str::to_owned))
}

/// Lines as comments; line breaks within a line begin another comment.
pub fn comments(lines: &[String]) -> String {
    lines.iter().flat_map(|line| line.lines()).map(|line| format!("# {line}\n")).collect()
}

/// Options as a YAML mapping.
pub fn yaml<'a>(options: impl Iterator<Item = &'a (&'static str, Value)>) -> String {
    let mut text = String::new();
    write_yaml(&tree(options), 0, &mut text);
    text
}

fn write_yaml(map: &Map<String, Value>, depth: usize, text: &mut String) {
    for (key, value) in map {
        let indent = "  ".repeat(depth);
        match value {
            Value::Object(inner) => {
                text.push_str(&format!("{indent}{key}:\n"));
                write_yaml(inner, depth + 1, text);
            }
            value => text.push_str(&format!("{indent}{key}: {}\n", scalar(value))),
        }
    }
}

/// Options as TOML tables.
pub fn toml<'a>(options: impl Iterator<Item = &'a (&'static str, Value)>) -> String {
    let tables = tree(options).into_iter().map(|(table, values)| {
        let values = values.as_object().cloned().unwrap_or_default();
        let lines = values.iter().map(|(key, value)| format!("{key} = {}\n", scalar(value)));
        format!("[{table}]\n{}", lines.collect::<String>())
    });
    tables.collect::<Vec<_>>().join("\n")
}

/// The mapping of mappings that paths describe.
fn tree<'a>(options: impl Iterator<Item = &'a (&'static str, Value)>) -> Map<String, Value> {
    let mut root = Map::new();
    for (path, value) in options {
        let mut map = &mut root;
        let mut keys = path.split('.').peekable();
        while let Some(key) = keys.next() {
            let entry = map.entry(key).or_insert_with(|| match keys.peek() {
                Some(_) => Value::Object(Map::new()),
                None => value.clone(),
            });
            match entry {
                Value::Object(inner) if keys.peek().is_some() => map = inner,
                _ => break,
            }
        }
    }
    root
}

/// A value without line breaks. YAML 1.1 reads `1e-6` as a string: a number with an exponent needs a point and a sign.
fn scalar(value: &Value) -> String {
    let text = value.to_string();
    match (value.is_f64(), text.split_once('e')) {
        (true, Some((mantissa, exponent))) => {
            let point = if mantissa.contains('.') { "" } else { ".0" };
            let sign = if exponent.starts_with('-') { "" } else { "+" };
            format!("{mantissa}{point}e{sign}{}", exponent.trim_start_matches('+'))
        }
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_with_exponents_have_a_point_and_a_sign() {
        for (number, text) in
            [(1e-6, "1.0e-6"), (1.5e-7, "1.5e-7"), (1e30, "1.0e+30"), (0.02, "0.02")]
        {
            assert_eq!(scalar(&json!(number)), text);
        }
    }

    #[test]
    fn words_that_the_shell_would_change_are_quoted() {
        assert_eq!(flag_words("layout", &json!("Et*3|t L")), ["--layout", "'Et*3|t L'"]);
        assert_eq!(flag_words("bf16", &json!(true)), ["--bf16"]);
        assert_eq!(
            flag_words("modules", &json!(["mlp", "it's"])),
            ["--modules", "mlp", r"'it'\''s'"]
        );
    }

    #[test]
    fn paths_become_nested_mappings() {
        let options = [("a.b.c", json!(1)), ("a.b.d", json!("x")), ("e.f", json!([1, 2]))];
        assert_eq!(yaml(options.iter()), "a:\n  b:\n    c: 1\n    d: \"x\"\ne:\n  f: [1,2]\n");
        let options = [("a.b", json!(1.0)), ("c.d", json!([["x"]]))];
        assert_eq!(toml(options.iter()), "[a]\nb = 1.0\n\n[c]\nd = [[\"x\"]]\n");
    }
}
