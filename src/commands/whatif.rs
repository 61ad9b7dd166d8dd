//! `narrows whatif`: plans a request anew for every combination of swept values.

use std::sync::atomic::Ordering;

use indicatif::ProgressBar;
use narrows_planner::SearchCache;

use super::break_even::{self, BreakEvenQuestion};
use super::search::warn_of_measurement;
use crate::args::{OutputFormat, WhatIfArgs, WhatIfSettings, WhatIfTask, validate};
use crate::errors::{self, CommandResult, ExitStatus, Failure, Problem};
use crate::output;
use crate::plot::{check_pictures, sweep_figures};
use crate::progress;
use crate::report::{self, FieldListReport, SolutionReport, WhatIfReport, write_documents};
use crate::search_defects::SearchDefects;
use crate::signals::stop_on_signals;
use crate::whatif::{
    Condition, Extreme, Point, PointOutcome, Scenario, SweepAxis, plan_points, solve,
};

/// Plans all points, writes the rows, reports.
pub fn run(args: &WhatIfArgs) -> CommandResult<()> {
    let WhatIfSettings { scenario, task, format, detail } = args.resolve()?;
    let (axes, sweep, until, csv, documents) = match task {
        WhatIfTask::List => {
            let fields = FieldListReport::new(scenario.field_names());
            return report::print(&fields, format, detail, false);
        }
        WhatIfTask::BreakEven { field, values, between, csv, documents } => {
            let question = BreakEvenQuestion { field, values, between };
            return break_even::run(&scenario, &question, csv, &documents, (format, detail));
        }
        WhatIfTask::Sweep { axes, sweep, until, csv, documents } => {
            (axes, sweep, until, csv, documents)
        }
    };
    if documents.plot.is_some() {
        check_pictures(&axes, sweep, documents.plot_kind).map_err(Failure::input)?;
    }
    let points = sweep.points(&scenario, &axes)?;
    if let (Some((condition, _)), Some(point)) = (&until, points.first()) {
        condition.check(point.training_run.as_ref()).map_err(Failure::input)?;
    }
    scenario.profiles().for_each(warn_of_measurement);
    let stop = stop_on_signals("Ctrl-C will end the sweep without its results");
    let bar = match format {
        OutputFormat::Text => ProgressBar::new(points.len() as u64),
        OutputFormat::Json => ProgressBar::hidden(),
    };
    let bar = progress::styled(bar, "{spinner} {wide_bar} {pos} of {len} points, {eta} left");
    let cache = SearchCache::default();
    let plan = |points: &[&Point]| plan_points(points, &cache, &stop, &|| bar.inc(1));
    let (outcomes, solution) = match &until {
        None => (plan(&points.iter().collect::<Vec<_>>()), None),
        Some((condition, extreme)) => {
            let (outcomes, solution) =
                search_value(&scenario, &axes[0], &points, (condition, *extreme), plan);
            (outcomes, Some(solution))
        }
    };
    bar.finish_and_clear();
    outcomes.iter().map(PointOutcome::defects).sum::<SearchDefects>().warn();
    let is_stopped = stop.load(Ordering::Relaxed);
    let unsolved = solution.as_ref().filter(|solution| solution.value.is_none()).cloned();
    let report = WhatIfReport::new(&axes, &points, &outcomes);
    let report = match solution {
        Some(solution) => report.with_solution(solution, !is_stopped),
        None => report,
    };
    let csv_on_stdout = csv.as_deref().is_some_and(output::is_stdout);
    let figures = || sweep_figures(&axes, sweep, &points, &outcomes);
    errors::all([
        csv.as_ref().map_or(Ok(()), |file| output::write_text(file, &report.csv())),
        report::print(&report, format, detail, csv_on_stdout),
        write_documents(&report, figures, &documents),
    ])?;
    if is_stopped {
        return Err(Failure { status: ExitStatus::Stopped, problems: vec![] });
    }
    if let Some(SolutionReport { condition, field, .. }) = unsolved {
        let message = format!("no planned value of `{field}` satisfies `{condition}`");
        return Err(Failure::failed(vec![Problem::new("", message)]));
    }
    if report.has_plan() {
        return Ok(());
    }
    Err(Failure::failed(vec![Problem::new("", "no point of the sweep has a plan")]))
}

/// Plans values of the field until its smallest or largest one that satisfies the condition is known.
fn search_value(
    scenario: &Scenario,
    axis: &SweepAxis,
    points: &[Point],
    (condition, extreme): (&Condition, Extreme),
    plan: impl Fn(&[&Point]) -> Vec<PointOutcome>,
) -> (Vec<PointOutcome>, SolutionReport) {
    let mut outcomes: Vec<PointOutcome> = points.iter().map(|_| PointOutcome::NotReached).collect();
    // Values that do not fit the request say nothing about the values around them.
    let mut valid = vec![];
    for (index, point) in points.iter().enumerate() {
        match validate(&point.request) {
            Ok(()) => valid.push(index),
            Err(failure) => outcomes[index] = PointOutcome::Invalid(failure.problems),
        }
    }
    let (mut values_planned, mut is_stopped) = (0, false);
    let (found, method) = solve(valid.len(), extreme, |positions| {
        let selected: Vec<&Point> = positions.iter().map(|at| &points[valid[*at]]).collect();
        let mut holds = vec![];
        for (at, outcome) in positions.iter().zip(plan(&selected)) {
            let is_reached = !matches!(outcome, PointOutcome::NotReached);
            is_stopped |= !is_reached;
            values_planned += usize::from(is_reached);
            holds.push(condition.holds(&outcome));
            outcomes[valid[*at]] = outcome;
        }
        holds
    });
    let is_range_end = |index: usize| match extreme {
        Extreme::Smallest => index == 0 && !scenario.is_least(&axis.field, &axis.values[index]),
        Extreme::Largest => index + 1 == points.len(),
    };
    let found = found.filter(|_| !is_stopped).map(|at| valid[at]);
    let solution = SolutionReport {
        condition: condition.to_string(),
        field: axis.field.name(),
        extreme,
        value: found.map(|index| axis.values[index].clone()),
        is_range_end: found.is_some_and(is_range_end),
        method,
        values_total: valid.len(),
        values_unfit: points.len() - valid.len(),
        values_planned,
    };
    (outcomes, solution)
}
