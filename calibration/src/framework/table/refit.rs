//! Fits the factors of a framework's table to rows of steps, and its errors with models or hardware left out.
//!
//! Minimises the mean of |ln(predicted / measured)| by coordinate descent, each kind of hardware with the same weight. What
//! a fit leaves out is also left out of the choice of its values: the counts of a table come from the framework's source,
//! not from rows.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use narrows_cost_model::Profile;
use narrows_cost_model::profile::{ProfileFile, preset};
use narrows_plan::Defects;

use super::file::FrameworkTable;
use super::step::decoder_step_time_s;
use crate::coordinate_descent::CoordinateDescent;
use crate::measurements::{
    DecoderModel, MeasuredQuantity, Measurement, TrainedModel, TrainingStep,
};
use crate::step_rows::measurements_from_rows;

/// Relative steps of the search, in order.
const STEPS: [f64; 4] = [0.2, 0.06, 0.02, 0.007];
/// Sweeps with each step.
const SWEEPS: usize = 4;
/// Moves of one value in a row.
const MOVES_MAX: usize = 20;

/// A fitted value of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableParameter {
    /// Both directions of attention, by the same factor.
    Attention,
    /// The factor on GEMMs.
    Gemm,
    /// The factor on passes over memory.
    Memory,
    /// The factor on collectives.
    Collective,
    /// The host's time of an operator.
    Operator,
    /// The host's time of a block.
    Block,
}

impl TableParameter {
    /// All parameters with the names of the command line.
    pub const ALL: [(&'static str, TableParameter); 6] = [
        ("attention", TableParameter::Attention),
        ("gemm", TableParameter::Gemm),
        ("memory", TableParameter::Memory),
        ("collective", TableParameter::Collective),
        ("operator", TableParameter::Operator),
        ("block", TableParameter::Block),
    ];

    fn scale(self, table: &mut FrameworkTable, factor: f64) {
        match self {
            TableParameter::Attention => {
                table.attention.forward *= factor;
                table.attention.backward *= factor;
            }
            TableParameter::Gemm => table.factors.gemm *= factor,
            TableParameter::Memory => table.factors.memory *= factor,
            TableParameter::Collective => table.factors.collective *= factor,
            TableParameter::Operator => table.host.operator_s *= factor,
            TableParameter::Block => table.host.block_s *= factor,
        }
    }
}

/// Rows that a fit leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// Nothing.
    Nothing,
    /// Each model in turn.
    Models,
    /// Each kind of hardware in turn.
    Hardware,
}

/// A row predicted by a fit.
#[derive(Clone, Debug)]
pub struct PredictedRow {
    /// The row's name.
    pub name: String,
    /// The name of its hardware profile.
    pub hardware: String,
    /// ln(measured / predicted).
    pub residual: f64,
    /// Whether the measured time lies within the table's 90 % interval around this prediction.
    pub inside: bool,
}

/// Rows of one framework, and its table.
pub struct TableRows {
    table: FrameworkTable,
    rows: Vec<DecoderRow>,
}

struct DecoderRow {
    measurement: Measurement,
    model: DecoderModel,
    step: TrainingStep,
    profile: Profile,
}

fn invalid(defects: Defects) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, defects.to_string())
}

impl TableRows {
    /// The rows of the framework of a table. Profiles among `profiles` replace presets of their names.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn read(table: &Path, rows: &Path, profiles: &[ProfileFile]) -> io::Result<TableRows> {
        let text = fs::read_to_string(table)?;
        let table = FrameworkTable::read(&table.display().to_string(), &text).map_err(invalid)?;
        let file =
            measurements_from_rows(&fs::read_to_string(rows)?, "rows", None).map_err(invalid)?;
        let mut selected = vec![];
        for measurement in file.measurements {
            let MeasuredQuantity::Step(step) = &measurement.measured else { continue };
            let TrainedModel::Decoder(model) = step.model else { continue };
            if step.framework.as_deref() != Some(table.name.as_str()) {
                continue;
            }
            let given = profiles.iter().find(|file| file.name == measurement.hardware);
            let profile = match given {
                Some(file) => file.clone().resolve().map_err(invalid)?,
                None => preset(&measurement.hardware).map_err(invalid)?,
            };
            let step = step.as_ref().clone();
            selected.push(DecoderRow { model, step, profile, measurement });
        }
        Ok(TableRows { table, rows: selected })
    }

    /// Fits `parameters`, and predicts every row by a fit that leaves its group out. Also returns the values of the fit to all
    /// rows, in the order of `parameters`, relative to the table's.
    pub fn predict(
        &self,
        parameters: &[TableParameter],
        left_out: LeftOut,
    ) -> (Vec<f64>, Vec<PredictedRow>) {
        let (ratios, all) = self.fit(parameters, |_| true);
        let group = |row: &DecoderRow| match left_out {
            LeftOut::Nothing => String::new(),
            LeftOut::Models => format!("{:?}", row.model),
            LeftOut::Hardware => row.measurement.hardware.clone(),
        };
        let groups: BTreeSet<String> = self.rows.iter().map(group).collect();
        let mut predicted = vec![];
        for left in &groups {
            let table = match left_out {
                LeftOut::Nothing => all.clone(),
                _ => self.fit(parameters, |row| group(row) != *left).1,
            };
            for row in self.rows.iter().filter(|row| group(row) == *left) {
                let (residual, profile) = (row.residual(&table), &row.profile);
                let [low, high] = self.table.errors.of(profile).1.map(f64::ln);
                predicted.push(PredictedRow {
                    name: row.measurement.name.clone(),
                    hardware: row.measurement.hardware.clone(),
                    residual,
                    inside: (low..=high).contains(&residual),
                });
            }
        }
        (ratios, predicted)
    }

    fn fit(
        &self,
        parameters: &[TableParameter],
        is_selected: impl Fn(&DecoderRow) -> bool,
    ) -> (Vec<f64>, FrameworkTable) {
        let rows: Vec<&DecoderRow> = self.rows.iter().filter(|row| is_selected(row)).collect();
        let of_hardware = |row: &DecoderRow| {
            rows.iter().filter(|other| other.profile.name() == row.profile.name()).count() as f64
        };
        let weights: Vec<f64> = rows.iter().map(|row| 1.0 / of_hardware(row)).collect();
        let scaled = |ratios: &Vec<f64>| {
            let mut table = self.table.clone();
            for (parameter, ratio) in parameters.iter().zip(ratios) {
                parameter.scale(&mut table, *ratio);
            }
            table
        };
        let loss = |ratios: &Vec<f64>| -> f64 {
            let table = scaled(ratios);
            rows.iter().zip(&weights).map(|(row, weight)| weight * row.residual(&table).abs()).sum()
        };
        let mut search = CoordinateDescent::new(vec![1.0; parameters.len()], loss);
        for step in STEPS {
            for _ in 0..SWEEPS {
                let factors = [1.0 + step, 1.0 / (1.0 + step)];
                let scale =
                    |ratios: &mut Vec<f64>, index: usize, factor: f64| ratios[index] *= factor;
                search.sweep(parameters.len(), factors, MOVES_MAX, scale, loss);
            }
        }
        let table = scaled(&search.best);
        (search.best, table)
    }
}

impl DecoderRow {
    /// ln(measured / predicted).
    fn residual(&self, table: &FrameworkTable) -> f64 {
        let (mesh, profile) = (self.measurement.mesh, &self.profile);
        let predicted_s = decoder_step_time_s(table, self.model, &self.step, mesh, profile);
        (self.measurement.measured_s(profile) / predicted_s).ln()
    }
}
