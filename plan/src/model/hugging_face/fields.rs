//! Reads the fields of a `config.json` one by one, and records unread and invalid fields.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::known::{IGNORED_FIELDS, NEUTRAL_FIELDS};
use crate::defect::{Defect, Defects};

/// The fields of a config. [`ConfigFields::finish`] reports every field that was not read, unless it is
/// known to have no effect.
///
/// A field that is `null` counts as absent, since Python writes defaults like this.
pub(super) struct ConfigFields<'a> {
    map: &'a Map<String, Value>,
    known: HashSet<&'static str>,
    pub defects: Defects,
    /// Fields that the original code ignores although they seem to change the function.
    pub warnings: Vec<Defect>,
    /// Whether all fields that were read had the expected type. Otherwise placeholders stand in for some,
    /// and checks of other fields against them would be misleading.
    pub well_typed: bool,
}

/// A whole number, written as `4096` or, by some tools, as `4096.0`.
fn whole_number(value: &Value) -> Option<u64> {
    let float = || value.as_f64().filter(|f| f.fract() == 0.0 && (0.0..2f64.powi(53)).contains(f));
    value.as_u64().or_else(|| float().map(|f| f as u64))
}

impl<'a> ConfigFields<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        ConfigFields {
            map,
            known: HashSet::new(),
            defects: Defects::default(),
            warnings: vec![],
            well_typed: true,
        }
    }

    /// The value of `field`, `None` when absent or `null`.
    pub fn get(&mut self, field: &'static str) -> Option<&'a Value> {
        self.known.insert(field);
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Whether the config has this field, also as `null`.
    pub fn is_present(&self, field: &str) -> bool {
        self.map.contains_key(field)
    }

    fn typed<T>(
        &mut self,
        field: &'static str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Option<T> {
        let value = self.get(field)?;
        let read = read(value);
        if read.is_none() {
            self.well_typed = false;
            let problem = format!("must be {expected}, not {}", excerpt(value));
            self.defects.push(Defect::new(field, problem));
        }
        read
    }

    /// A whole number; `None` when absent or, after a defect, invalid.
    pub fn size(&mut self, field: &'static str) -> Option<u64> {
        self.typed(field, "a whole number", whole_number)
    }

    /// A whole number that may be negative; `None` when absent or, after a defect, invalid.
    pub fn integer(&mut self, field: &'static str) -> Option<i64> {
        self.typed(field, "a whole number", Value::as_i64)
    }

    /// A token or a list of tokens; negative ones are left out. Empty when absent or, after a defect, invalid.
    pub fn tokens(&mut self, field: &'static str) -> Vec<u64> {
        let read = |value: &Value| match value {
            Value::Array(list) => list.iter().map(Value::as_i64).collect(),
            value => value.as_i64().map(|id| vec![id]),
        };
        let ids: Vec<i64> =
            self.typed(field, "a whole number or a list of them", read).unwrap_or_default();
        ids.into_iter().filter_map(|id| u64::try_from(id).ok()).collect()
    }

    /// A required whole number; 1 after a defect.
    pub fn required_size(&mut self, field: &'static str) -> u64 {
        if self.get(field).is_none() {
            self.well_typed = false;
            self.defects.push(Defect::new(field, "is missing"));
        }
        self.size(field).unwrap_or(1)
    }

    /// A number; `None` when absent or, after a defect, invalid.
    pub fn number(&mut self, field: &'static str) -> Option<f64> {
        self.typed(field, "a number", Value::as_f64)
    }

    /// A boolean; `None` when absent or, after a defect, invalid.
    pub fn flag(&mut self, field: &'static str) -> Option<bool> {
        self.typed(field, "true or false", Value::as_bool)
    }

    /// A string; `None` when absent or, after a defect, invalid.
    pub fn string(&mut self, field: &'static str) -> Option<&'a str> {
        self.typed(field, "a string", Value::as_str)
    }

    /// An object; `None` when absent or, after a defect, invalid.
    pub fn object(&mut self, field: &'static str) -> Option<&'a Map<String, Value>> {
        self.typed(field, "an object", Value::as_object)
    }

    /// All defects, including every unread field that could change the function of the model.
    pub fn finish(mut self) -> Defects {
        for (field, value) in self.map {
            if self.known.contains(field.as_str()) || IGNORED_FIELDS.contains(&field.as_str()) {
                continue;
            }
            // An empty path denotes the whole file.
            let place = if field.is_empty() { "\"\"" } else { field };
            match NEUTRAL_FIELDS.iter().find(|neutral| neutral.field == field) {
                Some(neutral) if neutral.value.accepts(value) => {}
                Some(neutral) => self.defects.push(
                    Defect::new(place, format!("is {}: {}", excerpt(value), neutral.reason))
                        .hint(format!("{}, if the model allows it", neutral.value.to_json())),
                ),
                None => self.defects.push(
                    Defect::new(
                        place,
                        "is an unknown field, which could change the function of the model",
                    )
                    .hint("remove it if it has no effect, or write the model as narrows-model/1"),
                ),
            }
        }
        self.defects
    }
}

/// The JSON of a value, shortened for a message.
pub(super) fn excerpt(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
