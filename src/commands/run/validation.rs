//! Validation of a run: evaluations on a held-out token file, and what follows from them.

use std::sync::Arc;

use narrows_plan::model::Model;
use narrows_runtime::Trainer;
use narrows_runtime::data::{Sampler, SamplerConfig, TokenFile};
use narrows_runtime::train::{Evaluation, EvaluationOutcome, Evaluator, TrainControl, TrainError};

use crate::args::{Recipe, ValidationSettings};
use crate::errors::{CommandResult, Failure};
use crate::output;
use crate::text::{plural, thousands};

/// Evaluates the weights of a run at regular steps.
pub struct Validation<'a> {
    settings: &'a ValidationSettings,
    evaluator: Evaluator,
    last: Option<Evaluation>,
}

/// An evaluation, and what it means for the run.
pub struct Verdict {
    /// The evaluation.
    pub evaluation: Evaluation,
    /// Whether its loss is the lowest of the run.
    pub is_best: bool,
    /// Whether the run continues.
    pub control: TrainControl,
}

impl Verdict {
    /// The progress line.
    pub fn line(&self, step: u64) -> String {
        let Evaluation { loss, predicted_tokens, .. } = self.evaluation;
        let (perplexity, tokens) = (self.evaluation.perplexity(), thousands(predicted_tokens));
        let best = if self.is_best { ", the lowest so far" } else { "" };
        format!(
            "  step {step}  eval loss {loss:.4}  perplexity {perplexity:.2}  of {tokens} tokens{best}\n"
        )
    }
}

impl<'a> Validation<'a> {
    /// Opens the token file, and prepares a run for it, with a warning where the run was evaluated on other tokens before.
    ///
    /// # Errors
    /// A file that cannot be read, is shorter than a sequence, or has a larger vocabulary than the model.
    pub fn new(
        settings: &'a ValidationSettings,
        model: &Model,
        recipe: &Recipe,
        trainer: &mut Trainer,
        is_rank_0: bool,
    ) -> CommandResult<Validation<'a>> {
        let session = trainer.session();
        let file = TokenFile::open(&settings.file).map_err(Failure::token_file)?;
        let sampling = SamplerConfig {
            sequence_length: session.program().context.workload.sequence_length,
            vocabulary: u32::try_from(model.vocab).unwrap_or(u32::MAX),
            seed: recipe.seed,
            targets: recipe.targets,
        };
        let sampler = Sampler::new(Arc::new(file), sampling).map_err(Failure::token_file)?;
        let evaluator = Evaluator::new(sampler, session, settings.tokens)?;
        if trainer.begin_evaluations(&evaluator) && is_rank_0 {
            output::warn(&format!(
                "{}: the evaluations until step {} were of other tokens, so their lowest loss no longer counts",
                settings.file.display(),
                trainer.session().steps()
            ));
        }
        Ok(Validation { settings, evaluator, last: None })
    }

    /// The tokens that are evaluated. Their number is that of whole sequences, and at most that of the file.
    pub fn description(&self) -> String {
        let (windows, file) = (self.evaluator.set().windows, self.settings.file.display());
        let tokens = windows * self.evaluator.sampler().sequence_length();
        let clause = match self.settings.tokens {
            Some(asked) if asked < tokens => {
                format!(", --eval-tokens {} rounded up", thousands(asked))
            }
            Some(asked) if asked > tokens => {
                format!(", fewer than --eval-tokens {}: all that it has", thousands(asked))
            }
            _ => String::new(),
        };
        let [tokens, windows] = [plural(tokens, "token"), plural(windows, "sequence")];
        format!("{tokens} of {file}, {windows}{clause}")
    }

    /// SHA-256 of the tokens, in hexadecimal digits.
    pub fn tokens_sha256(&self) -> String {
        self.evaluator.sampler().tokens_sha256().to_owned()
    }

    /// The token file.
    pub fn file(&self) -> &Arc<TokenFile> {
        self.evaluator.sampler().file()
    }

    /// The last evaluation.
    pub fn last(&self) -> Option<&Evaluation> {
        self.last.as_ref()
    }

    /// Evaluates the weights after a step, if that is due: every few steps, and after the last of `steps`.
    ///
    /// # Errors
    /// As [`Evaluator::evaluate`].
    pub fn evaluate_if_due(
        &mut self,
        trainer: &mut Trainer,
        steps: u64,
    ) -> Result<Option<EvaluationOutcome>, TrainError> {
        let step = trainer.session().steps();
        let is_due = step.is_multiple_of(self.settings.every.get()) || step == steps;
        is_due.then(|| trainer.evaluate(&mut self.evaluator)).transpose()
    }

    /// Compares an evaluation, the last one so far, with those before it.
    pub fn judge(&mut self, evaluation: Evaluation, trainer: &Trainer) -> Verdict {
        self.last = Some(evaluation);
        let is_best = trainer.evaluations().since_best == 0;
        let control = match self.ends(trainer) {
            true => TrainControl::StopEarly,
            false => TrainControl::Continue,
        };
        Verdict { evaluation, is_best, control }
    }

    /// Says that the run has stopped early.
    pub fn early_stop_sentence(trainer: &Trainer) -> String {
        let (step, evaluations) = (trainer.session().steps(), trainer.evaluations());
        let count = plural(evaluations.since_best, "evaluation");
        let best = evaluations.best_step.map_or(String::new(), |step| format!(" of step {step}"));
        format!(
            "The run stopped early after step {step}: the last {count} have not lowered the loss{best}. A larger \
             --early-stop with --resume continues it."
        )
    }

    /// Whether so many evaluations have not lowered the loss that the run ends, or has ended before it resumes.
    pub fn ends(&self, trainer: &Trainer) -> bool {
        let since_best = trainer.evaluations().since_best;
        self.settings.early_stop.is_some_and(|patience| since_best >= patience.get())
    }
}
