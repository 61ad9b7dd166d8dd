//! Nanosets, as datatrove writes them for nanotron, and which of their files must agree.
//!
//! | file | contents |
//! |---|---|
//! | `NAME.ds` | t tokens of w bytes |
//! | `NAME.ds.index` | the number of tokens until the end of each document, as u64; the last one is t |
//! | `NAME.ds.metadata` | lines: the tokenizer, a bar and w; t, which other programs may leave out; t in words |

use std::fs;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;

use crate::errors::{CommandResult, Failure, Problem};
use crate::text::plural;

use super::token_documents::{
    TokenDocuments, TokenFile, TokenFormat, TokenSpan, integers_at, open, unreadable,
};

/// Bytes of an entry of the index.
const ENTRY_BYTES: u64 = 8;

/// Opens the file `NAME.ds`.
///
/// # Errors
/// A file that cannot be read, metadata without the width of a token, and files of which one has other tokens than the
/// others.
pub fn open_nanoset(path: &Path, progress: ProgressBar) -> CommandResult<TokenDocuments> {
    let beside = |ending: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    let (index, metadata) = (beside(".index"), beside(".metadata"));
    let text = fs::read_to_string(&metadata).map_err(|error| unreadable(&metadata, &error))?;
    let format = token_format(&metadata, &text)?;
    let tokens = TokenFile { path: path.to_path_buf(), format, format_source: metadata };
    let count = token_count(&tokens)?;
    check_stated_count(&tokens, &text, count)?;
    let documents = document_count(&index, &tokens, count)?;
    let spans = spans(&index, documents, format.bytes())?;
    TokenDocuments::open(tokens, &index, Box::new(spans), progress)
}

/// The width of a token, which the first line of the metadata states.
fn token_format(metadata: &Path, text: &str) -> CommandResult<TokenFormat> {
    let first_line = text.lines().next().unwrap_or_default();
    match first_line.rsplit_once('|').map(|(_, width)| width.trim()) {
        Some("2") => Ok(TokenFormat::U16),
        Some("4") => Ok(TokenFormat::U32),
        _ => {
            let problem = defect(metadata, "does not state the bytes of a token".into());
            let hint = "the tokenizer, a bar, and 2 or 4";
            Err(Failure::input(problem.field("line 1").hint(hint)))
        }
    }
}

/// Number of tokens in the file `NAME.ds`.
fn token_count(TokenFile { path, format, format_source }: &TokenFile) -> CommandResult<u64> {
    let bytes = bytes_of(path)?;
    if bytes.is_multiple_of(format.bytes()) {
        return Ok(bytes / format.bytes());
    }
    let message = format!(
        "has {}, where {} says that a token takes {}",
        plural(bytes, "byte"),
        format_source.display(),
        format.size()
    );
    Err(Failure::input(defect(path, message).hint("the whole file")))
}

/// Checks the number of tokens in the second line of the metadata, if there is one.
fn check_stated_count(tokens: &TokenFile, text: &str, count: u64) -> CommandResult<()> {
    let Some(stated) = text.lines().nth(1).map(str::trim) else { return Ok(()) };
    if stated.parse() == Ok(count) {
        return Ok(());
    }
    let TokenFile { path, format, format_source } = tokens;
    let message = format!(
        "is `{stated}`, and {} has {} of {}",
        path.display(),
        plural(count, "token"),
        format.size()
    );
    Err(Failure::input(defect(format_source, message).field("line 2").hint(OF_ONE_NANOSET)))
}

/// Number of documents in the index.
fn document_count(index: &Path, tokens: &TokenFile, count: u64) -> CommandResult<u64> {
    let bytes = bytes_of(index)?;
    if !bytes.is_multiple_of(ENTRY_BYTES) {
        let message = format!(
            "has {}, and the end of a document takes {ENTRY_BYTES} bytes",
            plural(bytes, "byte")
        );
        return Err(Failure::input(defect(index, message).hint("the whole file")));
    }
    let documents = bytes / ENTRY_BYTES;
    let end = match documents.checked_sub(1) {
        Some(last) => integers_at(index, ENTRY_BYTES * last)?.next(),
        None => None,
    };
    let end = end.unwrap_or(Ok(0)).map_err(|error| unreadable(index, &error))?;
    if end != count {
        let TokenFile { path, format, .. } = tokens;
        let message = format!(
            "ends at token {end}, and {} has {} of {}",
            path.display(),
            plural(count, "token"),
            format.size()
        );
        return Err(Failure::input(defect(index, message).hint(OF_ONE_NANOSET)));
    }
    Ok(documents)
}

/// The documents, each from the end of the one before it.
fn spans(
    index: &Path,
    documents: u64,
    width: u64,
) -> CommandResult<impl Iterator<Item = CommandResult<TokenSpan>> + use<>> {
    let ends = integers_at(index, 0)?.take(documents as usize);
    let (mut begin, mut number) = (0u64, 0u64);
    let index = index.to_path_buf();
    Ok(ends.map(move |end| {
        let end = end.map_err(|error| unreadable(&index, &error))?;
        number += 1;
        let Some((tokens, start)) = end.checked_sub(begin).zip(begin.checked_mul(width)) else {
            let message =
                format!("document {number} ends at token {end}, before it begins at {begin}");
            return Err(Failure::input(defect(&index, message).hint(OF_ONE_NANOSET)));
        };
        begin = end;
        Ok(TokenSpan { start, tokens, ends_document: true })
    }))
}

const OF_ONE_NANOSET: &str = "the tokens, the index and the metadata that datatrove wrote together";

fn bytes_of(path: &Path) -> CommandResult<u64> {
    Ok(open(path)?.metadata().map_err(|error| unreadable(path, &error))?.len())
}

fn defect(file: &Path, message: String) -> Problem {
    Problem::new(file.display().to_string(), message)
}
