//! The command line: flags (`…Args`) and their resolution into settings (`…Settings`).
//!
//! There is one module per command or shared group of flags. `resolve` reads files, fills in defaults and reports all
//! errors at once. Commands see settings only.

mod calibrate;
mod check;
mod checkpoint;
mod compare;
mod convert;
mod data;
mod doctor;
mod documents;
mod export;
mod export_weights;
mod factor;
mod flags;
mod framework;
mod generate;
mod initial_weights;
mod launch;
mod lr_schedule;
mod named_files;
mod output;
mod plan;
mod plan_file;
mod plot;
mod recipe;
mod recipe_file;
mod request;
mod run;
mod run_outputs;
mod run_places;
mod run_settings;
mod schema;
mod sensitivity;
mod shell;
mod tokenizer;
mod trace;
mod training_run;
mod ui;
mod units;
mod validate;
mod validation;
mod values;
mod whatif;

use std::ffi::OsString;

use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};

pub use calibrate::{CalibrateArgs, CalibrateBackendArg, CalibrateSettings, CalibrateTarget};
pub use check::{CheckArgs, CheckSettings};
pub use checkpoint::{CheckpointSettings, RunOrigin};
pub use compare::{CompareArgs, CompareSettings};
pub use convert::ConvertArgs;
pub use data::{DataArgs, DataTask, TokenFileSettings};
pub use doctor::DoctorArgs;
pub use documents::DocumentFiles;
pub use export::{ExportArgs, PlanExportSettings};
pub use export_weights::{ExportClassArg, ExportSettings, ExportWeightsArgs};
pub use factor::{FactorArgs, FactorSettings};
pub use flags::{TypedFlags, flags, in_words, omitted, set_flag};
pub use framework::in_flag as framework_flag;
pub use generate::{GenerateArgs, GenerateSettings};
pub use launch::process_of_words;
pub use named_files::NamedFiles;
pub use output::{Detail, OutputFormat, OutputSettings};
pub use plan::{
    CostArgs, CostSettings, ExplainArgs, ExplainSettings, FrameworkCostSettings, PlanArgs,
    PlanReportSettings, PlanSelection, PlanSettings, PlanningArgs,
};
pub use plan_file::PlanFile;
pub use plot::PlotArgs;
pub use recipe::{Recipe, flags_of_optimizer};
pub use recipe_file::schema as recipe_schema;
pub use request::{RequestArgs, at_most_one_stdin, validate};
pub use run::{BackendArg, RunArgs};
pub use run_places::RunPlaces;
pub use run_settings::{
    ExecutionTarget, RunSettings, RunTask, TokenSource, TrainSettings, VerifyData,
};
pub use schema::{SchemaArgs, SchemaKind};
pub use sensitivity::{SensitivityArgs, SensitivitySettings};
pub use shell::{CompletionsArgs, ManArgs};
pub use tokenizer::tokenizer_files_of;
pub use trace::TraceSettings;
pub use training_run::TrainingRunArgs;
pub use ui::UiArgs;
pub use units::memory_limit;
pub use validate::{MeasurementInput, ValidateArgs, ValidateSettings};
pub use validation::ValidationSettings;
pub use whatif::{WhatIfArgs, WhatIfSettings, WhatIfTask};

/// Plans the training of low-rank language models on many devices.
///
/// From a model and a hardware profile, narrows finds the fastest way of splitting the work, proves
/// that no plan in its search space is faster or reports the gap, and writes the plan to a file. Exit
/// codes: 0 success, 1 no plan exists or a check or a run failed, 2 bad input, 75 a fault of the
/// environment such as a full disk, 130 stopped by a signal.
#[derive(Debug, Parser)]
#[command(name = "narrows", version, max_term_width = 100, arg_required_else_help = true)]
pub struct CommandLine {
    /// The command.
    #[command(subcommand)]
    pub command: Command,

    /// The files that the words name.
    #[arg(skip)]
    pub files: NamedFiles,
}

