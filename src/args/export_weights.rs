//! Flags of `export-weights`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use narrows_plan::model::Model;

use crate::errors::CommandResult;
use crate::weight_files::WeightFiles;

use super::output::FormatArgs;

/// Flags of `export-weights`.
#[derive(Debug, Args)]
pub struct ExportWeightsArgs {
    /// The folder of a checkpoint or of a run's checkpoints, or weights as --init-from reads them
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Model of the weights: a preset, a model file or a Hugging Face config.json [default: the model.json or else the
    /// config.json beside the weights]
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<OsString>,
    /// Class that is to load the weights
    #[arg(long, value_enum)]
    pub to: ExportClassArg,
    /// New folder for the weights and the configuration
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// `--to` of `export-weights`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportClassArg {
    /// CoLA's ColaForCausalLM
    Cola,
    /// LlamaForCausalLM of transformers; factor pairs without an activation become dense
    Llama,
    /// LORO's code, whose factors are `weight_in` and `weight_out` beside LLaMA's names and config.json
    Loro,
    /// Nanotron: BOOST's ColaLlamaForTraining, or LlamaForTraining for dense models
    Nanotron,
}

/// Settings of `export-weights`.
#[derive(Debug)]
pub struct ExportSettings {
    /// The weights.
    pub weights: WeightFiles,
    /// The model.
    pub model: Model,
    /// Class that is to load the weights.
    pub class: ExportClassArg,
}

impl ExportWeightsArgs {
    /// The settings.
    ///
    /// # Errors
    /// A model that cannot be found or read.
    pub fn resolve(&self) -> CommandResult<ExportSettings> {
        let weights = WeightFiles::find(&self.checkpoint)?;
        let model = weights.model(self.model.as_deref())?;
        Ok(ExportSettings { weights, model, class: self.to })
    }
}
