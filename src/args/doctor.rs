//! Flags of `doctor`.

use clap::Args;

use super::output::FormatArgs;

/// Flags of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Form of the answer.
    #[command(flatten)]
    pub format: FormatArgs,
}
