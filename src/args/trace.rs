//! The flags of traces, and what they mean.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::Args;

use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

/// Steps that a trace may have: with more of them, viewers take no pleasure in it.
const STEPS_MAX: u64 = 100;

/// Flags of traces.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Write when every instruction was executed, and when it was expected to be, to this file: for
    /// Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub trace: Option<OsString>,
    /// Which steps are traced, such as `5` or `5-7` [default: the last that is made]
    #[arg(long, value_name = "A-B", requires = "trace", value_parser = steps)]
    pub trace_steps: Option<RangeInclusive<u64>>,
}

/// What is traced.
#[derive(Debug)]
pub struct TraceSettings {
    /// Where it is written.
    pub file: PathBuf,
    /// Which steps, if not the last.
    pub steps: Option<RangeInclusive<u64>>,
}

impl TraceArgs {
    /// What they mean in a run of so many steps; `None` when no trace is asked for.
    pub fn resolve(&self, steps: u64) -> CommandResult<Option<TraceSettings>> {
        let Some(file) = &self.trace else { return Ok(None) };
        if output::is_stdout(file) {
            let problem = Problem::new("--trace", "a trace is written to a file of its own");
            return Err(Failure::input(problem.hint("the name of a file")));
        }
        if let Some(asked) = self.trace_steps.as_ref().filter(|asked| *asked.end() > steps) {
            let problem = format!("the run has {steps} steps, and no step {}", asked.end());
            return Err(Failure::input(Problem::new("--trace-steps", problem)));
        }
        Ok(Some(TraceSettings { file: file.into(), steps: self.trace_steps.clone() }))
    }
}

/// `5` or `5-7`.
fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u64>().ok().filter(|number| *number > 0);
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first > last => Err("the first step is after the last".into()),
        (Some(first), Some(last)) if last - first >= STEPS_MAX => {
            Err(format!("a trace has at most {STEPS_MAX} steps"))
        }
        (Some(first), Some(last)) => Ok(first..=last),
        _ => Err("not a step, counted from 1, or two with a dash between them".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::steps;

    #[test]
    fn steps_are_one_or_two_numbers() {
        assert_eq!(steps("5"), Ok(5..=5));
        assert_eq!(steps("5-7"), Ok(5..=7));
        for wrong in ["", "0", "7-5", "1-2-3", "-5", "5-", "1-101", "a"] {
            assert!(steps(wrong).is_err(), "{wrong}");
        }
    }
}
