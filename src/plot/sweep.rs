//! The pictures of a sweep: step time over one swept number with a line for each combination of the other values, and
//! the throughput over two fields.

use serde_json::Value;

use crate::errors::Problem;
use crate::text::{count, mesh_phrase};
use crate::whatif::{Point, PointOutcome, Sweep, SweepAxis, text_of};

use super::figure::{Figure, PlotKind};
use super::heat_map::{Cell, HeatMap};
use super::line_chart::{ChartPoint, LineChart, SERIES_MAX, Series};

/// Most columns and rows of a heat map.
const CELLS_MAX: [usize; 2] = [32, 64];

/// Checks that a sweep can be drawn, before it is planned.
///
/// # Errors
/// No field with two or more numbers, or more lines than colours where two fields do not make a heat map.
pub fn check_pictures(axes: &[SweepAxis], sweep: Sweep) -> Result<(), Problem> {
    let x = horizontal(axes)?;
    let lines = lines(axes, sweep, x);
    if lines <= SERIES_MAX || makes_heat_map(axes, sweep) {
        return Ok(());
    }
    let message = format!("the sweep has {lines} lines, and a chart at most {SERIES_MAX}");
    let hint = "two fields, fewer values of the other fields, or --csv";
    Err(Problem::new("--plot", message).hint(hint))
}

/// The pictures of a sweep: a chart of step times where it has few lines, and a heat map of two fields.
pub fn sweep_figures(
    axes: &[SweepAxis],
    sweep: Sweep,
    points: &[Point],
    outcomes: &[PointOutcome],
) -> Vec<Figure> {
    let Ok(x) = horizontal(axes) else { return vec![] };
    let few_lines = lines(axes, sweep, x) <= SERIES_MAX;
    let chart = few_lines.then(|| step_time_chart(axes, points, outcomes)).flatten();
    let caption = "Step time of the fastest plan of each point; whiskers are 90 % intervals.";
    let chart = Figure::of(PlotKind::Lines, chart.and_then(|chart| chart.picture()), caption);
    let map = makes_heat_map(axes, sweep).then(|| throughput_map(axes, x, points, outcomes));
    let caption = "Tokens per second of the fastest plan: the darker, the more. Lines separate meshes and ZeRO \
                   stages.";
    let map = Figure::of(PlotKind::HeatMap, map.flatten().and_then(|map| map.picture()), caption);
    chart.into_iter().chain(map).collect()
}

/// Lines of a chart over the field at index `x`.
fn lines(axes: &[SweepAxis], sweep: Sweep, x: usize) -> usize {
    let points = sweep.size(axes).unwrap_or(usize::MAX);
    match sweep {
        Sweep::Product => points / axes[x].values.len(),
        Sweep::Zip if axes.len() == 1 => 1,
        Sweep::Zip => points,
    }
}

/// Whether every combination of two fields is a cell of a heat map.
fn makes_heat_map(axes: &[SweepAxis], sweep: Sweep) -> bool {
    let fits = |axis: &SweepAxis| (2..=CELLS_MAX[0]).contains(&axis.values.len());
    let is_small = |axes: &[SweepAxis]| {
        axes.iter().all(|axis| axis.values.len() > 1 && axis.values.len() <= CELLS_MAX[1])
            && axes.iter().any(fits)
    };
    sweep == Sweep::Product && axes.len() == 2 && is_small(axes)
}

