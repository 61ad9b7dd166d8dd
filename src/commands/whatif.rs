//! `narrows whatif`: plans a request anew for every combination of swept values.

use std::sync::atomic::Ordering;

use indicatif::ProgressBar;

use super::search::warn_of_measurement;
use crate::args::{OutputFormat, WhatIfArgs, WhatIfSettings, WhatIfTask};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::output;
use crate::plot::{check_chart, step_time_chart};
use crate::progress;
use crate::report::{self, FieldListReport, Figure, WhatIfReport, write_documents};
use crate::signals::stop_on_signals;
use crate::whatif::plan_points;

/// Plans all points, writes the rows, reports.
pub fn run(args: &WhatIfArgs) -> CommandResult<()> {
    let WhatIfSettings { scenario, task, format, detail } = args.resolve()?;
    let (axes, sweep, csv, documents) = match task {
        WhatIfTask::List => {
            let fields = FieldListReport::new(scenario.field_names());
            return report::print(&fields, format, detail, false);
        }
        WhatIfTask::Sweep { axes, sweep, csv, documents } => (axes, sweep, csv, documents),
    };
    if documents.plot.is_some() {
        check_chart(&axes, sweep).map_err(Failure::input)?;
    }
    let points = sweep.points(&scenario, &axes)?;
    scenario.profiles().for_each(warn_of_measurement);
    let stop = stop_on_signals("Ctrl-C will end the sweep without its results");
    let bar = match format {
        OutputFormat::Text => ProgressBar::new(points.len() as u64),
        OutputFormat::Json => ProgressBar::hidden(),
    };
    let bar = progress::styled(bar, "{spinner} {wide_bar} {pos} of {len} points, {eta} left");
    let outcomes = plan_points(&points, &stop, &|| bar.inc(1));
    bar.finish_and_clear();
    let report = WhatIfReport::new(&axes, &points, &outcomes);
    if let Some(file) = &csv {
        output::write_text(file, &report.csv())?;
    }
    let csv_on_stdout = csv.is_some_and(|file| output::is_stdout(&file));
    report::print(&report, format, detail, csv_on_stdout)?;
    let chart = match check_chart(&axes, sweep) {
        Ok(()) => step_time_chart(&axes, &points, &outcomes).and_then(|chart| chart.picture()),
        Err(_) => None,
    };
    let caption = "Step time of the fastest plan of each point; whiskers are 90 % intervals.";
    let figures: Vec<Figure> = Figure::of(chart, caption).into_iter().collect();
    write_documents(&report, &figures, &documents)?;
    if stop.load(Ordering::Relaxed) {
        return Err(Failure { status: ExitStatus::Stopped, problems: vec![] });
    }
    if report.has_plan() {
        return Ok(());
    }
    Err(Failure::failed(vec![Problem::new("", "no point of the sweep has a plan")]))
}
