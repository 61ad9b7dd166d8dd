//! The report of a calibration: coverage, repeatability, provenance, and the comparison with measured steps.

use narrows_calibration::validation::{ClosedLoop, ClosedLoopPlan, PresetCoverage, StepInterval};
use narrows_cost_model::profile::{Provenance, Repeatability};
use narrows_cost_model::{KernelClass, Profile};
use narrows_plan::Seconds;
use serde::Serialize;

use super::Report;
use super::kernel_coverage::{self, ClassCoverage, KernelRate};
use super::page::{Align, Page};
use crate::args::Detail;
use crate::text::{half_width, percent, plural, signed_percents};

/// Share of the time below which a preset counts as not covered.
const COVERED_MIN: f64 = 0.5;

/// Output of `calibrate`.
#[derive(Debug, Serialize)]
pub struct CalibrationReport {
    /// The file of the profile.
    output: String,
    /// Description of the machine.
    machine: String,
    /// Number of plans that were timed.
    plans: usize,
    coverage: Vec<ClassCoverage>,
    /// Every measurement.
    kernels: Vec<KernelRate>,
    /// Share of the presets' kernels that were measured.
    presets: Vec<PresetCoverage>,
    repeatability: Option<Repeatability>,
    /// Reason for which the measurement is not reliable.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
    /// Source of every group of numbers in the profile.
    provenance: Vec<ProfileGroup>,
    /// Parts of the profile that were not measured.
    assumed: Vec<String>,
    /// Comparison with other plans, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    comparison: Option<ClosedLoop>,
}

/// A group of numbers in a profile.
#[derive(Debug, Serialize)]
struct ProfileGroup {
    /// Path in the file.
    field: &'static str,
    #[serde(flatten)]
    provenance: Provenance,
}

impl CalibrationReport {
    /// The report on a fitted profile that was written to `output`.
    pub fn new(
        profile: &Profile,
        plans: usize,
        presets: Vec<PresetCoverage>,
        comparison: Option<ClosedLoop>,
        output: String,
    ) -> CalibrationReport {
        let file = profile.file();
        let points = file.measured.as_ref().map_or(&[][..], |measured| &measured.points);
        let group = |(field, provenance): (&'static str, &Provenance)| ProfileGroup {
            field,
            provenance: provenance.clone(),
        };
        CalibrationReport {
            output,
            machine: file.description.clone(),
            plans,
            coverage: KernelClass::ALL.map(|class| ClassCoverage::new(file, points, class)).into(),
            kernels: points.iter().map(KernelRate::new).collect(),
            presets,
            repeatability: file.measured.as_ref().and_then(|measured| measured.repeatability),
            warning: profile.warning(),
            provenance: profile.provenance().into_iter().map(group).collect(),
            assumed: profile.assumed_paths(),
            comparison,
        }
    }

    fn summary(&self, page: &mut Page) {
        let mut fields = vec![
            ("profile", self.output.clone()),
            ("machine", self.machine.clone()),
            ("measured in", format!("steps of {}", plural(self.plans as u64, "plan"))),
        ];
        if let Some(repeatability) = self.repeatability {
            let share = percent(repeatability.undisturbed);
            let [median, tenth] =
                [repeatability.rounds_apart_median, repeatability.rounds_apart_90].map(percent);
            fields.push((
                "repeatability",
                format!(
                    "rounds differ by {median} in the median, and by {tenth} at the 90th percentile"
                ),
            ));
            fields.push((
                "best case",
                format!("instructions at their fastest add up to {share} of the fastest steps"),
            ));
        }
        page.fields(&fields);
    }

    /// A table with a row for each model size and a column for each model family.
    fn presets(&self, page: &mut Page) {
        let (mut families, mut sizes): (Vec<&str>, Vec<&str>) = (vec![], vec![]);
        for (family, size) in self.presets.iter().filter_map(|preset| preset.model.split_once('-'))
        {
            if !families.contains(&family) {
                families.push(family);
            }
            if !sizes.contains(&size) {
                sizes.push(size);
            }
        }
        let Some(devices) = self.presets.first().map(|preset| preset.devices) else { return };
        page.heading("Share of each preset's step time covered by measured kernels");
        let cell = |size: &str, family: &str| {
            let model = format!("{family}-{size}");
            let preset = self.presets.iter().find(|preset| preset.model == model)?;
            let PresetCoverage { measured_share, measured, kernels, .. } = preset;
            Some(format!("{} ({measured}/{kernels})", percent(*measured_share)))
        };
        let rows: Vec<Vec<String>> = sizes
            .iter()
            .map(|size| {
                let cells = families.iter().map(|family| cell(size, family).unwrap_or_default());
                std::iter::once(size.to_string()).chain(cells).collect()
            })
            .collect();
        let columns = families.iter().map(|family| (*family, Align::Right));
        let columns: Vec<_> = std::iter::once(("", Align::Left)).chain(columns).collect();
        page.table(&columns, &rows);
        let uncovered =
            self.presets.iter().filter(|preset| preset.measured_share < COVERED_MIN).count();
        if uncovered > 0 {
            page.paragraph(&format!(
                "In brackets: measured kernels of those that the plan for {} needs. For {uncovered} of {} \
                 presets less than half of the time is covered, which widens their intervals. --model \
                 NAME measures the kernels of a model too.",
                plural(devices, "device"),
                self.presets.len()
            ));
        }
    }

