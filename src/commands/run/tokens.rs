//! Tokens of a run: the file that it reads, and the tokenizer that made it.

use std::path::Path;
use std::sync::Arc;

use narrows_plan::Plan;
use narrows_plan::model::Model;
use narrows_runtime::data::{Sampler, SamplerConfig, TokenFile};
use narrows_runtime::sha256;
use narrows_runtime::train::TrainError;

use crate::args::{TokenSource, TrainSettings};
use crate::errors::{CommandResult, Failure, Problem};

/// The built-in text.
const BUILT_IN_TEXT: &[u8] = include_bytes!("../../../data/moby-dick.txt");

/// The name of the built-in text in reports.
const BUILT_IN_NAME: &str = "moby-dick.txt (within the program)";

/// Opens the tokens of a run.
///
/// # Errors
/// A file that cannot be read or is too short, a larger vocabulary than the model's, and the tokenizer of other tokens.
pub fn sampler(model: &Model, plan: &Plan, training: &TrainSettings) -> CommandResult<Sampler> {
    let file = match &training.tokens {
        TokenSource::BuiltIn => TokenFile::from_text(Path::new(BUILT_IN_NAME), BUILT_IN_TEXT),
        TokenSource::File(path) => TokenFile::open(path),
    }
    .map_err(Failure::token_file)?;
    let sampling = SamplerConfig {
        sequence_length: plan.workload.sequence_length,
        vocabulary: u32::try_from(model.vocab).unwrap_or(u32::MAX),
        seed: training.recipe.seed,
        targets: training.recipe.targets,
    };
    require_tokenizer_of(&file, training)?;
    Sampler::new(Arc::new(file), sampling).map_err(|error| TrainError::from(error).into())
}

/// Checks that the tokenizer for checkpoints is the one that made the tokens, where the token file says which one that was.
fn require_tokenizer_of(tokens: &TokenFile, training: &TrainSettings) -> CommandResult<()> {
    let (Some(file), Some(made_by)) = (training.tokenizer.first(), &tokens.header().tokenizer)
    else {
        return Ok(());
    };
    if sha256(&file.contents) == made_by.fingerprint {
        return Ok(());
    }
    let (tokens, made_by) = (tokens.path().display(), &made_by.name);
    let message = format!("is not the tokenizer of {tokens}, which was made with `{made_by}`");
    Err(Failure::input(
        Problem::new("--tokenizer", message).hint("the file that `narrows data` was given"),
    ))
}
