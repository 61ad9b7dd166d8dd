//! Measurements of GPT steps from comma-separated values.
//!
//! The first line names the columns in any order. No cell contains a comma or a line break: all that are read are numbers,
//! and names of columns without commas. Other columns are ignored:
//!
//! | column | meaning |
//! |---|---|
//! | `global batch`, `micro batch`, `sequence length` | the workload |
//! | `hidden size`, `attention heads`, `# layers` | the model |
//! | `tensor parallelism`, `data parallelism`, `pipeline parallelism` | the mesh |
//! | `# GPUs` | optional; must be the product of the mesh |
//! | `iteration time (ms)` | the measured value |
//!
//! [`CsvDefaults`] has the properties that the rows do not state. Rows that the coefficients of the framework were
//! fitted to are labelled as fitted.

use indexmap::IndexMap;
use narrows_cost_model::Executor;
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule};
use narrows_plan::{Defect, Defects, Mesh, Workload, Zero, json, short_number};

use crate::framework::fit_conditions_of;
use crate::measurements::{
    Citation, GptModel, MeasuredQuantity, Measurement, MeasurementUnit, MeasurementsFile,
    MeasurementsFormat, StepLinears, TrainedModel, TrainingStep, validate,
};

/// Properties that are common to all rows and not stated in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsvDefaults {
    /// The name of the measurements, which is also the key of their source.
    pub name: String,
    /// The source.
    pub source: Citation,
    /// The name of a hardware profile.
    pub hardware: String,
    /// Rows of the embedding.
    pub vocabulary: u64,
    /// Recomputation in the backward pass: nothing or whole blocks.
    pub recompute: Recompute,
}

/// Columns of every file.
const REQUIRED_COLUMNS: [&str; 10] = [
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
/// Reading ends after this many defects.
const DEFECTS_MAX: usize = 20;

/// Reads rows of comma-separated values.
///
/// # Errors
/// Missing and duplicate columns; else every cell that is missing or not a number, with its line; else the defects of
/// the measurements, with their lines.
pub fn measurements_from_csv(
    text: &str,
    defaults: &CsvDefaults,
) -> Result<MeasurementsFile, Defects> {
    let text = json::without_byte_order_mark(text);
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header = lines.next().map_or("", |(_, line)| line);
    let columns: Vec<String> = cells(header).map(str::to_ascii_lowercase).collect();
    check_columns(&columns)?;
    let mut defects = Defects::default();
    let mut measurements = vec![];
    let mut line_numbers = vec![];
    for (index, line) in lines {
        let cells: Vec<&str> = cells(line).collect();
        let mut row = CsvRow { line: index + 1, columns: &columns, cells, defects: &mut defects };
        measurements.push(row.measurement(defaults));
        line_numbers.push(index + 1);
        if defects.0.len() > DEFECTS_MAX {
            break;
        }
    }
    if measurements.is_empty() {
        return Err(Defect::new("line 2", "there are no rows below the column names").into());
    }
    defects.into_result(())?;
    let file = MeasurementsFile {
        format: MeasurementsFormat::V1,
        name: defaults.name.clone(),
        description: format!("{} steps of GPTs, from rows.", measurements.len()),
        sources: IndexMap::from([(defaults.name.clone(), defaults.source.clone())]),
        measurements,
    };
    validate(&file, |index| format!("line {}, ", line_numbers[index]))?;
    Ok(file)
}

/// The cells of a line. Quotes around a whole cell are not part of it.
fn cells(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(str::trim).map(|cell| {
        let within = cell.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        within.map_or(cell, str::trim)
    })
}

fn check_columns(columns: &[String]) -> Result<(), Defects> {
    let mut defects = Defects::default();
    for name in REQUIRED_COLUMNS.into_iter().chain([GPUS]) {
        match columns.iter().filter(|column| *column == name).count() {
            1 => {}
            0 if name == GPUS => {}
            0 => {
                let defect = Defect::new("line 1", format!("there is no column `{name}`"));
                defects.push(defect.hint("the first line names the columns, separated by commas"));
            }
            _ => defects
                .push(Defect::new("line 1", format!("more than one column is named `{name}`"))),
        }
    }
    defects.into_result(())
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

    /// The number in a cell; 1 for an invalid cell, which is reported.
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

    /// The count in a cell; 1 for an invalid cell, which is reported.
    fn size(&mut self, column: &str) -> u64 {
        let number = self.number(column);
        if number.fract() != 0.0 || !(1.0..1e9).contains(&number) {
            self.defect(column, format!("{} is not a count", short_number(number)));
            return 1;
        }
        number as u64
    }

    fn measurement(&mut self, defaults: &CsvDefaults) -> Measurement {
        if self.cells.len() > self.columns.len() {
            let (cells, columns) = (self.cells.len(), self.columns.len());
            let problem = format!("{cells} cells for {columns} columns");
            self.defects.push(Defect::new(format!("line {}", self.line), problem));
        }
        let mesh = Mesh {
            tensor: self.size("tensor parallelism"),
            pipeline: self.size("pipeline parallelism"),
            data: self.size("data parallelism"),
            context: 1,
        };
        let axes = [mesh.tensor, mesh.pipeline, mesh.data];
        if self.cell(GPUS).is_some() {
            let devices = self.size(GPUS);
            if u128::from(devices) != axes.map(u128::from).iter().product() {
                self.defect(GPUS, format!("{devices} is not the product of the mesh"));
            }
        }
        let gpt = GptModel {
            layers: self.size("# layers"),
            hidden: self.size("hidden size"),
            heads: self.size("attention heads"),
            vocabulary: defaults.vocabulary,
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
            recompute: defaults.recompute.into(),
            framework: None,
            interleaving: 1,
            norm: NormRule::Auto,
            weights: WeightRule::Any,
            zero: Zero::Off,
            overlap_tensor_collectives: false,
            linears: StepLinears::Any,
            accumulate_grad_in_fp32: None,
        };
        let value = self.number(TIME);
        Measurement {
            name: format!("line {}", self.line),
            table: "steps".into(),
            source: defaults.name.clone(),
            hardware: defaults.hardware.clone(),
            executor: Executor::Eager,
            mesh,
            fitted: fit_conditions_of(&step, mesh, value * 1e-3).is_some(),
            measured: MeasuredQuantity::Step(Box::new(step)),
            value,
            unit: MeasurementUnit::Ms,
            comparison_group: None,
        }
    }
}