/// The throughputs of a sweep of two fields; the one at index `x` is horizontal.
fn throughput_map(
    axes: &[SweepAxis],
    x: usize,
    points: &[Point],
    outcomes: &[PointOutcome],
) -> Option<HeatMap> {
    // The longer field is vertical where the horizontal one has no room.
    let x = if axes[x].values.len() > CELLS_MAX[0] { 1 - x } else { x };
    let y = 1 - x;
    let cell = |row: usize, column: usize| {
        let (first, last) = if x == 0 { (column, row) } else { (row, column) };
        let outcome = outcomes.get(first * axes[1].values.len() + last)?;
        let PointOutcome::Planned(planned) = outcome else { return None };
        let value = planned.prediction.tokens_per_s;
        let label = format!("{}/s", count(value.round() as u64));
        Some(Cell { value, label, region: mesh_phrase(&planned.plan) })
    };
    let (columns, rows) = (axes[x].values.len(), axes[y].values.len());
    let names = |axis: &SweepAxis| (axis.field.name(), axis.values.iter().map(text_of).collect());
    Some(HeatMap {
        title: format!("{}tokens per second of the fastest plan", subject(axes, points)?),
        columns: names(&axes[x]),
        rows: names(&axes[y]),
        cells: (0..rows)
            .flat_map(|row| (0..columns).map(move |column| (row, column)))
            .map(|(row, column)| cell(row, column))
            .collect(),
        legend: "darker: more tokens/s; lines separate meshes and ZeRO stages; T, P, D: devices along the tensor, \
                 pipeline and data axes; Z1: ZeRO-1"
            .into(),
    })
}

/// The step times of a sweep; `None` if no point has a plan.
fn step_time_chart(
    axes: &[SweepAxis],
    points: &[Point],
    outcomes: &[PointOutcome],
) -> Option<LineChart> {
    let x = horizontal(axes).ok()?;
    let mut series: Vec<Series> = vec![];
    for (point, outcome) in points.iter().zip(outcomes) {
        let (PointOutcome::Planned(planned), Some(at)) = (outcome, point.values[x].as_f64()) else {
            continue;
        };
        let name = series_name(axes, x, &point.values);
        let index = series.iter().position(|known| known.name == name).unwrap_or_else(|| {
            series.push(Series { name, points: vec![] });
            series.len() - 1
        });
        let prediction = &planned.prediction;
        series[index].points.push(ChartPoint {
            x: at,
            y: prediction.step_time_s,
            interval: prediction.step_time_interval_s,
        });
    }
    for line in &mut series {
        line.points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    Some(LineChart {
        title: format!("{}step time of the fastest plan", subject(axes, points)?),
        x_label: axes[x].field.name(),
        y_label: "step time in seconds".into(),
        series,
    })
}

/// Model and hardware of a sweep with a colon, each where it is not swept; `None` without points.
fn subject(axes: &[SweepAxis], points: &[Point]) -> Option<String> {
    let request = &points.first()?.request;
    let names = [("model", &*request.model.name), ("hardware", request.profile.name())];
    let is_swept = |field: &str| axes.iter().any(|axis| axis.field.name() == field);
    let fixed = names.into_iter().filter(|(field, _)| !is_swept(field));
    let subject = fixed.map(|(_, name)| name).collect::<Vec<_>>().join(" on ");
    Some(if subject.is_empty() { subject } else { format!("{subject}: ") })
}

/// The axis with the most numbers.
fn horizontal(axes: &[SweepAxis]) -> Result<usize, Problem> {
    let numbers = |axis: &SweepAxis| axis.values.iter().filter(|value| value.is_number()).count();
    let most = (0..axes.len()).rev().max_by_key(|&index| numbers(&axes[index]));
    most.filter(|&index| numbers(&axes[index]) > 1).ok_or_else(|| {
        let hint = "a swept field with two or more numbers, such as devices=8..64*2";
        Problem::new("--plot", "no swept field has two or more numbers").hint(hint)
    })
}

/// The values of the fields that are not on the horizontal axis.
fn series_name(axes: &[SweepAxis], x: usize, values: &[Value]) -> String {
    let others = axes.iter().zip(values).enumerate().filter(|(index, _)| *index != x);
    let phrase = |(_, (axis, value)): (usize, (&SweepAxis, &Value))| {
        let name = axis.field.name();
        let short = name.rsplit('.').next().unwrap_or(&name).replace('_', " ");
        format!("{short} {}", text_of(value))
    };
    others.map(phrase).collect::<Vec<_>>().join(", ")
}
