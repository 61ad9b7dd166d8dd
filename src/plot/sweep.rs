//! The pictures of a sweep: step time over one swept number with a line for each combination of the other values, and
//! the throughput over two fields.

use narrows_plan::{ContextAttention, Plan, Zero};
use serde_json::Value;

use crate::errors::Problem;
use crate::field_name::FieldName;
use crate::text::{count, mesh_phrase};
use crate::unit::CommonUnit;
use crate::whatif::{PlannedPoint, Point, PointOutcome, Sweep, SweepAxis, text_of};

use super::crossover::mark_crossovers;
use super::figure::{Figure, PlotKind};
use super::front::{FrontPoint, MemoryFront};
use super::heat_map::{Cell, HeatMap};
use super::line_chart::{ChartPoint, LineChart, SERIES_MAX, Series};
use super::scaling::{Throughput, scaling_picture};

/// Most columns and rows of a heat map.
const CELLS_MAX: [usize; 2] = [32, 64];

/// Checks that a sweep can be drawn as a picture of this kind, or as any without one, before it is planned.
///
/// # Errors
/// No field with two or more numbers, more lines than colours where two fields do not make a heat map, and a kind that
/// does not suit the fields.
pub fn check_pictures(
    axes: &[SweepAxis],
    sweep: Sweep,
    kind: Option<PlotKind>,
) -> Result<(), Problem> {
    let unsuited = |message: &str, hint: &str| Err(Problem::new("--plot-kind", message).hint(hint));
    match kind {
        Some(PlotKind::HeatMap) if !makes_heat_map(axes, sweep) => unsuited(
            "a heat map needs two fields, each with 2 to 64 values and one with at most 32",
            "--sweep devices=8..64*2 --sweep rank=256,512, without --zip",
        ),
        Some(PlotKind::Scaling) if !makes_scaling(axes) => unsuited(
            "scaling needs a sweep of `devices`, alone or with `global_batch`",
            "--sweep devices=8..64*2 for strong scaling; --sweep devices=8..64*2 --sweep global_batch=64..512*2 \
             for weak scaling too",
        ),
        Some(PlotKind::Memory) if axes.iter().all(|axis| axis.values.len() < 2) => unsuited(
            "a Pareto front needs two or more points",
            "--sweep memory_limit=24GiB,40GiB,80GiB",
        ),
        Some(PlotKind::Memory | PlotKind::HeatMap | PlotKind::Scaling) => Ok(()),
        kind => {
            let lines = lines(axes, sweep, horizontal(axes)?);
            let or_heat_map = kind.is_none() && makes_heat_map(axes, sweep);
            if kind == Some(PlotKind::Crossover) && lines < 2 {
                return unsuited(
                    "a crossover needs two or more lines",
                    "a second field, such as --sweep strategy=auto,btp,vanilla-tp",
                );
            }
            if lines <= SERIES_MAX || or_heat_map {
                return Ok(());
            }
            let message = format!("the sweep has {lines} lines, and a chart at most {SERIES_MAX}");
            let hint = "two fields, fewer values of the other fields, or --csv";
            Err(Problem::new("--plot", message).hint(hint))
        }
    }
}

