//! Flags of `completions` and `man`.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

/// Flags of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Flags of `man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder for the pages, which is created
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}
