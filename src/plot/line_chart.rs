//! Lines with 90 % intervals over one swept number.

use plotters::style::RGBColor;

use super::picture::{Anchor, Picture, Place};
use super::scale::{Scale, labels};
use super::{GRID, INK, PALETTE};

/// A chart of lines.
#[derive(Clone, Debug)]
pub struct LineChart {
    /// First line of the picture.
    pub title: String,
    /// Name and unit of the horizontal axis.
    pub x_label: String,
    /// Name and unit of the vertical axis.
    pub y_label: String,
    /// Lines, at most as many as there are colours.
    pub series: Vec<Series>,
    /// Thin lines that values are compared with.
    pub guides: Vec<Guide>,
}

/// A thin line with a name at its end, if it has one.
#[derive(Clone, Debug)]
pub struct Guide {
    /// Corners; those outside of the plot are moved to its edge.
    pub path: Vec<(f64, f64)>,
    /// The name.
    pub name: String,
}

/// One line.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend; empty where there is one line.
    pub name: String,
    /// Points by ascending `x`.
    pub points: Vec<ChartPoint>,
}

/// A value with its 90 % interval.
#[derive(Clone, Copy, Debug)]
pub struct ChartPoint {
    /// Position on the horizontal axis.
    pub x: f64,
    /// The value.
    pub y: f64,
    /// Ends of the interval.
    pub interval: [f64; 2],
}

/// Most lines of a chart.
pub const SERIES_MAX: usize = PALETTE.len();

const SIZE: (i32, i32) = (900, 540);
const LEFT: i32 = 84;
const TOP: i32 = 56;
const BOTTOM: i32 = 468;
/// Right end of the plot with a legend, and without one.
const RIGHT: [i32; 2] = [680, 860];
/// Half the width of a whisker's ends.
const CAP: i32 = 4;
/// Opacity of whiskers, which matter less than the values.
const WHISKER_OPACITY: f64 = 0.55;
/// Opacity of guides.
const GUIDE_OPACITY: f64 = 0.6;
/// Distance between the whiskers of two lines at one place.
const WHISKER_DISTANCE: i32 = 6;
/// Shares of the axes beyond the outermost values.
const MARGIN: [f64; 2] = [0.04, 0.06];
/// Least distance between labels of the horizontal axis, and the estimated width of a letter.
const LABEL_DISTANCE: i32 = 34;
const LETTER: i32 = 8;

impl LineChart {
    /// The chart; `None` without points.
    pub fn picture(&self) -> Option<Picture> {
        let [x, y] = self.scales()?;
        let right = RIGHT[usize::from(self.series.len() < 2)];
        Some(Plot { chart: self, picture: Picture::new(SIZE), x, y, right }.draw())
    }

    /// The horizontal and the vertical scale; `None` without points.
    fn scales(&self) -> Option<[Scale; 2]> {
        let points = self.series.iter().flat_map(|series| &series.points);
        let x = Scale::over(points.clone().map(|point| point.x), false)?.padded(MARGIN[0]);
        let y = points.flat_map(|point| point.interval.into_iter().chain([point.y]));
        let guides = self.guides.iter().flat_map(|guide| guide.path.first().map(|(_, y)| *y));
        let y = y.chain(guides);
        let y = Scale::over(y, true)?.padded(MARGIN[1]);
        Some([x, y])
    }
}

struct Plot<'a> {
    chart: &'a LineChart,
    picture: Picture,
    x: Scale,
    y: Scale,
    right: i32,
}

