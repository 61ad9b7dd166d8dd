//! Flags of `convert`.

use std::ffi::OsString;

use clap::Args;
use narrows_calibration::CsvDefaults;
use narrows_calibration::measurements::Citation;

use super::values::GptRecomputeArg;

/// Flags of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// A CSV file, or `-`
    #[arg(value_name = "ROWS")]
    pub rows: OsString,
    /// Name of the measurements
    #[arg(long, default_value = "rows")]
    pub name: String,
    /// Citation of the source
    #[arg(long, default_value = "unspecified")]
    pub source: String,
    /// Hardware of the measurements: a preset such as a100-80gb-8, or the name of a profile passed to
    /// `validate`
    ///
    /// The profile also sets the number of devices per node and the interconnect, which the rows omit.
    #[arg(long, value_name = "NAME")]
    pub hardware: String,
    /// Activations that were recomputed
    #[arg(long, value_name = "WHAT", value_enum)]
    pub recompute: GptRecomputeArg,
    /// Vocabulary size
    #[arg(long, value_name = "N", default_value_t = 51_200)]
    pub vocabulary: u64,
}

impl ConvertArgs {
    /// The properties that the rows share.
    pub fn csv_defaults(&self) -> CsvDefaults {
        let source = Citation {
            citation: self.source.clone(),
            conditions: format!(
                "Not specified by the rows: recomputation `{}`, a vocabulary of {}, hardware `{}`.",
                self.recompute.name(),
                self.vocabulary,
                self.hardware
            ),
        };
        CsvDefaults {
            name: self.name.clone(),
            source,
            hardware: self.hardware.clone(),
            vocabulary: self.vocabulary,
            recompute: self.recompute.into(),
        }
    }
}
