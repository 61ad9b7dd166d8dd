//! Pictures: colours that colour-blind readers tell apart, units on the axes, intervals as whiskers.

mod figure;
mod heat_map;
mod line_chart;
mod picture;
mod plan;
mod scale;
mod stacked_bars;
mod sweep;
mod timeline;

pub use figure::Figure;
pub use picture::check_picture_file;
pub use plan::{memory_picture, step_time_picture};
pub use sweep::{check_pictures, sweep_figures};
pub use timeline::timeline_picture;

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
/// Grid lines.
pub const GRID: RGBColor = RGBColor(222, 222, 222);
