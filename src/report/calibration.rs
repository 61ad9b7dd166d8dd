//! What a calibration found: coverage, repeatability, intervals, provenance, and the closed loop.

use narrows_calibration::validation::{ClosedLoop, ClosedLoopPlan, PresetCoverage};
use narrows_cost_model::profile::{MeasuredPoint, Provenance, Repeatability};
use narrows_cost_model::{KernelClass, Profile};
use narrows_plan::Seconds;
use serde::Serialize;

use super::page::{Align, TextPage, half_width, percent, plural};

/// Beyond this share of the time, what was measured says little of a plan.
const COVERED_MIN: f64 = 0.5;

/// What was measured of one class of kernels.
#[derive(Debug, Serialize)]
pub struct ClassCoverage {
    /// What people call it.
    pub kernels: &'static str,
    /// Shapes, each on so many devices once.
    pub measured: usize,
    /// Middle of how far two rounds lay apart, relative to the shorter.
    pub spread_median: f64,
    /// Nine measurements in ten lie this close to what the others make of them.
    pub half_width_90: f64,
}

/// A group of a profile's numbers.
#[derive(Debug, Serialize)]
pub struct ProfileGroup {
    /// Its path in the file.
    pub field: String,
    #[serde(flatten)]
    provenance: Provenance,
}

/// What a calibration found.
#[derive(Debug, Serialize)]
pub struct CalibrationReport {
    /// Where the profile was written.
    pub output: String,
    /// The machine.
    pub machine: String,
    /// Plans that were run to measure.
    pub plans: usize,
    /// What was measured.
    pub coverage: Vec<ClassCoverage>,
    /// What of it the presets' plans need.
    pub presets: Vec<PresetCoverage>,
    /// How well it repeats.
    pub repeatability: Option<Repeatability>,
    /// Why it is not to be trusted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Where every group of the profile's numbers comes from.
    pub provenance: Vec<ProfileGroup>,
    /// Parts of the profile that were not measured.
    pub assumed: Vec<String>,
    /// The closed loop, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comparison: Option<ClosedLoop>,
}

