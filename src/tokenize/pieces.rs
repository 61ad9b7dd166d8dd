//! Long texts in pieces that can be tokenized one by one.
//!
//! Tokenizers split a text into words before they look for tokens, with rules that never look back.
//! So a piece may end wherever a word ends in the whole text too. That is so
//! - behind a line feed alone between two characters that are no blanks;
//! - before the end of a line whose last character is a letter or a digit, whatever follows.
//!
//! Rules differ in where they divide several blanks, and in whether a line end belongs to the
//! punctuation before it; at these places they agree.
//!
//! A text without such a place is cut at any line end, and one without line ends between words when
//! it is very long. Where it is cut depends on the text alone, not on how it arrives.

use std::io::Read;

use super::TokenizeError;

/// Bytes of a piece, if there is a good place to cut.
const PIECE_BYTES: usize = 128 << 10;

/// Bytes of a piece, if there is none.
const PIECE_BYTES_MAX: usize = 4 << 20;

/// The pieces of a document.
pub struct TextPieces<R> {
    document: R,
    /// What was read and is in no piece yet.
    buffer: Vec<u8>,
    /// Where the buffer begins in the document.
    begin: u64,
    piece_bytes: usize,
    piece_bytes_max: usize,
}

impl<R: Read> TextPieces<R> {
    /// Those of a document.
    pub fn new(document: R) -> Self {
        TextPieces::of_sizes(document, PIECE_BYTES, PIECE_BYTES_MAX)
    }

    /// With other sizes.
    pub fn of_sizes(document: R, piece_bytes: usize, piece_bytes_max: usize) -> Self {
        TextPieces { document, buffer: vec![], begin: 0, piece_bytes, piece_bytes_max }
    }

    /// The next piece; `None` at the end.
    pub fn next_piece(&mut self) -> Result<Option<String>, TokenizeError> {
        let mut wanted = self.piece_bytes;
        loop {
            let ended = self.fill(wanted)?;
            if self.buffer.is_empty() {
                return Ok(None);
            }
            let text = self.text(ended)?;
            let end = if ended {
                Some(text.len())
            } else if wanted >= self.piece_bytes_max {
                Some(good_end(text).unwrap_or_else(|| poor_end(text)))
            } else {
                good_end(text)
            };
            if let Some(end) = end {
                let piece = text[..end].to_owned();
                self.buffer.drain(..end);
                self.begin += end as u64;
                return Ok(Some(piece));
            }
            wanted = (2 * wanted).min(self.piece_bytes_max);
        }
    }

    /// Reads until so many bytes are there; says whether the document ended before.
    fn fill(&mut self, wanted: usize) -> Result<bool, TokenizeError> {
        let missing = wanted.saturating_sub(self.buffer.len()) as u64;
        let read = self.document.by_ref().take(missing).read_to_end(&mut self.buffer);
        let read = read.map_err(TokenizeError::Unreadable)?;
        Ok((read as u64) < missing)
    }

    /// The buffer as text, without the beginning of a character that was not read whole.
    fn text(&self, ended: bool) -> Result<&str, TokenizeError> {
        let error = match std::str::from_utf8(&self.buffer) {
            Ok(text) => return Ok(text),
            Err(error) => error,
        };
        let valid = error.valid_up_to();
        if ended || error.error_len().is_some() || valid == 0 {
            return Err(TokenizeError::NotText(self.begin + valid as u64));
        }
        std::str::from_utf8(&self.buffer[..valid]).map_err(|_| TokenizeError::NotText(self.begin))
    }
}

/// The last place where every tokenizer ends a word, if there is one.
fn good_end(text: &str) -> Option<usize> {
    let between_lines = |at: usize| {
        let before = text[..at].chars().next_back();
        let after = text[at + 1..].chars().next();
        let something = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
        (something(before) && something(after)).then_some(at + 1)
    };
    let behind_a_word = |at: usize| {
        let line = without_line_end(&text[..at + 1]);
        line.chars().next_back().is_some_and(char::is_alphanumeric).then_some(line.len())
    };
    let line_ends = || text.match_indices('\n').map(|(at, _)| at).rev();
    line_ends().find_map(between_lines).or_else(|| line_ends().find_map(behind_a_word))
}

