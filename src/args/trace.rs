//! Flags for traces.

use std::ffi::{OsStr, OsString};
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::Args;

use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::text::plural;

/// Most steps in a trace: viewers become slow with more.
const STEPS_MAX: u64 = 100;

/// Flags for traces.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Write the measured and the predicted time of every instruction to this file, for Perfetto or
    /// chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub trace: Option<OsString>,
    /// Steps to trace, such as `5` or `5-7` [default: the last step of the run]
    #[arg(long, value_name = "A-B", requires = "trace", value_parser = steps)]
    pub trace_steps: Option<RangeInclusive<u64>>,
}

/// Flag for the trace of a simulated step.
#[derive(Clone, Debug, Args)]
pub struct StepTraceArgs {
    /// Write the simulated step to this file, for Perfetto (ui.perfetto.dev) or chrome://tracing
    ///
    /// A process is a device; its threads are the passes, compute and communication.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<OsString>,
}

/// Settings of a trace.
#[derive(Debug)]
pub struct TraceSettings {
    /// The trace file.
    pub file: PathBuf,
    /// The steps; `None` for the last one.
    pub steps: Option<RangeInclusive<u64>>,
}

impl TraceArgs {
    /// The settings for a run of `steps` steps; `None` without `--trace`.
    ///
    /// # Errors
    /// A stream instead of a file, and steps beyond the end of the run.
    pub fn resolve(&self, steps: u64) -> CommandResult<Option<TraceSettings>> {
        let Some(file) = &self.trace else { return Ok(None) };
        reject_stdout(file)?;
        if let Some(range) = self.trace_steps.as_ref().filter(|range| *range.end() > steps) {
            let steps = plural(steps, "step");
            let message = format!("the run has {steps}, and no step {}", range.end());
            return Err(Failure::input(Problem::new("--trace-steps", message)));
        }
        Ok(Some(TraceSettings { file: file.into(), steps: self.trace_steps.clone() }))
    }
}

impl StepTraceArgs {
    /// The trace file, checked before a long computation.
    ///
    /// # Errors
    /// A stream instead of a file, and a file that cannot be written.
    pub fn resolve(&self) -> CommandResult<Option<PathBuf>> {
        let Some(file) = &self.trace else { return Ok(None) };
        reject_stdout(file)?;
        output::check_writable(file.as_ref())?;
        Ok(Some(file.into()))
    }
}

fn reject_stdout(file: &OsStr) -> CommandResult<()> {
    if output::is_stdout(file) {
        let problem = Problem::new("--trace", "a trace cannot go to standard output");
        return Err(Failure::input(problem.hint("the name of a file")));
    }
    Ok(())
}

/// Parses `5` or `5-7`.
fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u64>().ok().filter(|number| *number > 0);
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first > last => Err("the first step is after the last".into()),
        (Some(first), Some(last)) if last - first >= STEPS_MAX => {
            Err(format!("a trace has at most {STEPS_MAX} steps"))
        }
        (Some(first), Some(last)) => Ok(first..=last),
        _ => Err("expected a step, counted from 1, or a range such as 5-7".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::steps;

    #[test]
    fn steps_are_a_number_or_a_range() {
        assert_eq!(steps("5"), Ok(5..=5));
        assert_eq!(steps("5-7"), Ok(5..=7));
        for invalid in ["", "0", "7-5", "1-2-3", "-5", "5-", "1-101", "a"] {
            assert!(steps(invalid).is_err(), "{invalid}");
        }
    }
}
