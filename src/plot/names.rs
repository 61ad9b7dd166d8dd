//! Names of points that may lie close together: a number at each point, and a column of names with their numbers at the
//! side.

use super::picture::{Anchor, Picture, Place};
use super::{INK, PAPER};

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
/// Rings of places around a point that are tried for its label.
const RINGS: i32 = 10;
/// Largest distance of a label from its point without a line between them, and the opacity of the line.
const LEADERLESS: i32 = 14;
const LEADER_OPACITY: f64 = 0.5;

/// Writes numbers at the points, and the names of the numbers in a column from `left` on and between two heights, in the order
/// of the points' heights. A last line counts the names that do not fit. Numbers keep clear of all points and of `marks`, which are
/// given by their ends; a thin line leads to a number that has no room near its point.
pub fn name_points(
    picture: &mut Picture,
    left: i32,
    [top, bottom]: [i32; 2],
    mut points: Vec<(Place, String)>,
    marks: &[[Place; 2]],
) {
    points.sort_by_key(|((x, y), _)| (*y, *x));
    let discs = points.iter().map(|(place, _)| [*place; 2]);
    let obstacles: Vec<[Place; 2]> = discs.chain(marks.iter().copied()).map(obstacle).collect();
    let rows = ((bottom - top) / ROW).max(1) as usize;
    let more = points.len().saturating_sub(rows);
    if more > 0 {
        points.truncate(rows - 1);
        let place = (left + INDENT, top + ROW * (rows as i32 - 1));
        picture.text(format!("{} more", more + 1), place, Anchor::Start, NAME_SIZE);
    }
    let places: Vec<Place> = points.iter().map(|(place, _)| *place).collect();
    for label in labels(&places, &obstacles) {
        let [corner, end] = label.corners;
        let (x, y) = label.point;
        let near = (x.clamp(corner.0, end.0), y.clamp(corner.1, end.1));
        if (near.0 - x).abs().max((near.1 - y).abs()) > LEADERLESS {
            picture.faint_path([label.point, near], INK, 1, LEADER_OPACITY);
        }
        picture.rectangle([corner, end], PAPER);
        picture.text(label.text, (corner.0 + 1, corner.1), Anchor::Start, NUMBER_SIZE);
    }
    for (index, (_, name)) in points.into_iter().enumerate() {
        let row = top + ROW * index as i32;
        picture.text((index + 1).to_string(), (left, row), Anchor::Start, NAME_SIZE);
        picture.text(name, (left + INDENT, row), Anchor::Start, NAME_SIZE);
    }
}

/// The numbers of a point.
#[derive(Debug)]
struct Label {
    /// The point.
    point: Place,
    /// The upper left and the lower right corner.
    corners: [Place; 2],
    text: String,
}

/// Labels of points with the numbers 1, 2, …. Points in one place share a label, and no label covers an obstacle or another label
/// where there is room for it.
fn labels(points: &[Place], obstacles: &[[Place; 2]]) -> Vec<Label> {
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
    let mut labels: Vec<Label> = vec![];
    for (point, numbers) in groups {
        let (x, y) = point;
        let text = numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let width = width(&text);
        let (beside, above) = (POINT + 1, HEIGHT + POINT - 1);
        // Beside the point, then above and below, ever further away.
        let [right, middle, left] = [x + beside, x - width / 2, x - beside - width];
        let sides = [right, left].map(|at| (at, y - HEIGHT / 2));
        let around = |ring: i32| {
            let far = ring * HEIGHT;
            let [upper, lower] = [y - above - far, y + POINT - 1 + far];
            [right, left, middle].into_iter().flat_map(move |at| [(at, upper), (at, lower)])
        };
        let places = around(0).chain(sides).chain((1..RINGS).flat_map(around));
        let covered = |corners: &[Place; 2]| {
            let of_marks = obstacles.iter().filter(|obstacle| overlap(corners, obstacle)).count();
            let of_labels = labels.iter().filter(|label| overlap(corners, &label.corners)).count();
            of_marks + of_labels
        };
        let corners = places.map(|(left, upper)| [(left, upper), (left + width, upper + HEIGHT)]);
        // The first of the best places.
        if let Some(corners) = corners.min_by_key(covered) {
            labels.push(Label { point, corners, text });
        }
    }
    labels
}

/// The room that labels leave free around a mark with these ends.
fn obstacle([(x0, y0), (x1, y1)]: [Place; 2]) -> [Place; 2] {
    [(x0.min(x1) - POINT, y0.min(y1) - POINT), (x0.max(x1) + POINT, y0.max(y1) + POINT)]
}

/// Whether two boxes with these upper left and lower right corners overlap.
fn overlap([a0, a1]: &[Place; 2], [b0, b1]: &[Place; 2]) -> bool {
    a0.0 < b1.0 && b0.0 < a1.0 && a0.1 < b1.1 && b0.1 < a1.1
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
        let discs = points.into_iter().chain([(112, 90), (290, 92)]).map(|place| [place; 2]);
        let whiskers = points.map(|(x, y)| [(x, y - 30), (x, y + 20)]);
        let obstacles: Vec<[Place; 2]> = discs.chain(whiskers).map(obstacle).collect();
        let labels = labels(&points, &obstacles);
        let texts: Vec<&str> = labels.iter().map(|label| label.text.as_str()).collect();
        assert_eq!(texts, ["1,2", "3", "4", "5", "6"]);
        for (index, label) in labels.iter().enumerate() {
            let corners = &label.corners;
            assert!(!obstacles.iter().any(|mark| overlap(corners, mark)), "{labels:?}");
            let earlier = &labels[..index];
            assert!(!earlier.iter().any(|other| overlap(corners, &other.corners)), "{labels:?}");
        }
    }
}
