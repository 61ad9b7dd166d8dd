//! Curves of training runs over their steps: loss, gradient norm, learning rate and step time, one below the other.

use super::picture::{Anchor, Picture, Place};
use super::scale::{Scale, labels};
use super::{GRID, INK, PALETTE};

/// The curves of a run.
#[derive(Clone, Debug)]
pub struct TrainingCurves {
    /// Name in the legend.
    pub name: String,
    /// Loss of each step.
    pub loss: Curve,
    /// Loss of evaluations.
    pub eval_loss: Curve,
    /// Gradient norm before clipping.
    pub gradient_norm: Curve,
    /// Learning rate in thousandths.
    pub learning_rate: Curve,
    /// Measured step time in seconds.
    pub step_time: Curve,
    /// Predicted step time in seconds.
    pub predicted_step_time: Curve,
}

/// Points (step, value) by ascending step.
pub type Curve = Vec<(f64, f64)>;

/// Most runs of a picture.
pub const RUNS_MAX: usize = PALETTE.len();

const SIZE: (i32, i32) = (900, 240);
const LEFT: i32 = 84;
const RIGHT: i32 = 680;
const TOP: i32 = 34;
const BOTTOM: i32 = 200;
/// Most points of a line; more are averaged.
const POINTS_MAX: usize = 600;
/// Opacity of lines that others are compared with.
const FAINT: f64 = 0.45;
/// Half the length of a line through one point.
const DASH: i32 = 6;
/// Least distance between labels of an axis, and the estimated width of a letter.
const LABEL_DISTANCE: i32 = 60;
const LETTER: i32 = 8;
/// Room above and below the outermost values, as a share of their range.
const MARGIN: f64 = 0.06;

/// Selects a curve of a run.
type SelectCurve = fn(&TrainingCurves) -> &Curve;

/// One panel: its title, the main curve of a run, and a curve that is drawn beside it.
struct Panel {
    title: &'static str,
    main: SelectCurve,
    beside: Option<(SelectCurve, Beside)>,
}

/// Form of a curve beside the main one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// A faint line.
    Line,
    /// A line with a disc at each point.
    Discs,
}

const PANELS: [Panel; 4] = [
    Panel {
        title: "loss (nats); discs: evaluations",
        main: |run| &run.loss,
        beside: Some((|run| &run.eval_loss, Beside::Discs)),
    },
    Panel { title: "gradient norm before clipping", main: |run| &run.gradient_norm, beside: None },
    Panel { title: "learning rate (10⁻³)", main: |run| &run.learning_rate, beside: None },
    Panel {
        title: "step time (s); faint: predicted",
        main: |run| &run.step_time,
        beside: Some((|run| &run.predicted_step_time, Beside::Line)),
    },
];

/// The picture of runs, at most [`RUNS_MAX`] of them; `None` without steps.
pub fn training_picture(runs: &[TrainingCurves]) -> Option<Picture> {
    let steps = runs.iter().flat_map(|run| run.loss.iter().map(|(step, _)| *step));
    let steps = Scale::linear(steps)?;
    let panels = PANELS.iter().filter_map(|panel| panel.picture(runs, &steps));
    let mut picture = panels.reduce(Picture::above)?;
    for (index, (run, colour)) in runs.iter().zip(PALETTE).enumerate() {
        let height = TOP + 10 + 24 * index as i32;
        picture.path([(RIGHT + 20, height), (RIGHT + 42, height)], colour, 3);
        picture.text(&run.name, (RIGHT + 50, height - 7), Anchor::Start, 14);
    }
    Some(picture)
}

