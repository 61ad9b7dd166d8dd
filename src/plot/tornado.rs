//! Tornado chart: how far each number moves the step time, the largest on top.

use super::figure::{Figure, PlotKind};
use super::picture::{Anchor, Picture};
use super::scale::Scale;
use super::{GRID, INK, PALETTE};
use crate::sensitivity::{Analysis, ParameterElasticity};

const WIDTH: i32 = 900;
/// Ends of the axis.
const ACROSS: [i32; 2] = [340, 860];
const TOP: i32 = 76;
/// Height of a bar, and distance from one bar to the next.
const BAR: [i32; 2] = [20, 32];
/// Half the height of a whisker's ends.
const CAP: i32 = 5;
/// Most bars.
const BARS_MAX: usize = 16;
/// Elasticities below this size are not drawn.
const SIZE_MIN: f64 = 0.005;
/// Share of the axis beyond the largest value.
const MARGIN: f64 = 0.05;

/// The picture of an analysis of `subject`, such as a model on devices; none where no number matters.
pub fn sensitivity_figures(subject: &str, analysis: &Analysis) -> Vec<Figure> {
    let caption = "Percent by which the step time of the fastest plan changes when a number grows by one percent. \
                   Numbers with * are assumed, not measured.";
    let picture = tornado(subject, &analysis.elasticities);
    Figure::of(PlotKind::Tornado, picture, caption).into_iter().collect()
}

fn tornado(subject: &str, elasticities: &[ParameterElasticity]) -> Option<Picture> {
    let is_drawn = |of: &&ParameterElasticity| of.replanned.value.abs() >= SIZE_MIN;
    let bars: Vec<&ParameterElasticity> =
        elasticities.iter().filter(is_drawn).take(BARS_MAX).collect();
    if bars.is_empty() {
        return None;
    }
    let ends =
        bars.iter().flat_map(|of| of.replanned.interval.into_iter().chain([of.replanned.value]));
    let scale = Scale::linear(ends.chain([0.0]))?.padded(MARGIN);
    let bottom = TOP + BAR[1] * bars.len() as i32;
    let mut picture = Picture::new((WIDTH, bottom + 66));
    let title = format!("{subject}: what the step time depends on");
    picture.text(title, (20, 20), Anchor::Start, 19);
    if bars.iter().any(|of| of.number.is_assumed) {
        picture.text("* assumed, not measured", (20, 50), Anchor::Start, 13);
    }
    let across = |value: f64| {
        let share = scale.position(value).clamp(0.0, 1.0);
        ACROSS[0] + (share * f64::from(ACROSS[1] - ACROSS[0])).round() as i32
    };
    for (tick, label) in scale.labelled_ticks() {
        picture.path([(across(tick), TOP), (across(tick), bottom)], GRID, 1);
        picture.text(label, (across(tick), bottom + 8), Anchor::Middle, 14);
    }
    let axis = "change of the step time in % for +1 % (whisker: 90 % interval)";
    picture.text(axis, ((ACROSS[0] + ACROSS[1]) / 2, bottom + 34), Anchor::Middle, 15);
    for (index, of) in bars.iter().enumerate() {
        let upper = TOP + (BAR[1] - BAR[0]) / 2 + BAR[1] * index as i32;
        let middle = upper + BAR[0] / 2;
        let mark = if of.number.is_assumed { "*" } else { "" };
        let name = format!("{}{mark}", of.number.name.short());
        picture.text(name, (ACROSS[0] - 10, middle - 8), Anchor::End, 14);
        let mut sides = [across(0.0), across(of.replanned.value)];
        sides.sort_unstable();
        let colour = if of.replanned.value < 0.0 { PALETTE[0] } else { PALETTE[1] };
        picture.rectangle([(sides[0], upper), (sides[1], upper + BAR[0])], colour);
        let [low, high] = of.replanned.interval.map(across);
        picture.path([(low, middle), (high, middle)], INK, 1);
        for end in [low, high] {
            picture.path([(end, middle - CAP), (end, middle + CAP)], INK, 1);
        }
    }
    picture.path([(across(0.0), TOP - 4), (across(0.0), bottom)], INK, 1);
    Some(picture)
}
