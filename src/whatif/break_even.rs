//! Values of a field at which one of two alternatives overtakes the other.
//!
//! Both are planned on a grid of values. Wherever the faster one changes between two neighbours, the gap is bisected, so
//! that any number of break-even points is found, except pairs of them between two neighbours.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::errors::Problem;

use super::field::SweepField;
use super::sweep::PointOutcome;
use super::values::{geometric_mean, scalar};

/// Values of a range that are planned first, evenly spaced on a logarithmic scale.
const GRID: usize = 13;

/// Ratio of the ends of a gap below which it is not bisected any further.
const RESOLUTION: f64 = 1.01;

/// Step times whose ratio differs from one by less are equal.
const TOLERANCE: f64 = 1e-6;

/// Values of the field of a break-even question.
#[derive(Clone, Debug, PartialEq)]
pub enum BreakEvenValues {
    /// All numbers between two, which are above zero.
    Range([f64; 2]),
    /// All whole numbers between two, which are above zero.
    WholeRange([f64; 2]),
    /// Numbers in ascending order.
    List(Vec<f64>),
}

/// The faster of two alternatives for one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FasterAlternative {
    /// The first one is faster.
    FirstFaster,
    /// The second one is faster.
    SecondFaster,
    /// Both are equally fast.
    Equal,
    /// Only the first one has a plan.
    OnlyFirst,
    /// Only the second one has a plan.
    OnlySecond,
    /// None of them has a plan.
    NoPlan,
}

/// Neighbouring values for which two alternatives compare in the same way.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct BreakEvenRegion {
    /// First and last value that was planned in the region.
    pub values: [f64; 2],
    /// The faster alternative there.
    pub faster: FasterAlternative,
}

impl FasterAlternative {
    /// The faster of two outcomes; `None` where one was not reached.
    pub fn of(outcomes: [&PointOutcome; 2]) -> Option<FasterAlternative> {
        if outcomes.iter().any(|outcome| matches!(outcome, PointOutcome::NotReached)) {
            return None;
        }
        let time = |outcome: &PointOutcome| match outcome {
            PointOutcome::Planned(planned) => Some(planned.prediction.step_time_s),
            _ => None,
        };
        Some(match outcomes.map(time) {
            [None, None] => FasterAlternative::NoPlan,
            [Some(_), None] => FasterAlternative::OnlyFirst,
            [None, Some(_)] => FasterAlternative::OnlySecond,
            [Some(first), Some(second)] => match second / first - 1.0 {
                slower if slower > TOLERANCE => FasterAlternative::FirstFaster,
                slower if slower < -TOLERANCE => FasterAlternative::SecondFaster,
                _ => FasterAlternative::Equal,
            },
        })
    }
}

impl BreakEvenValues {
    /// Values that are planned first.
    fn grid(&self) -> Vec<f64> {
        match self {
            BreakEvenValues::List(values) => values.clone(),
            BreakEvenValues::Range([low, high]) | BreakEvenValues::WholeRange([low, high]) => {
                let step = (high.ln() - low.ln()) / (GRID - 1) as f64;
                let inner = (1..GRID - 1).map(|index| {
                    self.rounded_between((low.ln() + index as f64 * step).exp(), [*low, *high])
                });
                let mut values: Vec<f64> = [*low].into_iter().chain(inner).chain([*high]).collect();
                values.dedup();
                values
            }
        }
    }

    /// Whether a gap between two values is to be bisected.
    fn is_wide(&self, [low, high]: [f64; 2]) -> bool {
        let is_resolved = high / low <= RESOLUTION;
        match self {
            BreakEvenValues::Range(_) => !is_resolved,
            BreakEvenValues::WholeRange(_) => !is_resolved && high - low > 1.0,
            BreakEvenValues::List(_) => false,
        }
    }

    /// A value with four significant digits, for readers; within `low` and `high`, which have as many digits as typed.
    fn rounded_between(&self, value: f64, [low, high]: [f64; 2]) -> f64 {
        let rounded: f64 = format!("{value:.3e}").parse().unwrap_or(value);
        let is_whole = matches!(self, BreakEvenValues::WholeRange(_));
        let rounded = if is_whole { rounded.round() } else { rounded };
        rounded.clamp(low, high)
    }
}

