//! Recipe files: TOML, or JSON where the name ends in `.json`.

use std::ffi::OsStr;
use std::path::Path;

use narrows_plan::{Defect, json};
use serde_json::{Map, Value};

use crate::errors::{CommandResult, Failure, Problem};
use crate::input;

use super::recipe::RecipeArgs;

/// Names within this edit distance, relative to the length of the name, are suggested.
const SUGGESTED_DISTANCE: f64 = 0.5;

/// Reads a recipe.
///
/// # Errors
/// A file that cannot be read, is neither TOML nor JSON, or has an unknown field or an invalid value.
pub fn read(argument: &OsStr) -> CommandResult<RecipeArgs> {
    let (name, text) = input::text(argument)?;
    let is_json = Path::new(argument).extension().is_some_and(|ending| ending == "json");
    parse(&text, is_json).map_err(|defect| Failure::input(Problem::in_file(&name, defect)))
}

/// Reads the text of a recipe. TOML becomes JSON first, so that both have the same errors.
fn parse(text: &str, is_json: bool) -> Result<RecipeArgs, Defect> {
    let text = json::without_byte_order_mark(text);
    let fields: Map<String, Value> = match is_json {
        true => json::read(text)?,
        false => toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
            let place = line.map_or(String::new(), |line| format!("line {line}"));
            Defect::new(place, format!("is not TOML: {}", error.message()))
        })?,
    };
    // TOML has no null; its numbers that are not finite become null.
    if let Some((field, _)) = fields.iter().find(|(_, value)| !is_json && value.is_null()) {
        return Err(Defect::new(field, "is not a finite number"));
    }
    let known = known_fields();
    if let Some(unknown) = fields.keys().find(|field| !known.contains(field)) {
        return Err(unknown_field(unknown, &known));
    }
    // The text of JSON itself, in which a repeated field is an error.
    match is_json {
        true => json::read(text),
        false => json::read(&Value::Object(fields).to_string())
            .map_err(|defect| Defect { problem: problem_in_toml(&defect, text), ..defect }),
    }
}

/// The problem of a field, with its line in a TOML text in place of its position in the JSON that was read.
fn problem_in_toml(defect: &Defect, text: &str) -> String {
    let problem = json::without_position(&defect.problem);
    let is_set = |line: &str| {
        line.split_once('=').is_some_and(|(name, _)| name.trim() == defect.field.as_str())
    };
    match text.lines().position(is_set) {
        Some(index) => format!("{problem} (line {})", index + 1),
        None => problem.to_owned(),
    }
}

/// Names of the fields of a recipe.
fn known_fields() -> Vec<String> {
    let schema = schema();
    let fields = schema["properties"].as_object();
    fields.into_iter().flat_map(Map::keys).cloned().collect()
}

fn unknown_field(field: &str, known: &[String]) -> Defect {
    let name = field.replace('-', "_");
    let distance = |known: &String| strsim::levenshtein(&name, known);
    let nearest = known.iter().min_by_key(|known| distance(known));
    let limit = SUGGESTED_DISTANCE * name.len() as f64;
    let defect = Defect::new(field, "is not a field of a recipe");
    match nearest.filter(|known| distance(known) as f64 <= limit) {
        Some(nearest) => defect.hint(format!("did you mean `{nearest}`?")),
        None => defect.hint("`narrows schema recipe` lists the fields"),
    }
}

/// The JSON Schema of recipe files.
pub fn schema() -> Value {
    schemars::schema_for!(RecipeArgs).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn toml_and_json_are_read_alike() {
        let toml = parse("beta2 = 0.999 # as PyTorch\nlr_schedule = \"wsd\"\nsteps = 7", false);
        let json = parse(r#"{"beta2": 0.999, "lr_schedule": "wsd", "steps": 7}"#, true);
        let text = |recipe: Result<RecipeArgs, Defect>| serde_json::to_string(&recipe.unwrap());
        assert_eq!(text(toml).unwrap(), text(json).unwrap());
    }

    #[test]
    fn defects_are_located() {
        for (text, field, problem) in [
            ("steps = 1\nbeta2 0.9", "line 2", "is not TOML: "),
            ("beta_2 = 0.9", "beta_2", "is not a field of a recipe"),
            ("beta2 = 1.5", "beta2", "expected a number from 0 to below 1"),
            ("learning_rate = \"fast\"", "learning_rate", "expected a number, found \"fast\""),
            ("steps = 2\n\nbeta1 = 0.9\n  beta2 = 1.5", "beta2", "below 1 (line 4)"),
            ("steps = 0", "steps", "expected a whole number from 1, found 0"),
            ("learning_rate = nan", "learning_rate", "is not a finite number"),
            ("\u{feff}a b", "line 1", "is not TOML: "),
        ] {
            let defect = parse(text, false).unwrap_err();
            assert_eq!(defect.field, field, "{text}: {defect:?}");
            assert!(defect.problem.contains(problem), "{text}: {defect:?}");
        }
        let repeated = parse(r#"{"steps": 7, "beta2": 0.9, "steps": 8}"#, true).unwrap_err();
        assert_eq!(repeated.to_string(), "steps: is set twice (line 1 column 34)");
        let hint = |text: &str| parse(text, false).unwrap_err().hint.unwrap_or_default();
        assert_eq!(hint("beta-2 = 0.9"), "did you mean `beta2`?");
        assert_eq!(hint("dropout_probability = 0"), "`narrows schema recipe` lists the fields");
    }

    #[test]
    fn any_text_is_read_or_rejected() {
        let seed = include_str!("../../recipes/cola-60m-c4.toml");
        arbtest::arbtest(|u| {
            let mut bytes = seed.as_bytes().to_vec();
            for _ in 0..u.int_in_range(1..=4)? {
                let at = u.choose_index(bytes.len())?;
                bytes[at] = *u.choose(b"=#\"\n.-0e[]_")?;
            }
            let _ = parse(&String::from_utf8_lossy(&bytes), false);
            Ok(())
        })
        .budget_ms(200);
    }
}
