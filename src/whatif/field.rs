//! Fields that can be swept.

use std::fmt;

use serde_json::Value;

use crate::args::{PlanningArgs, TrainingRunArgs, flags};
use crate::errors::Problem;
use crate::field_name::FieldName;

use super::document::{Document, ScalarField};
use super::values::{bytes, number};

/// A field of a request, by what holds it.
#[derive(Clone, Debug, PartialEq)]
pub enum SweepField {
    /// A flag of the request or of the training run, without its dashes: `devices`, `strategy`, `model`, `tokens`.
    Flag(String),
    /// The rank of every factor pair of the model.
    Rank,
    /// A field of the model file, by its path: `hidden`, `blocks.count`.
    Model(String),
    /// A number of the hardware profile, by its path.
    Hardware(HardwareField),
    /// The alternative of a break-even question, by its name; sets nothing.
    Alternative,
}

/// A number of the hardware profile.
#[derive(Clone, Debug, PartialEq)]
pub struct HardwareField {
    /// Path in the profile, in its own unit.
    pub path: String,
    /// The name as typed.
    typed: FieldName,
    /// One unit as typed in the unit of the profile.
    pub factor: f64,
}

impl HardwareField {
    /// A value as typed in the unit of the profile, rounded where the profile has a whole number; `null` where it is too
    /// large for a number.
    pub fn in_profile_unit(&self, value: f64, is_whole: bool) -> Value {
        let value = value * self.factor;
        number(if is_whole { value.round() } else { value })
    }
}

/// Flags that change the search rather than what is planned.
const FLAGS_NOT_SWEPT: [&str; 1] = ["time-limit"];

/// Flags in whose place a number of the profile is read where they are not set.
const FLAGS_IN_PLACE_OF_HARDWARE: [(&str, &str); 3] = [
    ("memory-limit", "device.memory_bytes"),
    ("memory-limit", "device.reserve.bytes"),
    ("price-per-device-hour", "price_per_device_hour"),
];

/// Names within this edit distance, relative to the length of the name, are suggested.
const SUGGESTED_DISTANCE: f64 = 0.4;

/// Distance added where only the last parts of two paths are compared.
const LAST_PART_PENALTY: f64 = 0.05;

/// Distance of a name to those that it abbreviates, and the least length of such a name.
const ABBREVIATION_DISTANCE: f64 = 0.3;
const ABBREVIATION_MIN: usize = 3;

/// Names this much farther than the nearest are suggested too.
const TIE: f64 = 0.05;

/// Most names suggested.
const SUGGESTIONS_MAX: usize = 3;

impl SweepField {
    /// The field called `name`.
    ///
    /// # Errors
    /// No field has this name; the hint has the nearest ones. The problem has no location.
    pub fn parse(name: &str, model: &Document, hardware: &Document) -> Result<SweepField, Problem> {
        let flag = name.replace('_', "-");
        if swept_flags().iter().any(|(known, _)| *known == flag) {
            return Ok(SweepField::Flag(flag));
        }
        if name == "rank" {
            return Ok(SweepField::Rank);
        }
        if let Some(path) = name.strip_prefix("model.")
            && model.accepts(path)
        {
            return Ok(SweepField::Model(path.to_owned()));
        }
        if let Some(path) = name.strip_prefix("hardware.") {
            let typed = FieldName::new(name);
            let path = path.to_owned();
            if let Some(residuals) = hardware.residuals_in_place_of(&path) {
                let message = format!(
                    "`{name}` has no effect: errors are drawn from the {residuals} residuals beside it"
                );
                let hint = "a profile without these `residuals`";
                return Err(Problem::new("", message).hint(hint));
            }
            if hardware.accepts(&path) {
                return Ok(SweepField::Hardware(HardwareField { path, typed, factor: 1.0 }));
            }
            if let Some(in_files) = FieldName::new(path).in_files()
                && hardware.accepts(in_files.as_str())
            {
                let (path, (_, factor)) = (in_files.to_string(), typed.unit().in_files());
                return Ok(SweepField::Hardware(HardwareField { path, typed, factor }));
            }
        }
        Err(unknown(name, model, hardware))
    }

    /// Whether setting this field after `earlier` makes the value of `earlier` void.
    pub fn replaces(&self, earlier: &SweepField, model: &Document) -> bool {
        let is_rank = |path: &str| path.ends_with(".rank");
        match (self, earlier) {
            // A rank of some linears leaves those of others.
            (SweepField::Model(path), SweepField::Rank) => {
                let fields = model.fields().into_iter();
                let mut ranks =
                    fields.filter(|field| is_rank(&field.path) && field.value.is_some());
                is_rank(path) && ranks.all(|field| field.path == *path)
            }
            (SweepField::Hardware(field), SweepField::Hardware(earlier)) => {
                field.path == earlier.path
            }
            (SweepField::Rank, SweepField::Model(path)) => is_rank(path),
            _ => self == earlier,
        }
    }