impl Panel {
    fn picture(&self, runs: &[TrainingCurves], steps: &Scale) -> Option<Picture> {
        let curves = |run| {
            let beside = self.beside.as_ref().map(|(curve, _)| curve(run).as_slice());
            (self.main)(run).iter().chain(beside.unwrap_or_default())
        };
        let values = runs.iter().flat_map(curves).map(|(_, value)| *value);
        let values = Scale::over(values, false)?.padded(MARGIN);
        let mut picture = Picture::new(SIZE);
        picture.text(self.title, (LEFT, 8), Anchor::Start, 15);
        let place = |(step, value): (f64, f64)| {
            let across = steps.position(step).clamp(0.0, 1.0) * f64::from(RIGHT - LEFT);
            let up = values.position(value).clamp(0.0, 1.0) * f64::from(BOTTOM - TOP);
            (LEFT + across.round() as i32, BOTTOM - up.round() as i32)
        };
        for (tick, label) in values.labelled_ticks() {
            let height = place((steps.low(), tick)).1;
            picture.path([(LEFT, height), (RIGHT, height)], GRID, 1);
            picture.text(label, (LEFT - 8, height - 7), Anchor::End, 13);
        }
        let mut previous = i32::MIN / 2;
        // Steps are whole.
        let mut whole: Vec<f64> = steps.ticks().into_iter().map(f64::round).collect();
        whole.dedup();
        for (&tick, label) in whole.iter().zip(labels(&whole)) {
            let across = place((tick, values.low())).0;
            picture.path([(across, BOTTOM), (across, BOTTOM + 5)], INK, 1);
            if across - previous >= LABEL_DISTANCE.max(LETTER * label.len() as i32) {
                picture.text(label, (across, BOTTOM + 9), Anchor::Middle, 13);
                previous = across;
            }
        }
        picture.path([(LEFT, BOTTOM), (RIGHT, BOTTOM)], INK, 1);
        picture.text("step", (RIGHT + 12, BOTTOM - 8), Anchor::Start, 13);
        for (run, colour) in runs.iter().zip(PALETTE) {
            if let Some((curve, form)) = &self.beside {
                let points = thinned(curve(run)).into_iter().map(place);
                match form {
                    Beside::Line => picture.faint_path(drawn(points.collect()), colour, 3, FAINT),
                    Beside::Discs => {
                        picture.faint_path(points.clone(), colour, 1, FAINT);
                        points.for_each(|point| picture.disc(point, 4, colour));
                    }
                }
            }
            let points: Vec<Place> = thinned((self.main)(run)).into_iter().map(place).collect();
            if let [point] = points[..] {
                picture.disc(point, 3, colour);
            }
            picture.path(points, colour, 1);
        }
        Some(picture)
    }
}

/// The corners of a line through points; a dash where there is one.
fn drawn(points: Vec<Place>) -> Vec<Place> {
    match points[..] {
        [(x, y)] => vec![(x - DASH, y), (x + DASH, y)],
        _ => points,
    }
}

/// The finite points of a curve; where these are many, means of consecutive ones.
fn thinned(curve: &Curve) -> Curve {
    let finite: Curve = curve.iter().copied().filter(|(_, value)| value.is_finite()).collect();
    let part = finite.len().div_ceil(POINTS_MAX).max(1);
    let mean = |points: &[(f64, f64)]| {
        let count = points.len() as f64;
        let sum = points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / count, sum.1 / count)
    };
    finite.chunks(part).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(steps: u64) -> TrainingCurves {
        let curve = |value: fn(f64) -> f64| -> Curve {
            (1..=steps).map(|step| (step as f64, value(step as f64))).collect()
        };
        TrainingCurves {
            name: "a.jsonl".into(),
            loss: curve(|step| 5.0 / step),
            eval_loss: vec![(steps as f64, 4.0)],
            gradient_norm: curve(|_| f64::NAN),
            learning_rate: curve(|_| 0.0),
            step_time: curve(|step| 0.1 + step),
            predicted_step_time: vec![],
        }
    }

    #[test]
    fn curves_without_finite_values_have_no_panel() {
        assert!(training_picture(&[run(0)]).is_none());
        let svg = training_picture(&[run(1), run(40)]).unwrap().svg().unwrap();
        for (part, occurs) in [
            ("loss (nats)", true),
            ("step time", true),
            ("gradient norm", false),
            ("a.jsonl", true),
        ] {
            assert_eq!(svg.contains(part), occurs, "{part}");
        }
    }

    #[test]
    fn one_step_is_a_disc() {
        let svg = |steps| training_picture(&[run(steps)]).unwrap().svg().unwrap();
        let discs = |steps| svg(steps).matches("<circle").count();
        // Those of one step are its evaluation, and loss, learning rate and step time.
        assert_eq!((discs(1), discs(2)), (4, 1));
        assert!(!svg(1).contains("\n1.2\n"), "no fraction of a step");
    }

    #[test]
    fn long_curves_are_averaged() {
        let curve: Curve = (0..6000).map(|step| (f64::from(step), 1.0)).collect();
        let thinned = thinned(&curve);
        assert_eq!((thinned.len(), thinned[0]), (600, (4.5, 1.0)));
    }
}
