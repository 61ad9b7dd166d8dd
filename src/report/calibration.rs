//! What a calibration found: coverage, repeatability, intervals, and the closed loop.

use narrows_cost_model::Profile;
use narrows_cost_model::price::measured::Class;
use narrows_cost_model::profile::Point;
use serde::Serialize;

use super::page::{Align, Page, percent};
use crate::calibrate::Subject;
use crate::calibrate::compare::Comparison;

/// What was measured of one class of kernels.
#[derive(Debug, Serialize)]
pub struct Coverage {
    /// What people call it.
    pub kernels: &'static str,
    /// Shapes, each on so many devices once.
    pub measured: usize,
    /// Middle of how far two rounds lay apart, relative to the shorter.
    pub spread_median: f64,
    /// Nine measurements in ten lie this close to what the others make of them.
    pub half_width_90: f64,
}

/// What a calibration found.
#[derive(Debug, Serialize)]
pub struct Findings {
    /// Where the profile was written.
    pub output: String,
    /// The machine.
    pub machine: String,
    /// Plans that were run to measure.
    pub plans: usize,
    /// What was measured.
    pub coverage: Vec<Coverage>,
    /// The step without disturbance over the shortest by the clock: the middle of all plans. Below 1,
    /// other work took part of the machine, or much of a step lies outside of instructions.
    pub undisturbed: f64,
    /// Parts of the profile that were not measured.
    pub assumed: Vec<String>,
    /// The closed loop, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comparison: Option<Comparison>,
}

impl Findings {
    /// Of a fitted profile and what it was fitted to.
    pub fn of(
        profile: &Profile,
        measured: &[Subject],
        comparison: Option<Comparison>,
        output: String,
    ) -> Findings {
        let file = profile.file();
        let points = file.measured.as_ref().map_or(&[][..], |measured| &measured.points);
        let width = |class| match class {
            Class::Gemm => file.gemm.relative_error.half_width_90,
            Class::Attention => file.attention.relative_error.half_width_90,
            Class::Pass => file.passes.relative_error.half_width_90,
            Class::Link => file.links.relative_error.half_width_90,
        };
        let coverage = Class::ALL.into_iter().map(|class| Coverage {
            kernels: title(class),
            measured: of_class(points, class).count(),
            spread_median: median(of_class(points, class).map(|point| point.spread).collect()),
            half_width_90: width(class),
        });
        let shares = measured.iter().filter_map(Subject::best);
        let shares = shares.map(|best| best.step_s() / best.shortest_step_s);
        Findings {
            output,
            machine: file.description.clone(),
            plans: measured.len(),
            coverage: coverage.collect(),
            undisturbed: median(shares.collect()),
            assumed: profile.assumed(),
            comparison,
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut page = Page::default();
        page.heading("Calibration");
        page.paragraph(&self.machine);
        page.fields(&[
            ("profile", self.output.clone()),
            ("measured in", format!("the steps of {} plans", self.plans)),
            (
                "undisturbed",
                format!("{} of the shortest steps by the clock", percent(self.undisturbed)),
            ),
        ]);
        let rows = self.coverage.iter().map(|of| {
            let count = of.measured.to_string();
            vec![of.kernels.into(), count, percent(of.spread_median), percent(of.half_width_90)]
        });
        page.table(
            &[
                ("kernels", Align::Left),
                ("shapes", Align::Right),
                ("rounds apart", Align::Right),
                ("interval ±", Align::Right),
            ],
            &rows.collect::<Vec<_>>(),
        );
        page.paragraph(&format!("Not measured: {}.", self.assumed.join(", ")));
        if let Some(comparison) = &self.comparison {
            compared(&mut page, comparison);
        }
        page.finish()
    }
}

fn compared(page: &mut Page, comparison: &Comparison) {
    page.heading("Predicted and measured");
    let seconds = |time: f64| format!("{:.1} ms", time * 1e3);
    let rows = comparison.plans.iter().map(|plan| {
        let other = if plan.familiar { "" } else { "other widths" };
        vec![
            plan.name.clone(),
            seconds(plan.shortest_step_time_s),
            seconds(plan.measured_step_time_s),
            seconds(plan.predicted_step_time_s),
            format!("{:+.1} %", plan.error * 100.0),
            percent(plan.spread),
            if plan.memory_exact { "exact".into() } else { "DIFFERS".into() },
            other.into(),
        ]
    });
    page.table(
        &[
            ("plan", Align::Left),
            ("by the clock", Align::Right),
            ("undisturbed", Align::Right),
            ("predicted", Align::Right),
            ("error", Align::Right),
            ("rounds apart", Align::Right),
            ("memory", Align::Left),
            ("", Align::Left),
        ],
        &rows.collect::<Vec<_>>(),
    );
    let unfamiliar = comparison.mean_absolute_error_unfamiliar;
    page.fields(&[
        ("mean error", percent(comparison.mean_absolute_error)),
        ("of other widths", unfamiliar.map_or("-".into(), percent)),
        ("worst", percent(comparison.worst_error)),
        (
            "order",
            format!(
                "{} of {} pairs more than 10 % apart are predicted the wrong way round, {} of {} \
                 among plans for the same task",
                comparison.pairs_wrong,
                comparison.pairs,
                comparison.pairs_of_one_task_wrong,
                comparison.pairs_of_one_task
            ),
        ),
        ("memory", format!("{} of {} exact", comparison.memory_exact, comparison.plans.len())),
    ]);
}

fn of_class(points: &[Point], class: Class) -> impl Iterator<Item = &Point> {
    points.iter().filter(move |point| Class::of(&point.kernel) == class)
}

fn title(class: Class) -> &'static str {
    match class {
        Class::Gemm => "products",
        Class::Attention => "attention",
        Class::Pass => "element-wise and optimizer",
        Class::Link => "collectives and transfers",
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or_default()
}