    /// Flags that leave this field without effect where they are set, in whatever order.
    pub fn flags_in_its_place(&self) -> impl Iterator<Item = &'static str> {
        let path = match self {
            SweepField::Hardware(field) => Some(field.path.clone()),
            _ => None,
        };
        FLAGS_IN_PLACE_OF_HARDWARE
            .into_iter()
            .filter(move |(_, replaced)| path.as_deref() == Some(*replaced))
            .map(|(flag, _)| flag)
    }

    /// The name in tables and JSON: the one typed, with underscores.
    pub fn name(&self) -> String {
        match self {
            SweepField::Flag(flag) => flag.replace('-', "_"),
            SweepField::Rank => "rank".into(),
            SweepField::Model(path) => format!("model.{path}"),
            SweepField::Hardware(field) => field.typed.to_string(),
            SweepField::Alternative => "alternative".into(),
        }
    }

    /// A value as a number: sizes such as `8GiB` in bytes. `None` for words.
    pub fn number(&self, value: &Value) -> Option<f64> {
        match (self, value) {
            (SweepField::Flag(flag), Value::String(text)) if flag == "memory-limit" => bytes(text),
            _ => value.as_f64(),
        }
    }

    /// The name with its unit.
    pub fn field_name(&self) -> FieldName {
        FieldName::new(self.name())
    }
}

impl fmt::Display for SweepField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// Names of all fields, with a help text where there is one.
pub fn field_names(model: &Document, hardware: &Document) -> Vec<(String, String)> {
    let flags = swept_flags().into_iter().map(|(flag, help)| (flag.replace('-', "_"), help));
    let rank = ("rank".to_owned(), "Rank of every factor pair".to_owned());
    let of = |prefix: &str, document: &Document| -> Vec<(String, String)> {
        let described = |field: ScalarField| {
            let help = match field.value {
                Some(value) => format!("now {value}"),
                None => format!("not set. {}", field.description),
            };
            (format!("{prefix}.{}", field.path), help)
        };
        document.fields().into_iter().map(described).collect()
    };
    flags.chain([rank]).chain(of("model", model)).chain(of("hardware", hardware)).collect()
}

/// Names and help texts of the flags that are swept: of the request with its optimizer, and of the training run.
fn swept_flags() -> Vec<(String, String)> {
    let all = flags::<PlanningArgs>().into_iter().chain(flags::<TrainingRunArgs>());
    all.filter(|(flag, _)| is_swept(flag)).collect()
}

/// Whether a flag of planning requests or training runs can be swept.
pub fn is_swept(flag: &str) -> bool {
    !FLAGS_NOT_SWEPT.contains(&flag)
}

/// Whether every word of a name begins a word of a known name, in their order: `seq_len`, `hardware.bandwidth`.
fn is_abbreviation(name: &str, known: &str) -> bool {
    let mut left = known.split(['.', '_']);
    name.len() >= ABBREVIATION_MIN
        && name
            .split(['.', '_'])
            .all(|word| !word.is_empty() && left.any(|known| known.starts_with(word)))
}

/// The field that a name without its unit means, as tables have it: `hardware.links.inter_node.bandwidth`.
fn with_unit(typed: &FieldName, model: &Document, hardware: &Document) -> Option<FieldName> {
    let mut known = field_names(model, hardware).into_iter().map(|(name, _)| FieldName::new(name));
    known.find(|known| known.short() == typed.short())
}

fn unknown(name: &str, model: &Document, hardware: &Document) -> Problem {
    let problem = Problem::new("", format!("no field is called `{name}`"));
    let typed = FieldName::new(name);
    if let Some(known) = with_unit(&typed, model, hardware) {
        let problem = problem.hint(format!("did you mean {known}?"));
        return match known.other_endings()[..] {
            [] => problem,
            ref endings => problem.hint(format!(
                "a name ends with the unit of its values; other endings: {}",
                endings.join(", ")
            )),
        };
    }
    let in_files = typed.in_files();
    let name = in_files.as_ref().map_or(name, FieldName::as_str);
    // The last part of a path names a field almost as well as the whole.
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
    let relative =
        |a: &str, b: &str| strsim::damerau_levenshtein(a, b) as f64 / a.len().max(1) as f64;
    let distance = |known: &str| {
        let spelled =
            relative(name, known).min(relative(&last(name), &last(known)) + LAST_PART_PENALTY);
        if is_abbreviation(name, known) { spelled.min(ABBREVIATION_DISTANCE) } else { spelled }
    };
    let names = field_names(model, hardware).into_iter().map(|(name, _)| name);
    let mut near: Vec<(f64, String)> = names.map(|known| (distance(&known), known)).collect();
    near.sort_by(|a, b| a.0.total_cmp(&b.0));
    let best = near.first().map_or(f64::INFINITY, |(distance, _)| *distance);
    near.retain(|(distance, _)| *distance <= SUGGESTED_DISTANCE && *distance <= best + TIE);
    near.truncate(SUGGESTIONS_MAX);
    let as_typed = |name: String| match FieldName::new(&name).with_ending_of(&typed) {
        Some(converted) => converted.to_string(),
        None => name,
    };
    let names: Vec<String> = near.into_iter().map(|(_, name)| as_typed(name)).collect();
    if names.is_empty() {
        return problem.hint("`narrows whatif --list --model NAME` names all fields");
    }
    problem.hint(format!("did you mean {}?", names.join(" or ")))
}
