//! The files of a corpus, and the documents in them.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::vec;

use indicatif::ProgressBar;
use narrows_runtime::data::TokenFile;

use crate::errors::{CommandResult, Failure, Problem};
use crate::input::TextDocument;
use crate::tokenize::{TokenizeError, Tokenizer};

use super::compressed::decompressed;
use super::document_writer::DocumentWriter;
use super::format::InputFormat;
use super::json_lines::{JsonLines, looks_like_json_lines};
use super::megatron::open_megatron;
use super::nanoset::open_nanoset;
use super::parquet_file::ParquetFile;
use super::text_batch::TextBatch;
use super::token_documents::TokenDocuments;

/// First bytes of Parquet files.
const PARQUET: &[u8; 4] = b"PAR1";

/// Hints for files with documents in a field.
const FIELD_OF_PARQUET: &str = "--input-format parquet, whose field --text-field is the text";
const FIELD_OF_JSON_LINES: &str = "--input-format jsonl, whose field --text-field is the text";

/// An input: a file, the files of a folder, or standard input.
#[derive(Debug)]
pub struct Corpus {
    /// The name in messages.
    pub name: String,
    /// The files, in order.
    pub files: Vec<CorpusFile>,
}

/// A file of a corpus.
#[derive(Debug)]
pub struct CorpusFile {
    /// The file or standard input.
    pub document: TextDocument,
    /// The path; `None` for standard input.
    pub path: Option<PathBuf>,
    /// The format, and whether it was given and not concluded from the name.
    pub format: (InputFormat, FormatOrigin),
}

/// Source of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatOrigin {
    /// The name of the file.
    Name,
    /// A flag.
    Flag,
}

/// Reads the documents of a corpus, one after the other.
pub struct CorpusReader<'a> {
    tokenizer: &'a Tokenizer,
    text_field: &'a str,
    progress: ProgressBar,
    files: vec::IntoIter<CorpusFile>,
    current: Option<FileReader>,
}

/// A file that is being read.
enum FileReader {
    /// A text that has not been read.
    Text(TextDocument, Box<dyn Read>),
    Json(JsonLines, TextBatch, String),
    Parquet(Box<ParquetFile>, TextBatch, String),
    Tokens(Box<TokenDocuments>),
}

impl CorpusFile {
    /// A file of a format, which its name states unless a flag does.
    pub fn new(document: TextDocument, format: Option<InputFormat>) -> CorpusFile {
        let path = document.path().map(Path::to_path_buf);
        let of_name = || path.as_deref().map_or(InputFormat::Text, InputFormat::of_name);
        let format = match format {
            Some(format) => (format, FormatOrigin::Flag),
            None => (of_name(), FormatOrigin::Name),
        };
        CorpusFile { document, path, format }
    }

    /// Whether the file has tokens, and not texts.
    pub fn has_tokens(&self) -> bool {
        matches!(self.format.0, InputFormat::Megatron | InputFormat::Nanoset)
    }
}

