//! Reads what the user names: presets, files, standard input.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use narrows_cost_model::{Profile, profile};
use narrows_plan::model::{self, Model, presets};
use narrows_plan::{Defect, Plan};

use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

/// Nothing that is read here is larger; whoever gives us an endless file hears about it.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Where a text comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum InputSource {
    Stdin,
    File(PathBuf),
}

impl InputSource {
    fn of(argument: &OsStr) -> InputSource {
        if is_stdin(argument) { InputSource::Stdin } else { InputSource::File(argument.into()) }
    }

    /// For messages, and to name models after.
    fn name(&self) -> String {
        match self {
            InputSource::Stdin => "<stdin>".into(),
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
            return Err(self.failure("is larger than 64 MiB: this cannot be the right file"));
        }
        String::from_utf8(bytes).map_err(|error| {
            let place = error.utf8_error().valid_up_to();
            self.failure(&format!("is not text: byte {place} is not UTF-8"))
        })
    }

    fn failure(&self, problem: &str) -> Failure {
        Failure::input(Problem::new(self.name(), problem))
    }
}

/// The name and the text of a file or of standard input.
pub fn text(argument: &OsStr) -> CommandResult<(String, String)> {
    let source = InputSource::of(argument);
    Ok((source.name(), source.text()?))
}

/// A text of any size, which is read as a stream.
#[derive(Debug)]
pub struct TextDocument {
    source: InputSource,
    name: String,
    bytes: Option<u64>,
}

impl TextDocument {
    /// A file that is there, or standard input. It is opened only when it is its turn: there may be
    /// more files than a process may have open.
    pub fn find(argument: &OsStr) -> CommandResult<TextDocument> {
        let source = InputSource::of(argument);
        let name = source.name();
        let bytes = match &source {
            InputSource::Stdin => None,
            InputSource::File(path) => {
                let metadata = fs::metadata(path)
                    .map_err(|error| source.failure(&format!("cannot be read: {error}")))?;
                if metadata.is_dir() {
                    return Err(source.failure("is a folder: name the files in it"));
                }
                metadata.is_file().then_some(metadata.len())
            }
        };
        Ok(TextDocument { source, name, bytes })
    }

    /// For messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How long it is, where that is known beforehand.
    pub fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    /// Begins to read it.
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

/// Whether an argument that is no preset is meant as a path.
fn looks_like_path(argument: &OsStr) -> bool {
    let path = Path::new(argument);
    let separated = path.components().count() > 1 || argument.to_string_lossy().ends_with('/');
    is_stdin(argument) || separated || path.extension().is_some() || path.exists()
}

/// The model of a preset's name, a file, a checkpoint's folder, or `-`.
pub fn model(argument: &OsStr) -> CommandResult<Model> {
    let name = argument.to_string_lossy();
    let preset = presets::find(&name);
    match preset {
        Ok(model) => Ok(model),
        Err(defect) if !looks_like_path(argument) => {
            let hint = "or the path of a model file or of a Hugging Face config.json";
            Err(Failure::input(Problem::in_flag(defect).hint(hint)))
        }
        Err(_) => {
            let mut source = InputSource::of(argument);
            if let InputSource::File(path) = &mut source
                && path.is_dir()
            {
                path.push("config.json");
            }
            let text = source.text()?;
            let name = source.name();
            let named = if source == InputSource::Stdin { "-" } else { name.as_str() };
            model::read(named, &text).map_err(|defects| Failure::file(&name, defects))
        }
    }
}

/// The hardware profile of a preset's name, a file, or `-`.
pub fn profile(argument: &OsStr) -> CommandResult<Profile> {
    let name = argument.to_string_lossy();
    if profile::preset_names().any(|known| known == name) || !looks_like_path(argument) {
        if Path::new(argument).is_file() {
            output::warn(&format!("`{name}` is taken as the preset; the file is `./{name}`"));
        }
        return profile::preset(&name).map_err(Failure::flags);
    }
    let source = InputSource::of(argument);
    let text = source.text()?;
    let name = source.name();
    profile::read(&name, &text).map_err(|defects| Failure::file(&name, defects))
}

/// The plan in a file or on standard input: a plan, or what `plan --format json` printed.
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
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let value: serde_json::Value = serde_json::from_str(text).map_err(|error| {
        Defect::new("", format!("is not JSON: {error}"))
            .hint("a plan that `narrows plan --output` wrote")
    })?;
    match value.get("decisions") {
        Some(decisions) if value.get("format").is_none() => Plan::read(&decisions.to_string()),
        _ => Plan::read(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Truncated, spliced and otherwise damaged texts are refused or read, but never panic.
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
            let _ = profile::read("fuzz", &text);
            let _ = read_plan(&text);
            Ok(())
        })
        .budget_ms(300);
    }

    #[test]
    fn paths_and_presets_are_told_apart() {
        for path in ["-", "a/b", "m.json", "./m", "/"] {
            assert!(looks_like_path(OsStr::new(path)), "{path}");
        }
        assert!(!looks_like_path(OsStr::new("cola-7b")));
    }

    #[test]
    fn text_after_the_plan_is_refused() {
        let defects = read_plan("{} {}").unwrap_err();
        assert!(defects.to_string().contains("trailing"), "{defects}");
    }
}
