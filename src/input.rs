//! Reads the inputs of flags: presets, files, standard input.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use narrows_cost_model::{Profile, profile};
use narrows_plan::model::{self, Model, presets};
use narrows_plan::strategy::NormRule;
use narrows_plan::{Plan, json};

use crate::errors::{CommandResult, Failure, Problem};
use crate::{nanotron_model, output, yaml};

/// Largest file that is read into memory; a device such as `/dev/zero` would never end.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The name of standard input in messages.
const STDIN_NAME: &str = "<stdin>";

/// A file or standard input.
#[derive(Clone, Debug, PartialEq, Eq)]
enum InputSource {
    Stdin,
    File(PathBuf),
}

impl InputSource {
    fn of(argument: &OsStr) -> InputSource {
        if is_stdin(argument) { InputSource::Stdin } else { InputSource::File(argument.into()) }
    }

    /// The name in messages, also used to name models.
    fn name(&self) -> String {
        match self {
            InputSource::Stdin => STDIN_NAME.into(),
            InputSource::File(path) => path.display().to_string(),
        }
    }

    fn text(&self) -> CommandResult<String> {
        let read = match self {
            InputSource::Stdin => limited(std::io::stdin().lock()),
            InputSource::File(path) => File::open(path).and_then(limited),
        };
        let bytes = read.map_err(|error| self.failure(&format!("cannot be read: {error}")))?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(
                self.failure("is larger than 64 MiB, the limit for models, plans and profiles")
            );
        }
        String::from_utf8(bytes).map_err(|error| {
            let offset = error.utf8_error().valid_up_to();
            self.failure(&format!("is not text: byte {offset} is not UTF-8"))
        })
    }

    fn failure(&self, message: &str) -> Failure {
        Failure::input(Problem::new(self.name(), message))
    }
}

/// The name and the text of a file or of standard input.
pub fn text(argument: &OsStr) -> CommandResult<(String, String)> {
    let source = InputSource::of(argument);
    Ok((source.name(), source.text()?))
}

/// A text of any size, read as a stream.
#[derive(Debug)]
pub struct TextDocument {
    source: InputSource,
    name: String,
    bytes: Option<u64>,
}

