//! Reads a model from the text of a file of either format.

use serde_json::{Map, Value};

use super::{Model, ModelFile, hugging_face, repeated};
use crate::defect::{Defect, Defects};
use crate::json;

/// Reads a model from the text of a file: our own format (it has a `format`) or a Hugging Face
/// `config.json` (it has a `model_type`, `architectures` or `hidden_size`).
///
/// `name_for_messages` is the path or whatever else the user called it; a file that does not name
/// its model is named after it.
///
/// # Errors
/// Every defect at once, each with its field; those of syntax and of type with line and column.
pub fn read(name_for_messages: &str, text: &str) -> Result<Model, Defects> {
    // Editors on some systems begin a file with a byte order mark, which JSON has no place for.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let Value::Object(fields) = json::read::<Value>(text)? else {
        return Err(unknown_format("the file is not a JSON object"));
    };
    repeated::check(text)?;
    let name = model_name(name_for_messages);
    if fields.contains_key("format") {
        check_format(&fields)?;
        check_required(&fields)?;
        let mut file: ModelFile = json::read(text)?;
        file.name.get_or_insert(name);
        file.resolve()
    } else if looks_like_hugging_face(&fields) {
        hugging_face::resolve(name, &fields)
    } else {
        Err(unknown_format("the file has neither a `format` nor a `model_type`"))
    }
}

/// Reports a file of another kind by its `format`, and not by the missing fields of a model.
fn check_format(fields: &Map<String, Value>) -> Result<(), Defects> {
    let format = fields.get("format").and_then(Value::as_str).unwrap_or_default();
    let kind = format.strip_prefix("narrows-").and_then(|format| format.split('/').next());
    match kind {
        Some(kind) if kind != "model" => {
            let problem = format!("is `{format}`: the file is a {kind}, not a model");
            Err(Defect::new("format", problem).hint("\"narrows-model/1\"").into())
        }
        _ => Ok(()),
    }
}

/// Required fields of a [`ModelFile`] and of its `blocks`.
const REQUIRED: [&str; 5] = ["hidden", "vocab", "heads", "d_ff", "blocks"];
const REQUIRED_OF_BLOCKS: [&str; 2] = ["count", "default"];

/// Reports all missing fields at once: serde stops at the first.
fn check_required(fields: &Map<String, Value>) -> Result<(), Defects> {
    let blocks = fields.get("blocks").and_then(Value::as_object);
    let top = REQUIRED.iter().filter(|field| !fields.contains_key(**field));
    let of_blocks = REQUIRED_OF_BLOCKS
        .iter()
        .filter(|field| blocks.is_some_and(|blocks| !blocks.contains_key(**field)));
    let places = top.map(|field| field.to_string());
    let places = places.chain(of_blocks.map(|field| format!("blocks.{field}")));
    Defects(places.map(|place| Defect::new(place, "is missing")).collect()).into_result(())
}

fn looks_like_hugging_face(fields: &Map<String, Value>) -> bool {
    let signs = ["model_type", "architectures", "hidden_size", "is_cola_llama_config"];
    signs.iter().any(|sign| fields.contains_key(*sign))
}

fn unknown_format(problem: &str) -> Defects {
    let hint = "\"format\": \"narrows-model/1\", or a Hugging Face config.json";
    Defect::new("", problem).hint(hint).into()
}

/// A short name out of a path: `runs/cola-7b.config.json` and `runs/cola-7b/config.json` are both
/// `cola-7b`.
fn model_name(path: &str) -> String {
    let mut parts = path.rsplit(['/', '\\']).filter(|part| !part.is_empty());
    let stem = |part: &str| {
        let part = part.strip_suffix(".json").unwrap_or(part);
        part.strip_suffix(".config").unwrap_or(part).to_owned()
    };
    let nameless = |name: &str| matches!(name, "" | "-" | "." | ".." | "config");
    let name = parts.next().map(stem).filter(|name| !nameless(name));
    name.or_else(|| parts.next().map(str::to_owned).filter(|name| !nameless(name)))
        .unwrap_or_else(|| "model".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn required_fields_are_those_of_the_schema() {
        let schema = crate::model::schema();
        let sorted = |fields: &[&str]| {
            let mut fields = fields.to_vec();
            fields.sort_unstable();
            serde_json::json!(fields)
        };
        let listed = |value: &Value| {
            let mut fields = value["required"].as_array().unwrap().clone();
            fields.retain(|field| field != "format");
            fields.sort_by_key(Value::to_string);
            Value::Array(fields)
        };
        assert_eq!(listed(&schema), sorted(&REQUIRED));
        assert_eq!(listed(&schema["$defs"]["BlocksFile"]), sorted(&REQUIRED_OF_BLOCKS));
    }

    #[test]
    fn models_are_named_after_their_files() {
        assert_eq!(model_name("models/cola-7b.config.json"), "cola-7b");
        assert_eq!(model_name("hub/cola-7b/config.json"), "cola-7b");
        assert_eq!(model_name("mixed-ranks.json"), "mixed-ranks");
        for nameless in ["-", "", "config.json", "../config.json", "/"] {
            assert_eq!(model_name(nameless), "model", "{nameless}");
        }
    }
}