impl Plot<'_> {
    fn draw(mut self) -> Picture {
        self.picture.text(&self.chart.title, (LEFT, 22), Anchor::Start, 19);
        self.grid();
        let chart = self.chart;
        let middle = (chart.series.len() as i32 - 1) / 2;
        for (index, (series, colour)) in chart.series.iter().zip(PALETTE).enumerate() {
            self.line(series, colour, (index as i32 - middle) * WHISKER_DISTANCE);
        }
        let mut names = 0;
        for guide in &chart.guides {
            self.guide(guide, names);
            names += i32::from(!guide.name.is_empty());
        }
        if chart.series.len() > 1 {
            self.legend();
        }
        self.picture
    }

    fn place(&self, x: f64, y: f64) -> (i32, i32) {
        // Ends of intervals may lie anywhere.
        let [x, y] = [self.x.position(x), self.y.position(y)].map(|at| at.clamp(-1.0, 2.0));
        let across = x * f64::from(self.right - LEFT);
        let up = y * f64::from(BOTTOM - TOP);
        (LEFT + across.round() as i32, BOTTOM - up.round() as i32)
    }

    fn grid(&mut self) {
        for (tick, label) in self.y.labelled_ticks() {
            let height = self.place(1.0, tick).1;
            self.picture.path([(LEFT, height), (self.right, height)], GRID, 1);
            self.picture.text(label, (LEFT - 8, height - 7), Anchor::End, 14);
        }
        // Swept values are the ticks; where they are too dense, some are not labelled.
        let mut values: Vec<f64> =
            self.chart.series.iter().flat_map(|s| s.points.iter().map(|p| p.x)).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let mut previous = i32::MIN / 2;
        for (value, label) in values.iter().zip(labels(&values)) {
            let across = self.place(*value, 1.0).0;
            self.picture.path([(across, BOTTOM), (across, BOTTOM + 5)], INK, 1);
            if across - previous >= LABEL_DISTANCE.max(LETTER * label.len() as i32) {
                self.picture.text(label, (across, BOTTOM + 9), Anchor::Middle, 14);
                previous = across;
            }
        }
        self.picture.path([(LEFT, BOTTOM), (self.right, BOTTOM)], INK, 1);
        let middle = (LEFT + (self.right - LEFT) / 2, BOTTOM + 36);
        self.picture.text(&self.chart.x_label, middle, Anchor::Middle, 15);
        self.picture.vertical_text(&self.chart.y_label, (22, TOP + (BOTTOM - TOP) / 2), 15);
    }

    /// A line, its points, and its whiskers, which are moved aside so that those of other lines do not cover them.
    fn line(&mut self, series: &Series, colour: RGBColor, aside: i32) {
        let places: Vec<Place> = series.points.iter().map(|p| self.place(p.x, p.y)).collect();
        self.picture.path(places.clone(), colour, 2);
        for (point, place) in series.points.iter().zip(places) {
            let ends = point.interval.map(|y| self.place(point.x, y)).map(|(x, y)| (x + aside, y));
            self.picture.faint_path(ends, colour, 1, WHISKER_OPACITY);
            for (x, y) in ends {
                self.picture.faint_path([(x - CAP, y), (x + CAP, y)], colour, 1, WHISKER_OPACITY);
            }
            self.picture.disc(place, 4, colour);
        }
    }

    /// A guide and its name, above as many names of the guides before it.
    fn guide(&mut self, guide: &Guide, names: i32) {
        let inside = |(x, y): &(f64, f64)| {
            let (x, y) = self.place(*x, *y);
            (x.clamp(LEFT, self.right), y.clamp(TOP, BOTTOM))
        };
        let places: Vec<Place> = guide.path.iter().map(inside).collect();
        let Some(&(x, y)) = places.last() else { return };
        self.picture.faint_path(places, INK, 1, GUIDE_OPACITY);
        let (place, anchor) = match x > (LEFT + self.right) / 2 {
            true => ((x - 6, y - 20 - 18 * names), Anchor::End),
            false => ((x + 6, y - 20 - 18 * names), Anchor::Start),
        };
        self.picture.text(&guide.name, place, anchor, 13);
    }

    fn legend(&mut self) {
        let left = self.right + 20;
        for (index, (series, colour)) in self.chart.series.iter().zip(PALETTE).enumerate() {
            let height = TOP + 10 + 24 * index as i32;
            self.picture.path([(left, height), (left + 22, height)], colour, 3);
            self.picture.text(&series.name, (left + 30, height - 7), Anchor::Start, 14);
        }
        let note = TOP + 22 + 24 * self.chart.series.len() as i32;
        self.picture.text("whiskers: 90 % interval", (left, note), Anchor::Start, 13);
    }
}
