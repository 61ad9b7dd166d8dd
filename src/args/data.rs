//! Flags of `data`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::errors::{CommandResult, Problem, Problems};
use crate::input::{self, TextDocument};
use crate::output;
use crate::tokenize::{HuggingFace, Tokenizer};

use super::output::FormatArgs;
use super::request::at_most_one_stdin;

/// Flags of `data`.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// Text files, or `-`
    #[arg(value_name = "TEXT", required_unless_present = "inspect")]
    pub texts: Vec<OsString>,
    /// Write the token file here
    #[arg(long, value_name = "FILE", required_unless_present = "inspect")]
    pub output: Option<OsString>,
    /// A Hugging Face tokenizer.json, or `-` [default: every byte is a token]
    ///
    /// If it has an end-of-text token, one is put between two texts.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<OsString>,
    /// Print the header of a token file (of this program or of llm.c) and verify its contents
    #[arg(long, value_name = "FILE", conflicts_with_all = ["texts", "output", "tokenizer"])]
    pub inspect: Option<OsString>,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// Task of `data`.
#[derive(Debug)]
pub enum DataTask {
    /// Makes a token file.
    Make(TokenFileSettings),
    /// Inspects one.
    Inspect(PathBuf),
}

/// A token file to make.
#[derive(Debug)]
pub struct TokenFileSettings {
    /// The texts, in order.
    pub documents: Vec<TextDocument>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The token file.
    pub output: PathBuf,
}

impl DataArgs {
    /// The task. All inputs are checked before anything is written.
    ///
    /// # Errors
    /// Inputs that cannot be read, streams in place of files, and an output that is also an input.
    pub fn resolve(&self) -> CommandResult<DataTask> {
        let mut problems = Problems::default();
        if let Some(file) = &self.inspect {
            if input::is_stdin(file) {
                problems.push(token_stream("--inspect"));
            }
            return problems.into_result().map(|()| DataTask::Inspect(file.into()));
        }
        let inputs = self.texts.iter().chain(&self.tokenizer);
        at_most_one_stdin(inputs.clone())?;
        let documents: Vec<TextDocument> =
            self.texts.iter().filter_map(|text| problems.take(TextDocument::find(text))).collect();
        let tokenizer = problems.take(tokenizer(self.tokenizer.as_ref()));
        let output = self.output.clone().unwrap_or_default();
        if output::is_stdout(&output) {
            let message = "a token file cannot go to a stream, because its header is written last";
            problems.push(Problem::new("--output", message).hint("the name of a file"));
        }
        if let Some(input) =
            inputs.into_iter().find(|input| is_same_file(input, Path::new(&output)))
        {
            problems.push(output_is_input("--output", input));
        }
        problems.into_result()?;
        let tokenizer = tokenizer.unwrap_or(Tokenizer::Bytes);
        Ok(DataTask::Make(TokenFileSettings { documents, tokenizer, output: output.into() }))
    }
}

fn tokenizer(argument: Option<&OsString>) -> CommandResult<Tokenizer> {
    let Some(argument) = argument else { return Ok(Tokenizer::Bytes) };
    let (name, text) = input::text(argument)?;
    Ok(Tokenizer::HuggingFace(Box::new(HuggingFace::read(&name, &text)?)))
}

/// The problem of a stream in place of a token file.
pub fn token_stream(flag: &str) -> Problem {
    let message = "a token file is memory-mapped, which a stream cannot be";
    Problem::new(flag, message).hint("the name of a file")
}

/// The problem of an output that is also an input.
pub fn output_is_input(flag: &str, input: &OsString) -> Problem {
    let message = format!("`{}` is an input too", input.display());
    Problem::new(flag, message).hint("another file name")
}

/// Whether an input and an output are the same file, possibly under different names.
pub fn is_same_file(input: &OsString, output: &Path) -> bool {
    let input = if input::is_stdin(input) { Path::new("/dev/stdin") } else { Path::new(input) };
    match (fs::canonicalize(input), fs::canonicalize(output)) {
        (Ok(input), Ok(output)) => input == output && output.is_file(),
        _ => false,
    }
}
