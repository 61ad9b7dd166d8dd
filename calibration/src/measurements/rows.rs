//! Rows of comma-separated values about steps of GPTs, as measurements.
//!
//! The first line names the columns; their order is free, and columns of other names are left aside:
//!
//! | column | meaning |
//! |---|---|
//! | `global batch`, `micro batch`, `sequence length` | the workload |
//! | `hidden size`, `attention heads`, `# layers` | the model |
//! | `tensor parallelism`, `data parallelism`, `pipeline parallelism` | the mesh |
//! | `# GPUs` | must be their product, where it is given |
//! | `iteration time (ms)` | the figure |
//!
//! What the rows do not say is [`RowDefaults`], and said once for all of them. Rows that the constants for
//! GPTs were fitted to are marked as [`fitted`](crate::gpt::fitted).

use indexmap::IndexMap;
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule, Zero};
use narrows_plan::units::short;
use narrows_plan::{Defect, Defects, Mesh, Workload};

use super::{
    Citation, GptModel, MeasuredQuantity, Measurement, MeasurementUnit, MeasurementsFile,
    MeasurementsFormat, TrainedModel, TrainingStep, check,
};
use crate::gpt::fitted::fitted_to;
use narrows_cost_model::Executor;

/// What rows do not say of themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowDefaults {
    /// The name of the measurements, their table and their source.
    pub name: String,
    /// Who measured them.
    pub source: Citation,
    /// The name of a hardware profile.
    pub hardware: String,
    /// Rows of the embedding.
    pub vocabulary: u64,
    /// What the backward pass computed again: nothing or whole blocks, no other is priced.
    pub recompute: Recompute,
}

/// The columns that every row needs.
const NEEDED: [&str; 10] = [
    "global batch",
    "micro batch",
    "sequence length",
    "hidden size",
    "attention heads",
    "# layers",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    TIME,
];
const TIME: &str = "iteration time (ms)";
const GPUS: &str = "# gpus";
/// As many defects of rows are told.
const TOLD_MAX: usize = 20;

/// Reads rows.
///
/// # Errors
/// Columns that are missing or named twice; every cell that is missing or no number, with its line; then
/// what [`read`](super::read) finds, with the line of its row.
pub fn from_rows(text: &str, assumed: &RowDefaults) -> Result<MeasurementsFile, Defects> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header = lines.next().map_or("", |(_, line)| line);
    let columns: Vec<String> = cells(header).map(str::to_ascii_lowercase).collect();
    named_once(&columns)?;
    let mut defects = Defects::default();
    let mut measurements = vec![];
    let mut places = vec![];
    for (index, line) in lines {
        let cells: Vec<&str> = cells(line).collect();
        let mut row = CsvRow { line: index + 1, columns: &columns, cells, defects: &mut defects };
        measurements.push(row.measurement(assumed));
        places.push(index + 1);
        if defects.0.len() > TOLD_MAX {
            break;
        }
    }
    if measurements.is_empty() {
        return Err(
            Defect::new("line 2", "there are no rows below the names of the columns").into()
        );
    }
    defects.into_result(())?;
    let file = MeasurementsFile {
        format: MeasurementsFormat::V1,
        name: assumed.name.clone(),
        description: format!("{} steps of GPTs, from rows.", measurements.len()),
        sources: IndexMap::from([(assumed.name.clone(), assumed.source.clone())]),
        measurements,
    };
    check::check(&file).map_err(|found| by_line(found, &places))?;
    Ok(file)
}

/// The cells of a line. Quotes around a whole cell are not part of it.
fn cells(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(str::trim).map(|cell| {
        let within = cell.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        within.map_or(cell, str::trim)
    })
}

fn named_once(columns: &[String]) -> Result<(), Defects> {
    let mut defects = Defects::default();
    for name in NEEDED.into_iter().chain([GPUS]) {
        match columns.iter().filter(|column| *column == name).count() {
            1 => {}
            0 if name == GPUS => {}
            0 => {
                let defect = Defect::new("line 1", format!("there is no column `{name}`"));
                defects.push(defect.hint("the first line names the columns, with commas between"));
            }
            _ => defects.push(Defect::new("line 1", format!("two columns are named `{name}`"))),
        }
    }
    defects.into_result(())
}

