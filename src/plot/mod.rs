//! Pictures: colours that colour-blind readers tell apart, units on the axes, intervals as whiskers.

mod block;
mod crossover;
mod figure;
mod front;
mod graph_columns;
mod heat_map;
mod layered_graph;
mod line_chart;
mod names;
mod picture;
mod plan;
mod roofline;
mod scale;
mod scaling;
mod stacked_bars;
mod sweep;
mod timeline;
mod tornado;
mod training_curves;
mod validation;

pub use block::block_picture;
pub use figure::{Figure, PlotKind};
pub use picture::check_picture_file;
pub use plan::{memory_picture, step_time_picture};
pub use roofline::roofline_picture;
pub use sweep::{check_pictures, sweep_figures};
pub use timeline::timeline_picture;
pub use tornado::sensitivity_figures;
pub use training_curves::{RUNS_MAX, TrainingCurves, training_picture};
pub use validation::validation_figures;

use narrows_runtime::TimeCategory;
use plotters::style::RGBColor;

/// Colours of series, after Okabe and Ito: distinguishable with any kind of colour blindness, and on white and dark
/// paper alike.
pub const PALETTE: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 94, 47),
    RGBColor(90, 90, 90),
];

/// Text and axes.
pub const INK: RGBColor = RGBColor(40, 40, 40);
/// The background.
const PAPER: RGBColor = RGBColor(255, 255, 255);
/// Grid lines.
pub const GRID: RGBColor = RGBColor(222, 222, 222);

/// The colour of a category of time, the same in every picture.
fn category_colour(category: TimeCategory) -> RGBColor {
    let index = TimeCategory::ALL.iter().position(|other| *other == category);
    PALETTE[index.unwrap_or(PALETTE.len() - 1)]
}

/// The colour at a share of the way from `from` to `to`.
fn blended(from: RGBColor, to: RGBColor, share: f64) -> RGBColor {
    let mix = |a: u8, b: u8| (f64::from(a) + share * (f64::from(b) - f64::from(a))).round() as u8;
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}
