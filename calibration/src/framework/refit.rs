//! Fits the factors of a framework's table to rows of steps, and its errors with models or hardware left out.
//!
//! Minimises the mean of |ln(predicted / measured)| over all rows by coordinate descent, in which one value also moves
//! against another: along single values alone the search stays near its start, the shipped values, which know the rows that
//! a fit leaves out. What a fit leaves out is also left out of the choice of its values, and of the choice among tables that
//! differ in what is no value: which collectives run beside which computation, where recomputation stops.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use narrows_cost_model::profile::{ProfileFile, preset};
use narrows_plan::Defects;

use super::file::FrameworkTable;
use super::parameter::{Fit, TableParameter};
use super::step::decoder_step_time_s;
use crate::coordinate_descent::CoordinateDescent;
use crate::measurements::{self, DecoderModel, MeasuredQuantity, Measurement, TrainingStep};
use crate::step_rows::measurements_from_rows;

/// Relative steps of the search, in order.
const STEPS: [f64; 4] = [0.2, 0.06, 0.02, 0.007];
/// Sweeps with each step.
const SWEEPS: usize = 4;
/// Moves of one value in a row.
const MOVES_MAX: usize = 20;

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
    fit: Fit,
    /// Other tables of the framework.
    alternatives: Vec<Fit>,
    rows: Vec<DecoderRow>,
}

struct DecoderRow {
    measurement: Measurement,
    model: DecoderModel,
    step: TrainingStep,
    /// Index of the hardware profile.
    profile: usize,
}

fn invalid(path: &Path, defects: &Defects) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {defects}", path.display()))
}

impl TableRows {
    /// The rows of the framework of a table, from files of rows and of measurements. Profiles among `profiles` replace
    /// presets of their names.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn read(table: &Path, rows: &[&Path], profiles: &[ProfileFile]) -> io::Result<TableRows> {
        let table = read_table(table)?;
        let measurements = rows.iter().map(|file| read_rows(file));
        let measurements = measurements.collect::<io::Result<Vec<_>>>()?;
        let invalid_rows =
            |defects: Defects| io::Error::new(io::ErrorKind::InvalidData, defects.to_string());
        TableRows::of(table, measurements.concat(), profiles).map_err(invalid_rows)
    }

    /// Adds tables of the same framework: every fit also chooses the table with the least error on its own rows.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn with_alternatives(mut self, tables: &[&Path]) -> io::Result<TableRows> {
        for table in tables {
            let (table, profiles) = (read_table(table)?, self.fit.profiles.clone());
            self.alternatives.push(Fit { table, profiles });
        }
        Ok(self)
    }

    /// The measurements of the framework of a table.
    ///
    /// # Errors
    /// Hardware that is not known.
    pub(super) fn of(
        table: FrameworkTable,
        measurements: Vec<Measurement>,
        profiles: &[ProfileFile],
    ) -> Result<TableRows, Defects> {
        let mut fit = Fit { table, profiles: vec![] };
        let mut rows = vec![];
        for measurement in measurements {
            let MeasuredQuantity::Step(step) = &measurement.measured else { continue };
            let Some((model, framework)) = step.decoder() else { continue };
            if framework != fit.table.name {
                continue;
            }
            let name = measurement.hardware.as_str();
            let known = fit.profiles.iter().position(|profile| profile.name() == name);
            let profile = match known {
                Some(known) => known,
                None => {
                    let given = profiles.iter().find(|file| file.name == name);
                    let read = given.map_or_else(|| preset(name), |file| file.clone().resolve());
                    fit.profiles.push(read?);
                    fit.profiles.len() - 1
                }
            };
            let step = step.as_ref().clone();
            rows.push(DecoderRow { model, step, profile, measurement });
        }
        Ok(TableRows { fit, alternatives: vec![], rows })
    }

    /// Fits `parameters`, and predicts every row by a fit that leaves its group out. Also returns the values of the fit to all
    /// rows, in the order of `parameters`, relative to those of the table that it chose.
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
            let fit = match left_out {
                LeftOut::Nothing => all.clone(),
                _ => self.fit(parameters, |row| group(row) != *left).1,
            };
            for row in self.rows.iter().filter(|row| group(row) == *left) {
                let (residual, profile) = (row.residual(&fit), &self.fit.profiles[row.profile]);
                let (_, interval) =
                    self.fit.table.errors.of(&row.step, row.measurement.mesh, profile);
                let [low, high] = interval.map(f64::ln);
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
    ) -> (Vec<f64>, Fit) {
        let rows: Vec<&DecoderRow> = self.rows.iter().filter(|row| is_selected(row)).collect();
        let fits = std::iter::once(&self.fit).chain(&self.alternatives);
        let fits = fits.map(|start| fit_from(start, parameters, &rows));
        let best = fits.min_by(|(a, ..), (b, ..)| a.total_cmp(b));
        best.map_or_else(|| (vec![], self.fit.clone()), |(_, ratios, fit)| (ratios, fit))
    }
}

/// The fit that starts at a table: its error, ratios of its values to those of the table, and the fitted table.
fn fit_from(
    start: &Fit,
    parameters: &[TableParameter],
    rows: &[&DecoderRow],
) -> (f64, Vec<f64>, Fit) {
    let scaled = |ratios: &Vec<f64>| {
        let mut fit = start.clone();
        for (parameter, ratio) in parameters.iter().zip(ratios) {
            parameter.scale(&mut fit, *ratio);
        }
        fit
    };
    let loss = |ratios: &Vec<f64>| -> f64 {
        let fit = scaled(ratios);
        rows.iter().map(|row| row.residual(&fit).abs()).sum()
    };
    // Each value alone, and each against each other one.
    let directions: Vec<(usize, Option<usize>)> = (0..parameters.len())
        .flat_map(|up| std::iter::once((up, None)).chain((0..up).map(move |down| (up, Some(down)))))
        .collect();
    let mut search = CoordinateDescent::new(vec![1.0; parameters.len()], loss);
    for step in STEPS {
        for _ in 0..SWEEPS {
            let factors = [1.0 + step, 1.0 / (1.0 + step)];
            let scale = |ratios: &mut Vec<f64>, index: usize, factor: f64| {
                let (up, down) = directions[index];
                ratios[up] *= factor;
                if let Some(down) = down {
                    ratios[down] /= factor;
                }
            };
            search.sweep(directions.len(), factors, MOVES_MAX, scale, loss);
        }
    }
    let fit = scaled(&search.best);
    (search.loss, search.best, fit)
}

impl DecoderRow {
    /// ln(measured / predicted).
    fn residual(&self, fit: &Fit) -> f64 {
        let (mesh, profile) = (self.measurement.mesh, &fit.profiles[self.profile]);
        let predicted_s = decoder_step_time_s(&fit.table, self.model, &self.step, mesh, profile);
        (self.measurement.measured_s(profile) / predicted_s).ln()
    }
}

fn read_table(path: &Path) -> io::Result<FrameworkTable> {
    FrameworkTable::read(&fs::read_to_string(path)?).map_err(|defects| invalid(path, &defects))
}

/// The measurements of a file of rows or of measurements.
fn read_rows(path: &Path) -> io::Result<Vec<Measurement>> {
    let text = fs::read_to_string(path)?;
    let is_measurements = text.contains("narrows-measurements/");
    let file = match is_measurements {
        true => measurements::read(&text),
        false => measurements_from_rows(&text, "rows", None),
    };
    Ok(file.map_err(|defects| invalid(path, &defects))?.measurements)
}
