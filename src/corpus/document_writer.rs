//! Writes the tokens of documents into a token file.

use narrows_runtime::data::{DataError, TokenFileHeader, TokenWriter};

/// Order and separators of documents in a token file. A document that already ends with the token of its end or of its
/// separator gets no second one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DocumentLayout {
    /// Packed, with a token between two documents if there is one.
    Separated(Option<u32>),
    /// Packed, with a token after each document.
    Ended(u32),
    /// All of one length: longer documents are cut, and shorter ones padded.
    Padded {
        /// Tokens of a document.
        length: u64,
        /// The token of the padding.
        pad_id: u32,
        /// The token at the end of each document, if there is one. It is kept where a document is cut.
        end: Option<u32>,
    },
}

impl DocumentLayout {
    /// The token between documents, or after each, if there is one.
    pub fn separator(self) -> Option<u32> {
        match self {
            DocumentLayout::Separated(separator) => separator,
            DocumentLayout::Ended(end) => Some(end),
            DocumentLayout::Padded { end, .. } => end,
        }
    }
}

/// A token file that documents are written to, one after the other.
pub struct DocumentWriter {
    writer: TokenWriter,
    layout: DocumentLayout,
    documents: u64,
    /// Tokens of documents so far, without separators and padding.
    document_tokens: u64,
    /// Bytes of text so far, of token documents none.
    text_bytes: u64,
    /// Tokens of the current document in the file; `None` between documents.
    current: Option<u64>,
    /// The last token of the current document, or of the previous one between documents.
    last: Option<u32>,
}

impl DocumentWriter {
    /// Writes documents to a file.
    pub fn new(writer: TokenWriter, layout: DocumentLayout) -> DocumentWriter {
        DocumentWriter {
            writer,
            layout,
            documents: 0,
            document_tokens: 0,
            text_bytes: 0,
            current: None,
            last: None,
        }
    }

    /// Number of complete documents.
    pub fn documents(&self) -> u64 {
        self.documents
    }

    /// Bytes of text so far.
    pub fn text_bytes(&self) -> u64 {
        self.text_bytes
    }

    /// Tokens of documents so far, without separators and padding.
    pub fn document_tokens(&self) -> u64 {
        self.document_tokens
    }

    /// Tokens of the file so far.
    pub fn token_count(&self) -> u64 {
        self.writer.token_count()
    }

    /// Adds bytes of text to their count.
    pub fn count_text(&mut self, bytes: u64) {
        self.text_bytes += bytes;
    }

    /// Appends tokens to the current document, which begins with them if there is none.
    ///
    /// # Errors
    /// When an id is not below the vocabulary, or the disk is full.
    pub fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        let written = self.begin()?;
        let kept = match self.layout {
            DocumentLayout::Separated(_) | DocumentLayout::Ended(_) => tokens,
            DocumentLayout::Padded { length, end, .. } => {
                let room = (length - u64::from(end.is_some())).saturating_sub(written);
                &tokens[..tokens.len().min(usize::try_from(room).unwrap_or(usize::MAX))]
            }
        };
        self.current = Some(written + kept.len() as u64);
        self.document_tokens += kept.len() as u64;
        self.last = kept.last().copied().or(self.last);
        self.writer.push(kept)
    }

    /// Ends the current document, an empty one if nothing was pushed.
    ///
    /// # Errors
    /// As [`push`](DocumentWriter::push).
    pub fn end_document(&mut self) -> Result<(), DataError> {
        let written = self.begin()?;
        match self.layout {
            DocumentLayout::Separated(_) => {}
            DocumentLayout::Ended(end) => self.writer.push(self.unless_last(end).as_slice())?,
            DocumentLayout::Padded { length, pad_id, end } => {
                let end = end.and_then(|end| self.unless_last(end));
                self.writer.push(end.as_slice())?;
                let missing = length - written - u64::from(end.is_some());
                self.writer.push(&vec![pad_id; missing as usize])?;
            }
        }
        self.documents += 1;
        self.current = None;
        Ok(())
    }

    /// Begins a document unless there is one. Returns its tokens in the file so far.
    fn begin(&mut self) -> Result<u64, DataError> {
        if let Some(written) = self.current {
            return Ok(written);
        }
        if let (DocumentLayout::Separated(Some(separator)), 1..) = (self.layout, self.documents) {
            self.writer.push(self.unless_last(separator).as_slice())?;
        }
        (self.current, self.last) = (Some(0), None);
        Ok(0)
    }

    /// The token, unless the document ends with it.
    fn unless_last(&self, token: u32) -> Option<u32> {
        (self.last != Some(token)).then_some(token)
    }

    /// Completes the file.
    ///
    /// # Errors
    /// When flushing or renaming fails.
    pub fn finish(self) -> Result<TokenFileHeader, DataError> {
        self.writer.finish()
    }
}

#[cfg(test)]
mod tests {
    use narrows_runtime::data::{TokenFile, TokenFileInfo};

    use super::*;

    /// The tokens of a file with documents, each pushed in pieces of one token.
    fn written(layout: DocumentLayout, documents: &[&[u32]]) -> Vec<u32> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.tokens");
        let writer = TokenWriter::create(&path, TokenFileInfo::bytes()).unwrap();
        let mut writer = DocumentWriter::new(writer, layout);
        for document in documents {
            document.iter().for_each(|token| writer.push(&[*token]).unwrap());
            writer.end_document().unwrap();
        }
        assert_eq!(writer.documents(), documents.len() as u64);
        let count = writer.finish().unwrap().token_count;
        let mut tokens = vec![0; count as usize];
        TokenFile::open(&path).unwrap().read_tokens(0, 256, &mut tokens).unwrap();
        tokens
    }

    #[test]
    fn documents_follow_their_layout() {
        let documents: &[&[u32]] = &[&[1, 2], &[], &[3, 4, 5, 6]];
        let padded = |end| DocumentLayout::Padded { length: 3, pad_id: 0, end };
        for (layout, expected) in [
            (DocumentLayout::Separated(None), &[1, 2, 3, 4, 5, 6][..]),
            (DocumentLayout::Separated(Some(9)), &[1, 2, 9, 9, 3, 4, 5, 6]),
            (DocumentLayout::Ended(9), &[1, 2, 9, 9, 3, 4, 5, 6, 9]),
            (padded(None), &[1, 2, 0, 0, 0, 0, 3, 4, 5]),
            (padded(Some(9)), &[1, 2, 9, 9, 0, 0, 3, 4, 9]),
        ] {
            assert_eq!(written(layout, documents), expected, "{layout:?}");
        }
    }

    #[test]
    fn a_document_that_ends_with_the_token_gets_no_second_one() {
        let documents: &[&[u32]] = &[&[1, 9], &[], &[9], &[2, 9, 3], &[4, 5, 9]];
        let padded = DocumentLayout::Padded { length: 3, pad_id: 0, end: Some(9) };
        for (layout, expected) in [
            (DocumentLayout::Separated(Some(9)), &[1, 9, 9, 9, 2, 9, 3, 9, 4, 5, 9][..]),
            (DocumentLayout::Ended(9), &[1, 9, 9, 9, 2, 9, 3, 9, 4, 5, 9]),
            (padded, &[1, 9, 0, 9, 0, 0, 9, 0, 0, 2, 9, 0, 4, 5, 9]),
        ] {
            assert_eq!(written(layout, documents), expected, "{layout:?}");
        }
    }
}