impl TextDocument {
    /// Finds a file, or standard input. [`open`](TextDocument::open) opens it, since there may be more files than a
    /// process can keep open.
    pub fn find(argument: &OsStr) -> CommandResult<TextDocument> {
        let source = InputSource::of(argument);
        let name = source.name();
        let bytes = match &source {
            InputSource::Stdin => None,
            InputSource::File(path) => {
                let metadata = fs::metadata(path)
                    .map_err(|error| source.failure(&format!("cannot be read: {error}")))?;
                metadata.is_file().then_some(metadata.len())
            }
        };
        Ok(TextDocument { source, name, bytes })
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path; `None` for standard input.
    pub fn path(&self) -> Option<&Path> {
        match &self.source {
            InputSource::Stdin => None,
            InputSource::File(path) => Some(path),
        }
    }

    /// Size in bytes; `None` for streams.
    pub fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    /// Opens the document.
    pub fn open(&self) -> CommandResult<Box<dyn Read>> {
        match &self.source {
            InputSource::Stdin => Ok(Box::new(std::io::stdin().lock())),
            InputSource::File(path) => match File::open(path) {
                Ok(file) => Ok(Box::new(file)),
                Err(error) => Err(self.source.failure(&format!("cannot be read: {error}"))),
            },
        }
    }
}

/// Whether an argument stands for standard input.
pub fn is_stdin(argument: &OsStr) -> bool {
    argument == "-"
}

fn limited(reader: impl Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![];
    reader.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether an argument that names no preset looks like a path.
fn looks_like_path(argument: &OsStr) -> bool {
    let path = Path::new(argument);
    let separated = path.components().count() > 1 || argument.to_string_lossy().ends_with('/');
    is_stdin(argument) || separated || path.extension().is_some() || path.exists()
}

/// Reads the model of a preset, a file, a folder with a `config.json`, or `-`.
pub fn model(argument: &OsStr) -> CommandResult<Model> {
    let (name, text) = model_text(argument)?;
    warn_of_ignored_fields(&name, &text);
    read_model(&name, &text)
}

/// Prints a warning for each field of a model file that the original code ignores.
pub fn warn_of_ignored_fields(name: &str, text: &str) {
    for warning in model::read_with_warnings(name, text).map(|(_, all)| all).unwrap_or_default() {
        output::warn(&format!("{name}: {warning}"));
    }
}

/// Reads a model from the text of a file. `name` is the name of the file in messages.
pub fn read_model(name: &str, text: &str) -> CommandResult<Model> {
    let path = if name == STDIN_NAME { "-" } else { name };
    model::read(path, text).map_err(|defects| Failure::file(name, defects))
}

/// The name and the text of a model file: of a preset, a file, a folder with a `config.json`, or `-`. The text of YAML is
/// its model in JSON.
pub fn model_text(argument: &OsStr) -> CommandResult<(String, String)> {
    let name = argument.to_string_lossy();
    match presets::find_file(&name) {
        Ok(file) => Ok((name.into_owned(), output::json_text(&file)?)),
        Err(defect) if !looks_like_path(argument) => {
            let hint = "or the path of a model file or a Hugging Face config.json";
            Err(Failure::input(Problem::in_flag("--model", defect).hint(hint)))
        }
        Err(_) => {
            let mut source = InputSource::of(argument);
            if let InputSource::File(path) = &mut source
                && path.is_dir()
            {
                path.push("config.json");
            }
            let (name, text) = (source.name(), source.text()?);
            match is_yaml(argument, &text) {
                true => nanotron_model::read(&text)
                    .map_err(|defects| Failure::file(&name, defects))
                    .and_then(|model| Ok((name, output::json_text(&model.config)?))),
                false => Ok((name, text)),
            }
        }
    }
}

/// Whether a file is YAML by its name, or else by its text. Models on standard input are JSON.
fn is_yaml(argument: &OsStr, text: &str) -> bool {
    let extension = Path::new(argument).extension().and_then(OsStr::to_str);
    extension.is_some_and(|extension| matches!(extension, "yaml" | "yml"))
        || !is_stdin(argument)
            && !text.trim_start().starts_with(['{', '['])
            && yaml::read(text).is_ok_and(|value| value.is_object())
}

/// The norms that a model file states, which BOOST's do; [`NormRule::Auto`] for all others, and where the file cannot be
/// read, which reading the model reports.
pub fn norm_rule(model: Option<&OsStr>) -> NormRule {
    let file = model.filter(|name| !is_stdin(name) && Path::new(name).is_file());
    let text =
        file.and_then(|name| InputSource::of(name).text().ok().filter(|text| is_yaml(name, text)));
    let read = text.and_then(|text| nanotron_model::read(&text).ok());
    read.and_then(|model| model.norm).unwrap_or(NormRule::Auto)
}

/// Reads the hardware profile of a preset, a file, or `-`.
pub fn profile(argument: &OsStr) -> CommandResult<Profile> {
    let name = argument.to_string_lossy();
    if profile::preset_names().any(|known| known == name) || !looks_like_path(argument) {
        if Path::new(argument).is_file() {
            output::warn(&format!("`{name}` is taken as the preset; for the file pass `./{name}`"));
        }
        return profile::preset(&name).map_err(|defects| Failure::flag("--hardware", defects));
    }
    let source = InputSource::of(argument);
    let text = source.text()?;
    let name = source.name();
    profile::read(&text).map_err(|defects| Failure::file(&name, defects))
}

/// Reads a plan file, or the output of `plan --format json`. Returns the name of the input too.
pub fn plan(argument: &OsString) -> CommandResult<(String, Plan)> {
    let source = InputSource::of(argument);
    let name = source.name();
    let text = source.text()?;
    match read_plan(&text) {
        Ok(plan) => Ok((name, plan)),
        Err(defects) => Err(Failure::file(&name, defects)),
    }
}

fn read_plan(text: &str) -> Result<Plan, narrows_plan::Defects> {
    let hint = "a plan written by `narrows plan --output`";
    let value: serde_json::Value = json::read(text).map_err(|defect| defect.hint(hint))?;
    match value.get("decisions") {
        Some(decisions) if value.get("format").is_none() => Plan::read(&decisions.to_string()),
        _ => Plan::read(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Truncated, spliced and otherwise damaged texts are accepted or rejected without a panic.
    #[test]
    fn damaged_texts_never_panic() {
        let seed = include_str!("../models/mixed-ranks.json");
        arbtest::arbtest(|u| {
            let mut bytes = seed.as_bytes().to_vec();
            for _ in 0..u.int_in_range(1..=6)? {
                let at = u.choose_index(bytes.len())?;
                match u.int_in_range(0..=2)? {
                    0 => bytes[at] = u.arbitrary()?,
                    1 => drop(bytes.drain(at..(at + 9).min(bytes.len()))),
                    _ => bytes.insert(at, *u.choose(b"{}[]\",:0-e9.")?),
                }
            }
            let text = String::from_utf8_lossy(&bytes);
            let _ = model::read("fuzz", &text);
            let _ = profile::read(&text);
            let _ = read_plan(&text);
            Ok(())
        })
        .budget_ms(300);
    }

    #[test]
    fn paths_and_presets_are_distinguished() {
        for path in ["-", "a/b", "m.json", "./m", "/"] {
            assert!(looks_like_path(OsStr::new(path)), "{path}");
        }
        assert!(!looks_like_path(OsStr::new("cola-7b")));
    }

    #[test]
    fn text_after_a_plan_is_rejected() {
        let defects = read_plan("{} {}").unwrap_err();
        assert!(defects.to_string().contains("trailing"), "{defects}");
    }
}
