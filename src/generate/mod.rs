//! Continues a text with a model, token by token.
//!
//! [`sampling`] chooses the next token from logits, and [`text`] turns tokens into text as they come.

mod sampling;
mod text;

use std::time::Instant;

use narrows_cpu::{CachedModel, SequenceError};

pub use sampling::TokenChoice;
pub use text::TextStream;

/// Reason for the end of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndOfGeneration {
    /// The text has the requested number of tokens.
    Tokens,
    /// The model chose the end-of-text token.
    EndOfText,
    /// The model has no further position.
    Positions,
}

/// The continuation of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The new tokens, without the end-of-text token.
    pub tokens: Vec<u32>,
    /// Reason for the end of the text.
    pub end: EndOfGeneration,
    /// Time of the prompt, in seconds.
    pub prompt_time_s: f64,
    /// Time of the new tokens, in seconds.
    pub time_s: f64,
}

/// Error of a generation.
#[derive(Debug)]
pub enum GenerateError<E> {
    /// The prompt does not fit the model.
    Prompt(SequenceError),
    /// The model has no finite logits.
    NotFinite,
    /// A new token could not be handed on.
    Output(E),
}

/// Limits of a generation.
#[derive(Clone, Copy, Debug)]
pub struct GenerationLimits {
    /// New tokens, at most.
    pub tokens: usize,
    /// Tokens with the prompt, at most.
    pub positions: usize,
    /// The token at which a text ends.
    pub end_of_text: Option<u32>,
}

/// Continues a prompt of at least one token. Calls `emit` with each new token at once.
///
/// # Errors
/// A prompt that does not fit the model, logits that are not finite, and errors of `emit`.
pub fn generate<E>(
    cached: &mut CachedModel,
    prompt: &[u32],
    limits: GenerationLimits,
    choice: &TokenChoice,
    mut emit: impl FnMut(u32) -> Result<(), E>,
) -> Result<Generation, GenerateError<E>> {
    let start = Instant::now();
    let mut logits = cached.push(prompt).map_err(GenerateError::Prompt)?;
    let prompt_time_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mut tokens = vec![];
    let end = loop {
        if tokens.len() == limits.tokens {
            break EndOfGeneration::Tokens;
        }
        let token = choice.choose(&logits, tokens.len() as u64).ok_or(GenerateError::NotFinite)?;
        if limits.end_of_text == Some(token) {
            break EndOfGeneration::EndOfText;
        }
        tokens.push(token);
        emit(token).map_err(GenerateError::Output)?;
        if prompt.len() + tokens.len() >= limits.positions {
            break match tokens.len() == limits.tokens {
                true => EndOfGeneration::Tokens,
                false => EndOfGeneration::Positions,
            };
        }
        logits = cached.push(&[token]).map_err(GenerateError::Prompt)?;
    };
    Ok(Generation { tokens, end, prompt_time_s, time_s: start.elapsed().as_secs_f64() })
}
