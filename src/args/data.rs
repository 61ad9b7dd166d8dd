//! What the flags of `data` mean.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::errors::{CommandResult, Problem, Problems};
use crate::input::{self, TextDocument};
use crate::output;
use crate::tokenize::{HuggingFace, Tokenizer};

use super::low::DataArgs;
use super::resolve::only_one_stdin;

/// What is asked of `data`.
#[derive(Debug)]
pub enum DataTask {
    /// Make a token file.
    Make(DataSettings),
    /// Say what one holds.
    Inspect(PathBuf),
}

/// A token file that is to be made.
#[derive(Debug)]
pub struct DataSettings {
    /// Its texts, in order.
    pub documents: Vec<TextDocument>,
    /// What turns them into tokens.
    pub tokenizer: Tokenizer,
    /// Where it goes.
    pub output: PathBuf,
}

/// Everything that `data` depends on. All inputs are looked at before anything is written.
pub fn data(args: &DataArgs) -> CommandResult<DataTask> {
    let mut problems = Problems::default();
    if let Some(file) = &args.inspect {
        if input::is_stdin(file) {
            let problem = "a token file is mapped into memory, and a stream cannot be";
            problems.push(Problem::new("--inspect", problem).hint("the name of a file"));
        }
        return problems.failure().map_or(Ok(DataTask::Inspect(file.into())), Err);
    }
    let inputs = args.texts.iter().chain(&args.tokenizer);
    only_one_stdin(inputs.clone())?;
    let found: Vec<_> =
        args.texts.iter().map(|text| problems.take(TextDocument::find(text))).collect();
    let documents: Vec<TextDocument> = found.into_iter().flatten().collect();
    let tokenizer = problems.take(tokenizer(args.tokenizer.as_ref()));
    let output = args.output.clone().unwrap_or_default();
    if output::is_stdout(&output) {
        let problem = "a token file cannot go to a stream: its header is known last";
        problems.push(Problem::new("--output", problem).hint("the name of a file"));
    }
    if let Some(input) = inputs.into_iter().find(|input| same_file(input, Path::new(&output))) {
        let problem = format!("`{}` is an input too", input.display());
        problems.push(Problem::new("--output", problem).hint("another name"));
    }
    match (problems.failure(), tokenizer) {
        (None, Some(tokenizer)) => {
            Ok(DataTask::Make(DataSettings { documents, tokenizer, output: output.into() }))
        }
        (failure, _) => Err(failure.unwrap_or_else(|| crate::errors::Failure::failed(vec![]))),
    }
}

fn tokenizer(argument: Option<&OsString>) -> CommandResult<Tokenizer> {
    let Some(argument) = argument else { return Ok(Tokenizer::Bytes) };
    let (name, text) = input::text(argument)?;
    Ok(Tokenizer::HuggingFace(Box::new(HuggingFace::read(&name, &text)?)))
}

/// Whether an input is the file that will be replaced, also by another name of it.
pub fn same_file(input: &OsString, output: &Path) -> bool {
    let input = if input::is_stdin(input) { Path::new("/dev/stdin") } else { Path::new(input) };
    match (fs::canonicalize(input), fs::canonicalize(output)) {
        (Ok(input), Ok(output)) => input == output && output.is_file(),
        _ => false,
    }
}
