//! Where the fastest of several lines changes.

use super::line_chart::{Guide, LineChart, Series};
use crate::whatif::gap_phrase;

/// Relative difference from which on one time is shorter than another.
const TIE: f64 = 1e-6;

/// Change of the fastest line between two neighbouring points.
#[derive(Clone, Debug, PartialEq)]
struct Crossing {
    /// Last point of the line that is fastest before it.
    before: (f64, f64),
    /// First point of the line that is fastest after it.
    after: (f64, f64),
    /// Index of that line.
    fastest: usize,
}

/// Marks the points between which the fastest line of a chart changes, with their values in `unit`. Returns how many changes
/// there are.
pub fn mark_crossovers(chart: &mut LineChart, unit: &str) -> usize {
    let crossings = crossings(&chart.series);
    let guides = |Crossing { before, after, fastest }: &Crossing| {
        let (gap, name) = ([before.0, after.0], &chart.series[*fastest].name);
        let name = format!("{name} is faster from {}", gap_phrase(gap, unit));
        [(*before, String::new()), (*after, name)]
            .map(|(point, name)| Guide { path: vec![point, (point.0, 0.0)], name })
    };
    chart.guides = crossings.iter().flat_map(guides).collect();
    crossings.len()
}

/// The changes of the fastest line between the points that the lines share.
fn crossings(series: &[Series]) -> Vec<Crossing> {
    let mut places: Vec<f64> =
        series.iter().flat_map(|line| line.points.iter().map(|p| p.x)).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let value = |line: usize, x: f64| {
        series[line].points.iter().find(|point| point.x == x).map(|point| point.y)
    };
    let mut crossings = vec![];
    // Fastest line of the last place, which has both lines of a crossing.
    let mut last: Option<(f64, usize)> = None;
    for x in places {
        let present = (0..series.len()).filter_map(|line| Some((line, value(line, x)?)));
        let Some((fastest, time)) = present.min_by(|(_, a), (_, b)| a.total_cmp(b)) else {
            continue;
        };
        if let Some((before, line)) = last {
            match value(line, x) {
                Some(other) if other <= time * (1.0 + TIE) => {
                    last = Some((x, line));
                    continue;
                }
                Some(_) if value(fastest, before).is_some() => {
                    let before = value(line, before).map(|time| (before, time));
                    let after = (x, time);
                    crossings.extend(before.map(|before| Crossing { before, after, fastest }));
                }
                _ => {}
            }
        }
        last = Some((x, fastest));
    }
    crossings
}

#[cfg(test)]
mod tests {
    use super::super::line_chart::ChartPoint;
    use super::*;

    fn line(points: &[(f64, f64)]) -> Series {
        let point = |&(x, y): &(f64, f64)| ChartPoint { x, y, interval: [y; 2] };
        Series { name: String::new(), points: points.iter().map(point).collect() }
    }

    /// Swept points say between which values the fastest line changes, and points of a bisection say where.
    #[test]
    fn crossings_are_named_with_their_unit() {
        for (at, unit, name) in [
            ([1.0, 2.0, 8.0, 16.0], "GB/s", "fast is faster from a value between 2 and 8 GB/s"),
            ([1.0, 2.0, 8.0, 16.0], "", "fast is faster from a value between 2 and 8"),
            ([1.0, 2.99, 3.01, 16.0], "GB/s", "fast is faster from 3 GB/s"),
        ] {
            let slow = line(&at.map(|x| (x, 1.0 / x)));
            let fast = Series { name: "fast".into(), ..line(&at.map(|x| (x, 3.0 / x / x))) };
            let mut chart = LineChart {
                title: String::new(),
                x_label: String::new(),
                y_label: String::new(),
                series: vec![slow, fast],
                guides: vec![],
            };
            assert_eq!(mark_crossovers(&mut chart, unit), 1);
            assert_eq!([&*chart.guides[0].name, &*chart.guides[1].name], ["", name]);
        }
    }

    #[test]
    fn crossings_lie_between_points_of_both_lines() {
        let at = [1.0, 2.0, 8.0, 16.0];
        let slow = line(&at.map(|x| (x, 1.0 / x)));
        let fast = line(&at.map(|x| (x, 3.0 / x / x)));
        let crossing = Crossing { before: (2.0, 0.5), after: (8.0, 3.0 / 64.0), fastest: 1 };
        assert_eq!(crossings(&[slow.clone(), fast]), [crossing]);
        assert_eq!(crossings(&[slow.clone(), slow.clone()]), [], "equal lines do not cross");
        let worse = line(&at.map(|x| (x, 2.0 / x)));
        assert_eq!(crossings(&[slow, worse]), []);
    }
}
