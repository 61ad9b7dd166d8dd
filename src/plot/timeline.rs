//! The passes of each pipeline stage over the time of a step.

use narrows_cost_model::PassSpan;
use narrows_plan::program::Phase;
use plotters::style::RGBColor;

use super::picture::{Anchor, Picture};
use super::scale::{Scale, label};
use super::{GRID, INK, PALETTE};

const WIDTH: i32 = 900;
const LEFT: i32 = 90;
const RIGHT: i32 = 870;
const TOP: i32 = 92;
/// Height of a stage.
const ROW: i32 = 26;
/// Largest height of all stages.
const ROWS_MAX: i32 = 520;
/// Least width of a pass with a gap to the next.
const GAPPED: i32 = 4;

/// The timeline of `spans`; `None` without any.
pub fn timeline_picture(title: &str, spans: &[PassSpan]) -> Option<Picture> {
    let stages = spans.iter().map(|span| span.stage + 1).max()? as i32;
    let row = ROW.min(ROWS_MAX / stages).max(2);
    let milliseconds = |seconds: f64| 1e3 * seconds;
    let ends = spans.iter().map(|span| milliseconds(span.end.0));
    let scale = Scale::linear(ends.chain([0.0]))?;
    let across = |ms: f64| {
        LEFT + (scale.position(ms).clamp(0.0, 1.0) * f64::from(RIGHT - LEFT)).round() as i32
    };
    let bottom = TOP + row * stages;
    let mut picture = Picture::new((WIDTH, bottom + 66));
    picture.text(title, (20, 20), Anchor::Start, 19);
    let has_phase = |(phase, _, _): &(Phase, &str, RGBColor)| {
        *phase != Phase::WeightGradient || spans.iter().any(|span| span.pass.phase == *phase)
    };
    for (index, (_, name, colour)) in PHASES.into_iter().filter(has_phase).enumerate() {
        let left = 20 + 150 * index as i32;
        picture.rectangle([(left, 54), (left + 14, 68)], colour);
        picture.text(name, (left + 20, 54), Anchor::Start, 14);
    }
    for tick in scale.ticks() {
        picture.path([(across(tick), TOP), (across(tick), bottom)], GRID, 1);
        picture.text(label(tick), (across(tick), bottom + 8), Anchor::Middle, 14);
    }
    picture.text("time in ms", ((LEFT + RIGHT) / 2, bottom + 34), Anchor::Middle, 15);
    for stage in 0..stages {
        if row >= 14 || stage % (14 / row + 1) == 0 {
            let middle = TOP + row * stage + row / 2;
            picture.text(format!("stage {stage}"), (LEFT - 10, middle - 8), Anchor::End, 13);
        }
    }
    for span in spans {
        let upper = TOP + row * span.stage as i32;
        let [begin, end] = [span.begin.0, span.end.0].map(|time| across(milliseconds(time)));
        // Passes that follow each other at once are told apart by a gap.
        let end = if end - begin >= GAPPED { end - 1 } else { end.max(begin + 1) };
        let lower = upper + 1 + (row - 2).max(1);
        picture.rectangle([(begin, upper + 1), (end, lower)], colour(span.pass.phase));
    }
    picture.path([(LEFT, TOP), (LEFT, bottom)], INK, 1);
    Some(picture)
}

/// Name and colour of each phase. Most schedules have no weight-gradient passes.
const PHASES: [(Phase, &str, RGBColor); 4] = [
    (Phase::Forward, "forward", PALETTE[5]),
    (Phase::Backward, "backward", PALETTE[0]),
    (Phase::WeightGradient, "weight gradients", PALETTE[2]),
    (Phase::Step, "step phase", PALETTE[4]),
];

fn colour(phase: Phase) -> RGBColor {
    PHASES.into_iter().find(|(other, ..)| *other == phase).map_or(INK, |(_, _, colour)| colour)
}
