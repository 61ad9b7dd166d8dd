//! `narrows export`: writes a plan as the configuration of another training framework.

use narrows_plan::{CheckedProgram, lower};

use crate::args::{Detail, ExportArgs, OutputFormat, PlanExportSettings};
use crate::errors::{CommandResult, Failure};
use crate::export::{Export, ExportedPlan};
use crate::output;
use crate::report::{self, ExportReport, check_problems};

/// Proves a plan, translates it, and writes the configuration unless a decision would be lost.
pub fn run(args: &ExportArgs) -> CommandResult<()> {
    let PlanExportSettings { file, framework, output, allow_loss, format } = args.resolve()?;
    let resolved =
        file.plan.resolve(&file.model).map_err(|defects| Failure::file(&file.name, defects))?;
    CheckedProgram::check(lower(&resolved))
        .map_err(|errors| Failure::failed(check_problems(&file.name, &errors)))?;
    let plan = ExportedPlan { model: &file.model, plan: &file.plan, resolved: &resolved };
    let export = Export::new(framework, &plan);
    let report = ExportReport::new(&file.name, &export);
    let problems = if allow_loss { vec![] } else { report.losses() };
    if problems.is_empty()
        && let Some(file) = &output
    {
        output::write_text(file, &export.text)?;
    }
    if problems.is_empty() || format == OutputFormat::Json {
        let stdout_in_use = output.as_deref().is_some_and(output::is_stdout);
        report::print(&report, format, Detail::Summary, stdout_in_use)?;
    }
    if problems.is_empty() { Ok(()) } else { Err(Failure::failed(problems)) }
}