/// A place to cut where there is no good one: a line end, a blank, or between any two characters.
fn poor_end(text: &str) -> usize {
    let behind_line = text.rfind('\n').map(|at| at + 1);
    let before_blank = || text.rfind(char::is_whitespace).filter(|at| *at > 0);
    behind_line.or_else(before_blank).unwrap_or(text.len())
}

fn without_line_end(line: &str) -> &str {
    let line = line.strip_suffix('\n').unwrap_or(line);
    line.strip_suffix('\r').unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that gives as little as it likes.
    struct TrickleReader<'a>(&'a [u8], usize);

    impl Read for TrickleReader<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let length = self.1.min(self.0.len()).min(into.len());
            into[..length].copy_from_slice(&self.0[..length]);
            self.0 = &self.0[length..];
            Ok(length)
        }
    }

    fn cut(
        bytes: &[u8],
        sizes: (usize, usize),
        at_once: usize,
    ) -> Result<Vec<String>, TokenizeError> {
        let mut pieces = TextPieces::of_sizes(TrickleReader(bytes, at_once), sizes.0, sizes.1);
        let mut found = vec![];
        while let Some(piece) = pieces.next_piece()? {
            found.push(piece);
        }
        Ok(found)
    }

    #[test]
    fn pieces_end_with_lines() {
        for (text, pieces) in [
            ("", &[][..]),
            ("one", &["one"]),
            ("one\ntwo\nthree\nfour", &["one\ntwo\n", "three\n", "four"]),
            ("one\r\ntwo\r\nthree\r\n", &["one\r\ntwo", "\r\nthree\r\n"]),
            ("one\n\n\ntwo\n\nthree\n\n", &["one\n\n\ntwo", "\n\nthree\n\n"]),
            ("a long line without an end\nb", &["a long line", " without an", " end\nb"]),
            ("ab.\n\n\n\nabc\n\n.", &["ab.\n\n\n\nabc", "\n\n."]),
        ] {
            assert_eq!(cut(text.as_bytes(), (10, 12), 3).unwrap(), pieces);
        }
    }

    #[test]
    fn pieces_make_the_text_however_it_arrives() {
        arbtest::arbtest(|u| {
            let mut text = String::new();
            for _ in 0..u.int_in_range(0..=60)? {
                text.push_str(u.choose(&["a", "bc", " ", "\n", "\r\n", ".", "é", "語", "7"])?);
            }
            let sizes = (u.int_in_range(4..=12)?, u.int_in_range(12..=24)?);
            let pieces = cut(text.as_bytes(), sizes, 1).unwrap();
            assert_eq!(pieces.concat(), text);
            assert!(pieces.iter().all(|piece| !piece.is_empty() && piece.len() <= sizes.1));
            assert_eq!(pieces, cut(text.as_bytes(), sizes, usize::MAX).unwrap());
            Ok(())
        })
        .budget_ms(300);
    }

    #[test]
    fn what_is_not_text_is_located() {
        for (bytes, place) in [
            (&b"\xff"[..], 0),
            (b"one\ntwo\nthree\nfour\xc3", 18),
            (b"one\ntwo\nthree\nfour\xc3\nmore and more", 18),
            ("one\ntwo\nthre\u{e9}\nfour".as_bytes(), usize::MAX),
        ] {
            match cut(bytes, (6, 12), 5) {
                Err(TokenizeError::NotText(byte)) => assert_eq!(byte, place as u64),
                other => assert!(place == usize::MAX && other.is_ok(), "{other:?}"),
            }
        }
    }
}
