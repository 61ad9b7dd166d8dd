//! Baselines beside a plan: their step times, and why one is impossible.

use narrows_plan::{Plan, Seconds};
use narrows_planner::Prediction;
use serde::Serialize;

use super::Report;
use super::page::{Align, Cell, Page};
use crate::args::Detail;
use crate::plot::{Figure, PlotKind, step_time_picture};
use crate::priced_plan::PricedPlan;
use crate::text::plan_phrase;

/// A baseline.
#[derive(Serialize)]
#[serde(untagged)]
pub enum BaselinePlan {
    /// The fastest plan of the baseline.
    Planned {
        /// Name of the baseline.
        name: String,
        /// The plan.
        #[serde(rename = "decisions")]
        plan: Box<Plan>,
        /// Prediction of the plan.
        prediction: Box<Prediction>,
    },
    /// The baseline has no plan.
    Impossible {
        /// Name of the baseline.
        name: String,
        /// Reason why there is none.
        reason: String,
    },
}

/// Comparison of a plan with baselines.
#[derive(Serialize)]
pub struct BaselinesReport<'a> {
    baselines: &'a [BaselinePlan],
    #[serde(skip)]
    chosen: &'a PricedPlan,
}

impl<'a> BaselinesReport<'a> {
    /// The report of baselines beside a plan.
    pub fn new(chosen: &'a PricedPlan, baselines: &'a [BaselinePlan]) -> BaselinesReport<'a> {
        BaselinesReport { baselines, chosen }
    }

    /// The step times of the plan and of the baselines that have one.
    pub fn figures(&self) -> Vec<Figure> {
        let plans: Vec<(&str, &Prediction)> =
            self.plans().map(|(name, _, prediction)| (name, prediction)).collect();
        let picture = step_time_picture("Step time by part, compared with the baselines", &plans);
        let caption =
            "Parts of the step time of this plan and of the fastest plan of each baseline.";
        Figure::of(PlotKind::StepTime, picture, caption).into_iter().collect()
    }

    /// Name, plan and prediction of this plan, and of the baselines that have a plan.
    fn plans(&self) -> impl Iterator<Item = (&str, &Plan, &Prediction)> {
        let PricedPlan { plan, prediction, .. } = self.chosen;
        let planned = self.baselines.iter().filter_map(|baseline| match baseline {
            BaselinePlan::Planned { name, plan, prediction } => {
                Some((&**name, &**plan, &**prediction))
            }
            BaselinePlan::Impossible { .. } => None,
        });
        std::iter::once(("this plan", plan, prediction)).chain(planned)
    }
}

impl Report for BaselinesReport<'_> {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        page.heading("Baselines");
        let columns = [
            ("", Align::Left),
            ("plan", Align::Left),
            ("step time", Align::Right),
            ("vs. this plan", Align::Right),
            ("memory", Align::Right),
        ];
        let reference = self.chosen.prediction.step_time_s;
        let row = |(name, plan, prediction): (&str, &Plan, &Prediction)| {
            let peak = prediction.peak_memory();
            let ratio = format!("{:.3} ×", prediction.step_time_s / reference);
            let time = Seconds(prediction.step_time_s);
            let plan = plan_phrase(plan);
            vec![name.to_owned().into(), plan.into(), time.into(), ratio.into(), peak.into()]
        };
        page.table(&columns, &self.plans().map(row).collect::<Vec<Vec<Cell>>>());
        for baseline in self.baselines {
            if let BaselinePlan::Impossible { name, reason } = baseline {
                page.paragraph(&format!("{name}: {reason}"));
            }
        }
        page
    }
}
