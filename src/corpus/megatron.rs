//! Indexed datasets of Megatron-LM: `NAME.bin` has the tokens, and `NAME.idx` their width and the place of every
//! sequence and document.
//!
//! | bytes of the index | contents |
//! |---|---|
//! | 9 | `MMIDIDX` and two zeros |
//! | 8 | version, 1 |
//! | 1 | code of the width: 1 for u8, 4 for i32, 8 for u16 |
//! | 8 | number of sequences s |
//! | 8 | number of document boundaries d |
//! | 4·s | length of each sequence in tokens |
//! | 8·s | first byte of each sequence |
//! | 8·d | the sequence that each document begins with, and at last s |

use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;

use crate::errors::{CommandResult, Failure, Problem};
use crate::text::plural;

use super::token_documents::{
    TokenDocuments, TokenFile, TokenFormat, TokenSpan, integers_at, open, unreadable,
};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";

/// Bytes before the lengths.
const HEADER_BYTES: u64 = 34;

/// Opens the dataset with the file `NAME.idx` or `NAME.bin`.
///
/// # Errors
/// A file that cannot be read, or that is no such index.
pub fn open_megatron(path: &Path, progress: ProgressBar) -> CommandResult<TokenDocuments> {
    let (index, tokens) = (path.with_extension("idx"), path.with_extension("bin"));
    let mut file = open(&index)?;
    let failure =
        |message: String| Failure::input(Problem::new(index.display().to_string(), message));
    let actual = file.metadata().map_err(|error| unreadable(&index, &error))?.len();
    let mut header = [0; HEADER_BYTES as usize];
    file.read_exact(&mut header).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => failure(format!(
            "ends too early: it has {}, and its header takes {HEADER_BYTES}",
            plural(actual, "byte")
        )),
        _ => unreadable(&index, &error),
    })?;
    let integer = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
    if !header.starts_with(MAGIC) {
        return Err(failure(
            "is not an index of Megatron-LM: it does not begin with MMIDIDX".into(),
        ));
    }
    if integer(9) != 1 {
        return Err(failure(format!("has version {}, and 1 is read", integer(9))));
    }
    let format = match header[17] {
        1 => TokenFormat::U8,
        4 => TokenFormat::U32,
        8 => TokenFormat::U16,
        code => {
            return Err(failure(format!(
                "has tokens of the format {code}, and 1, 4 and 8 are read"
            )));
        }
    };
    let (sequences, boundaries) = (integer(18), integer(26));
    let expected = sequences.checked_mul(12).zip(boundaries.checked_mul(8)).and_then(
        |(sequences, documents)| HEADER_BYTES.checked_add(sequences)?.checked_add(documents),
    );
    if expected != Some(actual) || boundaries == 0 {
        let message = format!(
            "has {actual} bytes, which {sequences} sequences and {boundaries} document boundaries do not take"
        );
        return Err(failure(message));
    }
    let pointers = HEADER_BYTES + 4 * sequences;
    let documents = pointers + 8 * sequences;
    let boundary = |number: u64| -> CommandResult<u64> {
        let boundary = integers_at(&index, documents + 8 * number)?.next();
        boundary.unwrap_or(Ok(0)).map_err(|error| unreadable(&index, &error))
    };
    let (first, last) = (boundary(0)?, boundary(boundaries - 1)?);
    if first != 0 {
        let message =
            format!("is {}, and the first document begins with sequence 0", first.cast_signed());
        return Err(defect(&index, "document_indices", 0, message));
    }
    if last != sequences {
        let message = format!(
            "is {}, where the last document ends, and there are {}",
            last.cast_signed(),
            plural(sequences, "sequence")
        );
        return Err(defect(&index, "document_indices", boundaries - 1, message));
    }
    let spans = Spans {
        lengths: lengths(&index, sequences)?,
        pointers: Box::new(integers_at(&index, pointers)?.take(sequences as usize)),
        ends: Box::new(integers_at(&index, documents + 8)?.take((boundaries - 1) as usize)),
        documents: 0,
        sequences,
        sequence: 0,
        end: None,
        index: index.clone(),
    };
    let tokens = TokenFile { path: tokens, format, format_source: index.clone() };
    TokenDocuments::open(tokens, &index, Box::new(spans), progress)
}

