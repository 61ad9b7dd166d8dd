//! Models and hardware profiles as JSON documents, in which fields are set by their paths.

use narrows_cost_model::interval::RESIDUALS_MIN;
use serde_json::Value;

/// Parts of a document that are not swept: labels, and lists of measurements.
const LABELS: [&str; 9] = [
    "$schema",
    "format",
    "name",
    "description",
    "form_of",
    "provenance",
    "precision",
    "refits",
    "measured",
];

/// A JSON document with the name that messages give it.
#[derive(Clone, Debug)]
pub struct Document {
    /// Name of the file or preset.
    pub name: String,
    /// Content of the document.
    pub value: Value,
    /// JSON Schema of the format, which names the optional fields that are absent; `Null` where there is none.
    pub schema: Value,
}

/// A scalar of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalarField {
    /// Path of the field, its parts separated by dots.
    pub path: String,
    /// Present value; `None` for an optional field that is absent.
    pub value: Option<Value>,
    /// Description in the schema, of absent fields only.
    pub description: String,
}

impl Document {
    /// All scalars that can be set: those of the document, and the optional ones that are absent from it; without
    /// half-widths of errors that are drawn from residuals.
    pub fn fields(&self) -> Vec<ScalarField> {
        let mut fields = vec![];
        collect_present(&self.value, "", &mut fields);
        fields.retain(|field| self.residuals_in_place_of(&field.path).is_none());
        self.collect_absent(Some(&self.value), &self.schema, "", &mut fields);
        fields
    }

    /// Whether a path names a scalar of the document, an optional one that is absent from it, or a number in a list.
    pub fn accepts(&self, path: &str) -> bool {
        self.fields().iter().any(|field| field.path == path)
            || (self.number(path).is_some()
                && !path.split('.').any(is_label)
                && self.residuals_in_place_of(path).is_none())
    }

    /// Number of residuals that errors are drawn from, where they leave the half-width at this path without effect.
    pub fn residuals_in_place_of(&self, path: &str) -> Option<usize> {
        let error = path.strip_suffix(".half_width_90")?;
        let residuals = self.value.pointer(&format!("/{}/residuals", error.replace('.', "/")))?;
        Some(residuals.as_array()?.len()).filter(|count| *count >= RESIDUALS_MIN)
    }

    /// The number at a path, whose parts after a list are indices.
    pub fn number(&self, path: &str) -> Option<f64> {
        self.value.pointer(&format!("/{}", path.replace('.', "/")))?.as_f64()
    }

    /// Whether the number at a path is written as an integer.
    pub fn is_whole(&self, path: &str) -> bool {
        let value = self.value.pointer(&format!("/{}", path.replace('.', "/")));
        value.is_some_and(|value| value.is_u64() || value.is_i64())
    }

    /// Paths of all numbers called `name`, those in lists included.
    pub fn paths_of(&self, name: &str) -> Vec<String> {
        fn collect(node: &Value, name: &str, path: &str, paths: &mut Vec<String>) {
            match node {
                Value::Object(members) => {
                    for (key, member) in members.iter().filter(|(key, _)| !is_label(key)) {
                        let path = joined(path, key);
                        match member {
                            Value::Number(_) if key == name => paths.push(path),
                            _ => collect(member, name, &path, paths),
                        }
                    }
                }
                Value::Array(items) => {
                    for (index, item) in items.iter().enumerate() {
                        collect(item, name, &joined(path, &index.to_string()), paths);
                    }
                }
                _ => {}
            }
        }
        let mut paths = vec![];
        collect(&self.value, name, "", &mut paths);
        paths
    }

    /// Sets a scalar; creates it, and the objects around it, where they are absent. Returns `false` where a part of the
    /// path is a scalar already, or a list without that index.
    pub fn set(&mut self, path: &str, value: Value) -> bool {
        let mut node = &mut self.value;
        for part in path.split('.') {
            node = match node {
                Value::Object(_) | Value::Null => &mut node[part],
                Value::Array(items) => {
                    let item = part.parse().ok().and_then(|index: usize| items.get_mut(index));
                    let Some(item) = item else { return false };
                    item
                }
                _ => return false,
            };
        }
        *node = value;
        true
    }

