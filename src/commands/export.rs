//! `narrows export`: writes a plan as the configuration of another training framework.

use narrows_plan::{CheckedProgram, lower};

use crate::args::{Detail, ExportArgs, OutputFormat, PlanExportSettings};
use crate::errors::{self, CommandResult, Failure};
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
    let stdout_in_use = output.as_deref().is_some_and(output::is_stdout);
    let print = |report| report::print(report, format, Detail::Summary, stdout_in_use);
    if problems.is_empty() {
        let file = output.as_ref();
        let written = file.map_or(Ok(()), |file| output::write_text(file, &export.text));
        return errors::all([written, print(&report)]);
    }
    if format == OutputFormat::Json {
        print(&report.without_configuration())?;
    }
    Err(Failure::failed(problems))
}
