//! Flags of `data`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::corpus::{Corpus, CorpusFile, DocumentLayout, InputFormat, files_of_folder};
use crate::errors::{CommandResult, Failure, Problem, Problems};
use crate::input::{self, TextDocument};
use crate::output;
use crate::text::plural;
use crate::tokenize::Tokenizer;

use super::output::FormatArgs;
use super::request::at_most_one_stdin;
use super::tokenizer::read_tokenizer;
use super::units::Positive;

/// Longest padded document: more than the context of any model.
const DOCUMENT_TOKENS_MAX: u64 = 1 << 24;

/// Flags that say how a file is made, and mean nothing for one that is inspected.
const FLAGS_OF_MAKING: [&str; 9] = [
    "texts",
    "input_format",
    "text_field",
    "weights",
    "append_eos",
    "pad_to",
    "pad_id",
    "output",
    "tokenizer",
];

/// Flags of `data`.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// Files, folders of files, or `-`: text, JSON lines, Parquet, or tokens of Megatron-LM or nanotron; text may be
    /// compressed with gzip or zstd
    #[arg(value_name = "INPUT", required_unless_present = "inspect")]
    pub texts: Vec<OsString>,
    /// Format of all inputs [default: of each file, what its name says]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub input_format: Option<InputFormat>,
    /// Field of JSON lines, and column of Parquet files, with the text of a document
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub text_field: String,
    /// Mixing weight of each input, by tokens: documents are interleaved until the input whose turn it is has no document left
    /// [default: one input after the other]
    #[arg(long, value_name = "W,W,…", value_delimiter = ',', allow_hyphen_values = true)]
    pub weights: Vec<Positive>,
    /// Put the tokenizer's end-of-text token after every document, instead of between two documents
    #[arg(long)]
    pub append_eos: bool,
    /// Cut or pad every document to this number of tokens, instead of packing documents
    #[arg(long, value_name = "L", requires = "pad_id", value_parser = clap::value_parser!(u64).range(1..=DOCUMENT_TOKENS_MAX))]
    pub pad_to: Option<u64>,
    /// Token that documents are padded with
    #[arg(long, value_name = "ID", requires = "pad_to")]
    pub pad_id: Option<u32>,
    /// Write the token file here
    #[arg(long, value_name = "FILE", required_unless_present = "inspect")]
    pub output: Option<OsString>,
    /// A Hugging Face tokenizer.json, or `-` [default: every byte is a token]
    ///
    /// If it has an end-of-text token, one is put between two texts.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<OsString>,
    /// Print the header of a token file (of this program or of llm.c) and verify its contents
    #[arg(long, value_name = "FILE", conflicts_with_all = FLAGS_OF_MAKING)]
    pub inspect: Option<OsString>,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// Task of `data`.
#[derive(Debug)]
pub enum DataTask {
    /// Makes a token file.
    Make(Box<TokenFileSettings>),
    /// Inspects one.
    Inspect(PathBuf),
}