/// The pictures of a sweep that suit its fields: step times where there are few lines, throughputs of two fields,
/// scaling over devices, changes of the fastest line, and memory against step time.
pub fn sweep_figures(
    axes: &[SweepAxis],
    sweep: Sweep,
    points: &[Point],
    outcomes: &[PointOutcome],
) -> Vec<Figure> {
    let mut figures = vec![];
    let suits = |kind| check_pictures(axes, sweep, Some(kind)).is_ok();
    let chart = suits(PlotKind::Lines).then(|| step_time_chart(axes, points, outcomes)).flatten();
    let caption = "Step time of the fastest plan of each point; whiskers are 90 % intervals.";
    let picture = chart.as_ref().and_then(LineChart::picture);
    figures.extend(Figure::of(PlotKind::Lines, picture, caption));
    let map = match horizontal(axes) {
        Ok(x) if suits(PlotKind::HeatMap) => throughput_map(axes, x, points, outcomes),
        _ => None,
    };
    let caption = "Tokens per second of the fastest plan: the darker, the more. Grey cells have no plan. Lines \
                   separate meshes and ZeRO stages.";
    figures.extend(Figure::of(PlotKind::HeatMap, map.and_then(|map| map.picture()), caption));
    let Some(subject) = subject(axes, points) else { return figures };
    if suits(PlotKind::Scaling) {
        let throughputs = throughputs(points, outcomes);
        let picture = scaling_picture(&format!("{subject}scaling"), &throughputs);
        let caption = "Throughput and efficiency compared with ideal scaling from the smallest cluster on. Whiskers are the \
                       90 % intervals of each point; the first point is taken as predicted.";
        figures.extend(Figure::of(PlotKind::Scaling, picture, caption));
    }
    if let (Some(mut chart), true) = (chart, suits(PlotKind::Crossover)) {
        let unit = horizontal(axes).map_or("", |x| axis_unit(&axes[x]).symbol());
        let crossovers = mark_crossovers(&mut chart, unit);
        let (title, caption) = match crossovers {
            0 => {
                ("step time; one line is fastest everywhere", "One line is the fastest everywhere.")
            }
            _ => (
                "step time, and where the fastest changes",
                "Vertical lines mark the planned points between which the fastest line changes.",
            ),
        };
        chart.title = format!("{subject}{title}");
        figures.extend(Figure::of(PlotKind::Crossover, chart.picture(), caption));
    }
    let plans = front_points(axes, points, outcomes);
    let front = MemoryFront { title: format!("{subject}memory and step time"), plans };
    let caption = "Memory of the fullest device against step time; the line joins the points that no other point beats \
                   in both.";
    figures.extend(Figure::of(PlotKind::Memory, front.picture(), caption));
    figures
}

/// The points that have a plan, with it.
fn planned<'a>(
    points: &'a [Point],
    outcomes: &'a [PointOutcome],
) -> impl Iterator<Item = (&'a Point, &'a PlannedPoint)> {
    points.iter().zip(outcomes).filter_map(|(point, outcome)| match outcome {
        PointOutcome::Planned(planned) => Some((point, &**planned)),
        _ => None,
    })
}

/// Whether devices are swept, and nothing else but the batch.
fn makes_scaling(axes: &[SweepAxis]) -> bool {
    let is = |axis: &SweepAxis, name: &str| axis.field.name() == name;
    let devices = axes.iter().find(|axis| is(axis, "devices"));
    devices.is_some_and(|devices| devices.values.len() > 1)
        && axes.iter().all(|axis| is(axis, "devices") || is(axis, "global_batch"))
}

fn throughputs(points: &[Point], outcomes: &[PointOutcome]) -> Vec<Throughput> {
    let throughput = |(point, planned): (&Point, &PlannedPoint)| {
        let prediction = &planned.prediction;
        let [low, high] = prediction.step_time_interval_s;
        let tokens = prediction.tokens_per_s * prediction.step_time_s;
        Throughput {
            devices: point.request.devices,
            global_batch: point.request.global_batch,
            tokens_per_s: prediction.tokens_per_s,
            interval: [tokens / high, tokens / low],
        }
    };
    planned(points, outcomes).map(throughput).collect()
}

fn front_points(
    axes: &[SweepAxis],
    points: &[Point],
    outcomes: &[PointOutcome],
) -> Vec<FrontPoint> {
    let plan = |(point, planned): (&Point, &PlannedPoint)| {
        let prediction = &planned.prediction;
        FrontPoint {
            name: series_name(axes, None, &point.values),
            memory_gib: prediction.peak_memory().as_f64() / (1_u64 << 30) as f64,
            step_time_s: prediction.step_time_s,
            interval_s: prediction.step_time_interval_s,
        }
    };
    planned(points, outcomes).map(plan).collect()
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
    let plans = || {
        outcomes.iter().filter_map(|outcome| match outcome {
            PointOutcome::Planned(planned) => Some(&planned.plan),
            _ => None,
        })
    };
    // Cells name the axes longer than one alone.
    let uses = |is_used: fn(&Plan) -> bool| plans().any(is_used);
    let letters = [
        ("T: tensor axis", uses(|plan| plan.mesh.tensor > 1)),
        ("C: context axis", uses(|plan| plan.mesh.context > 1)),
        ("g: gathered keys", uses(|plan| plan.context_attention == ContextAttention::Gather)),
        ("r: ring attention", uses(|plan| plan.context_attention == ContextAttention::Ring)),
        ("P: pipeline axis", uses(|plan| plan.mesh.pipeline > 1)),
        ("D: data axis", uses(|plan| plan.mesh.data > 1)),
        ("Z: stage of ZeRO", uses(|plan| plan.zero != Zero::Off)),
    ];
    let has_empty_cells = plans().count() < outcomes.len();
    let legend = [
        ("darker: more tokens/s", true),
        ("grey: no plan", has_empty_cells),
        ("lines separate meshes and ZeRO stages", true),
    ];
    let legend = legend.into_iter().chain(letters);
    let legend = legend.filter_map(|(phrase, is_used)| is_used.then_some(phrase));
    let names = |axis: &SweepAxis| {
        let has_numbers = axis.values.iter().all(Value::is_number);
        let name = axis.field.field_name();
        let symbol = if has_numbers { name.unit().symbol() } else { "" };
        (axis_label(&name, symbol), axis.values.iter().map(text_of).collect())
    };
    Some(HeatMap {
        title: format!("{}tokens per second of the fastest plan", subject(axes, points)?),
        columns: names(&axes[x]),
        rows: names(&axes[y]),
        cells: (0..rows)
            .flat_map(|row| (0..columns).map(move |column| (row, column)))
            .map(|(row, column)| cell(row, column))
            .collect(),
        legend: legend.collect::<Vec<_>>().join("; "),
    })
}

