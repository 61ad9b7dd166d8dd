//! Flags for a picture and a page of the answer.

use std::path::PathBuf;

use clap::Args;

use crate::errors::CommandResult;
use crate::output;
use crate::plot::check_picture_file;

/// `--plot` and `--report`.
#[derive(Clone, Debug, Args)]
pub struct DocumentArgs {
    /// Draw the step times to this file, .svg or .png
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Write the answer with pictures to this HTML file
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Files for people beside the answer.
#[derive(Clone, Debug)]
pub struct DocumentFiles {
    /// The first picture, as SVG or PNG.
    pub plot: Option<PathBuf>,
    /// The answer and all pictures, as HTML.
    pub report: Option<PathBuf>,
}

impl DocumentArgs {
    /// The files.
    ///
    /// # Errors
    /// A picture that is neither SVG nor PNG, and files that cannot be written.
    pub fn resolve(&self) -> CommandResult<DocumentFiles> {
        self.plot.as_deref().map_or(Ok(()), check_picture_file)?;
        self.report.as_deref().map_or(Ok(()), output::check_writable)?;
        Ok(DocumentFiles { plot: self.plot.clone(), report: self.report.clone() })
    }
}
