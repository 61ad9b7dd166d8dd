//! `narrows cost --framework`: predicts the step of a full-rank model under another framework.

use narrows_calibration::predict_framework_step;

use crate::args::{FrameworkCostSettings, framework_flag};
use crate::errors::{self, CommandResult, ExitStatus, Failure};
use crate::report::{self, FrameworkReport, write_documents};

use super::search::warn_of_measurement;

/// Prices the step and reports it.
pub fn run(settings: &FrameworkCostSettings) -> CommandResult<()> {
    let FrameworkCostSettings { step, request, .. } = settings;
    warn_of_measurement(&request.profile);
    let predicted = predict_framework_step(step, &request.model, &request.profile);
    let prediction = predicted.map_err(|defects| Failure {
        status: ExitStatus::BadInput,
        problems: defects.0.into_iter().map(framework_flag).collect(),
    })?;
    let report = FrameworkReport::new(step, request, &prediction);
    let report = report.with_training_run(settings.training_run.as_ref())?;
    errors::all([
        report::print(&report, settings.format, settings.detail, false),
        write_documents(&report, Vec::new, &settings.documents),
    ])
}
