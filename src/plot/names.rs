//! Names of points that lie close together: a column at the side, with a line to each point.

use plotters::style::RGBColor;

use super::picture::{Anchor, Picture, Place};

/// Distance between names.
const ROW: i32 = 19;
/// Opacity of the lines to the points.
const OPACITY: f64 = 0.5;

/// Writes the names of points in a column from `left` on and between two heights, in the order of the points' heights.
/// A last line counts the names that do not fit.
pub fn name_points(
    picture: &mut Picture,
    left: i32,
    [top, bottom]: [i32; 2],
    mut points: Vec<(Place, String)>,
    colour: RGBColor,
) {
    points.sort_by_key(|((x, y), _)| (*y, *x));
    let rows = ((bottom - top) / ROW).max(1) as usize;
    let more = points.len().saturating_sub(rows);
    if more > 0 {
        points.truncate(rows - 1);
        let place = (left, top + ROW * (rows as i32 - 1));
        picture.text(format!("{} more", more + 1), place, Anchor::Start, 13);
    }
    let count = points.len() as i32;
    let middle = points.iter().map(|((_, y), _)| y).sum::<i32>() / count.max(1);
    let first = (middle - ROW * count / 2).min(bottom - ROW * count).max(top);
    for (index, (place, name)) in points.into_iter().enumerate() {
        let row = first + ROW * index as i32;
        picture.faint_path([place, (left - 6, row + 8)], colour, 1, OPACITY);
        picture.text(name, (left, row), Anchor::Start, 13);
    }
}