/// A token file to make.
#[derive(Debug)]
pub struct TokenFileSettings {
    /// The inputs, in order.
    pub corpora: Vec<Corpus>,
    /// The weight of each input, if they are interleaved.
    pub weights: Option<Vec<f64>>,
    /// Field or column of the text.
    pub text_field: String,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Order and separators of documents.
    pub layout: DocumentLayout,
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
        at_most_one_stdin(self.texts.iter().chain(&self.tokenizer))?;
        let corpora: Vec<Corpus> =
            self.texts.iter().filter_map(|input| problems.take(self.corpus(input))).collect();
        let tokenizer = problems.take(
            self.tokenizer.as_ref().map_or(Ok(Tokenizer::Bytes), |file| read_tokenizer(file)),
        );
        let output = self.output.clone().unwrap_or_default();
        if output::is_stdout(&output) {
            let message = "a token file cannot go to a stream, because its header is written last";
            problems.push(Problem::new("--output", message).hint("the name of a file"));
        }
        let files = corpora.iter().flat_map(|corpus| &corpus.files);
        // Files that the words name are checked with the words; these may be in a folder.
        let mut paths = files.filter_map(|file| Some(file.path.as_ref()?.clone().into_os_string()));
        if let Some(input) = paths.find(|file| is_same_file(file, Path::new(&output))) {
            problems.push(output_is_input("--output", &input));
        }
        if !self.weights.is_empty() && self.weights.len() != self.texts.len() {
            let (weights, inputs) = (self.weights.len() as u64, self.texts.len() as u64);
            let message =
                format!("has {} for {}", plural(weights, "weight"), plural(inputs, "input"));
            problems.push(Problem::new("--weights", message).hint("a number for each input"));
        }
        let mut files = corpora.iter().flat_map(|corpus| &corpus.files);
        if let (Some(file), None) = (files.find(|file| file.has_tokens()), &self.tokenizer) {
            let message = "has tokens, of which the vocabulary is not known";
            let problem = Problem::new(file.document.name(), message);
            problems.push(problem.hint("--tokenizer FILE, the tokenizer that made them"));
        }
        let tokenizer = tokenizer.unwrap_or(Tokenizer::Bytes);
        let layout = problems.take(self.layout(&tokenizer));
        problems.into_result()?;
        let weights = self.weights.iter().map(|weight| weight.0).collect();
        Ok(DataTask::Make(Box::new(TokenFileSettings {
            corpora,
            weights: Some(weights).filter(|weights: &Vec<f64>| !weights.is_empty()),
            text_field: self.text_field.clone(),
            layout: layout.unwrap_or(DocumentLayout::Separated(None)),
            tokenizer,
            output: output.into(),
        })))
    }

    /// The files of an input.
    fn corpus(&self, input: &OsString) -> CommandResult<Corpus> {
        let document = TextDocument::find(input)?;
        let name = document.name().to_owned();
        let folder = document.path().filter(|path| path.is_dir());
        let Some(folder) = folder else {
            let files = vec![CorpusFile::new(document, self.input_format)];
            return Ok(Corpus { name, files });
        };
        let files = files_of_folder(folder)?;
        if files.is_empty() {
            return Err(Failure::input(Problem::new(name, "is a folder without files")));
        }
        let file = |path: PathBuf| {
            Ok(CorpusFile::new(TextDocument::find(path.as_os_str())?, self.input_format))
        };
        Ok(Corpus { name, files: files.into_iter().map(file).collect::<CommandResult<_>>()? })
    }

    /// Order and separators of documents.
    fn layout(&self, tokenizer: &Tokenizer) -> CommandResult<DocumentLayout> {
        let description = tokenizer.description();
        let end = match (self.append_eos, description.end_of_text) {
            (true, None) => {
                let problem =
                    Problem::new("--append-eos", "the tokenizer has no end-of-text token");
                return Err(Failure::input(problem.hint("a --tokenizer that has one")));
            }
            (true, end) => end,
            (false, _) => None,
        };
        let (Some(length), Some(pad_id)) = (self.pad_to, self.pad_id) else {
            return Ok(match end {
                Some(end) => DocumentLayout::Ended(end),
                None => DocumentLayout::Separated(description.end_of_text),
            });
        };
        if pad_id >= description.vocabulary {
            let message =
                format!("{pad_id} is not below the vocabulary size {}", description.vocabulary);
            return Err(Failure::input(Problem::new("--pad-id", message)));
        }
        Ok(DocumentLayout::Padded { length, pad_id, end })
    }
}

/// The problem of a stream in place of a token file.
pub fn token_stream(flag: &str) -> Problem {
    let message = "a token file is read at any position, which a stream cannot be";
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
        (Ok(input), Ok(output)) => {
            output.is_file() && (input == output || are_hard_links(&input, &output))
        }
        _ => false,
    }
}

/// Whether an output is an existing file of an input folder.
pub fn is_file_of(folder: &OsString, output: &Path) -> bool {
    match (fs::canonicalize(folder), fs::canonicalize(output)) {
        (Ok(folder), Ok(output)) => {
            folder.is_dir() && output.is_file() && output.starts_with(folder)
        }
        _ => false,
    }
}

/// Whether two existing files are hard links of one.
fn are_hard_links(one: &Path, other: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |path| fs::metadata(path).map(|file| (file.dev(), file.ino()));
        matches!((id(one), id(other)), (Ok(one), Ok(other)) if one == other)
    }
    #[cfg(not(unix))]
    {
        let _ = (one, other);
        false
    }
}