    /// A paragraph for each source, which most groups share.
    fn provenance(&self, page: &mut Page) {
        page.heading("Sources of the profile's numbers");
        let mut sources: Vec<(String, Vec<String>)> = vec![];
        for ProfileGroup { field, provenance } in &self.provenance {
            let Provenance { kind, source, date, assumed } = provenance;
            let source = format!("{}, {date}, {source}", kind.name());
            let except = match assumed.len() {
                0 => String::new(),
                _ => format!(" (assumed: {})", assumed.join(", ")),
            };
            let field = format!("{field}{except}");
            match sources.iter_mut().find(|(known, _)| *known == source) {
                Some((_, fields)) => fields.push(field),
                None => sources.push((source, vec![field])),
            }
        }
        for (source, fields) in sources {
            page.paragraph(&format!("{}: {source}.", fields.join(", ")));
        }
    }
}

impl Report for CalibrationReport {
    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        page.heading("Calibration");
        self.summary(&mut page);
        if let Some(comparison) = &self.comparison {
            compared_plans(&mut page, comparison, detail);
        }
        kernel_coverage::tables(&mut page, &self.coverage, &self.kernels, detail);
        super::prediction::assumed(&mut page, &self.assumed, Detail::Summary);
        self.presets(&mut page);
        if detail == Detail::Full {
            self.provenance(&mut page);
        }
        page
    }
}

fn compared_plans(page: &mut Page, comparison: &ClosedLoop, detail: Detail) {
    page.heading("Predicted and measured steps");
    let row = |plan: &ClosedLoopPlan| {
        let other_widths = if plan.widths_measured { "" } else { " †" };
        vec![
            format!("{}{other_widths}", plan.name),
            Seconds(plan.measured_step_time_s).to_string(),
            Seconds(plan.predicted_step_time_s).to_string(),
            signed_percents(plan.error * 100.0, 1),
            inside(plan).into(),
        ]
    };
    let columns = [
        ("plan", Align::Left),
        ("measured", Align::Right),
        ("predicted", Align::Right),
        ("error", Align::Right),
        ("in the interval", Align::Left),
    ];
    page.table(&columns, &comparison.plans.iter().map(row).collect::<Vec<_>>());
    if comparison.plans.iter().any(|plan| !plan.widths_measured) {
        page.line("† a model whose widths were not measured");
    }
    if detail == Detail::Full {
        compared_plan_details(page, comparison);
    }
    let ClosedLoop { plans, pairs, pairs_wrong, pairs_of_one_task, .. } = comparison;
    let other_widths = comparison.mean_absolute_error_other_widths;
    let mut fields = vec![
        ("mean error", percent(comparison.mean_absolute_error)),
        ("worst error", percent(comparison.worst_error)),
        (
            "instructions",
            format!(
                "mean error {}, without the overhead of a step",
                percent(comparison.mean_absolute_error_of_instructions)
            ),
        ),
        (
            "order",
            format!(
                "{pairs_wrong} of {pairs} pairs more than 10 % apart are predicted in the wrong order, {} of \
                 {pairs_of_one_task} among plans of one model, batch and length",
                comparison.pairs_of_one_task_wrong,
            ),
        ),
        ("memory", format!("{} of {} exact", comparison.memory_exact, plans.len())),
        ("interval", interval(comparison)),
    ];
    if let Some(other_widths) = other_widths {
        fields.insert(1, ("other widths", format!("mean error {}", percent(other_widths))));
    }
    page.fields(&fields);
}

/// Whether the measured step lies in the interval by the other groups of plans.
fn inside(plan: &ClosedLoopPlan) -> &'static str {
    match plan.interval_s {
        None => "",
        Some([low, high]) if (low..=high).contains(&plan.measured_step_time_s) => "yes",
        Some(_) => "NO",
    }
}

/// The sum of the shortest instructions, the interval, the difference between rounds, and memory.
fn compared_plan_details(page: &mut Page, comparison: &ClosedLoop) {
    let row = |plan: &ClosedLoopPlan| {
        let interval = plan.interval_s.map(|interval| interval.map(Seconds));
        vec![
            plan.name.clone(),
            Seconds(plan.min_instruction_sum_s).to_string(),
            interval.map_or(String::new(), |[low, high]| format!("{low} to {high}")),
            percent(plan.spread),
            if plan.memory_exact { "exact" } else { "DIFFERS" }.into(),
        ]
    };
    let columns = [
        ("plan", Align::Left),
        ("best case", Align::Right),
        ("90 % interval", Align::Left),
        ("spread", Align::Right),
        ("memory", Align::Left),
    ];
    page.heading("Details of the steps");
    page.table(&columns, &comparison.plans.iter().map(row).collect::<Vec<_>>());
}

fn interval(comparison: &ClosedLoop) -> String {
    let plans = comparison.plans.len();
    match &comparison.interval {
        Some(StepInterval { half_width_90, inside, groups, .. }) => format!(
            "{} around a predicted step; {inside} of {plans} plans ({}) lie within the interval computed from the \
             other {} groups",
            half_width(*half_width_90),
            percent(*inside as f64 / plans.max(1) as f64),
            groups - 1
        ),
        None => "as assumed: too few groups of plans were compared".into(),
    }
}
