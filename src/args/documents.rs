//! Flags for a picture and a page of the answer.

use std::path::PathBuf;

use clap::Args;

use crate::errors::CommandResult;
use crate::output;
use crate::plot::check_picture_file;

/// `--plot` and `--report`: files for people beside the answer.
#[derive(Clone, Debug, Args)]
pub struct DocumentFiles {
    /// Draw the step times to this file, .svg or .png
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Write the answer with pictures to this HTML file
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

impl DocumentFiles {
    /// The files, checked before a long computation.
    ///
    /// # Errors
    /// A picture that is neither SVG nor PNG, and files that cannot be written.
    pub fn resolve(&self) -> CommandResult<DocumentFiles> {
        self.plot.as_deref().map_or(Ok(()), check_picture_file)?;
        self.report.as_deref().map_or(Ok(()), output::check_writable)?;
        Ok(self.clone())
    }
}
