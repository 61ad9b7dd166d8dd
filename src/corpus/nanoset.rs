//! Nanosets, as datatrove writes them for nanotron: `NAME.ds` has the tokens, `NAME.ds.index` the number of tokens until
//! the end of each document as u64, and `NAME.ds.metadata` the tokenizer, the bytes of a token and their number.

use std::fs;
use std::path::Path;

use indicatif::ProgressBar;

use crate::errors::{CommandResult, Failure, Problem};

use super::token_documents::{
    TokenDocuments, TokenFormat, TokenSpan, integers_at, open, unreadable,
};

/// Opens the file `NAME.ds`.
///
/// # Errors
/// A file that cannot be read, and metadata without the width of a token.
pub fn open_nanoset(path: &Path, progress: ProgressBar) -> CommandResult<TokenDocuments> {
    let beside = |ending: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        std::path::PathBuf::from(name)
    };
    let (index, metadata) = (beside(".index"), beside(".metadata"));
    let text = fs::read_to_string(&metadata).map_err(|error| unreadable(&metadata, &error))?;
    // The first line is the tokenizer, a bar, and the bytes of a token.
    let first_line = text.lines().next().unwrap_or_default();
    let format = match first_line.rsplit_once('|').map(|(_, width)| width.trim()) {
        Some("2") => TokenFormat::U16,
        Some("4") => TokenFormat::U32,
        _ => {
            let message = "does not state the bytes of a token";
            let problem = Problem::new(metadata.display().to_string(), message).field("line 1");
            return Err(Failure::input(problem.hint("the tokenizer, a bar, and 2 or 4")));
        }
    };
    let width = if format == TokenFormat::U16 { 2 } else { 4 };
    let bytes = open(&index)?.metadata().map_err(|error| unreadable(&index, &error))?.len();
    let ends = integers_at(&index, 0)?.take((bytes / 8) as usize);
    let (mut begin, mut number) = (0u64, 0u64);
    let name = index.clone();
    let spans = ends.map(move |end| {
        let end = end.map_err(|error| unreadable(&name, &error))?;
        number += 1;
        let Some((tokens, start)) = end.checked_sub(begin).zip(begin.checked_mul(width)) else {
            let message =
                format!("document {number} ends at token {end}, before it begins at {begin}");
            let problem = Problem::new(name.display().to_string(), message);
            return Err(Failure::input(problem.hint("an index as datatrove writes it")));
        };
        begin = end;
        Ok(TokenSpan { start, tokens, ends_document: true })
    });
    TokenDocuments::open(path, format, &index, Box::new(spans), progress)
}
