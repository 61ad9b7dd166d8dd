//! Names of points that may lie close together: a number at each point, and a column of names with their numbers at the
//! side.

use super::PAPER;
use super::picture::{Anchor, Picture, Place};

/// Distance between names.
const ROW: i32 = 19;
/// Distance of a name from the left end of its number.
const INDENT: i32 = 26;
/// Sizes of names and of the numbers at the points.
const NAME_SIZE: i32 = 13;
const NUMBER_SIZE: i32 = 12;
/// Width of a digit, and height of a number.
const DIGIT: i32 = 8;
const HEIGHT: i32 = 13;
/// Distance in pixels up to which points share one label.
const SAME: i32 = 4;
/// Room around the centre of a point that labels leave free.
const POINT: i32 = 6;

/// Writes numbers at the points, and the names of the numbers in a column from `left` on and between two heights, in the order
/// of the points' heights. A last line counts the names that do not fit. Numbers keep clear of all points and of `others`.
pub fn name_points(
    picture: &mut Picture,
    left: i32,
    [top, bottom]: [i32; 2],
    mut points: Vec<(Place, String)>,
    others: &[Place],
) {
    points.sort_by_key(|((x, y), _)| (*y, *x));
    let discs: Vec<Place> =
        points.iter().map(|(place, _)| *place).chain(others.iter().copied()).collect();
    let rows = ((bottom - top) / ROW).max(1) as usize;
    let more = points.len().saturating_sub(rows);
    if more > 0 {
        points.truncate(rows - 1);
        let place = (left + INDENT, top + ROW * (rows as i32 - 1));
        picture.text(format!("{} more", more + 1), place, Anchor::Start, NAME_SIZE);
    }
    let places: Vec<Place> = points.iter().map(|(place, _)| *place).collect();
    for (corner, text) in labels(&places, &discs) {
        let end = (corner.0 + width(&text), corner.1 + HEIGHT);
        picture.rectangle([corner, end], PAPER);
        picture.text(text, (corner.0 + 1, corner.1), Anchor::Start, NUMBER_SIZE);
    }
    for (index, (_, name)) in points.into_iter().enumerate() {
        let row = top + ROW * index as i32;
        picture.text((index + 1).to_string(), (left, row), Anchor::Start, NAME_SIZE);
        picture.text(name, (left + INDENT, row), Anchor::Start, NAME_SIZE);
    }
}

/// Labels of points with the numbers 1, 2, …: their upper left corners and texts. Points in one place share a label, and no
/// label covers a disc or another label where there is room for it.
fn labels(points: &[Place], discs: &[Place]) -> Vec<(Place, String)> {
    let mut groups: Vec<(Place, Vec<usize>)> = vec![];
    for (index, &(x, y)) in points.iter().enumerate() {
        let is_near = |(place, _): &&mut (Place, Vec<usize>)| {
            (place.0 - x).abs() <= SAME && (place.1 - y).abs() <= SAME
        };
        match groups.iter_mut().find(is_near) {
            Some((_, numbers)) => numbers.push(index + 1),
            None => groups.push(((x, y), vec![index + 1])),
        }
    }
    let mut labels: Vec<(Place, String)> = vec![];
    for ((x, y), numbers) in groups {
        let text = numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let width = width(&text);
        let (beside, above) = (POINT + 1, HEIGHT + POINT - 1);
        // Beside the point, on both sides of the line that passes it, then above and below, ever further away.
        let corners = (0..4).flat_map(|ring: i32| {
            let far = ring * HEIGHT;
            let [right, left] = [x + beside, x - beside - width];
            [
                (right, y - above - far),
                (left, y - above - far),
                (right, y + POINT - 1 + far),
                (left, y + POINT - 1 + far),
                (right + far, y - HEIGHT / 2),
                (left - far, y - HEIGHT / 2),
            ]
        });
        let is_free = |&(left, upper): &Place| {
            let covers = |&(x, y): &Place| {
                x + POINT > left
                    && x - POINT < left + width
                    && y + POINT > upper
                    && y - POINT < upper + HEIGHT
            };
            let overlaps = |((x, y), text): &(Place, String)| {
                left < x + self::width(text)
                    && *x < left + width
                    && upper < y + HEIGHT
                    && *y < upper + HEIGHT
            };
            !discs.iter().any(covers) && !labels.iter().any(overlaps)
        };
        let corner = corners.clone().find(is_free).unwrap_or((x + beside, y - above));
        labels.push((corner, text));
    }
    labels
}

/// Width of a label.
fn width(text: &str) -> i32 {
    DIGIT * text.chars().count() as i32 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cover_neither_points_nor_each_other() {
        let points = [(100, 100), (103, 100), (110, 100), (118, 104), (100, 112), (300, 100)];
        let others = [(112, 90), (290, 92)];
        let discs: Vec<Place> = points.into_iter().chain(others).collect();
        let labels = labels(&points, &discs);
        let texts: Vec<&str> = labels.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(texts, ["1,2", "3", "4", "5", "6"]);
        let boxes: Vec<[i32; 4]> =
            labels.iter().map(|((x, y), text)| [*x, *y, x + width(text), y + HEIGHT]).collect();
        for (index, a) in boxes.iter().enumerate() {
            for (x, y) in &discs {
                assert!(*x <= a[0] || *x >= a[2] || *y <= a[1] || *y >= a[3], "{labels:?}");
            }
            for b in &boxes[..index] {
                let apart = a[0] >= b[2] || b[0] >= a[2] || a[1] >= b[3] || b[1] >= a[3];
                assert!(apart, "{labels:?}");
            }
        }
    }
}
