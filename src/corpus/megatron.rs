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

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use indicatif::ProgressBar;

use crate::errors::{CommandResult, Failure, Problem};

use super::token_documents::{
    DocumentSpan, TokenDocuments, TokenFormat, integers_at, open, unreadable,
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
    let read = |file: &mut File, bytes: &mut [u8]| {
        file.read_exact(bytes).map_err(|error| unreadable(&index, &error))
    };
    let mut header = [0; HEADER_BYTES as usize];
    read(&mut file, &mut header)?;
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
    let actual = file.metadata().map_err(|error| unreadable(&index, &error))?.len();
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
    let documents = integers_at(&index, pointers + 8 * sequences)?.take(boundaries as usize);
    let spans = Spans {
        lengths: lengths(&index)?,
        pointers: Box::new(integers_at(&index, pointers)?),
        documents: Box::new(documents),
        sequence: None,
    };
    TokenDocuments::open(&tokens, format, &index, Box::new(spans), progress)
}

/// The places of documents, each of consecutive sequences.
struct Spans {
    lengths: Box<dyn Iterator<Item = io::Result<i32>>>,
    pointers: Box<dyn Iterator<Item = io::Result<u64>>>,
    documents: Box<dyn Iterator<Item = io::Result<u64>>>,
    /// First sequence of the next document; `None` before the first boundary.
    sequence: Option<u64>,
}

impl Spans {
    fn next_span(&mut self) -> io::Result<Option<DocumentSpan>> {
        let first = match self.sequence {
            Some(first) => first,
            None => self.documents.next().transpose()?.unwrap_or(0),
        };
        let Some(end) = self.documents.next().transpose()? else { return Ok(None) };
        self.sequence = Some(end);
        let (mut start, mut tokens) = (None, 0u64);
        for _ in first..end {
            let (length, pointer) = (self.lengths.next(), self.pointers.next());
            let missing = || io::Error::other("a document has more sequences than there are");
            let length = length.unwrap_or_else(|| Err(missing()))?;
            let pointer = pointer.unwrap_or_else(|| Err(missing()))?;
            let first_byte = pointer.cast_signed();
            if length < 0 || first_byte < 0 {
                let message =
                    format!("a sequence has the length {length} and begins at byte {first_byte}");
                return Err(io::Error::other(message));
            }
            start.get_or_insert(pointer);
            tokens = tokens.saturating_add(length.unsigned_abs().into());
        }
        Ok(Some(DocumentSpan { start: start.unwrap_or(0), tokens }))
    }
}

impl Iterator for Spans {
    type Item = io::Result<DocumentSpan>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_span().transpose()
    }
}

/// The lengths of sequences.
fn lengths(index: &Path) -> CommandResult<Box<dyn Iterator<Item = io::Result<i32>>>> {
    let mut file = open(index)?;
    file.seek(SeekFrom::Start(HEADER_BYTES)).map_err(|error| unreadable(index, &error))?;
    let mut reader = BufReader::new(file);
    Ok(Box::new(std::iter::from_fn(move || {
        let mut bytes = [0; 4];
        Some(reader.read_exact(&mut bytes).map(|()| i32::from_le_bytes(bytes)))
    })))
}
