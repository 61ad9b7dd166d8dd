//! The report of `sensitivity`.

mod csv;
mod ratio;
mod rows;

use narrows_plan::{Bytes, Plan, Seconds};
use narrows_planner::SearchReport;
use schemars::JsonSchema;
use serde::Serialize;

use self::ratio::{share, signed, times};
use self::rows::{AssumedRow, ElasticityRow, GainRow, UpgradeRow};
use super::page::{Align, Page};
use super::prediction::PredictionReport;
use super::search::SearchSummary;
use super::{Report, finite_limit};
use crate::args::Detail;
use crate::field_name::FieldName;
use crate::priced_plan::PricedPlan;
use crate::sensitivity::{Analysis, Estimate, ParameterGroup};
use crate::text::{mesh_phrase, percent, plural, signed_percents};

/// Rows of a table without `--details`.
const ROWS_MAX: usize = 10;

/// Elasticities below this size are not listed without `--details`.
const ELASTICITY_MIN: f64 = 0.02;

/// Losses below this size cost less than a prediction can tell.
const LOSS_MIN: f64 = 0.001;

/// Answer of `narrows sensitivity`.
#[derive(Serialize, JsonSchema)]
#[schemars(title = "Narrows sensitivity answer")]
pub struct SensitivityReport<'a> {
    /// Whether every number was varied; `false` after Ctrl-C. Each list then has the numbers that were planned for it until
    /// then, and lacks the others.
    is_complete: bool,
    /// The plan, as `schema plan` describes it.
    decisions: &'a Plan,
    /// Prediction of the plan.
    prediction: PredictionReport<'a>,
    /// Status and effort of the search.
    search: SearchSummary,
    /// Elasticities of the step time, the largest first.
    elasticities: Vec<ElasticityRow>,
    /// Gains from better hardware, the largest first.
    upgrades: Vec<UpgradeRow>,
    /// Assumed numbers of the profile, in the order in which to measure them.
    assumed: Vec<AssumedRow>,
    /// Assumed numbers that were not varied, because they are zero.
    not_varied: Vec<FieldName>,
}

impl<'a> SensitivityReport<'a> {
    /// Model, devices and hardware in words.
    pub fn subject(&self) -> String {
        let Plan { model, hardware, mesh, .. } = self.decisions;
        let devices = plural(mesh.devices(), "device");
        format!("{} on {devices} of {}", model.name, hardware.name)
    }

