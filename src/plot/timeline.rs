//! The passes of each pipeline stage over the time of a step.

use narrows_cost_model::PassSpan;
use narrows_plan::program::Phase;
use plotters::style::RGBColor;

use super::picture::{Anchor, Picture};
use super::scale::Scale;
use super::{GRID, INK, PALETTE, PAPER, blended};
use crate::text::thousands;
use crate::unit::Unit;

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
/// Side of the colours of the legend.
const SWATCH: i32 = 14;
/// Most passes of a picture: with more, their borders are no longer visible.
const SPANS_MAX: usize = 4000;
/// Share of white in the colours of the last model chunk of a stage.
const LIGHTEST: f64 = 0.65;

/// The timeline of `spans`, or of the first [`SPANS_MAX`] of them; `None` without any.
pub fn timeline_picture(title: &str, mut spans: Vec<PassSpan>) -> Option<Picture> {
    let total = spans.len();
    let title = match total > SPANS_MAX {
        true => {
            spans.sort_by(|a, b| a.begin.0.total_cmp(&b.begin.0));
            spans.truncate(SPANS_MAX);
            let [shown, total] = [SPANS_MAX, total].map(|passes| thousands(passes as u64));
            format!("{title}, the first {shown} of {total} passes")
        }
        false => title.to_owned(),
    };
    let stages = spans.iter().map(|span| span.stage + 1).max()? as i32;
    let row = ROW.min(ROWS_MAX / stages).max(2);
    let last = spans.iter().map(|span| span.end.0).fold(0.0, f64::max);
    let unit = Unit::Seconds.common([last]);
    let scale = Scale::linear([0.0, unit.scaled(last)].into_iter())?;
    let across = |time: f64| {
        LEFT + (scale.position(time).clamp(0.0, 1.0) * f64::from(RIGHT - LEFT)).round() as i32
    };
    let bottom = TOP + row * stages;
    let mut picture = Picture::new((WIDTH, bottom + 66));
    picture.text(title, (20, 20), Anchor::Start, 19);
    let has_phase = |(phase, _, _): &(Phase, &str, RGBColor)| {
        *phase != Phase::WeightGradient || spans.iter().any(|span| span.pass.phase == *phase)
    };
    for (index, (_, name, colour)) in PHASES.into_iter().filter(has_phase).enumerate() {
        let left = legend_left(index);
        picture.rectangle([(left, 54), (left + SWATCH, 54 + SWATCH)], colour);
        picture.text(name, (left + SWATCH + 6, 54), Anchor::Start, 14);
    }
    let chunks = spans.iter().map(|span| span.pass.chunk + 1).max().unwrap_or(1);
    if chunks > 1 {
        let left = legend_left(PHASES.into_iter().filter(has_phase).count());
        chunk_legend(&mut picture, left, chunks);
    }
    for (tick, label) in scale.labelled_ticks() {
        picture.path([(across(tick), TOP), (across(tick), bottom)], GRID, 1);
        picture.text(label, (across(tick), bottom + 8), Anchor::Middle, 14);
    }
    let axis = format!("time in {}", unit.symbol());
    picture.text(axis, ((LEFT + RIGHT) / 2, bottom + 34), Anchor::Middle, 15);
    for stage in 0..stages {
        if row >= 14 || stage % (14 / row + 1) == 0 {
            let middle = TOP + row * stage + row / 2;
            picture.text(format!("stage {stage}"), (LEFT - 10, middle - 8), Anchor::End, 13);
        }
    }
    for span in &spans {
        let upper = TOP + row * span.stage as i32;
        let [begin, end] = [span.begin.0, span.end.0].map(|time| across(unit.scaled(time)));
        // Passes that follow each other at once are told apart by a gap.
        let end = if end - begin >= GAPPED { end - 1 } else { end.max(begin + 1) };
        let lower = upper + 1 + (row - 2).max(1);
        let colour = shade(colour(span.pass.phase), span.pass.chunk, chunks);
        picture.rectangle([(begin, upper + 1), (end, lower)], colour);
    }
    picture.path([(LEFT, TOP), (LEFT, bottom)], INK, 1);
    Some(picture)
}

/// The left end of an entry of the legend.
fn legend_left(index: usize) -> i32 {
    20 + 150 * index as i32
}

/// The entry of the legend for model chunks: the shades of a forward pass above those of a backward pass.
fn chunk_legend(picture: &mut Picture, left: i32, chunks: usize) {
    let width = (8 * SWATCH / chunks as i32).clamp(2, SWATCH);
    for chunk in 0..chunks {
        let begin = left + width * chunk as i32;
        for (phase, upper) in [(Phase::Forward, 54), (Phase::Backward, 54 + SWATCH / 2)] {
            let corners = [(begin, upper), (begin + width, upper + SWATCH / 2)];
            picture.rectangle(corners, shade(colour(phase), chunk, chunks));
        }
    }
    let text = format!("{chunks} model chunks per stage: the later, the lighter");
    picture.text(text, (left + width * chunks as i32 + 6, 54), Anchor::Start, 14);
}

/// The colour of a pass through a model chunk, of so many of a stage.
fn shade(colour: RGBColor, chunk: usize, chunks: usize) -> RGBColor {
    let share = chunk as f64 / (chunks - 1).max(1) as f64;
    blended(colour, PAPER, LIGHTEST * share)
}

/// Name and colour of each phase. Light shades of one are no shades of another. Most schedules have no weight-gradient
/// passes.
const PHASES: [(Phase, &str, RGBColor); 4] = [
    (Phase::Forward, "forward", PALETTE[0]),
    (Phase::Backward, "backward", PALETTE[1]),
    (Phase::WeightGradient, "weight gradients", PALETTE[2]),
    (Phase::Step, "step phase", PALETTE[7]),
];

fn colour(phase: Phase) -> RGBColor {
    PHASES.into_iter().find(|(other, ..)| *other == phase).map_or(INK, |(_, _, colour)| colour)
}

#[cfg(test)]
mod tests {
    use narrows_plan::Seconds;
    use narrows_plan::program::MicrobatchPass;

    use super::*;

    #[test]
    fn of_many_passes_the_first_are_drawn() {
        let span = |index: usize| PassSpan {
            stage: index % 8,
            pass: MicrobatchPass { phase: Phase::Forward, chunk: 0, microbatch: index as u64 },
            begin: Seconds(index as f64),
            end: Seconds(index as f64 + 1.0),
        };
        for (passes, part) in [(100, "\ntitle\n"), (5000, "title, the first 4,000 of 5,000 passes")]
        {
            let svg = timeline_picture("title", (0..passes).map(span).collect()).unwrap().svg();
            let svg = svg.unwrap();
            assert!(svg.contains(part), "{svg}");
            // The background, a pass each, and the legend.
            let rectangles = svg.matches("<rect").count();
            assert!(
                (passes.min(4000)..passes.min(4000) + 10).contains(&rectangles),
                "{rectangles}"
            );
        }
    }
}
