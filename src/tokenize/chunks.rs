//! Splits long texts into chunks that can be tokenized one by one.
//!
//! Tokenizers split a text into words before they search for tokens, by rules without look-behind. A chunk may therefore
//! end wherever a word ends in the whole text:
//! - after a single line feed between two characters that are not whitespace;
//! - before the end of a line whose last character is a letter or a digit.
//!
//! Other places depend on the tokenizer: the rules differ in how they split several blanks, and in whether a line end
//! belongs to the punctuation before it.
//!
//! A text without such a place is split at any line end, and a very long line between words. The boundaries depend on the
//! text alone, not on the sizes of reads.

use std::io::Read;

use super::error::TokenizeError;

/// Size of a chunk where a word boundary is found.
const CHUNK_BYTES: usize = 128 << 10;

/// Size of a chunk where none is found.
const CHUNK_BYTES_MAX: usize = 4 << 20;

/// The chunks of a document.
pub struct TextChunks<R> {
    document: R,
    /// Bytes that were read and are in no chunk yet.
    buffer: Vec<u8>,
    /// Offset of the buffer in the document.
    offset: u64,
    chunk_bytes: usize,
    chunk_bytes_max: usize,
}

impl<R: Read> TextChunks<R> {
    /// The chunks of a document.
    pub fn new(document: R) -> Self {
        TextChunks::with_sizes(document, CHUNK_BYTES, CHUNK_BYTES_MAX)
    }

    /// The chunks of a document, with other sizes.
    pub fn with_sizes(document: R, chunk_bytes: usize, chunk_bytes_max: usize) -> Self {
        TextChunks { document, buffer: vec![], offset: 0, chunk_bytes, chunk_bytes_max }
    }

    /// The next chunk; `None` at the end.
    pub fn next_chunk(&mut self) -> Result<Option<String>, TokenizeError> {
        let mut target = self.chunk_bytes;
        loop {
            let ended = self.fill(target)?;
            if self.buffer.is_empty() {
                return Ok(None);
            }
            let text = self.text(ended)?;
            let end = if ended {
                Some(text.len())
            } else if target >= self.chunk_bytes_max {
                Some(word_boundary(text).unwrap_or_else(|| fallback_boundary(text)))
            } else {
                word_boundary(text)
            };
            if let Some(end) = end {
                let chunk = text[..end].to_owned();
                self.buffer.drain(..end);
                self.offset += end as u64;
                return Ok(Some(chunk));
            }
            target = (2 * target).min(self.chunk_bytes_max);
        }
    }

    /// Fills the buffer to `target` bytes. Returns whether the document has ended.
    fn fill(&mut self, target: usize) -> Result<bool, TokenizeError> {
        let missing = target.saturating_sub(self.buffer.len()) as u64;
        let read = self.document.by_ref().take(missing).read_to_end(&mut self.buffer);
        let read = read.map_err(TokenizeError::Unreadable)?;
        Ok((read as u64) < missing)
    }

    /// The buffer as text, without an incomplete character at its end.
    fn text(&self, ended: bool) -> Result<&str, TokenizeError> {
        let error = match std::str::from_utf8(&self.buffer) {
            Ok(text) => return Ok(text),
            Err(error) => error,
        };
        let valid = error.valid_up_to();
        if ended || error.error_len().is_some() || valid == 0 {
            return Err(TokenizeError::NotText(self.offset + valid as u64));
        }
        std::str::from_utf8(&self.buffer[..valid]).map_err(|_| TokenizeError::NotText(self.offset))
    }
}

/// The last place where every tokenizer ends a word; `None` without such a place.
fn word_boundary(text: &str) -> Option<usize> {
    let after_line_feed = |at: usize| {
        let before = text[..at].chars().next_back();
        let after = text[at + 1..].chars().next();
        let is_visible = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
        (is_visible(before) && is_visible(after)).then_some(at + 1)
    };
    let after_word = |at: usize| {
        let line = without_line_end(&text[..at + 1]);
        line.chars().next_back().is_some_and(char::is_alphanumeric).then_some(line.len())
    };
    let line_ends = || text.match_indices('\n').map(|(at, _)| at).rev();
    line_ends().find_map(after_line_feed).or_else(|| line_ends().find_map(after_word))
}