    /// The report of an analysis. `memory_limit` is `Bytes(u64::MAX)` without a limit.
    pub fn new(
        priced: &'a PricedPlan,
        search: &SearchReport,
        memory_limit: Bytes,
        analysis: &Analysis,
    ) -> SensitivityReport<'a> {
        let PricedPlan { plan, prediction, .. } = priced;
        SensitivityReport {
            is_complete: analysis.is_complete,
            decisions: plan,
            prediction: PredictionReport {
                prediction,
                memory_limit_bytes: finite_limit(memory_limit),
            },
            search: SearchSummary::new(search),
            elasticities: analysis.elasticities.iter().map(ElasticityRow::from).collect(),
            upgrades: analysis.upgrades.iter().map(UpgradeRow::from).collect(),
            assumed: analysis.assumed.iter().map(AssumedRow::from).collect(),
            not_varied: analysis.not_varied.clone(),
        }
    }

    /// A row for each number as CSV (RFC 4180).
    pub fn csv(&self) -> String {
        csv::csv(&self.elasticities, &self.upgrades, &self.assumed)
    }

    /// The most important number of each kind, in words.
    fn verdict(&self) -> String {
        let step = Seconds(self.prediction.prediction.step_time_s);
        let mut sentences = vec![format!("The fastest plan takes {step} a step.")];
        if !self.is_complete {
            let stopped = "The analysis was stopped: the tables leave out numbers that were not planned until then.";
            sentences.push(stopped.into());
            return sentences.join(" ");
        }
        let hardware = self.elasticities.iter().find(|row| row.kind == ParameterGroup::Hardware);
        if let Some(row) = hardware {
            let change = signed_percents(row.replanned.value, 2);
            sentences.push(format!(
                "Of all hardware parameters, the step time is most sensitive to {}: {change} for +1 %.",
                row.number.short()
            ));
        }
        if let Some((upgrade, gain)) = self.upgrades.first().and_then(|upgrade| {
            let gain = upgrade.gains.last()?.gain?;
            (gain.value >= LOSS_MIN).then_some((upgrade, gain))
        }) {
            let factor = upgrade.gains.last().map_or(1.0, |gain| gain.factor);
            let amount = if factor < 1.0 { "Half" } else { "Twice" };
            sentences.push(format!(
                "{amount} the {} would save {} of the step, the most of all that can be bought.",
                upgrade.number.short(),
                percent(gain.value)
            ));
        }
        sentences.push(self.measure_first());
        sentences.join(" ")
    }

    /// The assumed numbers that could change the plan, in words.
    fn measure_first(&self) -> String {
        let Some(first) = self.assumed.first() else {
            return "No number of the profile that it depends on is assumed.".into();
        };
        let risky = self.assumed.iter().filter(|row| row.worst_loss() >= LOSS_MIN).count();
        let total = plural(self.assumed.len() as u64, "assumed number");
        let range = "half and twice its value";
        match (risky, first.worst_loss()) {
            (0, _) => format!(
                "None of {total} makes another plan more than {} faster between {range}; {} changes the step time the \
                 most.",
                percent(LOSS_MIN),
                self.most_sensitive_assumed().number.short()
            ),
            (_, loss) if loss.is_infinite() => format!(
                "Measure {} first: between {range}, the plan no longer fits in memory.",
                first.number.short()
            ),
            (_, loss) => format!(
                "Measure {} first: between {range}, keeping the plan costs up to {} of the step.",
                first.number.short(),
                percent(loss)
            ),
        }
    }

    fn most_sensitive_assumed(&self) -> &AssumedRow {
        let size = |row: &&AssumedRow| row.elasticity.unwrap_or_default().abs();
        let found = self.assumed.iter().max_by(|a, b| size(a).total_cmp(&size(b)));
        found.unwrap_or(&self.assumed[0])
    }

    fn elasticity_table(&self, page: &mut Page, detail: Detail) {
        let is_listed = |row: &&ElasticityRow| row.replanned.value.abs() >= ELASTICITY_MIN;
        let rows: Vec<Vec<String>> = self
            .elasticities
            .iter()
            .filter(|row| detail == Detail::Full || is_listed(row))
            .map(|row| {
                let Estimate { value, interval: [low, high] } = row.replanned;
                let name = row.number.short();
                vec![
                    if row.is_assumed { format!("{name}*") } else { name },
                    row.number.unit().format_range(row.values),
                    signed(value),
                    format!("±{:.2}", (high - low) / 2.0),
                    row.kept_plan.map_or(String::new(), |kept| signed(kept.value)),
                ]
            })
            .collect();
        page.heading("Change of the step time in % for +1 % of a parameter");
        let columns = [
            ("parameter", Align::Left),
            ("value", Align::Right),
            ("replanned", Align::Right),
            ("90 %", Align::Right),
            ("plan kept", Align::Right),
        ];
        page.table(&columns, &rows);
        let hidden = self.elasticities.len() - rows.len();
        let hidden = match hidden {
            0 => String::new(),
            many => format!(" {many} more change it by less: --details lists them."),
        };
        page.paragraph(&format!(
            "* assumed, not measured. Hardware parameters vary by ±5 %, shapes by an eighth, devices and batch by a \
             factor of 2.{hidden}"
        ));
    }

    fn upgrade_table(&self, page: &mut Page) {
        let gain = |row: &GainRow| row.gain.map_or("no plan".into(), |g| share(g.value));
        let interval = |row: &GainRow| {
            let Some(Estimate { interval: [low, high], .. }) = row.gain else {
                return String::new();
            };
            format!("{} to {}", share(low), share(high))
        };
        let rows: Vec<Vec<String>> = self
            .upgrades
            .iter()
            .map(|row| {
                let [small, double] = [&row.gains[0], &row.gains[1]];
                let value = row.number.unit().format(row.value);
                vec![row.number.short(), value, gain(small), gain(double), interval(double)]
            })
            .collect();
        page.heading("What to buy next: share of the step that better hardware saves");
        let columns = [
            ("parameter", Align::Left),
            ("value", Align::Right),
            ("+10 %", Align::Right),
            ("×2", Align::Right),
            ("90 % of ×2", Align::Right),
        ];
        page.table(&columns, &rows);
        page.paragraph("Launch gaps are divided by 1.1 and 2 instead. For memory: the gain of the plans that the larger memory allows.");
    }

    fn assumed_table(&self, page: &mut Page, detail: Detail) {
        if self.assumed.is_empty() {
            return;
        }
        let shown = if detail == Detail::Full { usize::MAX } else { ROWS_MAX };
        let is_listed = |row: &&AssumedRow| detail == Detail::Full || row.change.is_some();
        let rows: Vec<Vec<String>> = self
            .assumed
            .iter()
            .filter(is_listed)
            .take(shown)
            .map(|row| {
                let change = row.change.as_ref();
                vec![
                    row.number.short(),
                    row.number.unit().format(row.value),
                    change.map_or("no change".into(), |change| {
                        format!(
                            "{} ({})",
                            row.number.unit().format(change.value),
                            times(change.factor)
                        )
                    }),
                    change.map_or(String::new(), |change| self.new_plan(&change.decisions)),
                    match row.worst_loss() {
                        loss if loss.is_infinite() => "no fit".into(),
                        loss => percent(loss),
                    },
                ]
            })
            .collect();
        page.heading("What to measure first: assumed parameters that could change the plan");
        if rows.is_empty() {
            let phrase = match self.is_complete {
                true => "No assumed parameter changes the plan between half and twice its value.",
                false => {
                    "Of the assumed parameters that were varied until then, none changes the plan."
                }
            };
            page.paragraph(&format!("{phrase}{}", self.zeros_phrase()));
            return;
        }
        let columns = [
            ("parameter", Align::Left),
            ("value", Align::Right),
            ("plan changes at", Align::Right),
            ("new plan", Align::Left),
            ("loss", Align::Right),
        ];
        page.table(&columns, &rows);
        let found = match self.is_complete {
            true => {
                "Each was planned at half to twice its value, shares to at most 1 and slowdowns to at least 1, and \
                 the nearest change found by bisection."
            }
            false => {
                "The analysis was stopped before bisection ended: a plan may change nearer to its present value."
            }
        };
        page.paragraph(&format!(
            "{found} Loss: what keeping the present plan costs at the worse end of the range.{}{}",
            self.unlisted_phrase(rows.len()),
            self.zeros_phrase(),
        ));
    }

    /// The assumed numbers beyond the rows of their table, in words.
    fn unlisted_phrase(&self, rows: usize) -> String {
        let changing = self.assumed.iter().filter(|row| row.change.is_some()).count();
        let unlisted = (self.assumed.len() - rows) as u64;
        let changing = changing.saturating_sub(rows) as u64;
        let more = |count: u64, phrase: &str| match count {
            0 => String::new(),
            _ => format!(" {} {phrase}.", plural(count, "more number")),
        };
        let quiet = more(unlisted - changing, "without a change");
        quiet + &more(changing, "with a change: --details lists all")
    }

    /// The numbers that are not varied, in words.
    fn zeros_phrase(&self) -> String {
        let names: Vec<String> = self.not_varied.iter().map(FieldName::short).collect();
        match names.is_empty() {
            true => String::new(),
            false => format!(" Not varied, because zero: {}.", names.join(", ")),
        }
    }

    /// Mesh of a new plan, or the word that only ops differ.
    fn new_plan(&self, plan: &Plan) -> String {
        let (present, new) = (mesh_phrase(self.decisions), mesh_phrase(plan));
        let micro_batch = plan.workload.micro_batch;
        match (present == new, self.decisions.workload.micro_batch == micro_batch) {
            (true, true) => "same mesh".into(),
            (true, false) => format!("b{micro_batch}"),
            _ => new,
        }
    }
}

impl Report for SensitivityReport<'_> {
    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        page.heading(format!("Sensitivity of {}", self.subject()));
        page.paragraph(&self.verdict());
        self.elasticity_table(&mut page, detail);
        self.upgrade_table(&mut page);
        self.assumed_table(&mut page, detail);
        page
    }
}
