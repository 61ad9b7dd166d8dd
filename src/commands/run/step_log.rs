//! Records of the steps of a run: its metrics, TensorBoard events, history, warnings and lines of progress.

use indicatif::ProgressBar;
use narrows_runtime::train::{
    CollapseWatch, Evaluation, MetricsRecord, StepPrediction, TrainedStep,
};

use super::TextOutput;
use crate::args::TrainSettings;
use crate::errors::CommandResult;
use crate::metrics_file::MetricsFile;
use crate::report::{RunHistory, progress_line};
use crate::tensorboard::EventFile;
use crate::{output, progress};

/// Number of progress lines in a run.
const PROGRESS_LINES: u64 = 10;

/// Files of records that a run may have.
pub struct RecordFiles {
    /// The metrics.
    pub metrics: Option<MetricsFile>,
    /// The events of TensorBoard.
    pub events: Option<EventFile>,
}

/// Records every step of a run.
pub struct StepLog<'a> {
    training: &'a TrainSettings,
    files: RecordFiles,
    predicted: StepPrediction,
    history: RunHistory,
    collapse: CollapseWatch,
    text: TextOutput,
    progress: ProgressBar,
    first_step: u64,
    last_recorded: Option<u64>,
}

impl<'a> StepLog<'a> {
    /// The log of a run that begins after `first_step` steps, of a model with this number of tokens in its vocabulary.
    pub fn new(
        training: &'a TrainSettings,
        files: RecordFiles,
        predicted: StepPrediction,
        text: TextOutput,
        (first_step, vocabulary): (u64, u64),
    ) -> StepLog<'a> {
        let warm_up_steps = training.recipe.optimizer.warm_up_steps;
        StepLog {
            training,
            files,
            predicted,
            history: RunHistory::default(),
            collapse: CollapseWatch::new(vocabulary, warm_up_steps),
            text,
            progress: progress_bar(first_step, training.recipe.steps, text),
            first_step,
            last_recorded: None,
        }
    }

    /// Writes a step to the files, warns if the model stopped learning, and advances the progress bar.
    ///
    /// # Errors
    /// A file that cannot be written. The other one is written all the same.
    pub fn record(
        &mut self,
        trained: &TrainedStep,
        evaluation: Option<&Evaluation>,
    ) -> CommandResult<()> {
        let written = self.files.metrics.as_mut().map_or(Ok(()), |metrics| {
            let record = MetricsRecord::new(trained, Some(&self.predicted));
            metrics.write(&record.with_evaluation(evaluation))
        });
        let events = self.files.events.as_mut();
        let event =
            events.map_or(Ok(()), |events| events.write(trained, &self.predicted, evaluation));
        if written.is_ok() {
            self.history.push(trained);
            self.last_recorded = Some(trained.step);
        }
        let collapse = self.collapse.push(trained.step, trained.loss, trained.gradient_norm);
        if let Some(collapse) = collapse.filter(|_| self.training.is_rank_0()) {
            self.progress.suspend(|| output::warn(&format!("step {}: {collapse}", trained.step)));
        }
        self.progress.set_message(format!("loss {:.4}", trained.loss));
        self.progress.inc(1);
        written.and(event)
    }

    /// Prints the progress line of a step that has one, and the line of its evaluation.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    pub fn print(&self, trained: &TrainedStep, evaluation_line: &str) -> CommandResult<()> {
        let steps = self.training.recipe.steps;
        let line_every = (steps / PROGRESS_LINES).max(1);
        let mut lines = String::new();
        if trained.step == self.first_step + 1 || trained.step.is_multiple_of(line_every) {
            lines += &progress_line(trained, steps);
        }
        lines += evaluation_line;
        match lines.is_empty() {
            true => Ok(()),
            false => self.progress.suspend(|| self.text.print(&lines)),
        }
    }

    /// Removes the progress bar after the last step.
    pub fn finish(&self) {
        self.progress.finish_and_clear();
    }

    /// The steps so far.
    pub fn history(&self) -> &RunHistory {
        &self.history
    }

    /// The last step of this process that is in the metrics, where they are written.
    pub fn last_recorded(&self) -> Option<u64> {
        self.last_recorded
    }

    /// Name of the metrics file.
    pub fn metrics_name(&self) -> Option<&str> {
        self.files.metrics.as_ref().map(MetricsFile::name)
    }
}

fn progress_bar(first_step: u64, steps: u64, text: TextOutput) -> ProgressBar {
    if matches!(text, TextOutput::Json | TextOutput::Silent) {
        return ProgressBar::hidden();
    }
    let progress = ProgressBar::new(steps).with_position(first_step);
    // Steps before the checkpoint are not part of this run's time.
    progress.reset_eta();
    let template = "{spinner} {wide_bar} step {pos} of {len}, {msg}, {eta} left";
    progress::styled(progress, template)
}
