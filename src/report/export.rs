//! Report on a plan that was written for another framework: what survives.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::Report;
use super::page::{Align, Page};
use crate::args::Detail;
use crate::errors::Problem;
use crate::export::{Export, Fidelity};
use crate::text::plural;

/// Output of `export`.
#[derive(Serialize, JsonSchema)]
pub struct ExportReport {
    /// Name and version of the framework, whose options are written.
    framework: &'static str,
    /// Every decision of the plan.
    decisions: Vec<DecisionFidelity>,
    /// The configuration; `null` where a decision is not expressible, unless --allow-loss is given.
    configuration: Option<String>,
    /// The name of the plan file.
    #[serde(skip)]
    file: String,
}

/// A decision with its fidelity in the framework.
#[derive(Serialize, JsonSchema)]
struct DecisionFidelity {
    /// The decision, by its field in plan files.
    decision: &'static str,
    /// Value in the plan, in words.
    value: String,
    /// Whether the framework does the same.
    #[serde(rename = "fate")]
    fidelity: FidelityName,
    /// The difference, or the reason why the decision is lost; `null` for exact ones.
    difference: Option<String>,
    /// The options that express it.
    options: Map<String, Value>,
}

/// `exact`, `approximated` or `not-expressible`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum FidelityName {
    Exact,
    Approximated,
    NotExpressible,
}

impl FidelityName {
    fn words(self) -> &'static str {
        match self {
            FidelityName::Exact => "exact",
            FidelityName::Approximated => "approximated",
            FidelityName::NotExpressible => "not expressible",
        }
    }
}

impl ExportReport {
    /// The report on the configuration of a plan file.
    pub fn new(file: &str, export: &Export) -> ExportReport {
        let decision = |row: &crate::export::ExportRow| {
            let (fidelity, difference) = match &row.translation.fidelity {
                Fidelity::Exact => (FidelityName::Exact, None),
                Fidelity::Approximated(how) => (FidelityName::Approximated, Some(how.clone())),
                Fidelity::NotExpressible(why) => (FidelityName::NotExpressible, Some(why.clone())),
            };
            let options = row.translation.options.iter();
            DecisionFidelity {
                decision: row.decision.name(),
                value: row.value.clone(),
                fidelity,
                difference,
                options: options.map(|(path, value)| ((*path).to_owned(), value.clone())).collect(),
            }
        };
        ExportReport {
            framework: export.framework,
            decisions: export.rows.iter().map(decision).collect(),
            configuration: Some(export.text.clone()),
            file: file.to_owned(),
        }
    }

    /// An error for each decision that the framework cannot express.
    pub fn losses(&self) -> Vec<Problem> {
        let lost = self.decisions.iter().filter(|row| row.fidelity == FidelityName::NotExpressible);
        let problem = |row: &DecisionFidelity| {
            let reason = row.difference.as_deref().unwrap_or_default();
            let message = format!("`{}` is lost: {} {reason}", row.value, self.framework);
            Problem::new(&self.file, message).field(row.decision)
        };
        let mut problems: Vec<Problem> = lost.map(problem).collect();
        if let Some(last) = problems.last_mut() {
            let hint = "--allow-loss writes the rest, and lists at its head what is lost";
            last.hints.push(hint.into());
        }
        problems
    }

    /// The report on a configuration that is refused.
    pub fn without_configuration(self) -> ExportReport {
        ExportReport { configuration: None, ..self }
    }

    fn count(&self, fidelity: FidelityName) -> u64 {
        self.decisions.iter().filter(|row| row.fidelity == fidelity).count() as u64
    }
}

impl Report for ExportReport {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        page.heading(format!("{} for {}", self.file, self.framework));
        let others = [FidelityName::Approximated, FidelityName::NotExpressible]
            .map(|fidelity| format!("{} {}", self.count(fidelity), fidelity.words()));
        let exact = plural(self.count(FidelityName::Exact), "decision");
        page.paragraph(&format!("{exact} exact, {}.", others.join(", ")));
        let titles = [
            (FidelityName::NotExpressible, "Not expressible", "reason"),
            (FidelityName::Approximated, "Approximated", "difference"),
        ];
        for (fidelity, title, reason) in titles {
            let rows = self.decisions.iter().filter(|row| row.fidelity == fidelity);
            let cells = |row: &DecisionFidelity| {
                let difference = row.difference.clone().unwrap_or_default();
                vec![row.decision.into(), row.value.clone(), difference]
            };
            let rows: Vec<Vec<String>> = rows.map(cells).collect();
            if !rows.is_empty() {
                page.heading(title);
                page.table(&["decision", "plan", reason].map(|c| (c, Align::Left)), &rows);
            }
        }
        page
    }
}