    /// Adds the scalars of `schema` that `node` lacks. Absent objects are entered if all of their fields are optional.
    fn collect_absent(
        &self,
        node: Option<&Value>,
        schema: &Value,
        path: &str,
        fields: &mut Vec<ScalarField>,
    ) {
        let schema = self.resolved(schema);
        if node.is_some_and(|node| !node.is_object()) {
            return;
        }
        let properties = schema["properties"].as_object().into_iter().flatten();
        for (name, property) in properties.filter(|(name, _)| !is_label(name)) {
            let child = node.and_then(|node| node.get(name)).filter(|child| !child.is_null());
            let path = joined(path, name);
            let resolved = self.resolved(property);
            if child.is_none() && is_scalar(resolved) {
                let description = property["description"].as_str().unwrap_or_default();
                let description = description.replace('\n', " ");
                fields.push(ScalarField { path, value: None, description });
            } else if child.is_some() || resolved["required"].is_null() {
                self.collect_absent(child, resolved, &path, fields);
            }
        }
    }

    /// A schema without references: of alternatives the object, if one is, or else a scalar.
    fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        if let Some(reference) = schema["$ref"].as_str() {
            let target = self.schema.pointer(reference.trim_start_matches('#'));
            return target.map_or(&Value::Null, |target| self.resolved(target));
        }
        let alternatives = schema["anyOf"].as_array().into_iter().flatten();
        let alternatives: Vec<&Value> = alternatives.map(|schema| self.resolved(schema)).collect();
        let object = alternatives.iter().find(|schema| schema["properties"].is_object());
        object.or_else(|| alternatives.iter().find(|schema| is_scalar(schema))).unwrap_or(&schema)
    }

    /// Sets every number called `name`, at any depth. Returns how many there are.
    pub fn set_everywhere(&mut self, name: &str, value: &Value) -> usize {
        fn visit(node: &mut Value, name: &str, value: &Value) -> usize {
            match node {
                Value::Object(fields) => fields
                    .iter_mut()
                    .map(|(key, field)| match field {
                        Value::Number(_) if key == name => {
                            *field = value.clone();
                            1
                        }
                        _ => visit(field, name, value),
                    })
                    .sum(),
                Value::Array(items) => items.iter_mut().map(|item| visit(item, name, value)).sum(),
                _ => 0,
            }
        }
        visit(&mut self.value, name, value)
    }

    /// Drops the bootstrap draws of a number that a sweep sets: it is given, so it is not uncertain.
    pub fn drop_refits_of(&mut self, path: &str) {
        let Some(refits) = self.value.get_mut("refits") else { return };
        let names = refits["numbers"].as_array().cloned().unwrap_or_default();
        let Some(index) = names.iter().position(|name| name == path) else { return };
        if names.len() == 1 {
            self.value.as_object_mut().map(|fields| fields.remove("refits"));
            return;
        }
        let remove = |list: &mut Value| list.as_array_mut().map(|list| list.remove(index));
        remove(&mut refits["numbers"]);
        refits.get_mut("fitted").map(remove);
        refits["draws"].as_array_mut().into_iter().flatten().for_each(|draw| {
            remove(draw);
        });
    }
}

