//! The flags of `doctor`.

use clap::Args;

use super::low::Format;

/// Flags of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// How the answer is printed
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}
