//! Batches of short documents, which are tokenized in parallel.

use std::collections::VecDeque;

use crate::errors::{CommandResult, Failure, Problem};
use crate::tokenize::Tokenizer;

/// Bytes of text that are tokenized at once, unless one document is larger.
const BATCH_BYTES: usize = 1 << 20;

/// A document as tokens, with the bytes of its text.
pub struct TokenizedDocument {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Bytes of the text.
    pub text_bytes: u64,
}

/// Tokenized documents that are not written yet.
#[derive(Default)]
pub struct TextBatch(VecDeque<TokenizedDocument>);

impl TextBatch {
    /// The next document. Where none is left, reads and tokenizes more with `next_text`.
    ///
    /// # Errors
    /// A text that cannot be read, or that the tokenizer rejects. `name` is the file in messages.
    pub fn next_document(
        &mut self,
        tokenizer: &Tokenizer,
        name: &str,
        mut next_text: impl FnMut() -> CommandResult<Option<String>>,
    ) -> CommandResult<Option<TokenizedDocument>> {
        if self.0.is_empty() {
            let (mut texts, mut bytes) = (vec![], 0);
            while bytes < BATCH_BYTES
                && let Some(text) = next_text()?
            {
                bytes += text.len();
                texts.push(text);
            }
            let sizes: Vec<u64> = texts.iter().map(|text| text.len() as u64).collect();
            let rejected = |message| Failure::input(Problem::new(name, message));
            let tokens = tokenizer.encode(texts).map_err(rejected)?;
            let documents = tokens.into_iter().zip(sizes);
            self.0 = documents
                .map(|(tokens, text_bytes)| TokenizedDocument { tokens, text_bytes })
                .collect();
        }
        Ok(self.0.pop_front())
    }
}
