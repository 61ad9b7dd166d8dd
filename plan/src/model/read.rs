//! Reads a model from the text of a file of either format.

use serde_json::{Map, Value};

use super::{Model, ModelFile, hugging_face, repeated};
use crate::defect::{Defect, Defects};
use crate::json;

/// Reads a model as [`read_with_warnings`] does, without the warnings.
///
/// # Errors
/// As [`read_with_warnings`].
pub fn read(name_for_messages: &str, text: &str) -> Result<Model, Defects> {
    read_with_warnings(name_for_messages, text).map(|(model, _)| model)
}

/// Reads a model from the text of a `narrows-model/1` file, which has a `format`, or of a Hugging Face
/// `config.json`, which has a `model_type`, `architectures` or `hidden_size`.
///
/// `name_for_messages` is the path of the file; a model without a name of its own is named after it. A warning
/// names a field that the original code ignores, although it seems to change the function.
///
/// # Errors
/// Every defect, each with its field; errors of syntax and of type also with line and column.
pub fn read_with_warnings(
    name_for_messages: &str,
    text: &str,
) -> Result<(Model, Vec<Defect>), Defects> {
    let text = json::without_byte_order_mark(text);
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
        Ok((file.resolve()?, vec![]))
    } else if looks_like_hugging_face(&fields) {
        hugging_face::resolve(name, &fields)
    } else {
        Err(unknown_format("the file has neither a `format` nor a `model_type`"))
    }
}

/// Reports a Narrows file of another kind by its `format` rather than by its fields.
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

/// Reports all missing fields; serde would stop at the first.
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
    let fields_of_config = ["model_type", "architectures", "hidden_size", "is_cola_llama_config"];
    fields_of_config.iter().any(|field| fields.contains_key(*field))
}

fn unknown_format(problem: &str) -> Defects {
    let hint = "\"format\": \"narrows-model/1\", or a Hugging Face config.json";
    Defect::new("", problem).hint(hint).into()
}

/// The name of a model from the path of its file: `cola-7b` for `runs/cola-7b.config.json` and for
/// `runs/cola-7b/config.json`.
fn model_name(path: &str) -> String {
    let mut parts = path.rsplit(['/', '\\']).filter(|part| !part.is_empty());
    let stem = |part: &str| {
        let suffixes = [".json", ".yaml", ".yml"];
        let part = suffixes.iter().find_map(|suffix| part.strip_suffix(suffix)).unwrap_or(part);
        part.strip_suffix(".config").unwrap_or(part).to_owned()
    };
    let is_generic = |name: &str| matches!(name, "" | "-" | "." | ".." | "config");
    let name = parts.next().map(stem).filter(|name| !is_generic(name));
    name.or_else(|| parts.next().map(str::to_owned).filter(|name| !is_generic(name)))
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
        assert_eq!(model_name("cola/config_cola_llama_1b.yaml"), "config_cola_llama_1b");
        for path in ["-", "", "config.json", "../config.json", "/"] {
            assert_eq!(model_name(path), "model", "{path}");
        }
    }
}
