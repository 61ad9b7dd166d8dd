//! The flags of `doctor`.

use clap::Args;

use super::low::OutputFormat;

/// Flags of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// How the answer is printed
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}
