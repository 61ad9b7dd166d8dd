//! Errors of the check, with place, reason and hint.

use std::fmt;

use crate::program::{ChunkPhase, Instr, InstrOrigin};

/// Most errors that are reported: later ones usually follow from the first.
const REPORTED_MAX: usize = 8;

/// One error of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckError {
    /// The pipeline stage; `None` for errors of the whole program.
    pub stage: Option<usize>,
    /// The instruction, by phase of a chunk, index in the phase and origin; `None` for errors of a stage.
    pub instruction: Option<(ChunkPhase, usize, InstrOrigin)>,
    /// The problem and its reason, as one sentence without a full stop.
    pub problem: String,
    /// A possible correction.
    pub hint: Option<String>,
}

/// The first errors of a program. Not empty when returned as an error.
#[derive(Clone, Debug, Default, PartialEq, Eq, thiserror::Error)]
pub struct CheckErrors(pub Vec<CheckError>);

/// An error without its place, which the caller adds.
#[derive(Clone, Debug)]
pub(super) struct CheckFault {
    pub problem: String,
    pub hint: Option<String>,
}

pub(super) type CheckResult<T = ()> = Result<T, CheckFault>;

/// Returns an error.
pub(super) fn fault<T>(problem: impl Into<String>) -> CheckResult<T> {
    Err(CheckFault { problem: problem.into(), hint: None })
}

/// Returns an error with a hint.
pub(super) fn fault_hint<T>(problem: impl Into<String>, hint: impl Into<String>) -> CheckResult<T> {
    Err(CheckFault { problem: problem.into(), hint: Some(hint.into()) })
}

/// Returns an error unless `condition` holds.
pub(super) fn ensure(condition: bool, problem: impl FnOnce() -> String) -> CheckResult {
    if condition { Ok(()) } else { fault(problem()) }
}

impl CheckErrors {
    pub(super) fn push(&mut self, error: CheckError) {
        if self.0.len() < REPORTED_MAX {
            self.0.push(error);
        }
    }

    pub(super) fn push_stage(&mut self, stage: usize, fault: CheckFault) {
        let CheckFault { problem, hint } = fault;
        self.push(CheckError { stage: Some(stage), instruction: None, problem, hint });
    }

    pub(super) fn push_instruction(
        &mut self,
        (stage, at, index): (usize, ChunkPhase, usize),
        instr: &Instr,
        fault: CheckFault,
    ) {
        let CheckFault { problem, hint } = fault;
        let instruction = Some((at, index, instr.origin.clone()));
        self.push(CheckError { stage: Some(stage), instruction, problem, hint });
    }

    pub(super) fn push_program(&mut self, fault: CheckFault) {
        let CheckFault { problem, hint } = fault;
        self.push(CheckError { stage: None, instruction: None, problem, hint });
    }

    /// Whether further errors are not reported.
    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= REPORTED_MAX
    }
}

impl fmt::Display for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(stage) = self.stage {
            write!(f, "stage {stage}")?;
            if let Some((at, index, origin)) = &self.instruction {
                write!(f, ", {at} instruction {index} ({origin})")?;
            }
            write!(f, ": ")?;
        }
        write!(f, "{}", self.problem)?;
        if let Some(hint) = &self.hint {
            write!(f, " (try: {hint})")?;
        }
        Ok(())
    }
}

impl fmt::Display for CheckErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}
