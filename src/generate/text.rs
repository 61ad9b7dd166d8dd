//! Text of tokens that come one after the other, always in whole characters.
//!
//! A token may hold a part of a character, and how a token reads may depend on the one before it (the blank of
//! SentencePiece). The text of a token is therefore what it adds to the text of the tokens before it, and is held back
//! while it ends within a character.

use std::mem::take;

use crate::tokenize::Tokenizer;

/// Tokens of the prompt that the text of the first new token may depend on.
const CONTEXT_TOKENS: usize = 8;

/// A character has at most four bytes: what is still incomplete with as many tokens is no character.
const PENDING_TOKENS_MAX: usize = 4;

/// The text after a prompt.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens before the pending ones.
    context: Vec<u32>,
    /// Tokens whose text is held back.
    pending: Vec<u32>,
}

impl<'a> TextStream<'a> {
    /// The text after this prompt.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> TextStream<'a> {
        let context = prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..].to_vec();
        TextStream { tokenizer, context, pending: vec![] }
    }

    /// Adds a token. Returns the text that is complete with it.
    ///
    /// # Errors
    /// The message of the tokenizer.
    pub fn push(&mut self, token: u32) -> Result<String, String> {
        self.pending.push(token);
        let text = self.pending_text()?;
        let is_within_character = text.ends_with(char::REPLACEMENT_CHARACTER);
        if is_within_character && self.pending.len() < PENDING_TOKENS_MAX {
            return Ok(String::new());
        }
        self.context = take(&mut self.pending);
        Ok(text)
    }

    /// The text that is still held back.
    ///
    /// # Errors
    /// The message of the tokenizer.
    pub fn finish(self) -> Result<String, String> {
        self.pending_text()
    }

    /// The text that the pending tokens add to that of the tokens before them.
    fn pending_text(&self) -> Result<String, String> {
        let before = self.tokenizer.decode(&self.context)?;
        let all = self.tokenizer.decode(&[&self.context[..], &self.pending].concat())?;
        Ok(all.strip_prefix(&before).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streamed(bytes: &[u8]) -> Vec<String> {
        let mut stream = TextStream::new(&Tokenizer::Bytes, b"Ahab".map(u32::from).as_slice());
        let mut parts: Vec<String> =
            bytes.iter().map(|byte| stream.push(u32::from(*byte)).unwrap()).collect();
        parts.push(stream.finish().unwrap());
        parts
    }

    #[test]
    fn characters_appear_whole_and_at_once() {
        assert_eq!(
            streamed("aé€🐋b".as_bytes()),
            ["a", "", "é", "", "", "€", "", "", "", "🐋", "b", ""]
        );
        assert_eq!(streamed(b"a\xf0\x9f"), ["a", "", "", "\u{fffd}"]);
    }

    #[test]
    fn the_parts_are_the_text_of_all_bytes() {
        arbtest::arbtest(|u| {
            let bytes: Vec<u8> = (0..u.int_in_range(0..=20)?)
                .map(|_| Ok(*u.choose(&[b'a', 0xc3, 0xa9, 0xf0, 0x9f, 0x90, 0x8b, 0xff, 0x80])?))
                .collect::<Result<_, _>>()?;
            let text = streamed(&bytes).concat();
            if let Ok(whole) = std::str::from_utf8(&bytes) {
                assert_eq!(text, whole);
            }
            let letters = |text: &str| text.matches('a').count();
            assert_eq!(letters(&text), bytes.iter().filter(|byte| **byte == b'a').count());
            Ok(())
        })
        .budget_ms(200);
    }
}
