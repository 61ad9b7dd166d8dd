//! Flags of `doctor`.

use clap::Args;

use super::output::{DetailArgs, FormatArgs};

/// Flags of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
}
