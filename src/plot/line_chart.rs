//! Lines with 90 % intervals over one swept number.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontTransform, TextStyle};

use super::axis::{Axis, label};
use super::{FONT, GRID, INK, PALETTE};

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

const SIZE: (u32, u32) = (900, 540);
const LEFT: i32 = 84;
const TOP: i32 = 56;
const BOTTOM: i32 = 468;
/// Right end of the plot with a legend, and without one.
const RIGHT: [i32; 2] = [680, 860];
/// Half the width of a whisker's ends.
const CAP: i32 = 4;
/// Distance between the whiskers of two lines at one place.
const WHISKER_DISTANCE: i32 = 6;
/// Shares of the axes beyond the outermost values.
const MARGIN: [f64; 2] = [0.04, 0.06];
/// Least distance between labels of the horizontal axis.
const LABEL_DISTANCE: i32 = 34;

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawResult = Result<(), Box<dyn std::error::Error>>;

impl LineChart {
    /// The chart as SVG; `None` without points.
    pub fn svg(&self) -> Option<String> {
        let points = self.series.iter().flat_map(|series| &series.points);
        let x = Axis::over(points.clone().map(|point| point.x), false)?.padded(MARGIN[0]);
        let y = points.flat_map(|point| point.interval.into_iter().chain([point.y]));
        let y = Axis::over(y, true)?.padded(MARGIN[1]);
        let mut text = String::new();
        let canvas = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        let right = RIGHT[usize::from(self.series.len() < 2)];
        Plot { chart: self, canvas, x, y, right }.draw().ok()?;
        Some(text)
    }
}

struct Plot<'a> {
    chart: &'a LineChart,
    canvas: Canvas<'a>,
    x: Axis,
    y: Axis,
    right: i32,
}

impl Plot<'_> {
    fn draw(&self) -> DrawResult {
        self.canvas.fill(&WHITE)?;
        self.text(&self.chart.title, (LEFT, 22), HPos::Left, 19)?;
        self.grid()?;
        let middle = (self.chart.series.len() as i32 - 1) / 2;
        for (index, (series, colour)) in self.chart.series.iter().zip(PALETTE).enumerate() {
            self.line(series, colour, (index as i32 - middle) * WHISKER_DISTANCE)?;
        }
        if self.chart.series.len() > 1 {
            self.legend()?;
        }
        self.canvas.present()?;
        Ok(())
    }

    fn place(&self, x: f64, y: f64) -> (i32, i32) {
        let across = self.x.position(x) * f64::from(self.right - LEFT);
        let up = self.y.position(y) * f64::from(BOTTOM - TOP);
        (LEFT + across.round() as i32, BOTTOM - up.round() as i32)
    }

    fn grid(&self) -> DrawResult {
        for tick in self.y.ticks() {
            let height = self.place(1.0, tick).1;
            self.canvas.draw(&PathElement::new([(LEFT, height), (self.right, height)], GRID))?;
            self.text(&label(tick), (LEFT - 8, height - 7), HPos::Right, 14)?;
        }
        // Swept values are the ticks; where they are too dense, some are not labelled.
        let mut values: Vec<f64> =
            self.chart.series.iter().flat_map(|s| s.points.iter().map(|p| p.x)).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let mut previous = i32::MIN / 2;
        for value in values {
            let across = self.place(value, 1.0).0;
            self.canvas.draw(&PathElement::new([(across, BOTTOM), (across, BOTTOM + 5)], INK))?;
            if across - previous >= LABEL_DISTANCE {
                self.text(&label(value), (across, BOTTOM + 9), HPos::Center, 14)?;
                previous = across;
            }
        }
        self.canvas.draw(&PathElement::new([(LEFT, BOTTOM), (self.right, BOTTOM)], INK))?;
        let middle = (LEFT + (self.right - LEFT) / 2, BOTTOM + 36);
        self.text(&self.chart.x_label, middle, HPos::Center, 15)?;
        let style = self.style(HPos::Center, 15).transform(FontTransform::Rotate270);
        self.canvas.draw_text(&self.chart.y_label, &style, (22, TOP + (BOTTOM - TOP) / 2))?;
        Ok(())
    }

    /// A line, its points, and its whiskers, which are moved aside so that those of other lines do not cover them.
    fn line(&self, series: &Series, colour: RGBColor, aside: i32) -> DrawResult {
        let places: Vec<(i32, i32)> = series.points.iter().map(|p| self.place(p.x, p.y)).collect();
        self.canvas.draw(&PathElement::new(places.clone(), colour.stroke_width(2)))?;
        for (point, place) in series.points.iter().zip(places) {
            let ends = point.interval.map(|y| self.place(point.x, y)).map(|(x, y)| (x + aside, y));
            let whisker = colour.mix(0.55).stroke_width(1);
            self.canvas.draw(&PathElement::new(ends, whisker))?;
            for (x, y) in ends {
                self.canvas.draw(&PathElement::new([(x - CAP, y), (x + CAP, y)], whisker))?;
            }
            self.canvas.draw(&Circle::new(place, 4, colour.filled()))?;
        }
        Ok(())
    }

    fn legend(&self) -> DrawResult {
        for (index, (series, colour)) in self.chart.series.iter().zip(PALETTE).enumerate() {
            let height = TOP + 10 + 24 * index as i32;
            let left = self.right + 20;
            let sample = [(left, height), (left + 22, height)];
            self.canvas.draw(&PathElement::new(sample, colour.stroke_width(3)))?;
            self.text(&series.name, (left + 30, height - 7), HPos::Left, 14)?;
        }
        let note = TOP + 22 + 24 * self.chart.series.len() as i32;
        self.text("whiskers: 90 % interval", (self.right + 20, note), HPos::Left, 13)
    }

    fn style(&self, side: HPos, size: u32) -> TextStyle<'static> {
        (FONT, size).into_font().color(&INK).pos(Pos::new(side, VPos::Top))
    }

    fn text(&self, text: &str, place: (i32, i32), side: HPos, size: u32) -> DrawResult {
        self.canvas.draw_text(text, &self.style(side, size), place)?;
        Ok(())
    }
}
