//! `narrows sensitivity`: how a step time depends on the numbers that it is predicted from.

use std::sync::atomic::Ordering;

use indicatif::ProgressBar;
use narrows_planner::SearchCache;

use super::search::search;
use crate::args::{OutputFormat, SensitivityArgs, SensitivitySettings};
use crate::errors::{self, CommandResult, ExitStatus, Failure};
use crate::output;
use crate::plot::sensitivity_figures;
use crate::priced_plan::PricedPlan;
use crate::progress;
use crate::report::{self, InfeasibleReport, SensitivityReport, write_documents};
use crate::sensitivity::{StepSample, analyse};
use crate::signals::stop_on_signals;

/// Plans, varies every number, reports.
pub fn run(args: &SensitivityArgs) -> CommandResult<()> {
    let SensitivitySettings { scenario, request, csv, documents, format, detail } =
        args.resolve()?;
    let cache = SearchCache::default();
    let result = search(&request, &cache, format);
    let Some(best) = result.best else {
        return Err(InfeasibleReport::new(&request, &result.report, &cache).into_failure());
    };
    let priced = PricedPlan::of_search(&request, best)?;
    let step = StepSample::new(&request, &priced.prediction, &priced.program);
    let stop = stop_on_signals("Ctrl-C will end the analysis without its results");
    let bar = match format {
        OutputFormat::Text => ProgressBar::new(0),
        OutputFormat::Json => ProgressBar::hidden(),
    };
    let bar = progress::styled(bar, "{spinner} {wide_bar} {pos} of {len} variants, {eta} left");
    let analysis = analyse(
        &scenario,
        &request,
        &priced.plan,
        &step,
        &stop,
        &|more| bar.inc_length(more),
        &|| bar.inc(1),
    )?;
    bar.finish_and_clear();
    analysis.defects.warn();
    let limit = request.arena_limit();
    let report = SensitivityReport::new(&priced, &result.report, limit, &analysis);
    let csv_on_stdout = csv.as_deref().is_some_and(output::is_stdout);
    let figures = || sensitivity_figures(&report.subject(), &analysis);
    errors::all([
        csv.as_ref().map_or(Ok(()), |file| output::write_text(file, &report.csv())),
        report::print(&report, format, detail, csv_on_stdout),
        write_documents(&report, figures, &documents),
    ])?;
    if stop.load(Ordering::Relaxed) {
        return Err(Failure { status: ExitStatus::Stopped, problems: vec![] });
    }
    Ok(())
}
