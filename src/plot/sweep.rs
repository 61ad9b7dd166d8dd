//! The chart of a sweep: step time over one swept number, a line for each combination of the other values.

use serde_json::Value;

use crate::errors::Problem;
use crate::whatif::{Point, PointOutcome, Sweep, SweepAxis, text_of};

use super::line_chart::{ChartPoint, LineChart, SERIES_MAX, Series};

/// Checks that a sweep can be drawn, before it is planned.
///
/// # Errors
/// No field with two or more numbers, or more lines than colours.
pub fn check_chart(axes: &[SweepAxis], sweep: Sweep) -> Result<(), Problem> {
    let x = horizontal(axes)?;
    let points = sweep.size(axes).unwrap_or(usize::MAX);
    let lines = match sweep {
        Sweep::Product => points / axes[x].values.len(),
        Sweep::Zip if axes.len() == 1 => 1,
        Sweep::Zip => points,
    };
    if lines <= SERIES_MAX {
        return Ok(());
    }
    let message = format!("the sweep has {lines} lines, and a chart at most {SERIES_MAX}");
    Err(Problem::new("--plot", message).hint("fewer values of the other fields, or --csv"))
}

/// The step times of a sweep; `None` if no point has a plan.
pub fn step_time_chart(
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
    let request = &points.first()?.request;
    let swept: Vec<String> = axes.iter().map(|axis| axis.field.name()).collect();
    // A swept model or profile is in the legend.
    let names = [("model", &*request.model.name), ("hardware", request.profile.name())];
    let fixed = names.into_iter().filter(|(field, _)| !swept.iter().any(|swept| swept == field));
    let subject = fixed.map(|(_, name)| name).collect::<Vec<_>>().join(" on ");
    let colon = if subject.is_empty() { "" } else { ": " };
    Some(LineChart {
        title: format!("{subject}{colon}step time of the fastest plan"),
        x_label: swept[x].clone(),
        y_label: "step time in seconds".into(),
        series,
    })
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