/// Plans values until every change of the faster alternative lies between two neighbours that are close, and returns the regions
/// in ascending order. `compare` plans several values at once; `None` stands for a value that was not reached.
pub fn regions(
    values: &BreakEvenValues,
    mut compare: impl FnMut(&[f64]) -> Vec<Option<FasterAlternative>>,
) -> Vec<BreakEvenRegion> {
    // Keyed by the bits of positive numbers, whose order is that of the numbers.
    let mut known: BTreeMap<u64, FasterAlternative> = BTreeMap::new();
    let mut next = values.grid();
    while !next.is_empty() {
        let compared = compare(&next);
        let is_stopped = compared.iter().any(Option::is_none);
        let reached =
            next.iter().zip(compared).filter_map(|(value, c)| Some((value.to_bits(), c?)));
        known.extend(reached);
        let neighbours = known.iter().zip(known.iter().skip(1));
        let gaps = neighbours
            .filter(|((_, a), (_, b))| a != b)
            .map(|((a, _), (b, _))| [f64::from_bits(*a), f64::from_bits(*b)]);
        let wide = gaps.filter(|gap| !is_stopped && values.is_wide(*gap));
        next = wide.map(|gap| values.rounded_between(geometric_mean(gap), gap)).collect();
    }
    let mut regions: Vec<BreakEvenRegion> = vec![];
    for (bits, faster) in known {
        let value = f64::from_bits(bits);
        match regions.last_mut() {
            Some(region) if region.faster == faster => region.values[1] = value,
            _ => regions.push(BreakEvenRegion { values: [value; 2], faster }),
        }
    }
    regions
}

/// Parses `LOW..HIGH` of a field, whose values may be sizes such as `8GiB`; `None` for values of another form.
///
/// # Errors
/// Limits that are not above zero and in ascending order. The problem has no location.
pub fn parse_range(field: &SweepField, values: &str) -> Option<Result<[f64; 2], Problem>> {
    let (low_text, high_text) = values.split_once("..")?;
    let (low_text, high_text) = (low_text.trim(), high_text.trim());
    let number = |text| field.number(&scalar(text)).filter(|value| value.is_finite());
    let [low, high] = [number(low_text)?, number(high_text)?];
    let message = match low {
        ..=0.0 => format!("the limits are to be above zero, and {low_text} is not"),
        _ if low > high => format!("{low_text} is above {high_text}"),
        _ if low == high => format!("both limits are {low_text}"),
        _ => return Some(Ok([low, high])),
    };
    Some(Err(Problem::new("", message).hint("a range such as 5..400")))
}

