//! Repeats the fit of [`FITTED_FRAMEWORK`] to its rows, and writes the data files that are derived from them.
//!
//! The rows are not part of the repository.

use std::path::Path;
use std::{fs, io};

use narrows_cost_model::profile::{Profile, Provenance, ProvenanceKind, preset};
use narrows_plan::Defects;
use narrows_plan::strategy::Recompute;

use super::coefficients::COEFFICIENT_NAMES;
use super::fit::{FrameworkStep, HoldOut, StepRows};
use super::fitted_rows::row_digest;
use super::interval::IntervalModel;
use super::{FITTED_FRAMEWORK, FitConditions};
use crate::measurements::{
    Citation, GptModel, MeasuredQuantity, Measurement, TrainedModel, TrainingStep,
};
use crate::{CsvDefaults, measurements_from_csv};

/// Draws of a bootstrap.
pub(super) const DRAWS: usize = 16;
pub(super) const SEED: u64 = 270;

/// A file of rows, with the properties that it does not state.
pub(super) struct RowFile {
    pub name: &'static str,
    /// The name of a preset.
    pub hardware: &'static str,
    pub recompute: Recompute,
}

/// The files of the fit: within a node, and across nodes.
pub(super) const ROW_FILES: [RowFile; 2] = [
    RowFile {
        name: "vtrain-a100-single-sample.csv",
        hardware: "a100-80gb-8",
        recompute: Recompute::None,
    },
    RowFile {
        name: "vtrain-a100-multi-sample.csv",
        hardware: "a100-80gb-8-4nic",
        recompute: Recompute::Block,
    },
];

impl RowFile {
    fn read(&self, folder: &Path) -> io::Result<Vec<Measurement>> {
        let text = fs::read_to_string(folder.join(self.name))?;
        let source = Citation { citation: self.name.into(), conditions: String::new() };
        let (name, hardware) = ("rows".into(), self.hardware.into());
        let recompute = self.recompute;
        let defaults = CsvDefaults { name, source, hardware, vocabulary: 51_200, recompute };
        Ok(measurements_from_csv(&text, &defaults).map_err(invalid)?.measurements)
    }
}

fn invalid(defects: Defects) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, defects.to_string())
}

/// The measured steps of GPTs that the framework was fitted to.
pub struct FrameworkRows {
    pub(super) rows: Vec<Measurement>,
    /// The profiles of [`ROW_FILES`].
    pub(super) profiles: [Profile; 2],
}

/// Result of a fit.
pub struct FrameworkFit {
    /// Names and values of the fitted coefficients.
    pub coefficients: Vec<(&'static str, f64)>,
    /// The text of `data/fits/gpt-a100.json`.
    pub intervals: String,
}

impl FrameworkRows {
    /// Reads `vtrain-a100-single-sample.csv` and `vtrain-a100-multi-sample.csv` in a folder.
    ///
    /// # Errors
    /// A file that cannot be read, or without the columns of such rows.
    pub fn read(folder: &Path) -> io::Result<FrameworkRows> {
        let [single, multi] = &ROW_FILES;
        let profile = |file: &RowFile| preset(file.hardware).map_err(invalid);
        Ok(FrameworkRows {
            rows: [single.read(folder)?, multi.read(folder)?].concat(),
            profiles: [profile(single)?, profile(multi)?],
        })
    }

    /// The rows that `is_selected` accepts by index.
    pub(super) fn select(&self, is_selected: impl Fn(usize, &Measurement) -> bool) -> StepRows<'_> {
        let rows = self.rows.iter().enumerate();
        let selected = rows.filter(|(index, row)| is_selected(*index, row));
        StepRows::new(selected.filter_map(|(_, row)| self.step_row(row)).collect())
    }

    fn step_row<'a>(&'a self, row: &'a Measurement) -> Option<FrameworkStep<'a>> {
        let (step, _) = gpt_step(row)?;
        let profile = self.profile(row)?;
        Some(FrameworkStep { step, mesh: row.mesh, profile, measured_s: row.measured_s(profile) })
    }

    fn profile(&self, row: &Measurement) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.name() == row.hardware)
    }

    /// Fits the coefficients to all rows, and the intervals of the shipped coefficients.
    ///
    /// # Errors
    /// Intervals that cannot be serialized.
    pub fn fit(&self) -> io::Result<FrameworkFit> {
        let all = self.select(|_, _| true);
        let fitted = all.fit();
        let shipped = FITTED_FRAMEWORK.coefficients(&self.profiles[1]);
        let [by_row, by_model] =
            [HoldOut::Rows, HoldOut::Models].map(|unit| all.bootstrap(unit, shipped, DRAWS, SEED));
        let mut intervals = IntervalModel::of(&all, &shipped, &by_row, &by_model, provenance());
        let round = |number: &mut f64| *number = (*number * 1e4).round() / 1e4;
        for fit in [&mut intervals.by_row, &mut intervals.by_model] {
            fit.draws.iter_mut().flatten().for_each(round);
            fit.within_a_node.iter_mut().for_each(round);
            fit.across_nodes.iter_mut().for_each(round);
        }
        intervals.log_size_ranges.iter_mut().flatten().for_each(round);
        let intervals = serde_json::to_string(&intervals)?.replace("],[", "],\n[") + "\n";
        let coefficients = COEFFICIENT_NAMES.into_iter().zip(fitted).collect();
        Ok(FrameworkFit { coefficients, intervals })
    }

    /// The text of `data/fits/gpt-a100-rows.txt`: the conditions of each file, followed by the digests of its rows, sorted
    /// to hide the order of the rows.
    pub fn digests(&self) -> String {
        let of_file = |profile: &Profile| {
            let digest = |row: &Measurement| {
                let (step, gpt) = gpt_step(row)?;
                let (hardware, recompute) = (row.hardware.clone(), step.recompute);
                let conditions = FitConditions { hardware, recompute, vocabulary: gpt.vocabulary };
                let digest = row_digest(step, row.mesh, row.measured_s(profile))?;
                Some((conditions.labels().join(" "), digest))
            };
            let own_rows = self.rows.iter().filter(|row| row.hardware == profile.name());
            let mut digests: Vec<(String, String)> = own_rows.filter_map(digest).collect();
            digests.sort();
            let heading = digests.first().map_or(String::new(), |(heading, _)| heading.clone());
            let lines = digests.into_iter().map(|(_, digest)| digest + "\n");
            format!("{heading}\n{}", lines.collect::<String>())
        };
        self.profiles.iter().map(of_file).collect()
    }
}

/// The step and the model of a row; `None` for a row that is not a step of a GPT.
pub(super) fn gpt_step(row: &Measurement) -> Option<(&TrainingStep, &GptModel)> {
    let MeasuredQuantity::Step(step) = &row.measured else { return None };
    let TrainedModel::Gpt(gpt) = &step.model else { return None };
    Some((step, gpt))
}

/// The provenance in the shipped file of intervals, which the coefficients of its date belong to.
pub(super) fn provenance() -> Provenance {
    Provenance {
        kind: ProvenanceKind::Published,
        source: "240 steps on one node and 30 on 8 to 64 nodes of the validation rows of vTrain (KAIST); \
                 draws and residuals by `cargo run --release -p narrows-calibration --example refit_framework`"
            .into(),
        date: "2026-11-24".into(),
        assumed: vec![],
    }
}
