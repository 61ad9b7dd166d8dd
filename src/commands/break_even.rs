//! `narrows whatif --break-even`: values at which one of two alternatives overtakes the other.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;
use narrows_planner::SearchCache;
use serde_json::Value;

use super::search::warn_of_measurement;
use crate::args::{Detail, DocumentFiles, OutputFormat};
use crate::errors::{self, CommandResult, ExitStatus, Failure, Problem};
use crate::output;
use crate::plot::sweep_figures;
use crate::progress;
use crate::report::{self, BreakEvenReport, WhatIfReport, write_documents};
use crate::search_defects::SearchDefects;
use crate::signals::stop_on_signals;
use crate::whatif::{
    BreakEvenAlternative, BreakEvenValues, FasterAlternative, Point, PointOutcome, Scenario, Sweep,
    SweepAxis, SweepField, number, plan_points, regions,
};

/// A field, its values, and the alternatives that are compared.
pub struct BreakEvenQuestion {
    /// The field.
    pub field: SweepField,
    /// Values of the field.
    pub values: BreakEvenValues,
    /// The alternatives.
    pub between: [BreakEvenAlternative; 2],
}

/// The points of one value, one for each alternative.
type Pair = [(Point, PointOutcome); 2];

/// Plans both alternatives until all break-even points are found, writes the rows, reports.
pub fn run(
    scenario: &Scenario,
    question: &BreakEvenQuestion,
    csv: Option<OsString>,
    documents: &DocumentFiles,
    (format, detail): (OutputFormat, Detail),
) -> CommandResult<()> {
    scenario.profiles().for_each(warn_of_measurement);
    let stop = stop_on_signals("Ctrl-C will end the search without its results");
    let bar = match format {
        OutputFormat::Text => ProgressBar::new(0),
        OutputFormat::Json => ProgressBar::hidden(),
    };
    let bar = progress::styled(bar, "{spinner} {wide_bar} {pos} of {len} points, {eta} left");
    let cache = SearchCache::default();
    let mut planned: BTreeMap<u64, Pair> = BTreeMap::new();
    let mut failure = None;
    let regions = regions(&question.values, |values| {
        let points: CommandResult<Vec<Point>> = values
            .iter()
            .flat_map(|value| question.between.iter().map(|a| point(scenario, question, a, *value)))
            .collect();
        let points = match points {
            Ok(points) => points,
            Err(error) => {
                failure = Some(error);
                return vec![None; values.len()];
            }
        };
        bar.inc_length(points.len() as u64);
        let outcomes =
            plan_points(&points.iter().collect::<Vec<_>>(), &cache, &stop, &|| bar.inc(1));
        let mut pairs = points.into_iter().zip(outcomes);
        let mut faster = vec![];
        for value in values {
            let (Some(first), Some(second)) = (pairs.next(), pairs.next()) else { break };
            faster.push(FasterAlternative::of([&first.1, &second.1]));
            planned.insert(value.to_bits(), [first, second]);
        }
        faster
    });
    bar.finish_and_clear();
    if let Some(failure) = failure {
        return Err(failure);
    }
    let values = planned.keys().map(|bits| number(f64::from_bits(*bits))).collect();
    let (points, outcomes): (Vec<Point>, Vec<PointOutcome>) =
        planned.into_values().flatten().unzip();
    outcomes.iter().map(PointOutcome::defects).sum::<SearchDefects>().warn();
    let names = question.between.iter().map(|alternative| Value::from(&*alternative.name));
    let axes = [
        SweepAxis { field: question.field.clone(), values },
        SweepAxis { field: SweepField::Alternative, values: names.collect() },
    ];
    let objectives = points.iter().map(|point| point.request.objective);
    let answer = BreakEvenReport::new(&axes, regions, objectives);
    let report = WhatIfReport::new(&axes, &points, &outcomes).with_break_even(answer);
    let csv_on_stdout = csv.as_deref().is_some_and(output::is_stdout);
    let figures = || sweep_figures(&axes, Sweep::Product, &points, &outcomes);
    errors::all([
        csv.as_ref().map_or(Ok(()), |file| output::write_text(file, &report.csv())),
        report::print(&report, format, detail, csv_on_stdout),
        write_documents(&report, figures, documents),
    ])?;
    if stop.load(Ordering::Relaxed) {
        return Err(Failure { status: ExitStatus::Stopped, problems: vec![] });
    }
    if report.has_plan() {
        return Ok(());
    }
    Err(Failure::failed(vec![Problem::new("", "no point has a plan")]))
}

/// The request of an alternative for one value of the field.
fn point(
    scenario: &Scenario,
    question: &BreakEvenQuestion,
    alternative: &BreakEvenAlternative,
    value: f64,
) -> CommandResult<Point> {
    let value = number(value);
    let own = (question.field.clone(), value.clone());
    let settings: Vec<(SweepField, Value)> =
        alternative.settings.iter().cloned().chain([own]).collect();
    scenario.point(vec![value, Value::from(&*alternative.name)], &settings)
}