/// The positive numbers among the values of a field in ascending order; `None` where a value is none.
pub fn sorted_numbers(field: &SweepField, values: &[Value]) -> Option<Vec<f64>> {
    let number = |value| field.number(value).filter(|number| *number > 0.0);
    let mut numbers: Vec<f64> = values.iter().map(number).collect::<Option<_>>()?;
    numbers.sort_by(f64::total_cmp);
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(
        values: &BreakEvenValues,
        compare: impl Fn(f64) -> FasterAlternative,
    ) -> (Vec<BreakEvenRegion>, usize) {
        let mut planned = 0;
        let regions = regions(values, |values| {
            planned += values.len();
            values.iter().map(|value| Some(compare(*value))).collect()
        });
        (regions, planned)
    }

    /// Every boundary of several regions is enclosed within one percent.
    #[test]
    fn all_break_even_points_are_found() {
        let boundaries = [12.3, 37.0, 250.0];
        let compare = |value: f64| match boundaries.iter().filter(|at| value > **at).count() {
            0 => FasterAlternative::OnlySecond,
            1 | 3 => FasterAlternative::FirstFaster,
            _ => FasterAlternative::SecondFaster,
        };
        let (regions, planned) = found(&BreakEvenValues::Range([5.0, 400.0]), compare);
        assert_eq!(regions.len(), 4);
        for (pair, boundary) in regions.windows(2).zip(boundaries) {
            let (low, high) = (pair[0].values[1], pair[1].values[0]);
            assert!(low <= boundary && boundary <= high && high / low <= RESOLUTION);
        }
        assert_eq!((regions[0].values[0], regions[3].values[1]), (5.0, 400.0));
        assert!(planned <= GRID + 3 * 6, "{planned}");
    }

    /// No value lies outside of a range, and none is planned twice, however narrow or large the range is.
    #[test]
    fn planned_values_stay_within_their_range() {
        for [low, high] in [[37.12345, 37.12399], [5.0, 400.0], [1e-300, 1e-10], [1e200, 1.7e308]] {
            let mut planned = vec![];
            let middle = f64::sqrt(low) * f64::sqrt(high);
            let found = regions(&BreakEvenValues::Range([low, high]), |values| {
                planned.extend_from_slice(values);
                let faster = |value: &f64| match *value < middle {
                    true => FasterAlternative::FirstFaster,
                    false => FasterAlternative::SecondFaster,
                };
                values.iter().map(|value| Some(faster(value))).collect()
            });
            assert!(planned.iter().all(|value| (low..=high).contains(value)), "{planned:?}");
            planned.sort_by(f64::total_cmp);
            assert!(planned.windows(2).all(|pair| pair[0] < pair[1]), "{planned:?}");
            assert_eq!(found.len(), 2, "{low} to {high}");
            assert_eq!((found[0].values[0], found[1].values[1]), (low, high));
            let [below, above] = [found[0].values[1], found[1].values[0]];
            assert!(above / below <= RESOLUTION, "{below} to {above}");
        }
    }

    #[test]
    fn whole_numbers_are_found_to_the_next() {
        for [low, high] in [[1.0, 2.0], [1.0, 8.0], [3.0, 70.0], [50.0, 400.0], [1e9, 9e10]] {
            for share in [0.001, 0.5, 0.999] {
                let boundary = low + share * (high - low);
                let (found, planned) = found(&BreakEvenValues::WholeRange([low, high]), |value| {
                    match value < boundary {
                        true => FasterAlternative::FirstFaster,
                        false => FasterAlternative::SecondFaster,
                    }
                });
                let values: Vec<f64> = found.iter().flat_map(|region| region.values).collect();
                assert!(values.iter().all(|value| value.fract() == 0.0), "{values:?}");
                let [below, above] = [values[1], values[2]];
                assert!(below < boundary && boundary <= above, "{below} to {above}");
                assert!(above - below == 1.0 || above / below <= RESOLUTION, "{below} to {above}");
                assert!(planned <= 2 * GRID, "{planned}");
            }
        }
    }

    #[test]
    fn lists_are_not_refined() {
        let compare = |value: f64| match value < 3.0 {
            true => FasterAlternative::FirstFaster,
            false => FasterAlternative::SecondFaster,
        };
        let (regions, planned) = found(&BreakEvenValues::List(vec![1.0, 2.0, 4.0]), compare);
        assert_eq!((regions.len(), planned), (2, 3));
        assert_eq!(regions[1].values, [4.0, 4.0]);
        let (regions, _) = found(&BreakEvenValues::List(vec![1.0, 2.0]), compare);
        assert_eq!(regions.len(), 1);
    }

    #[test]
    fn a_stop_ends_the_search() {
        let regions = regions(&BreakEvenValues::Range([1.0, 9.0]), |values| {
            values.iter().map(|v| (*v < 5.0).then_some(FasterAlternative::Equal)).collect()
        });
        assert_eq!(regions.len(), 1);
        assert!(regions[0].values[1] < 5.0);
    }

    #[test]
    fn ranges_have_two_positive_ends() {
        let [devices, memory] =
            ["devices", "memory-limit"].map(|flag| SweepField::Flag(flag.to_owned()));
        assert_eq!(parse_range(&devices, "5..400"), Some(Ok([5.0, 400.0])));
        let kibibytes = Some(Ok([2048.0, 3072.0]));
        assert_eq!(parse_range(&memory, "2KiB..3KiB"), kibibytes);
        for text in ["5..400*2", "5..400+5", "5", "a..b", "5GiB..8GiB"] {
            assert_eq!(parse_range(&devices, text), None, "{text}");
        }
        for (text, message) in [
            ("400..5", "400 is above 5"),
            ("0..5", "the limits are to be above zero, and 0 is not"),
            ("5..5", "both limits are 5"),
        ] {
            let problem = parse_range(&devices, text).expect("a range").unwrap_err();
            assert_eq!(problem.message, message);
        }
    }
}