/// A command; each is a file under `commands`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Find the fastest plan
    ///
    /// The first Ctrl-C ends the search as --time-limit does, with the best plan so far; a second one ends the program.
    Plan(PlanArgs),
    /// Predict the step time and the memory of a plan
    ///
    /// With PLAN, the flags for batch, sequence length, microbatch, mesh and ZeRO replace the values of
    /// the plan before it is priced. Without PLAN, the fastest plan is searched and priced. With --framework, the step
    /// is that of a full-rank model under another framework, on the mesh of the flags.
    /// Example: cost --framework torchtitan --model llama-7b --hardware h100-sxm --devices 64 --micro-batch 1
    Cost(CostArgs),
    /// Explain why a plan is the fastest, what limits it, and how the baselines compare
    ///
    /// With PLAN, the search runs for the model, hardware and batch of the plan, and PLAN is compared
    /// with the plan that it finds. The first Ctrl-C ends the search, with the best plan so far, or leaves out alternatives
    /// that are not planned yet; a second one ends the program.
    Explain(ExplainArgs),
    /// Compare plans of one model: decisions, step time, memory and communication
    ///
    /// The largest differences come first. With --with-search, the plans are compared with the fastest plan for
    /// the hardware, the devices and the batch of the first one.
    Compare(CompareArgs),
    /// Plan a request anew for every combination of swept values
    ///
    /// What if the rank were 512, the cluster had 64 devices, or the links between nodes half the bandwidth?
    /// Every point is searched as by plan without a time limit: its plan is proven the fastest, or how much less time another
    /// one may take is printed. Example: whatif --model cola-7b --devices 8
    /// --sweep rank=256,512,1024 --sweep hardware.links.inter_node.bandwidth_gbps=12.5,25,50
    #[command(name = "whatif")]
    WhatIf(Box<WhatIfArgs>),
    /// Rank the numbers that a step time depends on, and what to buy or to measure next
    ///
    /// Varies every number of the hardware, the model and the workload, and plans anew for each value: by how
    /// many percent does the step time change for one percent, what do faster links or devices gain, and which assumed
    /// numbers would change the plan. Example: sensitivity --model cola-7b --devices 8
    Sensitivity(Box<SensitivityArgs>),
    /// Serve a page on which the plan follows sliders: model, cluster, rank, batch, bandwidth, memory
    ///
    /// The page needs no network and is served to this machine only. Ctrl-C ends the server. The flags below are what
    /// the page begins with: flags without a control apply to every plan.
    #[command(
        mut_arg("model", |arg| arg.help(MODEL_OF_UI).long_help(MODEL_OF_UI)),
        mut_arg("hardware", |arg| arg.help(HARDWARE_OF_UI).long_help(HARDWARE_OF_UI)),
        mut_arg("devices", |arg| arg.help(DEVICES_OF_UI)),
        mut_arg("global_batch", |arg| arg.help(GLOBAL_BATCH_OF_UI)),
    )]
    Ui(Box<UiArgs>),
    /// Prove that a plan is correct: layouts, collectives, transfers, buffer lifetimes, memory
    Check(CheckArgs),
    /// Write a plan as the configuration of another training framework
    ///
    /// Every decision of the plan is exact, approximated or not expressible there. Where any is not expressible, nothing is
    /// written and the exit code is 1, unless --allow-loss is given. docs/export.md says which decisions survive.
    Export(ExportArgs),
    /// Train a model under a plan, or count what a plan executes
    ///
    /// Without PLAN, the fastest plan is searched and run. By default that is cola-tiny on one device
    /// that uses all cores, in steps of 8 sequences of 128 tokens. This machine is measured for some
    /// seconds first, unless `calibrate` did so before. After Ctrl-C, SIGTERM or SIGUSR1 the run finishes its
    /// step, reports, and exits with code 130. Where a disk is full or a token file was truncated, it writes a
    /// checkpoint, if there is a folder for them, and exits with code 75.
    #[command(
        mut_arg("hardware", |arg| arg.long_help(HARDWARE_OF_RUN)),
        mut_arg("global_batch", |arg| arg.help(GLOBAL_BATCH_OF_RUN)),
        mut_arg("sequence_length", |arg| arg.help(SEQUENCE_LENGTH_OF_RUN)),
    )]
    Run(Box<RunArgs>),
    /// Draw the metrics of training runs: loss, gradient norm, learning rate, measured and predicted step time
    ///
    /// Several runs are drawn in one picture. Example: plot run.jsonl other.jsonl --output runs.svg
    Plot(PlotArgs),
    /// Make a token file from texts, or inspect one
    ///
    /// Inputs are joined in the order given, or interleaved by --weights. Without --tokenizer every byte is a token.
    Data(DataArgs),
    /// Continue a text with the weights of a checkpoint
    ///
    /// Runs on the CPU, in f32, whatever plan the checkpoint was written under, and prints the text as it comes.
    /// Example: generate checkpoints --prompt "Call me" --tokens 50
    Generate(GenerateArgs),
    /// Write the weights of a checkpoint for the classes of another training code
    ///
    /// Writes the weights and a config.json, so that `from_pretrained` of the class loads the folder;
    /// for Nanotron, the folder of a checkpoint. Weights are F32.
    ExportWeights(ExportWeightsArgs),
    /// Make a low-rank model from a dense one by singular value decomposition
    ///
    /// Writes the factors of every linear and a model file, with the error of each. Train them with
    /// `run --model DIR/model.json --init-from DIR`.
    Factor(FactorArgs),
    /// Compare predictions with measurements
    ///
    /// Without --measurements, the built-in published measurements are compared.
    Validate(ValidateArgs),
    /// Convert rows of step times, in CSV or in JSON, into a measurements file
    ///
    /// CSV rows are GPTs. The first line names the columns: global batch, micro batch, hidden size, attention
    /// heads, # layers, sequence length, tensor parallelism, data parallelism, pipeline parallelism, iteration
    /// time (ms). Flags give the values that the rows omit. Rows in JSON are decoders under FSDP, torchtitan,
    /// Nanotron or Megatron-LM; docs/measurements-format.md has their fields.
    Convert(ConvertArgs),
    /// Measure this machine and write its hardware profile
    ///
    /// Times the instructions of training steps of small models under plans of every kind; on GPUs
    /// (--backend cuda, one process each) also whole steps. Other programs that run meanwhile distort
    /// the measurement. `run` predicts with the profile.
    Calibrate(CalibrateArgs),
    /// Report what this machine can run, and what is missing
    ///
    /// The CUDA libraries are searched in NARROWS_CUDA_LIBRARIES, LD_LIBRARY_PATH, CUDA_HOME,
    /// VIRTUAL_ENV and CONDA_PREFIX, in the usual system folders, and in the packages of the Python on
    /// the PATH.
    Doctor(DoctorArgs),
    /// Print the JSON Schema of a file format, or of the answer of a command
    Schema(SchemaArgs),
    /// Print completions of commands and flags for a shell
    ///
    /// Example: completions bash > ~/.local/share/bash-completion/completions/narrows
    Completions(CompletionsArgs),
    /// Write manual pages: one for the program, and one for each command
    ///
    /// Example: man ~/.local/share/man/man1
    Man(ManArgs),
}