fn is_label(name: &str) -> bool {
    LABELS.contains(&name)
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Whether a schema without references describes a number, a truth value or a word.
fn is_scalar(schema: &Value) -> bool {
    let is_word = |alternative: &Value| alternative["const"].is_string();
    let types = schema["type"].as_array().cloned().unwrap_or_else(|| vec![schema["type"].clone()]);
    let scalars = ["integer", "number", "boolean", "string"];
    types.iter().filter_map(Value::as_str).any(|name| scalars.contains(&name))
        || schema["oneOf"].as_array().is_some_and(|words| words.iter().all(is_word))
}

fn collect_present(node: &Value, path: &str, fields: &mut Vec<ScalarField>) {
    match node {
        Value::Object(members) => {
            for (name, member) in members.iter().filter(|(name, _)| !is_label(name)) {
                collect_present(member, &joined(path, name), fields);
            }
        }
        Value::Number(_) | Value::Bool(_) | Value::String(_) if !path.is_empty() => {
            let (path, value) = (path.to_owned(), Some(node.clone()));
            fields.push(ScalarField { path, value, description: String::new() });
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn document() -> Document {
        let value = json!({
            "format": "x", "hidden": 4, "blocks": {"count": 2, "default": {"all": {"rank": 8}}},
            "overrides": [{"rank": 3}],
            "refits": {"numbers": ["a.b", "c"], "fitted": [1, 2], "draws": [[1, 2], [3, 4]]},
        });
        Document { name: "test".into(), value, schema: Value::Null }
    }

    fn paths(document: &Document) -> Vec<String> {
        document.fields().into_iter().map(|field| field.path).collect()
    }

    #[test]
    fn scalars_are_listed_and_set() {
        let mut document = document();
        assert_eq!(paths(&document), ["hidden", "blocks.count", "blocks.default.all.rank"]);
        assert!(document.set("blocks.count", json!(7)));
        assert_eq!(document.value["blocks"]["count"], 7);
        assert!(!document.set("hidden.width", json!(7)), "a scalar has no fields");
        assert_eq!(document.paths_of("rank"), ["blocks.default.all.rank", "overrides.0.rank"]);
        assert!(document.accepts("overrides.0.rank") && document.set("overrides.0.rank", json!(9)));
        assert_eq!(document.number("overrides.0.rank"), Some(9.0));
        assert!(
            !document.accepts("overrides.1.rank") && !document.set("overrides.1.rank", json!(9))
        );
        assert!(!document.accepts("refits.draws.0.0"), "a label");
        assert_eq!(document.set_everywhere("rank", &json!(5)), 2);
        assert_eq!(document.value["overrides"][0]["rank"], 5);
    }

    #[test]
    fn half_widths_without_effect_are_no_fields() {
        let error =
            |residuals: usize| json!({"half_width_90": 0.1, "residuals": vec![0.1; residuals]});
        let value = json!({"gemm": {"relative_error": error(10)}, "links": error(9)});
        let document = Document { name: "test".into(), value, schema: Value::Null };
        assert_eq!(paths(&document), ["links.half_width_90"]);
        assert!(!document.accepts("gemm.relative_error.half_width_90"));
        assert!(document.accepts("links.half_width_90"));
    }

    #[test]
    fn optional_fields_that_are_absent_can_be_set() {
        let file = narrows_plan::model::presets::find_file("cola-tiny").unwrap();
        let value = serde_json::to_value(&file).unwrap();
        let schema = narrows_plan::model::schema();
        let mut document = Document { name: "cola-tiny".into(), value, schema };
        let listed = paths(&document);
        for path in ["hidden", "kv_heads", "head_dim", "blocks.default.q.rank"] {
            assert_eq!(listed.iter().filter(|known| *known == path).count(), 1, "{listed:?}");
        }
        for path in ["name", "format", "blocks.default.q.crossing.gate"] {
            assert!(!document.accepts(path), "{path}");
        }
        document.set("kv_heads", json!(2));
        document.set("blocks.default.q.rank", json!(16));
        let model = narrows_plan::model::read("test", &document.value.to_string()).unwrap();
        assert_eq!((model.kv_heads, model.blocks[0].q.rank()), (2, Some(16)));
        assert_eq!(model.blocks[0].k.rank(), Some(64));
    }

    #[test]
    fn a_number_that_is_set_has_no_draws() {
        let mut document = document();
        document.drop_refits_of("c");
        assert_eq!(
            document.value["refits"],
            json!({"numbers": ["a.b"], "fitted": [1], "draws": [[1], [3]]})
        );
        document.drop_refits_of("a.b");
        assert!(document.value.get("refits").is_none());
    }
}
