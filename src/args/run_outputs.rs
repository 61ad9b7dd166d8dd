//! Outputs of `run`, which must differ from each other and from its inputs.

use std::ffi::OsString;
use std::path::Path;

use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

use super::data::{is_file_of, is_same_file, output_is_input};
use super::output::{OutputFormat, OutputSettings, reject_repeated_outputs};
use super::recipe::RecipeArgs;
use super::run::RunArgs;

impl RunArgs {
    pub(super) fn reject_two_documents_on_stdout(
        &self,
        output: &OutputSettings,
    ) -> CommandResult<()> {
        if !self.metrics.as_deref().is_some_and(output::is_stdout) {
            return Ok(());
        }
        let other = match output.format {
            OutputFormat::Json => "JSON answer",
            OutputFormat::Text if output.plan_on_stdout() => "plan",
            OutputFormat::Text => return Ok(()),
        };
        let message = format!("the metrics and the {other} would both go to standard output");
        Err(Failure::input(Problem::new("--metrics", message).hint("the name of a file")))
    }

    /// Rejects outputs that are also other outputs or inputs that a recipe or a folder names; files that the words name are
    /// checked with the words. A truncated token file would end the run.
    pub(super) fn reject_overwritten_inputs(&self, recipe: &RecipeArgs) -> CommandResult<()> {
        let (data, eval_data) = (self.data(recipe), self.validation.file(recipe));
        let init_from = self.initial_weights.init_from.clone().map(OsString::from);
        let outputs = [
            ("--metrics", &self.metrics),
            ("--output", &self.output.output),
            ("--trace", &self.trace.trace),
        ];
        let outputs: Vec<(&str, &Path)> = outputs
            .iter()
            .filter_map(|(flag, output)| Some((*flag, Path::new(output.as_ref()?))))
            .filter(|(_, output)| !output::is_stdout(output.as_os_str()))
            .collect();
        reject_repeated_outputs(&outputs)?;
        for (flag, output) in outputs {
            let is_overwritten = |input: &&OsString| is_same_file(input, output);
            let is_in_folder = |folder: &&OsString| is_file_of(folder, output);
            let folder = init_from.iter().find(is_in_folder);
            let file = data.iter().chain(&eval_data).find(is_overwritten);
            if let Some(input) = file.or(folder) {
                return Err(Failure::input(output_is_input(flag, input)));
            }
        }
        Ok(())
    }
}
