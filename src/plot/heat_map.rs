//! A grid of coloured cells over two swept fields.

use plotters::style::RGBColor;

use super::picture::{Anchor, Picture};
use super::{INK, blended};

/// Cells by column and row.
#[derive(Clone, Debug)]
pub struct HeatMap {
    /// First line of the picture.
    pub title: String,
    /// Name and values of the horizontal field.
    pub columns: (String, Vec<String>),
    /// Name and values of the vertical field.
    pub rows: (String, Vec<String>),
    /// Cells of all rows, the first row first; `None` where there is no value.
    pub cells: Vec<Option<Cell>>,
    /// A sentence about colours and regions.
    pub legend: String,
}

/// One cell.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The value, which gives the colour on a logarithmic scale: the larger, the darker.
    pub value: f64,
    /// The value in words.
    pub label: String,
    /// Neighbouring cells with the same region have no border between them.
    pub region: String,
}

const WIDTH: i32 = 900;
const RIGHT: i32 = 870;
const TOP: i32 = 84;
/// Narrowest and widest column of row names, and the estimated width of a letter.
const NAMES: [i32; 2] = [60, 360];
const LETTER: f64 = 7.8;
/// Height of a row.
const ROW: i32 = 46;
/// Least width of a column with text in its cells, and the most columns for which the picture grows to have them.
const LABELLED: i32 = 96;
const LABELLED_COLUMNS_MAX: usize = 16;
/// Distance between labels of narrow columns.
const LABEL_DISTANCE: i32 = 40;
/// Colours of the smallest and of the largest value; the lightness alone tells them apart.
const COLOURS: [RGBColor; 2] = [RGBColor(236, 243, 251), RGBColor(66, 146, 198)];
/// Colour of a cell without a value.
const EMPTY: RGBColor = RGBColor(245, 245, 245);

impl HeatMap {
    /// The picture; `None` without a cell that has a positive value.
    pub fn picture(&self) -> Option<Picture> {
        let logs =
            self.cells.iter().flatten().map(|cell| cell.value.ln()).filter(|log| log.is_finite());
        let low = logs.clone().reduce(f64::min)?;
        let high = logs.reduce(f64::max)?;
        let (columns, rows) = (self.columns.1.len(), self.rows.1.len());
        let longest = self.rows.1.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let left = (24 + (LETTER * longest as f64) as i32).clamp(NAMES[0], NAMES[1]);
        let least = if columns <= LABELLED_COLUMNS_MAX { LABELLED } else { 1 };
        let width = ((RIGHT - left) / columns as i32).max(least);
        let right = RIGHT.max(left + width * columns as i32);
        let bottom = TOP + ROW * rows as i32;
        let mut picture = Picture::new((right + WIDTH - RIGHT, bottom + 96));
        picture.text(&self.title, (20, 20), Anchor::Start, 19);
        picture.text(&self.rows.0, (20, TOP - 24), Anchor::Start, 14);
        let corner =
            |column: usize, row: usize| (left + width * column as i32, TOP + ROW * row as i32);
        for row in 0..rows {
            let middle = corner(0, row).1 + ROW / 2;
            picture.text(&self.rows.1[row], (left - 12, middle - 8), Anchor::End, 14);
            for column in 0..columns {
                let cell = self.cell(column, row);
                let share = |cell: &Cell| match high > low {
                    true => ((cell.value.ln() - low) / (high - low)).clamp(0.0, 1.0),
                    false => 0.0,
                };
                let colour =
                    cell.map_or(EMPTY, |cell| blended(COLOURS[0], COLOURS[1], share(cell)));
                picture.rectangle([corner(column, row), corner(column + 1, row + 1)], colour);
                let centre = corner(column, row).0 + width / 2;
                if let Some(cell) = cell.filter(|_| width >= LABELLED) {
                    picture.text(&cell.label, (centre, middle - 17), Anchor::Middle, 13);
                    picture.text(&cell.region, (centre, middle + 2), Anchor::Middle, 12);
                }
            }
        }
        for row in 0..rows {
            for column in 0..columns {
                let differs = |other: Option<&Cell>| {
                    let region = |cell: Option<&Cell>| cell.map(|cell| cell.region.clone());
                    region(other) != region(self.cell(column, row))
                };
                if column + 1 < columns && differs(self.cell(column + 1, row)) {
                    let ends = [corner(column + 1, row), corner(column + 1, row + 1)];
                    picture.path(ends, INK, 2);
                }
                if row + 1 < rows && differs(self.cell(column, row + 1)) {
                    picture.path([corner(column, row + 1), corner(column + 1, row + 1)], INK, 2);
                }
            }
        }
        // Where columns are narrow, some are not labelled.
        let labelled = (LABEL_DISTANCE / width.max(1)).max(0) as usize + 1;
        for (column, value) in self.columns.1.iter().enumerate().step_by(labelled) {
            let centre = corner(column, rows).0 + width / 2;
            picture.text(value, (centre, bottom + 8), Anchor::Middle, 14);
        }
        picture.text(&self.columns.0, ((left + right) / 2, bottom + 34), Anchor::Middle, 15);
        picture.text(&self.legend, (20, bottom + 66), Anchor::Start, 13);
        Some(picture)
    }

    fn cell(&self, column: usize, row: usize) -> Option<&Cell> {
        self.cells.get(row * self.columns.1.len() + column)?.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(values: &[f64], columns: usize) -> HeatMap {
        let names = |count: usize| (0..count).map(|index| index.to_string()).collect();
        let cell =
            |value: &f64| Some(Cell { value: *value, label: String::new(), region: String::new() });
        HeatMap {
            title: String::new(),
            columns: ("x".into(), names(columns)),
            rows: ("y".into(), names(values.len() / columns)),
            cells: values.iter().map(cell).collect(),
            legend: String::new(),
        }
    }

    #[test]
    fn values_without_a_logarithm_are_drawn_as_the_smallest() {
        assert!(map(&[0.0, 0.0], 2).picture().is_none());
        assert!(map(&[0.0, 1.0, f64::INFINITY, 3.0], 2).picture().is_some());
        assert!(map(&[5.0; 64], 32).picture().is_some(), "equal values in narrow columns");
    }
}
