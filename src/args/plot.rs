//! Flags of `plot`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

/// Flags of `plot`.
#[derive(Debug, Args)]
pub struct PlotArgs {
    /// Metrics files, as `run --metrics` writes them, or `-`
    #[arg(value_name = "METRICS", required = true)]
    pub metrics: Vec<OsString>,
    /// Picture, .svg or .png
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
}