/// The places of sequences, each at its own pointer.
struct Spans {
    lengths: Box<dyn Iterator<Item = io::Result<i32>>>,
    pointers: Box<dyn Iterator<Item = io::Result<u64>>>,
    /// The sequences at which documents end.
    ends: Box<dyn Iterator<Item = io::Result<u64>>>,
    /// Documents whose ends were read.
    documents: u64,
    /// Number of sequences.
    sequences: u64,
    /// The next sequence.
    sequence: u64,
    /// End of the document of the next sequence; `None` between documents.
    end: Option<u64>,
    index: PathBuf,
}

impl Spans {
    fn next_span(&mut self) -> CommandResult<Option<TokenSpan>> {
        let end = match self.end {
            Some(end) => end,
            None => match self.next_end()? {
                Some(end) => end,
                None => return Ok(None),
            },
        };
        if self.sequence == end {
            return Ok(Some(TokenSpan { start: 0, tokens: 0, ends_document: true }));
        }
        let number = self.sequence;
        self.sequence += 1;
        let ends_document = self.sequence == end;
        self.end = (!ends_document).then_some(end);
        let unreadable = |error: io::Error| unreadable(&self.index, &error);
        let length = self.lengths.next().unwrap_or_else(ended).map_err(unreadable)?;
        let pointer = self.pointers.next().unwrap_or_else(ended).map_err(unreadable)?;
        let negative = |field, value: i64| {
            defect(
                &self.index,
                field,
                number,
                format!("is {value}, and no sequence has a negative one"),
            )
        };
        let tokens =
            u64::try_from(length).map_err(|_| negative("sequence_lengths", length.into()))?;
        if pointer.cast_signed() < 0 {
            return Err(negative("sequence_pointers", pointer.cast_signed()));
        }
        Ok(Some(TokenSpan { start: pointer, tokens, ends_document }))
    }

    /// The end of the next document, which may be empty.
    fn next_end(&mut self) -> CommandResult<Option<u64>> {
        let end = self.ends.next().transpose().map_err(|error| unreadable(&self.index, &error))?;
        let Some(end) = end else { return Ok(None) };
        self.documents += 1;
        if end > self.sequences {
            let message = format!(
                "is {}, and there are {}",
                end.cast_signed(),
                plural(self.sequences, "sequence")
            );
            return Err(defect(&self.index, "document_indices", self.documents, message));
        }
        if end < self.sequence {
            let message = format!(
                "is {end}, and the document that ends there begins with sequence {}",
                self.sequence
            );
            return Err(defect(&self.index, "document_indices", self.documents, message));
        }
        Ok(Some(end))
    }
}

impl Iterator for Spans {
    type Item = CommandResult<TokenSpan>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_span().transpose()
    }
}

/// A table of the index that ends early, as when the file is cut meanwhile.
fn ended<T>() -> io::Result<T> {
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// A value of the index that cannot be right, under the name that Megatron-LM has for its field.
fn defect(index: &Path, field: &str, number: u64, message: String) -> Failure {
    let problem = Problem::new(index.display().to_string(), message);
    let problem = problem.field(format!("{field}[{number}]"));
    Failure::input(problem.hint("an index as preprocess_data.py of Megatron-LM writes it"))
}

/// The lengths of sequences.
fn lengths(
    index: &Path,
    sequences: u64,
) -> CommandResult<Box<dyn Iterator<Item = io::Result<i32>>>> {
    let mut file = open(index)?;
    file.seek(SeekFrom::Start(HEADER_BYTES)).map_err(|error| unreadable(index, &error))?;
    let mut reader = BufReader::new(file);
    let lengths = std::iter::from_fn(move || {
        let mut bytes = [0; 4];
        Some(reader.read_exact(&mut bytes).map(|()| i32::from_le_bytes(bytes)))
    });
    Ok(Box::new(lengths.take(sequences as usize)))
}