impl CalibrationReport {
    /// Of a fitted profile and what it was fitted to.
    pub fn of(
        profile: &Profile,
        plans: usize,
        presets: Vec<PresetCoverage>,
        comparison: Option<ClosedLoop>,
        output: String,
    ) -> CalibrationReport {
        let file = profile.file();
        let points = file.measured.as_ref().map_or(&[][..], |measured| &measured.points);
        let width = |class| match class {
            KernelClass::Gemm => file.gemm.relative_error.half_width_90,
            KernelClass::Attention => file.attention.relative_error.half_width_90,
            KernelClass::Fused => file.fused.relative_error.half_width_90,
            KernelClass::Link => file.links.relative_error.half_width_90,
        };
        let coverage = KernelClass::ALL.into_iter().map(|class| ClassCoverage {
            kernels: title(class),
            measured: of_class(points, class).count(),
            spread_median: median(of_class(points, class).map(|point| point.spread).collect()),
            half_width_90: width(class),
        });
        let group = |(field, provenance)| ProfileGroup { field, provenance };
        CalibrationReport {
            output,
            machine: file.description.clone(),
            plans,
            coverage: coverage.collect(),
            presets,
            repeatability: file.measured.as_ref().and_then(|measured| measured.repeatability),
            warning: profile.warning(),
            provenance: profile.provenance().into_iter().map(group).collect(),
            assumed: profile.assumed_paths(),
            comparison,
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut page = TextPage::default();
        page.heading("Calibration");
        page.paragraph(&self.machine);
        let mut fields = vec![
            ("profile", self.output.clone()),
            ("measured in", format!("the steps of {} plans", self.plans)),
        ];
        if let Some(found) = self.repeatability {
            let share = percent(found.undisturbed);
            fields.push(("undisturbed", format!("{share} of the shortest steps by the clock")));
            let [half, tenth] = [found.rounds_apart_median, found.rounds_apart_90].map(percent);
            let text =
                format!("half of the time repeats within {half}, nine tenths within {tenth}");
            fields.push(("rounds", text));
        }
        page.fields(&fields);
        let rows = self.coverage.iter().map(|of| {
            let count = of.measured.to_string();
            vec![of.kernels.into(), count, percent(of.spread_median), half_width(of.half_width_90)]
        });
        page.table(
            &[
                ("kernels", Align::Left),
                ("shapes", Align::Right),
                ("rounds apart", Align::Right),
                ("interval", Align::Right),
            ],
            &rows.collect::<Vec<_>>(),
        );
        if self.coverage.iter().any(|of| of.half_width_90 > 1.0) {
            page.paragraph(
                "Beyond ±100 %, the factor that nine measurements in ten lie within, either way, of what the \
                 others make of them: of such kernels the profile says nothing. Most often the machine was busy: \
                 measure it again.",
            );
        }
        presets(&mut page, &self.presets);
        provenance(&mut page, &self.provenance);
        if let Some(comparison) = &self.comparison {
            compared(&mut page, comparison);
        }
        page.finish()
    }
}

/// A row for each size, a column for each family.
fn presets(page: &mut TextPage, presets: &[PresetCoverage]) {
    let (mut families, mut sizes): (Vec<&str>, Vec<&str>) = (vec![], vec![]);
    for (family, size) in presets.iter().filter_map(|one| one.model.split_once('-')) {
        if !families.contains(&family) {
            families.push(family);
        }
        if !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    let Some(devices) = presets.first().map(|one| one.devices) else { return };
    page.heading("Time of the presets' plans that is of kernels like those measured");
    let cell = |size: &str, family: &str| {
        let own = presets.iter().find(|one| one.model == format!("{family}-{size}"));
        own.map(|own| format!("{} ({}/{})", percent(own.measured_share), own.measured, own.kernels))
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
    let short = presets.iter().filter(|one| one.measured_share < COVERED_MIN).count();
    if short > 0 {
        page.paragraph(&format!(
            "Planned for {} as `narrows run` does; in brackets, kernels measured of those needed. {short} of {} \
             have less than half: their intervals are wider, and `plan` names what is missing. --model NAME \
             measures a model's kernels too.",
            plural(devices, "device"),
            presets.len()
        ));
    }
}

/// A paragraph for each source: most groups share one.
fn provenance(page: &mut TextPage, groups: &[ProfileGroup]) {
    page.heading("Where the profile's numbers come from");
    let mut sources: Vec<(String, Vec<String>)> = vec![];
    for ProfileGroup { field, provenance } in groups {
        let Provenance { kind, source, date, assumed } = provenance;
        let from = format!("{}, {date}, {source}", format!("{kind:?}").to_lowercase());
        let except = match assumed.len() {
            0 => String::new(),
            _ => format!(" (assumed: {})", assumed.join(", ")),
        };
        let field = format!("{field}{except}");
        match sources.iter_mut().find(|(known, _)| *known == from) {
            Some((_, fields)) => fields.push(field),
            None => sources.push((from, vec![field])),
        }
    }
    for (from, fields) in sources {
        page.paragraph(&format!("{}: {from}.", fields.join(", ")));
    }
}

fn between(plan: &ClosedLoopPlan) -> String {
    let Some(interval) = plan.interval_s else { return "-".into() };
    let [low, high] = interval.map(Seconds);
    let within = (interval[0]..=interval[1]).contains(&plan.measured_step_time_s);
    format!("{low} to {high}{}", if within { "" } else { ", OUTSIDE" })
}

fn compared(page: &mut TextPage, comparison: &ClosedLoop) {
    page.heading("Predicted and measured");
    let seconds = |time: f64| format!("{:.1} ms", time * 1e3);
    let rows = comparison.plans.iter().map(|plan| {
        let other = if plan.familiar { "" } else { "other widths" };
        vec![
            plan.name.clone(),
            seconds(plan.undisturbed_step_time_s),
            seconds(plan.measured_step_time_s),
            seconds(plan.predicted_step_time_s),
            format!("{:+.1} %", plan.error * 100.0),
            between(plan),
            percent(plan.spread),
            if plan.memory_exact { "exact".into() } else { "DIFFERS".into() },
            other.into(),
        ]
    });
    page.table(
        &[
            ("plan", Align::Left),
            ("undisturbed", Align::Right),
            ("by the clock", Align::Right),
            ("predicted", Align::Right),
            ("error", Align::Right),
            ("90 % by the other groups", Align::Left),
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
            "of instructions",
            format!(
                "{}, without what a step takes beyond them",
                percent(comparison.mean_absolute_error_of_instructions)
            ),
        ),
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
        ("interval", interval(comparison)),
    ]);
}

fn interval(comparison: &ClosedLoop) -> String {
    let plans = comparison.plans.len();
    match &comparison.interval {
        Some(found) => format!(
            "{} of a step from now on; {} of {plans} plans ({}) lie within what the other {} groups say",
            half_width(found.half_width_90),
            found.inside,
            percent(found.inside as f64 / plans.max(1) as f64),
            found.groups - 1
        ),
        None => "as assumed: too few groups of plans were compared".into(),
    }
}

fn of_class(points: &[MeasuredPoint], class: KernelClass) -> impl Iterator<Item = &MeasuredPoint> {
    points.iter().filter(move |point| KernelClass::of(&point.kernel) == class)
}

fn title(class: KernelClass) -> &'static str {
    match class {
        KernelClass::Gemm => "products",
        KernelClass::Attention => "attention",
        KernelClass::Fused => "element-wise and optimizer",
        KernelClass::Link => "collectives and transfers",
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or_default()
}
