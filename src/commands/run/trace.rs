//! The trace of a run: its measured steps beside the one that was expected.

use std::io;

use narrows_cost_model::{Prices, simulate};
use narrows_plan::CheckedProgram;
use narrows_runtime::Trainer;
use narrows_runtime::train::TrainedStep;

use crate::args::trace::TraceSettings;
use crate::errors::CommandResult;
use crate::output;
use crate::report::page::plural;
use crate::report::trace::{MeasuredTrace, TraceEvent, expected, measured};

/// Collects the events of a run's steps.
pub struct Tracer<'a> {
    asked: &'a TraceSettings,
    expected: Vec<TraceEvent>,
    measured: Vec<MeasuredTrace>,
}

impl<'a> Tracer<'a> {
    /// With what is expected of a step at these prices.
    pub fn new(asked: &'a TraceSettings, program: &CheckedProgram, prices: &Prices) -> Tracer<'a> {
        let price = |kernel: &narrows_plan::Kernel| prices.kernel_time(kernel);
        let timeline = simulate(program, &price);
        let expected = expected(program.program(), &timeline, &price);
        Tracer { asked, expected, measured: vec![] }
    }

    /// Sees a step that was made.
    pub fn after(&mut self, trainer: &Trainer, trained: &TrainedStep) {
        match &self.asked.steps {
            Some(steps) if !steps.contains(&trained.step) => return,
            Some(_) => {}
            // The last one that is made, and who knows which that is.
            None => self.measured.clear(),
        }
        self.measured.push(MeasuredTrace::of(trainer, trained.step));
    }

    /// Writes the file of a run that failed, if any step that was asked for was made before. Gives
    /// what is in it, as a sentence.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn rescue(self, trainer: &Trainer) -> CommandResult<Option<String>> {
        if self.measured.is_empty() {
            return Ok(None);
        }
        let (steps, file) = (self.measured.len() as u64, self.asked.file.display());
        let what = format!("the trace of {} before it is in {file}", plural(steps, "step"));
        self.finish(trainer).map(|()| Some(what))
    }

    /// Writes the file. Says so where none of the steps that were asked for was made.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self, trainer: &Trainer) -> CommandResult<()> {
        let name = self.asked.file.display().to_string();
        if self.measured.is_empty() {
            output::warn(&format!("no step that {name} is about was made: it has none measured"));
        }
        let mut events = measured(trainer.session().program(), &self.measured);
        events.append(&mut self.expected);
        let document = serde_json::json!({ "displayTimeUnit": "ms", "traceEvents": events });
        serde_json::to_string(&document)
            .map_err(io::Error::from)
            .and_then(|text| output::write_whole(&self.asked.file, &text))
            .map_err(|error| output::unwritable(&name, &error))
    }
}