/// The step times of a sweep; `None` if no point has a plan.
fn step_time_chart(
    axes: &[SweepAxis],
    points: &[Point],
    outcomes: &[PointOutcome],
) -> Option<LineChart> {
    let x = horizontal(axes).ok()?;
    let unit = axis_unit(&axes[x]);
    let mut series: Vec<Series> = vec![];
    for (point, planned) in planned(points, outcomes) {
        let Some(at) = axes[x].field.number(&point.values[x]) else { continue };
        let name = series_name(axes, Some(x), &point.values);
        let index = series.iter().position(|known| known.name == name).unwrap_or_else(|| {
            series.push(Series { name, points: vec![] });
            series.len() - 1
        });
        let prediction = &planned.prediction;
        series[index].points.push(ChartPoint {
            x: unit.scaled(at),
            y: prediction.step_time_s,
            interval: prediction.step_time_interval_s,
        });
    }
    for line in &mut series {
        line.points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    Some(LineChart {
        title: format!("{}step time of the fastest plan", subject(axes, points)?),
        x_label: axis_label(&axes[x].field.field_name(), unit.symbol()),
        y_label: "step time in seconds".into(),
        series,
        guides: vec![],
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

/// Unit of the horizontal axis over a field: that of the field, of bytes with a prefix.
fn axis_unit(axis: &SweepAxis) -> CommonUnit {
    axis.field.field_name().unit().of_axis(axis.numbers())
}

/// The last parts of a field's name, with a unit: `inter node bandwidth in GB/s`.
fn axis_label(field: &FieldName, symbol: &str) -> String {
    let name = field.short();
    let keys: Vec<&str> = name.split('.').collect();
    let name = keys[keys.len().saturating_sub(2)..].join(" ").replace('_', " ");
    match symbol {
        "" => name,
        _ => format!("{name} in {symbol}"),
    }
}

/// The axis with the most numbers.
fn horizontal(axes: &[SweepAxis]) -> Result<usize, Problem> {
    let numbers = |axis: &SweepAxis| axis.numbers().count();
    let most = (0..axes.len()).rev().max_by_key(|&index| numbers(&axes[index]));
    most.filter(|&index| numbers(&axes[index]) > 1).ok_or_else(|| {
        let hint = "a swept field with two or more numbers, such as devices=8..64*2";
        Problem::new("--plot", "no swept field has two or more numbers").hint(hint)
    })
}

/// The values of the fields that are not on the horizontal axis, if there is one.
fn series_name(axes: &[SweepAxis], x: Option<usize>, values: &[Value]) -> String {
    let others = axes.iter().zip(values).enumerate().filter(|(index, _)| Some(*index) != x);
    let phrase = |(_, (axis, value)): (usize, (&SweepAxis, &Value))| {
        let name = axis.field.name();
        let short = name.rsplit('.').next().unwrap_or(&name).replace('_', " ");
        format!("{short} {}", text_of(value))
    };
    others.map(phrase).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_units() {
        for (field, label) in [
            ("devices", "devices"),
            ("global_batch", "global batch in sequences"),
            ("hardware.links.inter_node.bandwidth_gbps", "inter node bandwidth in GB/s"),
            ("hardware.executors.captured.gap_s", "captured gap in s"),
            ("hardware.device.peak_flops_per_s.bf16", "peak flops bf16 in FLOP/s"),
        ] {
            let field = FieldName::new(field);
            assert_eq!(axis_label(&field, field.unit().symbol()), label);
        }
    }
}
