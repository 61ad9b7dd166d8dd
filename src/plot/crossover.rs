//! Where the fastest of several lines changes.

use super::line_chart::{Guide, LineChart, Series};
use super::scale::{Scale, rounded};

/// Relative difference from which on one time is shorter than another.
const TIE: f64 = 1e-6;

/// Change of the fastest line between two neighbouring points.
#[derive(Clone, Debug, PartialEq)]
struct Crossing {
    /// Place of the crossing.
    x: f64,
    y: f64,
    /// Index of the line that is fastest after it.
    after: usize,
}

/// Marks the places where the fastest line of a chart changes, with their values in `unit`. Returns how many there are.
pub fn mark_crossovers(chart: &mut LineChart, unit: &str) -> usize {
    let Some(scales) = chart.scales() else { return 0 };
    let crossings = crossings(&chart.series, &scales);
    let guide = |Crossing { x, y, after }: &Crossing| Guide {
        path: vec![(*x, *y), (*x, 0.0)],
        name: format!("{} is faster from {} {unit}", chart.series[*after].name, rounded(*x))
            .trim_end()
            .to_owned(),
    };
    chart.guides = crossings.iter().map(guide).collect();
    crossings.len()
}

/// The crossings of the lines as they are drawn between the points that they share.
fn crossings(series: &[Series], scales: &[Scale; 2]) -> Vec<Crossing> {
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
                Some(_) => crossings.extend(crossing(&value, (before, line), (x, fastest), scales)),
                None => {}
            }
        }
        last = Some((x, fastest));
    }
    crossings
}

/// The crossing of the lines that are fastest at two places; `None` where a line has no value at the first one.
fn crossing(
    value: &dyn Fn(usize, f64) -> Option<f64>,
    (x0, before): (f64, usize),
    (x1, after): (f64, usize),
    [x, y]: &[Scale; 2],
) -> Option<Crossing> {
    let height = |line, at| Some(y.position(value(line, at)?));
    let difference = |at| Some(height(before, at)? - height(after, at)?);
    let (d0, d1) = (difference(x0)?, difference(x1)?);
    let share = if d1 > d0 { (-d0 / (d1 - d0)).clamp(0.0, 1.0) } else { 0.5 };
    let between = |a: f64, b: f64| a + share * (b - a);
    Some(Crossing {
        x: x.value(between(x.position(x0), x.position(x1))),
        y: y.value(between(height(before, x0)?, height(before, x1)?)),
        after,
    })
}

#[cfg(test)]
mod tests {
    use super::super::line_chart::ChartPoint;
    use super::*;

    fn line(points: &[(f64, f64)]) -> Series {
        let point = |&(x, y): &(f64, f64)| ChartPoint { x, y, interval: [y; 2] };
        Series { name: String::new(), points: points.iter().map(point).collect() }
    }

    fn chart(series: &[Series]) -> LineChart {
        LineChart {
            title: String::new(),
            x_label: String::new(),
            y_label: String::new(),
            series: series.to_vec(),
            guides: vec![],
        }
    }

    /// The crossings of a chart of these lines.
    fn found(series: &[Series]) -> Vec<Crossing> {
        crossings(series, &chart(series).scales().expect("points"))
    }

    #[test]
    fn crossings_are_named_with_their_unit() {
        let at = [1.0, 2.0, 8.0, 16.0];
        let (slow, fast) = (line(&at.map(|x| (x, 1.0 / x))), line(&at.map(|x| (x, 3.0 / x / x))));
        for (unit, name) in [("GB/s", "fast is faster from 3 GB/s"), ("", "fast is faster from 3")]
        {
            let named = Series { name: "fast".into(), ..fast.clone() };
            let mut chart = chart(&[slow.clone(), named]);
            assert_eq!(mark_crossovers(&mut chart, unit), 1);
            assert_eq!(chart.guides[0].name, name);
        }
    }

    #[test]
    fn crossings_lie_where_two_power_laws_meet() {
        // 1/x and 3/x² meet at 3.
        let at = [1.0, 2.0, 8.0, 16.0];
        let slow = line(&at.map(|x| (x, 1.0 / x)));
        let fast = line(&at.map(|x| (x, 3.0 / x / x)));
        let crossing = &found(&[slow.clone(), fast])[..];
        assert_eq!(crossing.len(), 1);
        assert!((crossing[0].x - 3.0).abs() < 1e-9 && (crossing[0].y - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(crossing[0].after, 1);
        assert_eq!(found(&[slow.clone(), slow.clone()]), [], "equal lines do not cross");
        let worse = line(&at.map(|x| (x, 2.0 / x)));
        assert_eq!(found(&[slow, worse]), []);
    }
}
