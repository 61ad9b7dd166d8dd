//! Flags of `convert`.

use std::ffi::OsString;

use clap::Args;
use narrows_calibration::CsvDefaults;
use narrows_calibration::measurements::Citation;

use crate::errors::{CommandResult, ExitStatus, Failure, Problem, Problems};

use super::values::GptRecomputeArg;

/// Default vocabulary: that of GPT-2, rounded up for a tensor axis.
const VOCABULARY: u64 = 51_200;

/// Flags of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// A file of rows, in CSV or in JSON, or `-`
    #[arg(value_name = "ROWS")]
    pub rows: OsString,
    /// Name of the measurements
    #[arg(long, default_value = "rows")]
    pub name: String,
    /// Citation of the source, for CSV [default: unspecified]
    #[arg(long)]
    pub source: Option<String>,
    /// Hardware of the measurements: a preset such as a100-80gb-8, or the name of a profile passed to
    /// `validate`. Required for CSV; rows in JSON state a device, which this replaces
    ///
    /// The profile also sets the number of devices per node and the interconnect, which the rows omit.
    #[arg(long, value_name = "NAME")]
    pub hardware: Option<String>,
    /// Activations that were recomputed. Required for CSV; rows in JSON state it
    #[arg(long, value_name = "WHAT", value_enum)]
    pub recompute: Option<GptRecomputeArg>,
    /// Vocabulary size, for CSV [default: 51200]
    #[arg(long, value_name = "N")]
    pub vocabulary: Option<u64>,
}

impl ConvertArgs {
    /// The properties that CSV rows of the file `path` share.
    ///
    /// # Errors
    /// Flags that are missing.
    pub fn csv_defaults(&self, path: &str) -> CommandResult<CsvDefaults> {
        let (Some(hardware), Some(recompute)) = (&self.hardware, self.recompute) else {
            let hardware = self.hardware.is_none().then(|| {
                let problem =
                    format!("is missing: `{path}` is read as CSV, which does not state hardware");
                Problem::new("--hardware", problem).hint("a100-80gb-8")
            });
            let recompute = self.recompute.is_none().then(|| {
                let problem = format!(
                    "is missing: `{path}` is read as CSV, which does not state recomputation"
                );
                Problem::new("--recompute", problem).hint("none, block")
            });
            let problems = hardware.into_iter().chain(recompute).collect();
            return Err(Failure { status: ExitStatus::BadInput, problems });
        };
        let vocabulary = self.vocabulary.unwrap_or(VOCABULARY);
        let source = Citation {
            citation: self.source.clone().unwrap_or("unspecified".into()),
            conditions: format!(
                "Not specified by the rows: recomputation `{}`, a vocabulary of {vocabulary}, hardware `{hardware}`.",
                recompute.name(),
            ),
        };
        Ok(CsvDefaults {
            name: self.name.clone(),
            source,
            hardware: hardware.clone(),
            vocabulary,
            recompute: recompute.into(),
        })
    }

    /// Checks that no flag states what rows in JSON, those of the file `path`, state themselves.
    ///
    /// # Errors
    /// Such a flag.
    pub fn check_json_rows(&self, path: &str) -> CommandResult<()> {
        let flags = [
            ("--recompute", self.recompute.is_some()),
            ("--source", self.source.is_some()),
            ("--vocabulary", self.vocabulary.is_some()),
        ];
        let mut problems = Problems::default();
        for (flag, _) in flags.into_iter().filter(|(_, is_set)| *is_set) {
            let problem = format!(
                "applies to CSV only, and `{path}` holds JSON rows, which carry this value"
            );
            problems.push(Problem::new(flag, problem).hint(format!("omit {flag}")));
        }
        problems.into_result()
    }
}
