//! Flags of validation during a run.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;

use crate::errors::{CommandResult, Failure, Problem};
use crate::input;

use super::data::token_stream;
use super::recipe::RecipeArgs;

/// Evaluations of a run by default.
const EVALUATIONS: u64 = 10;

/// Flags of validation.
#[derive(Debug, Args)]
pub struct ValidationArgs {
    /// Token file to evaluate: loss and perplexity, by forward passes alone
    #[arg(long, value_name = "FILE")]
    pub eval_data: Option<OsString>,
    /// End the run when this many evaluations in a row have not lowered the evaluation loss
    #[arg(long, value_name = "N")]
    pub early_stop: Option<NonZeroU64>,
}

/// Settings of validation.
#[derive(Debug)]
pub struct ValidationSettings {
    /// The token file.
    pub file: PathBuf,
    /// Steps between evaluations.
    pub every: NonZeroU64,
    /// Tokens of an evaluation; `None` for the whole file.
    pub tokens: Option<u64>,
    /// Evaluations without a lower loss that end the run.
    pub early_stop: Option<NonZeroU64>,
}

impl ValidationArgs {
    /// The token file of the flag or else of the recipe.
    pub fn file(&self, recipe: &RecipeArgs) -> Option<OsString> {
        self.eval_data.clone().or_else(|| recipe.eval_data.clone().map(OsString::from))
    }

    /// The settings for a run of `steps` steps, of which the best checkpoint may be kept; `None` without a token file.
    ///
    /// # Errors
    /// A stream in place of a file, and flags without a file.
    pub fn resolve(
        &self,
        recipe: &RecipeArgs,
        steps: u64,
        keep_best: bool,
    ) -> CommandResult<Option<ValidationSettings>> {
        let Some(file) = self.file(recipe) else {
            let flags = [
                ("--keep-best", keep_best),
                ("--early-stop", self.early_stop.is_some()),
                ("--eval-every", recipe.eval_every.is_some()),
                ("--eval-tokens", recipe.eval_tokens.is_some()),
            ];
            return match flags.into_iter().find(|(_, is_set)| *is_set) {
                None => Ok(None),
                Some((flag, _)) => {
                    let problem = Problem::new(flag, "needs evaluations");
                    Err(Failure::input(problem.hint("--eval-data FILE")))
                }
            };
        };
        if input::is_stdin(&file) {
            return Err(Failure::input(token_stream("--eval-data")));
        }
        let every = NonZeroU64::new(steps / EVALUATIONS).unwrap_or(NonZeroU64::MIN);
        Ok(Some(ValidationSettings {
            file: file.into(),
            every: recipe.eval_every.unwrap_or(every),
            tokens: recipe.eval_tokens.map(NonZeroU64::get),
            early_stop: self.early_stop,
        }))
    }
}