/// The files of a folder and of the folders in it that are documents by their names, in the order of their paths. Hidden
/// files and indexes beside token files are left out.
///
/// # Errors
/// A folder that cannot be listed.
pub fn files_of_folder(folder: &Path) -> CommandResult<Vec<PathBuf>> {
    let failure = |error| {
        let message = format!("cannot be listed: {error}");
        Failure::input(Problem::new(folder.display().to_string(), message))
    };
    let entries = fs::read_dir(folder).map_err(failure)?;
    let entries: Result<Vec<_>, _> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut paths = entries.map_err(failure)?;
    paths.sort();
    let mut files = vec![];
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_index = [".ds.index", ".ds.metadata"].iter().any(|ending| name.ends_with(ending))
            || name.ends_with(".bin") && path.with_extension("idx").exists();
        if name.starts_with('.') || is_index {
            continue;
        }
        if path.is_dir() {
            files.extend(files_of_folder(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

impl<'a> CorpusReader<'a> {
    /// Reads a corpus with a tokenizer. `text_field` is the field of JSON lines and the column of Parquet files that has the
    /// text; the progress bar counts bytes of files.
    pub fn new(
        corpus: Corpus,
        tokenizer: &'a Tokenizer,
        text_field: &'a str,
        progress: ProgressBar,
    ) -> CorpusReader<'a> {
        let files = corpus.files.into_iter();
        CorpusReader { tokenizer, text_field, progress, files, current: None }
    }

    /// Writes the next document; false at the end.
    ///
    /// # Errors
    /// A file that cannot be read or tokenized, and a token file that cannot be written.
    pub fn write_document(&mut self, writer: &mut DocumentWriter) -> CommandResult<bool> {
        loop {
            if self.current.is_none() {
                let Some(file) = self.files.next() else { return Ok(false) };
                self.current = Some(self.open(file)?);
            }
            if self.write_document_of_file(writer)? {
                writer.end_document().map_err(Failure::token_file)?;
                return Ok(true);
            }
        }
    }

    fn open(&self, file: CorpusFile) -> CommandResult<FileReader> {
        let CorpusFile { document, path, format } = file;
        let (field, progress) = (self.text_field, self.progress.clone());
        let name = document.name().to_owned();
        let path = path.as_deref();
        let seekable = || {
            let problem = Problem::new(&name, "is a stream, and this format needs a file");
            path.ok_or_else(|| Failure::input(problem.hint("the name of a file")))
        };
        match format.0 {
            InputFormat::Text => {
                let reader = self.contents(&document)?;
                let reader = refuse_other_formats(reader, &document, format.1)?;
                Ok(FileReader::Text(document, Box::new(reader)))
            }
            InputFormat::Jsonl => {
                let lines = JsonLines::new(name.clone(), field.into(), self.contents(&document)?);
                Ok(FileReader::Json(lines, TextBatch::default(), name))
            }
            InputFormat::Parquet => {
                let file = ParquetFile::open(seekable()?, field, progress)?;
                Ok(FileReader::Parquet(Box::new(file), TextBatch::default(), name))
            }
            InputFormat::Megatron => {
                Ok(FileReader::Tokens(Box::new(open_megatron(seekable()?, progress)?)))
            }
            InputFormat::Nanoset => {
                Ok(FileReader::Tokens(Box::new(open_nanoset(seekable()?, progress)?)))
            }
        }
    }

    fn contents(&self, document: &TextDocument) -> CommandResult<BufReader<Box<dyn Read>>> {
        decompressed(document.open()?, self.progress.clone()).map_err(|error| {
            Failure::input(Problem::new(document.name(), format!("cannot be read: {error}")))
        })
    }

    /// Writes the next document of the current file. Returns false at the end of the file, which is then closed.
    fn write_document_of_file(&mut self, writer: &mut DocumentWriter) -> CommandResult<bool> {
        let tokenizer = self.tokenizer;
        let next = match self.current.take() {
            None => return Ok(false),
            // The whole file is one document.
            Some(FileReader::Text(document, reader)) => {
                tokenizer
                    .tokenize(reader, writer)
                    .map_err(|error| tokenize_failure(document.name(), error))?;
                return Ok(true);
            }
            Some(FileReader::Tokens(mut tokens)) => {
                let vocabulary = tokenizer.description().vocabulary;
                let has_document = tokens.next_document(vocabulary, |tokens| {
                    writer.push(tokens).map_err(Failure::token_file)
                })?;
                self.current = has_document.then_some(FileReader::Tokens(tokens));
                return Ok(has_document);
            }
            Some(FileReader::Json(mut lines, mut batch, name)) => {
                let next = batch.next_document(tokenizer, &name, || lines.next_text())?;
                self.current =
                    Some(FileReader::Json(lines, batch, name)).filter(|_| next.is_some());
                next
            }
            Some(FileReader::Parquet(mut file, mut batch, name)) => {
                let next = batch.next_document(tokenizer, &name, || file.next_text())?;
                self.current =
                    Some(FileReader::Parquet(file, batch, name)).filter(|_| next.is_some());
                next
            }
        };
        let Some(document) = next else { return Ok(false) };
        writer.count_text(document.text_bytes);
        writer.push(&document.tokens).map_err(Failure::token_file)?;
        Ok(true)
    }
}

/// Refuses JSON lines, Parquet files and token files that would be read as text, unless a flag says that they are.
fn refuse_other_formats(
    mut reader: BufReader<Box<dyn Read>>,
    document: &TextDocument,
    origin: FormatOrigin,
) -> CommandResult<BufReader<Box<dyn Read>>> {
    let beginning = reader.fill_buf().map_err(|error| {
        Failure::input(Problem::new(document.name(), format!("cannot be read: {error}")))
    })?;
    let found = match beginning {
        _ if origin == FormatOrigin::Flag => None,
        beginning if beginning.starts_with(PARQUET) => {
            Some(("has a Parquet file, and would be read as text", FIELD_OF_PARQUET))
        }
        beginning if TokenFile::is_beginning(beginning) => {
            Some(("is a token file already", "`narrows run --data` takes it as it is"))
        }
        beginning if looks_like_json_lines(beginning) => {
            Some(("has JSON lines, and would be read as text", FIELD_OF_JSON_LINES))
        }
        _ => None,
    };
    if let Some(tokens) =
        tokens_of_nanoset(document.name()).filter(|_| origin == FormatOrigin::Name)
    {
        let problem = Problem::new(document.name(), "is a part of a nanoset without its tokens");
        return Err(Failure::input(problem.hint(format!("{tokens}, which is read with it"))));
    }
    let Some((contents, hint)) = found else { return Ok(reader) };
    let problem = Problem::new(document.name(), contents).hint(hint);
    Err(Failure::input(problem.hint("--input-format text, to take the whole file as one text")))
}

/// The file of tokens to which an index or the metadata of a nanoset belong.
fn tokens_of_nanoset(name: &str) -> Option<&str> {
    let tokens = [".index", ".metadata"].iter().find_map(|ending| name.strip_suffix(ending));
    tokens.filter(|tokens| tokens.ends_with(".ds"))
}

fn tokenize_failure(name: &str, error: TokenizeError) -> Failure {
    let at = |byte: u64, message: String| Problem::new(name, message).field(format!("byte {byte}"));
    Failure::input(match error {
        TokenizeError::Unreadable(error) => Problem::new(name, format!("cannot be read: {error}")),
        // One with an index was read as such.
        TokenizeError::NotText(byte) if name.ends_with(".bin") => {
            let index = Path::new(name).with_extension("idx");
            at(byte, "is not UTF-8".into())
                .hint(format!("{}, if these are tokens of Megatron-LM", index.display()))
                .hint("text in UTF-8")
        }
        TokenizeError::NotText(byte) => at(byte, "is not UTF-8".into())
            .hint("text in UTF-8, or no --tokenizer, so that every byte is a token"),
        TokenizeError::Rejected { first_byte, message } => at(first_byte, message)
            .because(["because the tokenizer rejects the text that begins there".into()])
            .hint("a tokenizer with a token for unknown text"),
        TokenizeError::Unwritable(error) => return Failure::token_file(error),
    })
}
