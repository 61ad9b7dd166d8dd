//! Flags of `generate`.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::Args;
use narrows_plan::model::Model;

use crate::errors::{CommandResult, Failure, Problem};
use crate::generate::TokenChoice;
use crate::tokenize::Tokenizer;
use crate::weight_files::WeightFiles;

use super::output::FormatArgs;
use super::tokenizer::{TOKENIZER_FILE, read_tokenizer};
use super::units::{NonNegative, Share};

/// Value of `--tokenizer` for models of bytes.
const BYTES: &str = "bytes";

/// Vocabulary of a model whose tokens are taken as bytes.
const BYTE_VOCABULARY: u64 = 256;

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The folder of a checkpoint or of a run's checkpoints, or weights as --init-from reads them
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Text to continue
    #[arg(long, value_name = "TEXT")]
    pub prompt: String,
    /// Maximum number of new tokens; generation ends earlier at an end-of-text token, or at the model's maximum sequence length
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: u32,
    /// Divides the logits before a token is drawn: lower is less random, and 0 takes the likeliest token
    #[arg(long, value_name = "T", default_value = "0.8")]
    pub temperature: NonNegative,
    /// Draw from the likeliest tokens that together have this share of the probability
    #[arg(long, value_name = "P", default_value = "0.95")]
    pub top_p: Share,
    /// Seed of the draws; the same seed gives the same text
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Model of the weights: a preset, a model file or a Hugging Face config.json [default: the model.json or else the
    /// config.json beside the weights]
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<OsString>,
    /// Tokenizer of the training data, a tokenizer.json, or `bytes` [default: the tokenizer.json beside the weights, or
    /// else bytes for a vocabulary of 256]
    #[arg(long, value_name = "FILE|bytes")]
    pub tokenizer: Option<OsString>,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// Settings of `generate`.
#[derive(Debug)]
pub struct GenerateSettings<'a> {
    /// The weights.
    pub weights: WeightFiles,
    /// Their model.
    pub model: Model,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The text to continue.
    pub prompt: &'a str,
    /// New tokens, at most.
    pub tokens: u32,
    /// Choice of tokens.
    pub choice: TokenChoice,
}

impl GenerateArgs {
    /// The settings.
    ///
    /// # Errors
    /// A model or a tokenizer that cannot be found or read.
    pub fn resolve(&self) -> CommandResult<GenerateSettings<'_>> {
        let weights = WeightFiles::find(&self.checkpoint)?;
        let model = weights.model(self.model.as_deref())?;
        let tokenizer = self.tokenizer(&weights, &model)?;
        let choice = TokenChoice::new(self.temperature.0, self.top_p.0, self.seed);
        let (prompt, tokens) = (&self.prompt, self.tokens);
        Ok(GenerateSettings { weights, model, tokenizer, prompt, tokens, choice })
    }

    fn tokenizer(&self, weights: &WeightFiles, model: &Model) -> CommandResult<Tokenizer> {
        match self.tokenizer.as_deref() {
            Some(bytes) if bytes == OsStr::new(BYTES) => Ok(Tokenizer::Bytes),
            Some(file) => read_tokenizer(file),
            None => match weights.companion(TOKENIZER_FILE) {
                Some(file) => read_tokenizer(file.as_os_str()),
                None if model.vocab == BYTE_VOCABULARY => Ok(Tokenizer::Bytes),
                None => {
                    let path = weights.path().display().to_string();
                    let message = format!(
                        "has no {TOKENIZER_FILE}, and the model has {} tokens, not the {BYTE_VOCABULARY} of bytes",
                        model.vocab
                    );
                    let problem = Problem::new(path, message)
                        .hint("--tokenizer FILE, the tokenizer.json of the training data")
                        .hint("--tokenizer bytes, where every byte was a token");
                    Err(Failure::input(problem))
                }
            },
        }
    }
}
