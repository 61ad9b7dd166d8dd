//! Documents that are tokens already, in files without a header: integers of one width, and the end of every document.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;

use crate::errors::{CommandResult, Failure, Problem};
use crate::text::plural;

/// Tokens that are read at once.
const CHUNK_TOKENS: u64 = 64 << 10;

/// Width of a token in a file, as a little-endian integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFormat {
    /// One byte.
    U8,
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
}

impl TokenFormat {
    /// Bytes of a token.
    pub fn bytes(self) -> u64 {
        match self {
            TokenFormat::U8 => 1,
            TokenFormat::U16 => 2,
            TokenFormat::U32 => 4,
        }
    }

    /// Bytes of a token, with their noun.
    pub fn size(self) -> &'static str {
        match self {
            TokenFormat::U8 => "1 byte",
            TokenFormat::U16 => "2 bytes",
            TokenFormat::U32 => "4 bytes",
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<u32> {
        match self {
            TokenFormat::U8 => bytes.iter().map(|byte| u32::from(*byte)).collect(),
            TokenFormat::U16 => {
                bytes.as_chunks().0.iter().map(|pair| u16::from_le_bytes(*pair).into()).collect()
            }
            TokenFormat::U32 => {
                bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
            }
        }
    }
}

/// The part of a token file that a document is, or of which it has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSpan {
    /// First byte.
    pub start: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Whether it is the last one of its document.
    pub ends_document: bool,
}

/// A file of tokens of one width.
#[derive(Clone, Debug)]
pub struct TokenFile {
    /// The file.
    pub path: PathBuf,
    /// Width of a token.
    pub format: TokenFormat,
    /// The file that states the width.
    pub format_source: PathBuf,
}

/// Reads the documents of a token file. Their places come from an index, which is read as a stream.
pub struct TokenDocuments {
    tokens: TokenFile,
    file: File,
    file_bytes: u64,
    spans: Box<dyn Iterator<Item = CommandResult<TokenSpan>>>,
    index: PathBuf,
    progress: ProgressBar,
}

impl TokenDocuments {
    /// The documents of a token file at `spans`, which the file `index` has and whose errors name it.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(
        tokens: TokenFile,
        index: &Path,
        spans: Box<dyn Iterator<Item = CommandResult<TokenSpan>>>,
        progress: ProgressBar,
    ) -> CommandResult<TokenDocuments> {
        let file = open(&tokens.path)?;
        let file_bytes = file.metadata().map_or(0, |metadata| metadata.len());
        Ok(TokenDocuments { tokens, file, file_bytes, spans, index: index.to_path_buf(), progress })
    }

    /// Passes the tokens of the next document to `push`, in pieces; false at the end.
    ///
    /// # Errors
    /// A file that cannot be read or is too short for its index, an id that is not below `vocabulary`, and the errors of
    /// `push`.
    pub fn next_document(
        &mut self,
        vocabulary: u32,
        mut push: impl FnMut(&[u32]) -> CommandResult<()>,
    ) -> CommandResult<bool> {
        let mut is_begun = false;
        while let Some(span) = self.spans.next() {
            let span = span?;
            self.read_span(span, vocabulary, &mut push)?;
            if span.ends_document {
                return Ok(true);
            }
            is_begun = true;
        }
        Ok(is_begun)
    }

    fn read_span(
        &mut self,
        TokenSpan { start, tokens, .. }: TokenSpan,
        vocabulary: u32,
        push: &mut impl FnMut(&[u32]) -> CommandResult<()>,
    ) -> CommandResult<()> {
        let TokenFile { path, format, .. } = &self.tokens;
        let width = format.bytes();
        let end = tokens.checked_mul(width).and_then(|bytes| bytes.checked_add(start));
        if end.is_none_or(|end| end > self.file_bytes) {
            let message = format!(
                "has {} from byte {start} on, and {} has {}",
                plural(tokens, "token"),
                path.display(),
                plural(self.file_bytes, "byte")
            );
            let problem = Problem::new(self.index.display().to_string(), message);
            return Err(Failure::input(problem.hint("the index of this token file")));
        }
        let failure = |error: io::Error| unreadable(path, &error);
        self.file.seek(SeekFrom::Start(start)).map_err(failure)?;
        let mut left = tokens;
        while left > 0 {
            let count = left.min(CHUNK_TOKENS);
            let mut bytes = vec![0; (count * width) as usize];
            self.file.read_exact(&mut bytes).map_err(failure)?;
            let ids = format.decode(&bytes);
            if let Some(index) = ids.iter().position(|id| *id >= vocabulary) {
                let byte = start + width * (tokens - left + index as u64);
                return Err(self.unknown_id(ids[index], byte, vocabulary));
            }
            push(&ids)?;
            self.progress.inc(bytes.len() as u64);
            left -= count;
        }
        Ok(())
    }

    fn unknown_id(&self, id: u32, byte: u64, vocabulary: u32) -> Failure {
        let TokenFile { path, format, format_source } = &self.tokens;
        let source = format_source.display();
        let message = format!(
            "id {id} is not below {vocabulary}, the vocabulary size of the tokenizer, where {source} says that an id takes {}",
            format.size()
        );
        let problem = Problem::new(path.display().to_string(), message);
        let problem = problem.field(format!("byte {byte}"));
        let hint = format!(
            "--tokenizer FILE, the tokenizer that made these tokens; or {source} belongs to another file"
        );
        Failure::input(problem.hint(hint))
    }
}

/// Opens a file.
pub fn open(path: &Path) -> CommandResult<File> {
    File::open(path).map_err(|error| unreadable(path, &error))
}

/// Reads little-endian integers of eight bytes from a position of a file on.
pub fn integers_at(
    path: &Path,
    position: u64,
) -> CommandResult<impl Iterator<Item = io::Result<u64>> + use<>> {
    let mut file = open(path)?;
    file.seek(SeekFrom::Start(position)).map_err(|error| unreadable(path, &error))?;
    let mut reader = BufReader::new(file);
    Ok(std::iter::from_fn(move || {
        let mut bytes = [0; 8];
        Some(reader.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes)))
    }))
}

/// The failure of a file that cannot be read.
pub fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::input(Problem::new(path.display().to_string(), format!("cannot be read: {error}")))
}
