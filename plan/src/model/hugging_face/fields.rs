//! Reads the fields of a `config.json` one by one, and records unread and invalid fields.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::known::{IGNORED_FIELDS, NEUTRAL_FIELDS};
use crate::defect::{Defect, Defects};

/// The fields of one object. Every field must be asked for before [`ConfigFields::finish`], or be known to
/// do no harm.
///
/// A field that is `null` is as good as absent: that is how Python writes "the default".
pub(super) struct ConfigFields<'a> {
    map: &'a Map<String, Value>,
    known: HashSet<&'static str>,
    pub defects: Defects,
    /// Whether every field asked for could be read. When not, what stands in for it would make
    /// other fields look wrong.
    pub well_typed: bool,
}

/// Python writes numbers of this size as `4096`, and some tools as `4096.0`.
fn whole_number(value: &Value) -> Option<u64> {
    let float = || value.as_f64().filter(|f| f.fract() == 0.0 && (0.0..2f64.powi(53)).contains(f));
    value.as_u64().or_else(|| float().map(|f| f as u64))
}

impl<'a> ConfigFields<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        ConfigFields { map, known: HashSet::new(), defects: Defects::default(), well_typed: true }
    }

    /// The value of `field`, `None` when absent or `null`.
    pub fn get(&mut self, field: &'static str) -> Option<&'a Value> {
        self.known.insert(field);
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Whether `field` is written, `null` included.
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
            let found = excerpt(value);
            self.defects.push(Defect::new(field, format!("must be {expected}, not {found}")));
        }
        read
    }

    /// A whole number, `None` when absent or (reported) wrong.
    pub fn size(&mut self, field: &'static str) -> Option<u64> {
        self.typed(field, "a whole number", whole_number)
    }

    /// A whole number without which there is no model; 1 when (reported) missing or wrong.
    pub fn required_size(&mut self, field: &'static str) -> u64 {
        if self.get(field).is_none() {
            self.well_typed = false;
            self.defects.push(Defect::new(field, "is missing"));
        }
        self.size(field).unwrap_or(1)
    }

    /// A number, `None` when absent or (reported) wrong.
    pub fn number(&mut self, field: &'static str) -> Option<f64> {
        self.typed(field, "a number", Value::as_f64)
    }

    /// `true` or `false`, `None` when absent or (reported) wrong.
    pub fn flag(&mut self, field: &'static str) -> Option<bool> {
        self.typed(field, "true or false", Value::as_bool)
    }

    /// A word, `None` when absent or (reported) wrong.
    pub fn string(&mut self, field: &'static str) -> Option<&'a str> {
        self.typed(field, "a string", Value::as_str)
    }

    /// An object, `None` when absent or (reported) wrong.
    pub fn object(&mut self, field: &'static str) -> Option<&'a Map<String, Value>> {
        self.typed(field, "an object", Value::as_object)
    }

    /// Refuses what was not asked for, unless it is harmless or neutral.
    pub fn finish(mut self) -> Defects {
        for (field, value) in self.map {
            if self.known.contains(field.as_str()) || IGNORED_FIELDS.contains(&field.as_str()) {
                continue;
            }
            // A path that is empty would stand for the whole file.
            let place = if field.is_empty() { "\"\"" } else { field };
            match NEUTRAL_FIELDS.iter().find(|demand| demand.field == field) {
                Some(demand) if demand.neutral.accepts(value) => {}
                Some(demand) => self.defects.push(
                    Defect::new(place, format!("is {}: {}", excerpt(value), demand.reason))
                        .hint(format!("{}, if the model allows it", demand.neutral.to_json())),
                ),
                None => self.defects.push(
                    Defect::new(
                        place,
                        "is not a field we know: it could change the function of the model",
                    )
                    .hint("remove it if it does not, or write the model as narrows-model/1"),
                ),
            }
        }
        self.defects
    }
}

/// A value short enough for a message.
pub(super) fn excerpt(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
