//! Defects of user input, with field, problem and hint.

use std::fmt;

/// One defect of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defect {
    /// Path in the document, such as `blocks[3].q.rank`; empty for the whole document.
    pub field: String,
    /// The problem, as one sentence without a full stop.
    pub problem: String,
    /// A possible correction.
    pub hint: Option<String>,
}

impl Defect {
    /// A defect at `field`.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Defect { field: field.into(), problem: problem.into(), hint: None }
    }

    /// Adds a hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}", self.problem)?;
        if let Some(hint) = &self.hint {
            write!(f, " (try: {hint})")?;
        }
        Ok(())
    }
}

/// Every defect of one input, reported at once. Never empty when returned as an error.
#[derive(Clone, Debug, Default, PartialEq, Eq, thiserror::Error)]
pub struct Defects(pub Vec<Defect>);

impl Defects {
    /// A single defect.
    pub fn single(defect: Defect) -> Self {
        Defects(vec![defect])
    }

    /// Adds a defect.
    pub fn push(&mut self, defect: Defect) {
        self.0.push(defect);
    }

    /// `Ok(value)` without defects.
    pub fn into_result<T>(self, value: T) -> Result<T, Defects> {
        if self.0.is_empty() { Ok(value) } else { Err(self) }
    }
}

impl fmt::Display for Defects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, defect) in self.0.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{defect}")?;
        }
        Ok(())
    }
}

impl From<Defect> for Defects {
    fn from(defect: Defect) -> Self {
        Defects::single(defect)
    }
}
