//! Flags of `ui`.

use std::ffi::OsString;

use clap::Args;

use super::flags::TypedFlags;
use super::plan::PlanningArgs;
use super::request::at_most_one_stdin;
use super::training_run::TrainingRunArgs;
use crate::defaults::RequestDefaults;
use crate::errors::{CommandResult, Failure, Problem};
use crate::input;

/// Flags of `ui`.
#[derive(Debug, Args)]
pub struct UiArgs {
    /// Port on 127.0.0.1; 0 takes any free one
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub port: u16,
    /// Flags of the following groups as typed.
    #[command(flatten)]
    pub typed: TypedFlags,
    /// Planning request that the page begins with.
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Training run.
    #[command(flatten)]
    pub training_run: TrainingRunArgs,
}

impl UiArgs {
    /// The model and the hardware that the page begins with.
    ///
    /// # Errors
    /// Model or hardware from standard input, which can be read only once, and an incomplete training run.
    pub fn inputs(&self, model: &str) -> CommandResult<(OsString, OsString)> {
        let inputs = &self.planning.request.model;
        let files = [("--model", &inputs.model), ("--hardware", &inputs.hardware)];
        at_most_one_stdin(files.iter().flat_map(|(_, file)| file.as_ref()))?;
        for (flag, file) in files {
            if file.as_ref().is_some_and(|file| input::is_stdin(file)) {
                let problem = Problem::new(flag, "`-` can be read only once");
                return Err(Failure::input(problem.hint("a file, which each plan reads again")));
            }
        }
        self.training_run.resolve(self.planning.request.minimises_cost())?;
        let or =
            |file: &Option<OsString>, preset: &str| file.clone().unwrap_or_else(|| preset.into());
        Ok((or(&inputs.model, model), or(&inputs.hardware, RequestDefaults::PLAN.hardware)))
    }
}
