//! Flags for a picture and a page of the answer.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::plot::{PlotKind, check_picture_file};

use super::output::reject_repeated_outputs;

/// `--plot` and `--report`: files for people beside the answer.
#[derive(Clone, Debug, Args)]
pub struct DocumentFiles {
    /// Draw a picture of the result to this file, .svg or .png
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Picture to draw with --plot [default: the first that the command has]
    ///
    /// `plan` and `cost` have step-time, memory, pipeline, block and roofline; `explain` and `compare` have step-time; `whatif` has
    /// lines, heat-map, scaling, crossover and memory, where they suit the sweep; `sensitivity` has tornado;
    /// `validate` has step-time, gemm-efficiency and communication.
    #[arg(long, value_name = "KIND", requires = "plot")]
    pub plot_kind: Option<PlotKind>,
    /// Write the result with its pictures to this HTML file
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

impl DocumentFiles {
    /// The files, checked before a long computation. `kinds` are the pictures that the command can draw, and `others` the flags
    /// and files of its other outputs.
    ///
    /// # Errors
    /// A picture that the command does not draw or that is neither SVG nor PNG, files that cannot be written, and one file for
    /// two outputs.
    pub fn resolve(
        &self,
        kinds: &[PlotKind],
        others: &[(&str, Option<&OsStr>)],
    ) -> CommandResult<DocumentFiles> {
        if let Some(kind) = self.plot_kind.filter(|kind| !kinds.contains(kind)) {
            let message = format!("this command draws no picture `{}`", kind.name());
            return Err(Failure::input(
                Problem::new("--plot-kind", message).hint(PlotKind::names(kinds)),
            ));
        }
        for (flag, file) in [("--plot", &self.plot), ("--report", &self.report)] {
            if file.as_ref().is_some_and(|file| output::is_stdout(file.as_os_str())) {
                let problem =
                    Problem::new(flag, "`-` is standard output, which the answer is written to");
                let example = if flag == "--plot" { "plan.svg" } else { "plan.html" };
                return Err(Failure::input(problem.hint(format!("a file such as {example}"))));
            }
        }
        self.plot.as_deref().map_or(Ok(()), |file| check_picture_file("--plot", file))?;
        self.report.as_deref().map_or(Ok(()), output::check_writable)?;
        let own = [("--plot", &self.plot), ("--report", &self.report)]
            .map(|(flag, file)| (flag, file.as_deref().map(Path::as_os_str)));
        let outputs: Vec<(&str, &Path)> = own
            .iter()
            .chain(others)
            .filter_map(|(flag, file)| Some((*flag, Path::new((*file)?))))
            .collect();
        reject_repeated_outputs(&outputs)?;
        Ok(self.clone())
    }

    /// Rejects a picture of the pipeline before a search whose plans all have this number of pipeline stages; `None` if the search
    /// chooses it.
    ///
    /// # Errors
    /// A picture of the pipeline where there is one stage.
    pub fn require_pipeline(&self, stages: Option<u64>) -> CommandResult<()> {
        if self.plot_kind != Some(PlotKind::Pipeline) || stages != Some(1) {
            return Ok(());
        }
        let message = "a plan with one pipeline stage has no picture `pipeline`";
        let others: Vec<PlotKind> =
            PlotKind::OF_PLAN.iter().copied().filter(|kind| *kind != PlotKind::Pipeline).collect();
        Err(Failure::input(Problem::new("--plot-kind", message).hint(PlotKind::names(&others))))
    }
}
