//! Errors of serde in the words of this program: where, what was expected and what was found.

use serde_json::error::Category;

use crate::Defect;
use crate::counts::plural_with;

/// Longest value that a message shows, in characters.
const SHOWN_MAX: usize = 60;

/// The defect of a field, whose path is empty for the document itself.
pub(super) fn defect(field: String, error: &serde_json::Error) -> Defect {
    let text = error.to_string();
    let (problem, place) = problem_and_place(&text);
    match error.classify() {
        Category::Syntax | Category::Eof => {
            Defect::new(field, format!("is not JSON: {}{place}", syntax_problem(problem)))
        }
        Category::Data | Category::Io => {
            let (field, problem) = data_problem(field, problem);
            Defect::new(field, problem + &place)
        }
    }
}

/// The defect of an enum whose value is neither a name nor an object.
pub(super) fn defect_of_enum(field: String, error: &serde_json::Error) -> Defect {
    let (_, place) = problem_and_place(&error.to_string());
    Defect::new(field, format!("expected a name, or an object with one field{place}"))
}

/// The parts of a message. Errors of values that were parsed before have no position.
fn problem_and_place(text: &str) -> (&str, String) {
    match text.rsplit_once(" at line ") {
        Some((problem, place)) => (problem, format!(" (line {place})")),
        None => (text, String::new()),
    }
}

fn syntax_problem(problem: &str) -> String {
    match problem.strip_prefix("EOF while parsing ") {
        Some(unfinished) => format!("the text ends within {unfinished}"),
        None if problem == "expected value" => "expected a value".into(),
        None => problem.to_owned(),
    }
}

/// The field and the problem of a value that JSON allows and the format does not.
fn data_problem(field: String, problem: &str) -> (String, String) {
    let quoted = |start: &str| problem.strip_prefix(start)?.split_once('`');
    if let Some((name, _)) = quoted("missing field `") {
        return (member(&field, name), "is missing".into());
    }
    if let Some((name, _)) = quoted("duplicate field `") {
        return (member(&field, name), "is set twice".into());
    }
    if let Some((name, rest)) = quoted("unknown field `") {
        let known = rest
            .strip_prefix(", expected ")
            .map(|known| format!("; expected {}", known.strip_prefix("one of ").unwrap_or(known)));
        let problem = format!("is an unknown field{}", known.unwrap_or_default());
        return (member(&field, name), problem);
    }
    if let Some((name, rest)) = quoted("unknown variant `") {
        let known = rest.strip_prefix(", expected ").unwrap_or("another name");
        return (field, format!("expected {known}, found `{}`", shortened(name)));
    }
    if problem.starts_with("data did not match any variant of untagged enum") {
        return (field, "has none of the forms of this field".into());
    }
    let mismatch = ["invalid type: ", "invalid value: ", "invalid length "]
        .into_iter()
        .find_map(|start| problem.strip_prefix(start)?.rsplit_once(", expected "));
    match mismatch {
        Some((found, expected)) => {
            let found = match problem.starts_with("invalid length ") {
                true if expected.starts_with("struct ") => "a list".into(),
                true => plural_with(found.parse().unwrap_or(0), "element", "elements"),
                false => found_value(found),
            };
            (field, format!("expected {}, found {found}", expected_value(expected)))
        }
        None => (field, problem.to_owned()),
    }
}

/// The path of a field of an object. The path of the object ends with the field where serde had read its name.
fn member(object: &str, name: &str) -> String {
    match object.strip_suffix(name) {
        Some(rest) if rest.is_empty() || rest.ends_with('.') => object.to_owned(),
        _ if object.is_empty() => name.to_owned(),
        _ => format!("{object}.{name}"),
    }
}

/// A value in the words of JSON.
fn found_value(found: &str) -> String {
    let value = ["integer `", "floating point `", "boolean `", "character `"]
        .into_iter()
        .find_map(|kind| found.strip_prefix(kind)?.strip_suffix('`'));
    match found {
        "map" => "an object".into(),
        "sequence" => "a list".into(),
        _ => shortened(value.or(found.strip_prefix("string ")).unwrap_or(found)),
    }
}

/// A type in the words of JSON.
fn expected_value(expected: &str) -> String {
    let words = match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" | "u128" => "a whole number from 0",
        "i8" | "i16" | "i32" | "i64" | "isize" | "i128" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",

        _ if expected.starts_with("a nonzero u") => "a whole number from 1",
        _ if expected.starts_with("struct ") => "an object",
        _ => expected,
    };
    let size = expected.rsplit_once(" of size ").or(expected.rsplit_once(" of length "));
    size.map_or(words.to_owned(), |(_, size)| format!("a list of {size}"))
}

fn shortened(value: &str) -> String {
    match value.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use serde::Deserialize;

    use super::super::read;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "read for its errors")]
    struct Document {
        ops: Vec<Op>,
        #[serde(default)]
        shape: [u8; 2],
        #[serde(default)]
        share: f64,
        #[serde(default)]
        count: Option<NonZeroU64>,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "read for its errors")]
    struct Op {
        strategy: Strategy,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[allow(dead_code, reason = "read for its errors")]
    enum Strategy {
        Row,
        Column,
        Split(u64),
    }

    #[test]
    fn errors_say_where_what_was_expected_and_what_was_found() {
        for (text, expected) in [
            (r#"{"ops": {}}"#, "ops: expected a list, found an object"),
            ("{}", "ops: is missing"),
            (r#"{"ops": [{}]}"#, "ops[0].strategy: is missing"),
            (
                r#"{"ops": [{"strategy": "rwo"}]}"#,
                "ops[0].strategy: expected one of `row`, `column`, `split`, found `rwo`",
            ),
            (
                r#"{"ops": [{"strategy": 1}]}"#,
                "ops[0].strategy: expected a name, or an object with one field",
            ),
            (
                r#"{"ops": [], "opps": 1}"#,
                "opps: is an unknown field; expected `ops`, `shape`, `share`, `count`",
            ),
            (r#"{"ops": [], "ops": []}"#, "ops: is set twice"),
            (
                r#"{"ops": [], "shape": [1, 300]}"#,
                "shape[1]: expected a whole number from 0 to 255, found 300",
            ),
            (r#"{"ops": [], "shape": [1]}"#, "shape: expected a list of 2, found 1 element"),
            (r#"{"ops": [], "share": "half"}"#, "share: expected a number, found \"half\""),
            (r#"{"ops": [], "share": true}"#, "share: expected a number, found true"),
            (r#"{"ops": [], "count": 0}"#, "count: expected a whole number from 1, found 0"),
            ("[]", "expected an object, found a list"),
            (r#"{"op"#, "is not JSON: the text ends within a string"),
            (r#"{"ops": [{"st"#, "ops[0]: is not JSON: the text ends within a string"),
            ("[", "is not JSON: the text ends within a list"),
            ("", "is not JSON: the text ends within a value"),
            ("nought", "is not JSON: expected ident"),
        ] {
            let defect = read::<Document>(text).unwrap_err();
            let message = defect.to_string();
            let (message, place) = message.rsplit_once(" (").unwrap();
            assert_eq!(message, expected, "{text}");
            assert!(place.starts_with("line 1 column "), "{place}");
        }
    }
}