/// Defects of measurements at the lines of their rows.
fn by_line(found: Defects, places: &[usize]) -> Defects {
    let place = |defect: Defect| {
        let at = defect.field.strip_prefix("measurements[").and_then(|rest| rest.split_once("]."));
        let line = |index: &str| places.get(index.parse::<usize>().ok()?);
        let field = at.and_then(|(index, field)| Some(format!("line {}, {field}", line(index)?)));
        Defect { field: field.unwrap_or_else(|| defect.field.clone()), ..defect }
    };
    Defects(found.0.into_iter().map(place).collect())
}

struct CsvRow<'a> {
    line: usize,
    columns: &'a [String],
    cells: Vec<&'a str>,
    defects: &'a mut Defects,
}

impl CsvRow<'_> {
    fn defect(&mut self, column: &str, problem: String) {
        let place = format!("line {}, column `{column}`", self.line);
        self.defects.push(Defect::new(place, problem));
    }

    fn cell(&self, column: &str) -> Option<&str> {
        let at = self.columns.iter().position(|name| name == column)?;
        self.cells.get(at).copied()
    }

    /// What stands there; 1 where that is no number, which is a defect.
    fn number(&mut self, column: &str) -> f64 {
        let Some(cell) = self.cell(column) else {
            self.defect(column, "is missing".into());
            return 1.0;
        };
        cell.parse().unwrap_or_else(|_| {
            self.defect(column, "is not a number".into());
            1.0
        })
    }

    fn size(&mut self, column: &str) -> u64 {
        let number = self.number(column);
        if number.fract() != 0.0 || !(1.0..1e9).contains(&number) {
            self.defect(column, format!("{} is not a count", short(number)));
            return 1;
        }
        number as u64
    }

    fn measurement(&mut self, assumed: &RowDefaults) -> Measurement {
        if self.cells.len() > self.columns.len() {
            let (cells, columns) = (self.cells.len(), self.columns.len());
            let problem = format!("{cells} cells, where there are {columns} columns");
            self.defects.push(Defect::new(format!("line {}", self.line), problem));
        }
        let mesh = Mesh {
            tensor: self.size("tensor parallelism"),
            pipeline: self.size("pipeline parallelism"),
            data: self.size("data parallelism"),
        };
        let axes = [mesh.tensor, mesh.pipeline, mesh.data];
        if self.cell(GPUS).is_some() {
            let devices = self.size(GPUS);
            if u128::from(devices) != axes.map(u128::from).iter().product() {
                self.defect(GPUS, format!("{devices} devices are not those of the mesh"));
            }
        }
        let gpt = GptModel {
            layers: self.size("# layers"),
            hidden: self.size("hidden size"),
            heads: self.size("attention heads"),
            vocabulary: assumed.vocabulary,
        };
        let workload = Workload {
            global_batch: self.size("global batch"),
            sequence_length: self.size("sequence length"),
            micro_batch: self.size("micro batch"),
        };
        let step = TrainingStep {
            model: TrainedModel::Gpt(gpt),
            workload,
            strategy: Baseline::FullrankTp,
            recompute: assumed.recompute,
            norm: NormRule::Auto,
            weights: WeightRule::Any,
            zero: Zero::Off,
        };
        let value = self.number(TIME);
        Measurement {
            name: format!("line {}", self.line),
            table: "steps".into(),
            source: assumed.name.clone(),
            hardware: assumed.hardware.clone(),
            executor: Executor::Eager,
            mesh,
            fitted: fitted_to(&step, mesh, value * 1e-3).is_some(),
            measured: MeasuredQuantity::Step(Box::new(step)),
            value,
            unit: MeasurementUnit::Ms,
            race: None,
        }
    }
}
