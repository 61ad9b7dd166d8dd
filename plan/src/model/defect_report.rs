//! Collects the defects of a model file.

use std::collections::HashSet;

use crate::defect::{Defect, Defects};

/// The defects of a model file. Each problem of a field is reported once, so that an invalid default is
/// one defect and not one for each block.
#[derive(Default)]
pub(super) struct DefectReport {
    defects: Defects,
    seen: HashSet<(String, String)>,
}

impl DefectReport {
    pub fn push(&mut self, defect: Defect) {
        if self.seen.insert((defect.field.clone(), defect.problem.clone())) {
            self.defects.push(defect);
        }
    }

    /// Removes and returns all defects.
    pub fn take(&mut self) -> Defects {
        std::mem::take(&mut self.defects)
    }

    pub fn defect(&mut self, field: impl Into<String>, problem: impl Into<String>) {
        self.push(Defect::new(field, problem));
    }

    pub fn hint(
        &mut self,
        field: impl Into<String>,
        problem: impl Into<String>,
        hint: impl Into<String>,
    ) {
        self.push(Defect::new(field, problem).hint(hint));
    }

    /// Returns `value` when it is in `1..=max`, and reports it otherwise.
    pub fn size(&mut self, field: &str, value: u64, max: u64) -> Option<u64> {
        match value {
            0 => self.defect(field, "must be at least 1"),
            value if value > max => {
                self.hint(field, format!("{value} is more than {max}"), format!("at most {max}"));
            }
            value => return Some(value),
        }
        None
    }

    /// Reports a value that is not a positive number.
    pub fn positive(&mut self, field: &str, value: f64) {
        if !(value.is_finite() && value > 0.0) {
            self.defect(field, format!("must be a positive number, not {value}"));
        }
    }
}
