//! Horizontal bars of stacked parts.

use plotters::style::RGBColor;

use super::picture::{Anchor, Picture};
use super::scale::Scale;
use super::{GRID, INK};

/// Bars whose parts add up.
#[derive(Clone, Debug)]
pub struct StackedBars {
    /// First line of the picture.
    pub title: String,
    /// Name and unit of the axis.
    pub axis_label: String,
    /// Names and colours of the parts. A single part needs no legend.
    pub parts: Vec<(String, RGBColor)>,
    /// The bars, from top to bottom.
    pub bars: Vec<Bar>,
    /// A value that no bar should exceed, with its name.
    pub limit: Option<(f64, String)>,
}

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Name on its left; empty for a bar that belongs to the one above.
    pub name: String,
    /// Sizes of the parts, none negative.
    pub values: Vec<f64>,
    /// Ends of the 90 % interval of their sum.
    pub interval: Option<[f64; 2]>,
    /// Text on its right.
    pub note: String,
}

const WIDTH: i32 = 900;
/// Narrowest column of names, and the widest in a picture of the usual width: longer names make the picture wider.
const NAMES: [i32; 2] = [90, 320];
/// Letters of a name; longer ones are shortened.
const NAME_LETTERS: usize = 120;
/// Estimated width of a letter of a name.
const LETTER: f64 = 7.8;
/// Right end of the largest bar beside short notes, and of the picture's texts.
const RIGHT: [i32; 2] = [780, 890];
const TOP: i32 = 96;
/// Height of a bar, and distance from one bar to the next: of few bars, and of many.
const FEW: [i32; 2] = [26, 40];
const MANY: [i32; 2] = [12, 16];
/// Distance between groups of bars.
const GROUP_GAP: i32 = 8;
/// Bars from which on they are many.
const MANY_BARS: usize = 13;
/// Half the height of a whisker's ends.
const CAP: i32 = 5;
/// Width of a legend entry, and entries of a row.
const LEGEND: (i32, usize) = (190, 4);
/// Share of the axis beyond the largest value.
const MARGIN: f64 = 0.04;

impl StackedBars {
    /// The chart; `None` without a finite value.
    pub fn picture(&self) -> Option<Picture> {
        let ends = self.bars.iter().flat_map(|bar| {
            let end: f64 = bar.values.iter().sum();
            bar.interval.into_iter().flatten().chain([end])
        });
        let limit = self.limit.iter().map(|(value, _)| *value);
        let scale = Scale::linear(ends.chain(limit).chain([0.0]))?.padded(MARGIN);
        let bar_size = if self.bars.len() < MANY_BARS { FEW } else { MANY };
        let legend_rows = self.parts.len().div_ceil(LEGEND.1).max(1) as i32;
        let top = TOP + 22 * (legend_rows - 1);
        let (uppers, bottom) = self.uppers(top, bar_size);
        let longest = |texts: &mut dyn Iterator<Item = &String>| {
            let letters = texts.map(|text| text.chars().count()).max().unwrap_or(0);
            (LETTER * letters as f64) as i32
        };
        let shown: Vec<String> = self.bars.iter().map(|bar| shortened(&bar.name)).collect();
        let names = 20 + longest(&mut shown.iter());
        let left = names.max(NAMES[0]);
        let wider = (names - NAMES[1]).max(0);
        let right_end =
            wider + RIGHT[0].min(RIGHT[1] - longest(&mut self.bars.iter().map(|bar| &bar.note)));
        let mut picture = Picture::new((WIDTH + wider, bottom + 66));
        picture.text(&self.title, (20, 20), Anchor::Start, 19);
        self.legend(&mut picture);
        let across = |value: f64| {
            left + (scale.position(value).clamp(0.0, 1.0) * f64::from(right_end - left)).round()
                as i32
        };
        for (tick, label) in scale.labelled_ticks() {
            picture.path([(across(tick), top), (across(tick), bottom)], GRID, 1);
            picture.text(label, (across(tick), bottom + 8), Anchor::Middle, 14);
        }
        picture.text(&self.axis_label, ((left + right_end) / 2, bottom + 34), Anchor::Middle, 15);
        for ((bar, name), upper) in self.bars.iter().zip(&shown).zip(uppers) {
            let middle = upper + bar_size[0] / 2;
            picture.text(name, (left - 10, middle - 8), Anchor::End, 14);
            let mut begin = 0.0;
            for (value, (_, colour)) in bar.values.iter().zip(&self.parts) {
                let corners =
                    [(across(begin), upper), (across(begin + value), upper + bar_size[0])];
                begin += value;
                if corners[0].0 < corners[1].0 {
                    picture.rectangle(corners, *colour);
                }
            }
            let mut right = across(begin);
            if let Some(interval) = bar.interval {
                let [low, high] = interval.map(across);
                picture.path([(low, middle), (high, middle)], INK, 1);
                for end in [low, high] {
                    picture.path([(end, middle - CAP), (end, middle + CAP)], INK, 1);
                }
                right = right.max(high);
            }
            picture.text(&bar.note, (right + 10, middle - 8), Anchor::Start, 14);
        }
        if let Some((value, name)) = &self.limit {
            let at = across(*value);
            picture.path([(at, top - 6), (at, bottom)], INK, 2);
            picture.text(name, (at, top - 24), Anchor::Middle, 13);
        }
        picture.path([(left, top), (left, bottom)], INK, 1);
        Some(picture)
    }

    /// The upper ends of the bars, and the lower end of the last one. Bars that belong together have no gap between them.
    fn uppers(&self, top: i32, [height, distance]: [i32; 2]) -> (Vec<i32>, i32) {
        let has_groups = self.bars.iter().any(|bar| bar.name.is_empty());
        let mut next = top;
        let upper = |bar: &Bar| {
            next += if has_groups && !bar.name.is_empty() { GROUP_GAP } else { 0 };
            let upper = next + (distance - height) / 2;
            next += distance;
            upper
        };
        let uppers = self.bars.iter().map(upper).collect();
        (uppers, next)
    }

    fn legend(&self, picture: &mut Picture) {
        if self.parts.len() < 2 {
            return;
        }
        for (index, (name, colour)) in self.parts.iter().enumerate() {
            let left = 20 + LEGEND.0 * (index % LEGEND.1) as i32;
            let upper = 54 + 22 * (index / LEGEND.1) as i32;
            picture.rectangle([(left, upper), (left + 14, upper + 14)], *colour);
            picture.text(name, (left + 20, upper), Anchor::Start, 14);
        }
    }
}

/// A name that is no longer than its place.
fn shortened(name: &str) -> String {
    match name.char_indices().nth(NAME_LETTERS) {
        Some(_) => name.chars().take(NAME_LETTERS - 1).chain(['…']).collect(),
        None => name.to_owned(),
    }
}