/// The boundary in a text without a word boundary: at a line end, at a blank, or at the end.
fn fallback_boundary(text: &str) -> usize {
    let after_line = text.rfind('\n').map(|at| at + 1);
    let before_blank = || text.rfind(char::is_whitespace).filter(|at| *at > 0);
    after_line.or_else(before_blank).unwrap_or(text.len())
}

fn without_line_end(line: &str) -> &str {
    let line = line.strip_suffix('\n').unwrap_or(line);
    line.strip_suffix('\r').unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that returns a few bytes at a time.
    struct TrickleReader<'a>(&'a [u8], usize);

    impl Read for TrickleReader<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let length = self.1.min(self.0.len()).min(into.len());
            into[..length].copy_from_slice(&self.0[..length]);
            self.0 = &self.0[length..];
            Ok(length)
        }
    }

    fn split(
        bytes: &[u8],
        sizes: (usize, usize),
        read_bytes: usize,
    ) -> Result<Vec<String>, TokenizeError> {
        let mut chunks = TextChunks::with_sizes(TrickleReader(bytes, read_bytes), sizes.0, sizes.1);
        let mut all = vec![];
        while let Some(chunk) = chunks.next_chunk()? {
            all.push(chunk);
        }
        Ok(all)
    }

    #[test]
    fn chunks_end_with_lines() {
        for (text, expected) in [
            ("", &[][..]),
            ("one", &["one"]),
            ("one\ntwo\nthree\nfour", &["one\ntwo\n", "three\n", "four"]),
            ("one\r\ntwo\r\nthree\r\n", &["one\r\ntwo", "\r\nthree\r\n"]),
            ("one\n\n\ntwo\n\nthree\n\n", &["one\n\n\ntwo", "\n\nthree\n\n"]),
            ("a long line without an end\nb", &["a long line", " without an", " end\nb"]),
            ("ab.\n\n\n\nabc\n\n.", &["ab.\n\n\n\nabc", "\n\n."]),
        ] {
            assert_eq!(split(text.as_bytes(), (10, 12), 3).unwrap(), expected);
        }
    }

    #[test]
    fn chunks_concatenate_to_the_text_for_any_sizes_of_reads() {
        arbtest::arbtest(|u| {
            let mut text = String::new();
            for _ in 0..u.int_in_range(0..=60)? {
                text.push_str(u.choose(&["a", "bc", " ", "\n", "\r\n", ".", "é", "語", "7"])?);
            }
            let sizes = (u.int_in_range(4..=12)?, u.int_in_range(12..=24)?);
            let chunks = split(text.as_bytes(), sizes, 1).unwrap();
            assert_eq!(chunks.concat(), text);
            assert!(chunks.iter().all(|chunk| !chunk.is_empty() && chunk.len() <= sizes.1));
            assert_eq!(chunks, split(text.as_bytes(), sizes, usize::MAX).unwrap());
            Ok(())
        })
        .budget_ms(300);
    }

    #[test]
    fn invalid_utf8_is_located() {
        for (bytes, place) in [
            (&b"\xff"[..], 0),
            (b"one\ntwo\nthree\nfour\xc3", 18),
            (b"one\ntwo\nthree\nfour\xc3\nmore and more", 18),
            ("one\ntwo\nthre\u{e9}\nfour".as_bytes(), usize::MAX),
        ] {
            match split(bytes, (6, 12), 5) {
                Err(TokenizeError::NotText(byte)) => assert_eq!(byte, place as u64),
                other => assert!(place == usize::MAX && other.is_ok(), "{other:?}"),
            }
        }
    }
}
