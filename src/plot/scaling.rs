//! Strong and weak scaling: throughput and efficiency over the number of devices.
//!
//! With n devices and throughput t(n), the efficiency is (t(n)/n) / (t(n₀)/n₀) for the smallest n₀. Strong scaling keeps
//! the global batch, weak scaling the sequences of a device.

use super::line_chart::{ChartPoint, Guide, LineChart, Series};
use super::picture::Picture;
use super::scale::label;

/// Throughput of the fastest plan of one point.
#[derive(Clone, Copy, Debug)]
pub struct Throughput {
    /// Devices.
    pub devices: u64,
    /// Sequences of a step.
    pub global_batch: u64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Ends of the 90 % interval.
    pub interval: [f64; 2],
}

/// Points of one kind of scaling, by ascending devices.
struct ScalingSeries {
    name: String,
    points: Vec<Throughput>,
}

/// The chart of throughputs above that of efficiencies; `None` without two points of one kind of scaling.
pub fn scaling_picture(title: &str, points: &[Throughput]) -> Option<Picture> {
    let series = scaling_series(points);
    if series.is_empty() {
        return None;
    }
    let chart =
        |y_label: &str, value: &dyn Fn(&Throughput, &Throughput, f64) -> f64, ideal| LineChart {
            title: title.to_owned(),
            x_label: "devices".into(),
            y_label: y_label.to_owned(),
            series: series.iter().map(|series| series.line(value)).collect(),
            guides: ideal,
        };
    let mut ideal: Vec<Guide> = series.iter().map(ScalingSeries::ideal).collect();
    // One name is enough for lines that nearly coincide.
    ideal[1..].iter_mut().for_each(|guide| guide.name.clear());
    let throughput = chart("tokens per second", &|_, _, tokens_per_s| tokens_per_s, ideal);
    let points = || series.iter().flat_map(|series| &series.points).map(|point| point.devices);
    let ends = [points().min(), points().max()].map(|devices| (devices.unwrap_or(1) as f64, 100.0));
    let ideal = Guide { path: ends.to_vec(), name: "ideal".into() };
    let efficiency = |first: &Throughput, point: &Throughput, tokens_per_s: f64| {
        let share = tokens_per_s / first.tokens_per_s;
        100.0 * share * first.devices as f64 / point.devices as f64
    };
    let mut efficiencies = chart("efficiency in %", &efficiency, vec![ideal]);
    efficiencies.title.clear();
    for line in &mut efficiencies.series {
        let (kind, _) = line.name.split_once(':').unwrap_or((&line.name, ""));
        if let Some(last) = line.points.last() {
            line.name = format!("{kind}: {:.1} % at {}", last.y, label(last.x));
        }
    }
    Some(throughput.picture()?.above(efficiencies.picture()?))
}

/// Strong scaling of the largest batch, and weak scaling from the smallest cluster and batch on, each where it has two
/// points or more.
fn scaling_series(points: &[Throughput]) -> Vec<ScalingSeries> {
    let mut points = points.to_vec();
    points.sort_by_key(|point| (point.devices, point.global_batch));
    let Some(smallest) = points.first().copied() else { return vec![] };
    let largest = points.iter().map(|point| point.global_batch).max();
    let same_share = |point: &&Throughput| {
        let (batch, devices) = (u128::from(point.global_batch), u128::from(point.devices));
        batch * u128::from(smallest.devices) == u128::from(smallest.global_batch) * devices
    };
    let strong = points.iter().filter(|point| Some(point.global_batch) == largest);
    let weak = points.iter().filter(same_share);
    let share = smallest.global_batch as f64 / smallest.devices as f64;
    let strong_name = format!("strong: batch {}", largest.unwrap_or(0));
    [
        ScalingSeries { name: strong_name, points: strong.copied().collect() },
        ScalingSeries {
            name: format!("weak: {share} per device"),
            points: weak.copied().collect(),
        },
    ]
    .into_iter()
    .filter(|series| series.points.len() > 1)
    .collect()
}

impl ScalingSeries {
    /// A line of `value(first point, point, throughput)`.
    fn line(&self, value: &dyn Fn(&Throughput, &Throughput, f64) -> f64) -> Series {
        let first = &self.points[0];
        let point = |point: &Throughput| ChartPoint {
            x: point.devices as f64,
            y: value(first, point, point.tokens_per_s),
            interval: point.interval.map(|end| value(first, point, end)),
        };
        Series { name: self.name.clone(), points: self.points.iter().map(point).collect() }
    }

    /// The throughput in proportion to the devices.
    fn ideal(&self) -> Guide {
        let first = &self.points[0];
        let at = |point: &Throughput| {
            let devices = point.devices as f64;
            (devices, first.tokens_per_s * devices / first.devices as f64)
        };
        Guide { path: self.points.iter().map(at).collect(), name: "ideal".into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strong_scaling_keeps_the_batch_and_weak_scaling_the_share_of_a_device() {
        let point = |devices: u64, global_batch: u64| Throughput {
            devices,
            global_batch,
            tokens_per_s: (devices as f64).sqrt(),
            interval: [1.0, 2.0],
        };
        let grid = [8, 16, 32].map(|devices| [64, 128, 256].map(|batch| point(devices, batch)));
        let series = scaling_series(grid.as_flattened());
        let places = |series: &ScalingSeries| -> Vec<(u64, u64)> {
            series.points.iter().map(|point| (point.devices, point.global_batch)).collect()
        };
        assert_eq!(places(&series[0]), [(8, 256), (16, 256), (32, 256)]);
        assert_eq!(places(&series[1]), [(8, 64), (16, 128), (32, 256)]);
        assert_eq!(scaling_series(&grid[0]).len(), 0, "one size of cluster");
        let row = [point(8, 64), point(16, 64)];
        let names: Vec<String> =
            scaling_series(&row).into_iter().map(|series| series.name).collect();
        assert_eq!(names, ["strong: batch 64"]);
    }
}
