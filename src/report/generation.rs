//! Report on a generated text.

use serde::Serialize;

use crate::args::GenerateSettings;
use crate::generate::{EndOfGeneration, Generation};
use crate::text::plural;

/// Output of `generate`.
#[derive(Serialize)]
pub struct GenerationReport {
    model: String,
    weights: String,
    prompt: String,
    /// The continuation, without the prompt.
    text: String,
    prompt_tokens: Vec<u32>,
    tokens: Vec<u32>,
    ended_by: EndOfGeneration,
    prompt_time_s: f64,
    time_s: f64,
    tokens_per_s: f64,
}

impl GenerationReport {
    /// The report on the continuation `text` of a prompt with these tokens.
    pub fn new(
        settings: &GenerateSettings<'_>,
        prompt_tokens: Vec<u32>,
        text: String,
        generation: &Generation,
    ) -> GenerationReport {
        let Generation { tokens, end, prompt_time_s, time_s } = generation;
        GenerationReport {
            model: settings.model.name.clone(),
            weights: settings.weights.path().display().to_string(),
            prompt: settings.prompt.to_owned(),
            text,
            prompt_tokens,
            tokens: tokens.clone(),
            ended_by: *end,
            prompt_time_s: *prompt_time_s,
            time_s: *time_s,
            tokens_per_s: tokens.len() as f64 / time_s.max(f64::MIN_POSITIVE),
        }
    }

    /// One line on the tokens, their times and the end of the text.
    pub fn summary(&self) -> String {
        let end = match self.ended_by {
            EndOfGeneration::Tokens => "",
            EndOfGeneration::EndOfText => ", ended by the end-of-text token",
            EndOfGeneration::Positions => ", ended by the longest sequence of the model",
        };
        format!(
            "{} after {} of prompt, {:.1} tokens/s{end}\n",
            plural(self.tokens.len() as u64, "token"),
            plural(self.prompt_tokens.len() as u64, "token"),
            self.tokens_per_s
        )
    }
}
