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
//! What the rows do not say is [`Assumed`], and said once for all of them.

use indexmap::IndexMap;
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule, Zero};
use narrows_plan::{Defect, Defects, Mesh, Workload};

use super::{
    Format, Gpt, Measured, Measurement, MeasurementsFile, Source, Step, Subject, Unit, check,
};
use crate::Executor;

/// What rows do not say of themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assumed {
    /// The name of the measurements, their table and their source.
    pub name: String,
    /// Who measured them.
    pub source: Source,
    /// The name of a hardware profile.
    pub hardware: String,
    /// Rows of the embedding.
    pub vocabulary: u64,
    /// What the backward pass computed again.
    pub recompute: Recompute,
}

/// Reads rows.
///
/// # Errors
/// Every cell that is missing or no number, with its line; then what [`read`](super::read) finds.
pub fn from_rows(text: &str, assumed: &Assumed) -> Result<MeasurementsFile, Defects> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header = lines.next().map_or("", |(_, line)| line);
    let columns: Vec<String> =
        header.split(',').map(|name| name.trim().to_ascii_lowercase()).collect();
    let mut defects = Defects::default();
    let mut measurements = vec![];
    for (index, line) in lines {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let mut row = Row { line: index + 1, columns: &columns, cells, defects: &mut defects };
        measurements.push(row.measurement(assumed));
        if defects.0.len() > 20 {
            break;
        }
    }
    defects.into_result(())?;
    let file = MeasurementsFile {
        format: Format::V1,
        name: assumed.name.clone(),
        description: format!("{} steps of GPTs, from rows.", measurements.len()),
        sources: IndexMap::from([(assumed.name.clone(), assumed.source.clone())]),
        measurements,
    };
    check::check(&file)?;
    Ok(file)
}

struct Row<'a> {
    line: usize,
    columns: &'a [String],
    cells: Vec<&'a str>,
    defects: &'a mut Defects,
}

impl Row<'_> {
    fn defect(&mut self, column: &str, problem: String) {
        let place = format!("line {}, column `{column}`", self.line);
        self.defects.push(Defect::new(place, problem));
    }

    fn cell(&self, column: &str) -> Option<&str> {
        let at = self.columns.iter().position(|name| name == column)?;
        self.cells.get(at).copied()
    }

    fn number(&mut self, column: &str) -> f64 {
        match self.cell(column).map(str::parse::<f64>) {
            Some(Ok(number)) => number,
            Some(Err(_)) => {
                self.defect(column, "is not a number".into());
                1.0
            }
            None => {
                self.defect(column, "is missing".into());
                1.0
            }
        }
    }

    fn size(&mut self, column: &str) -> u64 {
        let number = self.number(column);
        if number.fract() != 0.0 || !(1.0..1e9).contains(&number) {
            self.defect(column, format!("{number} is not a count"));
            return 1;
        }
        number as u64
    }

    fn measurement(&mut self, assumed: &Assumed) -> Measurement {
        let mesh = Mesh {
            tensor: self.size("tensor parallelism"),
            pipeline: self.size("pipeline parallelism"),
            data: self.size("data parallelism"),
        };
        if self.cell("# gpus").is_some() {
            let devices = self.size("# gpus");
            if devices != mesh.tensor * mesh.pipeline * mesh.data {
                self.defect("# gpus", format!("{devices} devices are not those of the mesh"));
            }
        }
        let gpt = Gpt {
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
        let step = Step {
            model: Subject::Gpt(gpt),
            workload,
            strategy: Baseline::FullrankTp,
            recompute: assumed.recompute,
            norm: NormRule::Auto,
            weights: WeightRule::Any,
            zero: Zero::Off,
        };
        Measurement {
            name: format!("line {}", self.line),
            table: "steps".into(),
            source: assumed.name.clone(),
            hardware: assumed.hardware.clone(),
            executor: Executor::Eager,
            mesh,
            measured: Measured::Step(Box::new(step)),
            value: self.number("iteration time (ms)"),
            unit: Unit::Ms,
            race: None,
            fitted: false,
        }
    }
}
