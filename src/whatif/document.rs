//! Models and hardware profiles as JSON documents, in which fields are set by their paths.

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
    /// Its content.
    pub value: Value,
}

impl Document {
    /// The paths of all scalars that can be set, with their values.
    pub fn leaves(&self) -> Vec<(String, &Value)> {
        let mut leaves = vec![];
        collect_leaves(&self.value, "", &mut leaves);
        leaves
    }

    /// Whether a path names a scalar, or an absent field of an object. The reader of the document rejects unknown
    /// fields.
    pub fn accepts(&self, path: &str) -> bool {
        self.leaves().iter().any(|(known, _)| known == path)
    }

    /// Sets a scalar.
    pub fn set(&mut self, path: &str, value: Value) {
        let pointer = format!("/{}", path.replace('.', "/"));
        if let Some(field) = self.value.pointer_mut(&pointer) {
            *field = value;
        }
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
        refits["draws"].as_array_mut().into_iter().flatten().for_each(|draw| {
            remove(draw);
        });
    }
}

fn collect_leaves<'a>(node: &'a Value, path: &str, leaves: &mut Vec<(String, &'a Value)>) {
    match node {
        Value::Object(fields) => {
            for (name, field) in fields.iter().filter(|(name, _)| !LABELS.contains(&name.as_str()))
            {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                collect_leaves(field, &path, leaves);
            }
        }
        Value::Number(_) | Value::Bool(_) | Value::String(_) if !path.is_empty() => {
            leaves.push((path.to_owned(), node));
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
            "refits": {"numbers": ["a.b", "c"], "draws": [[1, 2], [3, 4]]},
        });
        Document { name: "test".into(), value }
    }

    #[test]
    fn scalars_are_listed_and_set() {
        let mut document = document();
        let paths: Vec<String> = document.leaves().into_iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["hidden", "blocks.count", "blocks.default.all.rank"]);
        document.set("blocks.count", json!(7));
        assert_eq!(document.value["blocks"]["count"], 7);
        assert_eq!(document.set_everywhere("rank", &json!(5)), 2);
        assert_eq!(document.value["overrides"][0]["rank"], 5);
    }

    #[test]
    fn a_number_that_is_set_has_no_draws() {
        let mut document = document();
        document.drop_refits_of("c");
        assert_eq!(document.value["refits"], json!({"numbers": ["a.b"], "draws": [[1], [3]]}));
        document.drop_refits_of("a.b");
        assert!(document.value.get("refits").is_none());
    }
}
