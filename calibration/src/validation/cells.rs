//! Cells of measured steps with large errors, and the term of the prediction that would mend each.
//!
//! A cell is all steps of a table with the same model width, tensor axis, microbatch and hardware. A factor f on a term with the
//! share s changes a prediction by 1 + s·(f − 1). Each term has a factor that removes the mean error of a cell; the term
//! that mends it is the one whose factor, applied to the whole table, leaves the smallest mean error there. A term that
//! mends a cell at the cost of others is therefore not named where another one mends both.

use super::compare::ComparedMeasurement;
use crate::measurements::{MeasuredQuantity, TrainedModel};
use crate::step_terms::StepTerm;

/// The factors on a term that count as plausible.
const FACTORS: std::ops::RangeInclusive<f64> = 0.2..=5.0;
/// Cells with a smaller mean error are not reported, as |ln|.
const ERROR_MIN: f64 = 0.05;

/// A cell of measured steps.
#[derive(Clone, Debug, PartialEq)]
pub struct ErrorCell {
    /// The name of its table, with that of the file.
    pub table: String,
    /// Width or name of the model, tensor axis, microbatch and hardware.
    pub name: String,
    /// Number of measurements.
    pub count: usize,
    /// Mean of predicted / measured − 1.
    pub mean_error: f64,
    /// The term that would mend the cell; `None` if every plausible factor on one term makes its table worse.
    pub mended_by: Option<MendingTerm>,
}

/// A term that would mend a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MendingTerm {
    /// The term.
    pub term: StepTerm,
    /// The factor on it.
    pub factor: f64,
    /// Mean of |predicted / measured − 1| over the table.
    pub table_error: f64,
    /// The same with the factor.
    pub table_error_mended: f64,
}

/// The cells with the largest mean errors, the largest first; at most `count_max`.
pub fn worst_cells(compared: &[ComparedMeasurement], count_max: usize) -> Vec<ErrorCell> {
    let steps: Vec<Step> = compared.iter().filter_map(Step::of).collect();
    let mut keys: Vec<(&str, &str)> = vec![];
    for step in &steps {
        if !keys.contains(&(&step.table, &step.cell)) {
            keys.push((&step.table, &step.cell));
        }
    }
    let cell = |(table, name): (&str, &str)| {
        let table: Vec<&Step> = steps.iter().filter(|step| step.table == table).collect();
        cell_of(&table, name)
    };
    let mut cells: Vec<ErrorCell> = keys.into_iter().filter_map(cell).collect();
    let size = |cell: &ErrorCell| cell.mean_error.ln_1p().abs();
    cells.retain(|cell| size(cell) >= ERROR_MIN);
    cells.sort_by(|a, b| size(b).total_cmp(&size(a)));
    cells.truncate(count_max);
    cells
}

/// A measured step with what cells need.
struct Step<'a> {
    table: String,
    cell: String,
    /// predicted / measured.
    ratio: f64,
    compared: &'a ComparedMeasurement<'a>,
}

impl<'a> Step<'a> {
    fn of(compared: &'a ComparedMeasurement<'a>) -> Option<Step<'a>> {
        let measurement = compared.measurement;
        let MeasuredQuantity::Step(step) = &measurement.measured else { return None };
        let model = match &step.model {
            TrainedModel::Preset(name) => name.clone(),
            TrainedModel::Described(file) => file.name.clone()?,
            TrainedModel::Gpt(gpt) => format!("width {}", gpt.hidden),
            TrainedModel::Decoder(model) => format!("width {}", model.hidden),
        };
        let (tensor, work) = (measurement.mesh.tensor, step.workload);
        let (micro_batch, length) = (work.micro_batch, work.sequence_length);
        let hardware = &measurement.hardware;
        Some(Step {
            table: format!("{}: {}", compared.file, measurement.table),
            cell: format!("{model}, tensor {tensor}, {micro_batch} × {length} tokens, {hardware}"),
            ratio: compared.predicted_s / compared.measured_s,
            compared,
        })
    }

    /// The share of a term, 0 for a term that the prediction does not have.
    fn share(&self, term: StepTerm) -> f64 {
        let shares = self.compared.terms.iter();
        shares.filter(|(of, _)| *of == term).map(|(_, share)| share).sum()
    }

    /// |predicted / measured − 1| with a factor on a term.
    fn error(&self, term: StepTerm, factor: f64) -> f64 {
        (self.ratio * (1.0 + self.share(term) * (factor - 1.0)) - 1.0).abs()
    }
}

fn cell_of(table: &[&Step], name: &str) -> Option<ErrorCell> {
    let cell: Vec<&&Step> = table.iter().filter(|step| step.cell == name).collect();
    let mean = |values: &mut dyn Iterator<Item = f64>, count: usize| {
        values.sum::<f64>() / count.max(1) as f64
    };
    let log_ratio = mean(&mut cell.iter().map(|step| step.ratio.ln()), cell.len());
    let table_error =
        |term, factor| mean(&mut table.iter().map(|step| step.error(term, factor)), table.len());
    let mending = |term: StepTerm| {
        let share = mean(&mut cell.iter().map(|step| step.share(term)), cell.len());
        let factor = 1.0 + ((-log_ratio).exp() - 1.0) / share;
        FACTORS.contains(&factor).then(|| MendingTerm {
            term,
            factor,
            table_error: table_error(term, 1.0),
            table_error_mended: table_error(term, factor),
        })
    };
    let mended_by = StepTerm::ALL
        .into_iter()
        .filter_map(mending)
        .filter(|mending| mending.table_error_mended <= mending.table_error)
        .min_by(|a, b| a.table_error_mended.total_cmp(&b.table_error_mended));
    Some(ErrorCell {
        table: table.first()?.table.clone(),
        name: name.to_owned(),
        count: cell.len(),
        mean_error: log_ratio.exp_m1(),
        mended_by,
    })
}
