//! The trace of a run: its measured steps, and the predicted step.

use narrows_cost_model::{Prices, simulate};
use narrows_plan::CheckedProgram;
use narrows_runtime::Trainer;
use narrows_runtime::train::TrainedStep;

use crate::args::TraceSettings;
use crate::errors::CommandResult;
use crate::output;
use crate::report::{MeasuredTrace, TraceText, add_measured_steps, add_predicted_step};
use crate::text::plural;

/// Collects the events of a run's steps.
pub struct Tracer<'a> {
    settings: &'a TraceSettings,
    /// Content of the file: the predicted step, and at the end the measured ones.
    text: TraceText,
    measured: Vec<MeasuredTrace>,
}

impl<'a> Tracer<'a> {
    /// A tracer with the predicted step at these prices.
    pub fn new(
        settings: &'a TraceSettings,
        program: &CheckedProgram,
        prices: &Prices,
    ) -> Tracer<'a> {
        let price = |kernel: &narrows_plan::Kernel| prices.kernel_time(kernel);
        let timeline = simulate(program, prices.streams(&price));
        let mut text = TraceText::new();
        add_predicted_step(&mut text, program.program(), &timeline, prices.streams(&price));
        Tracer { settings, text, measured: vec![] }
    }

    /// Records a completed step, if it is selected.
    pub fn record(&mut self, trainer: &Trainer, trained: &TrainedStep) {
        match &self.settings.steps {
            Some(steps) if !steps.contains(&trained.step) => return,
            Some(_) => {}
            // Only the last step is traced, and every step may be the last.
            None => self.measured.clear(),
        }
        self.measured.push(MeasuredTrace::of(trainer, trained.step));
    }

    /// Writes the trace of a failed run, if it has a measured step. Returns a clause for the error message.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write_after_failure(self, trainer: &Trainer) -> CommandResult<Option<String>> {
        if self.measured.is_empty() {
            return Ok(None);
        }
        let (steps, file) = (self.measured.len() as u64, self.settings.file.display());
        let clause = format!("the trace of {} before it is in {file}", plural(steps, "step"));
        self.write(trainer).map(|()| Some(clause))
    }

    /// Writes the trace, with a warning if no step was measured.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(mut self, trainer: &Trainer) -> CommandResult<()> {
        let name = self.settings.file.display().to_string();
        if self.measured.is_empty() {
            output::warn(&format!(
                "{name} has no measured step: the run made none of --trace-steps"
            ));
        }
        add_measured_steps(&mut self.text, trainer.session().program(), &self.measured);
        output::write_file(&self.settings.file, &self.text.finish(&name, None)?)
    }
}
