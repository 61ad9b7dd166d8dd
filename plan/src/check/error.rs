//! What a check finds: what, where, why, and what to try.

use std::fmt;

use crate::program::{InstrOrigin, Phase};

/// Faults past this many are not reported: the first few explain the rest.
const REPORTED: usize = 8;

/// One reason why a program is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckError {
    /// The pipeline stage, when the fault lies in one.
    pub stage: Option<usize>,
    /// The instruction: its phase, its index there and its origin.
    pub instruction: Option<(Phase, usize, InstrOrigin)>,
    /// What is wrong and why, as one sentence without a full stop.
    pub problem: String,
    /// What to try, when something sensible can be said.
    pub hint: Option<String>,
}

/// The first reasons why a program is refused. Never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, thiserror::Error)]
pub struct CheckErrors(pub Vec<CheckError>);

/// A fault whose place is known to the caller.
#[derive(Clone, Debug)]
pub(super) struct CheckFault {
    pub problem: String,
    pub hint: Option<String>,
}

pub(super) type CheckResult<T = ()> = Result<T, CheckFault>;

/// A fault as an error.
pub(super) fn fault<T>(problem: impl Into<String>) -> CheckResult<T> {
    Err(CheckFault { problem: problem.into(), hint: None })
}

/// A fault with what to try.
pub(super) fn fault_hint<T>(problem: impl Into<String>, hint: impl Into<String>) -> CheckResult<T> {
    Err(CheckFault { problem: problem.into(), hint: Some(hint.into()) })
}

/// `Ok` when `fine`, else the fault.
pub(super) fn ensure(fine: bool, problem: impl FnOnce() -> String) -> CheckResult {
    if fine { Ok(()) } else { fault(problem()) }
}

impl CheckErrors {
    pub(super) fn push(&mut self, error: CheckError) {
        if self.0.len() < REPORTED {
            self.0.push(error);
        }
    }

    pub(super) fn of_stage(&mut self, stage: usize, fault: CheckFault) {
        let CheckFault { problem, hint } = fault;
        self.push(CheckError { stage: Some(stage), instruction: None, problem, hint });
    }

    pub(super) fn of_all(&mut self, fault: CheckFault) {
        let CheckFault { problem, hint } = fault;
        self.push(CheckError { stage: None, instruction: None, problem, hint });
    }

    /// Whether nothing more would be reported.
    pub(super) fn full(&self) -> bool {
        self.0.len() >= REPORTED
    }
}

/// The name of a phase in messages.
pub(super) fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Step => "step",
    }
}

impl fmt::Display for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(stage) = self.stage {
            write!(f, "stage {stage}")?;
            if let Some((phase, index, origin)) = &self.instruction {
                write!(f, ", {} instruction {index} ({origin})", phase_name(*phase))?;
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