impl CommandLine {
    /// Parses the words of a command line. A negative number is the value of the flag before it, so that its message says
    /// which values are valid.
    ///
    /// # Errors
    /// Unknown flags and invalid values, and requests for the help or the version.
    pub fn parse_from_words(
        words: impl IntoIterator<Item = OsString>,
    ) -> Result<CommandLine, clap::Error> {
        let takes_numbers = |arg: Arg| match arg.get_action().takes_values() {
            true if !arg.is_positional() => arg.allow_negative_numbers(true),
            _ => arg,
        };
        let mut command =
            CommandLine::command().mut_subcommands(|subcommand| subcommand.mut_args(takes_numbers));
        let matches = command.try_get_matches_from_mut(words)?;
        let parsed = CommandLine::from_arg_matches(&matches)?;
        Ok(CommandLine { files: NamedFiles::of(&command, &matches), ..parsed })
    }
}

const HARDWARE_OF_RUN: &str = "Hardware to plan for: a preset such as cpu-local, a profile file, or `-` [default: \
    this machine as measured; with --backend cuda the profile that `calibrate --backend cuda` cached for these GPUs, \
    or the preset nearest to them; cpu-local with --backend null]\n\n\
    With a plan file: the profile that the plan names.";
const GLOBAL_BATCH_OF_RUN: &str = "Sequences in one optimizer step, over all devices [default: 8, \
    rounded up to a multiple of the devices]";
const SEQUENCE_LENGTH_OF_RUN: &str =
    "Tokens in a sequence [default: 128, or the model's longest if that is less]";
const MODEL_OF_UI: &str =
    "Model: a preset, a model file or a Hugging Face config.json [default: cola-7b]";
const HARDWARE_OF_UI: &str = "Hardware: a preset or a profile file [default: a100-80gb]";
const DEVICES_OF_UI: &str = "Number of devices [default: 16]";
const GLOBAL_BATCH_OF_UI: &str = "Sequences in one optimizer step, over all devices [default: 64; with --devices, one per device]";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn any_words_are_parsed_or_rejected() {
        let words = [
            "plan",
            "run",
            "--steps",
            "--model",
            "-",
            "--zero",
            "one",
            "--devices",
            "9e9",
            "=",
            "§",
        ];
        arbtest::arbtest(|u| {
            let mut line = vec!["narrows".to_owned()];
            for _ in 0..u.int_in_range(0..=8)? {
                line.push(u.choose(&words)?.to_string());
            }
            let _ = CommandLine::parse_from_words(line.into_iter().map(OsString::from));
            Ok(())
        })
        .budget_ms(200);
    }
}
