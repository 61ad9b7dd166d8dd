//! What was typed: one field a flag, no file read, nothing defaulted that depends on another flag.

use std::ffi::OsString;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use narrows_cost_model::Executor;
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule, Zero};
use narrows_planner::{GroupingRule, MemoryLimit};

use super::calibrate::CalibrateArgs;
use super::doctor::DoctorArgs;
use super::run::RunArgs;
use super::units;

/// Plans the training of low-rank language models on many devices.
///
/// Describe a model and the hardware; narrows proves which way of splitting the work is fastest and
/// writes that plan down. Exit codes: 0 done, 1 no plan exists, a check or a run failed, 2 bad
/// input.
#[derive(Debug, Parser)]
#[command(name = "narrows", version, max_term_width = 100, arg_required_else_help = true)]
pub struct LowArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// One variant a file under `commands`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Find the fastest plan
    Plan(PlanArgs),
    /// Price a plan file, or what the flags describe
    ///
    /// With PLAN, the flags of batch, sequence, microbatch, mesh and ZeRO replace what the plan says
    /// before it is priced. Without PLAN, the fastest plan is searched and priced.
    Cost(PlanFileArgs),
    /// Say why a plan is the fastest, what binds it, and how the baselines compare
    ///
    /// With PLAN, the search is made for the plan's model, hardware and batch, and PLAN is compared
    /// with what it finds.
    Explain(PlanFileArgs),
    /// Prove a plan: layouts, collectives, transfers, lifetimes, memory
    Check(CheckArgs),
    /// Train a model under a plan, or count what a plan does
    ///
    /// Without PLAN the fastest plan is searched and run. What is not said is then: cola-tiny on one
    /// device of this machine, which is measured for some seconds the first time, unless `calibrate`
    /// did; steps of 8 sequences of 128 tokens. Stopped by Ctrl-C or SIGTERM, it
    /// finishes its step, reports, and exits with 130.
    #[command(
        mut_arg("hardware", |arg| arg.long_help(HARDWARE_OF_RUN)),
        mut_arg("global_batch", |arg| arg.help(GLOBAL_BATCH_OF_RUN)),
        mut_arg("sequence_length", |arg| arg.help(SEQUENCE_LENGTH_OF_RUN)),
    )]
    Run(Box<RunArgs>),
    /// Make a token file of texts, or say what one holds
    ///
    /// Texts are joined in the order given. Without --tokenizer every byte is a token.
    Data(DataArgs),
    /// Compare predictions with measurements
    ///
    /// Without --measurements: the published figures that come with the program.
    Validate(ValidateArgs),
    /// Turn rows of comma-separated values into measurements of GPT steps
    ///
    /// The first line names the columns: global batch, micro batch, hidden size, attention heads,
    /// # layers, sequence length, tensor parallelism, data parallelism, pipeline parallelism, iteration
    /// time (ms). What rows do not say, the flags do.
    Convert(ConvertArgs),
    /// Measure this machine, and write its hardware profile
    ///
    /// Steps of small models under plans of every kind are timed, instruction by instruction; of GPUs (--backend
    /// cuda, one a process) whole steps too. Whatever else runs meanwhile is measured. `run` uses the profile.
    Calibrate(CalibrateArgs),
    /// Say what this machine can run, and what it lacks
    ///
    /// Libraries of CUDA are looked for where NARROWS_CUDA_LIBRARIES, LD_LIBRARY_PATH, CUDA_HOME, VIRTUAL_ENV
    /// and CONDA_PREFIX say, where systems have them, and in the packages of the Python on the PATH.
    Doctor(DoctorArgs),
    /// Print the JSON Schema of a kind of file
    Schema(SchemaArgs),
}

const HARDWARE_OF_RUN: &str = "On what: a preset such as cpu-local, a profile file, or `-` [default: this machine, measured; \
    with --backend cuda what `calibrate --backend cuda` kept of these GPUs, otherwise the preset nearest to \
    them; cpu-local with --backend null]\n\n\
    For a plan file: the profile it names, unless given here.";
const GLOBAL_BATCH_OF_RUN: &str = "Sequences in one optimizer step, over all devices [default: 8, \
    rounded up to a multiple of the devices]";
const SEQUENCE_LENGTH_OF_RUN: &str =
    "Tokens in a sequence [default: 128, or the model's longest when that is less]";

/// Flags of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// What is asked.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Where the answer goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Flags of `cost` and `explain`.
#[derive(Debug, Args)]
pub struct PlanFileArgs {
    /// A plan file, or `-`
    #[arg(value_name = "PLAN")]
    pub plan: Option<OsString>,
    /// What is asked.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Where the answer goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Flags of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// A plan file, or `-`
    #[arg(value_name = "PLAN")]
    pub plan: OsString,
    /// Model and hardware.
    #[command(flatten)]
    pub subject: ModelArgs,
    /// Memory of a device: `auto` (the profile's, less its reserve), `none`, or bytes such as 64GiB
    #[arg(long, value_name = "BYTES", default_value = "auto", allow_hyphen_values = true)]
    #[arg(value_parser = units::memory_limit)]
    pub memory_limit: MemoryLimit,
    /// Also run a small twin of the plan, and compare loss and gradients with unsharded training
    ///
    /// The twin has the plan's mesh, stages and decisions, and small widths; its devices are threads
    /// of this machine.
    #[arg(long)]
    pub numeric: bool,
    /// Form of the answer
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

/// Flags of `data`.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// Text files, or `-`
    #[arg(value_name = "TEXT", required_unless_present = "inspect")]
    pub texts: Vec<OsString>,
    /// Write the token file here
    #[arg(long, value_name = "FILE", required_unless_present = "inspect")]
    pub output: Option<OsString>,
    /// A Hugging Face tokenizer.json, or `-` [default: every byte is a token]
    ///
    /// If it has an end-of-text token, one stands between two texts.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<OsString>,
    /// Print what a token file says of itself, and verify every byte: ours, or llm.c's
    #[arg(long, value_name = "FILE", conflicts_with_all = ["texts", "output", "tokenizer"])]
    pub inspect: Option<OsString>,
    /// Form of the answer
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

/// Flags of `validate`.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// A file of measurements, or `-`; may be given again [default: the published figures]
    #[arg(long, value_name = "FILE")]
    pub measurements: Vec<OsString>,
    /// A profile that measurements name besides the presets, as `calibrate` writes; may be given again
    ///
    /// One that calls itself like a preset is taken in its place, and the report says so.
    #[arg(long, value_name = "FILE")]
    pub hardware: Vec<OsString>,
    /// Form of the answer
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

/// Flags of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// A file of rows, or `-`
    #[arg(value_name = "ROWS")]
    pub rows: OsString,
    /// What the measurements are called
    #[arg(long, default_value = "rows")]
    pub name: String,
    /// Who measured them
    #[arg(long, default_value = "not said")]
    pub source: String,
    /// On what: a preset such as a100-80gb-8, or the name of a profile that `validate` is given
    ///
    /// It also says how many devices a node has, and what connects the nodes: rows say neither.
    #[arg(long, value_name = "NAME")]
    pub hardware: String,
    /// What the backward pass computed again, which rows do not say
    #[arg(long, value_name = "WHAT", value_parser = named(&RECOMPUTE_OF_GPT))]
    pub recompute: Recompute,
    /// Rows of the embedding
    #[arg(long, value_name = "N", default_value_t = 51_200)]
    pub vocabulary: u64,
}

impl ConvertArgs {
    /// The name of what was computed again.
    pub fn recompute_name(&self) -> &'static str {
        name_of(&RECOMPUTE_OF_GPT, &self.recompute)
    }
}

/// Flags of `schema`.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// Which files
    #[arg(value_enum)]
    pub kind: SchemaKind,
}

/// What has a schema.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum SchemaKind {
    /// Model files
    Model,
    /// Hardware profiles
    Profile,
    /// Plans
    Plan,
    /// Measurements
    Measurements,
}

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// For people
    Text,
    /// One JSON document
    Json,
}

/// What the search minimises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Objective {
    /// Seconds of one optimizer step
    StepTime,
}

/// Model and hardware.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// What to train: a preset such as cola-7b, a model file, a Hugging Face config.json, or `-`
    ///
    /// Presets: llama-, cola-, svd- or lax- with 60m, 130m, 350m, 1b, 3b, 7b, 13b, 30b or 40b, and
    /// cola-tiny. For a plan file: the model it names, unless given here.
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<OsString>,
    /// On what: a preset such as a100-80gb, a profile file, or `-` [default: a100-80gb]
    ///
    /// For a plan file: the profile it names, unless given here.
    #[arg(long, value_name = "NAME|FILE")]
    pub hardware: Option<OsString>,
}

/// Everything the search depends on.
#[derive(Debug, Args)]
pub struct RequestArgs {
    /// Model and hardware.
    #[command(flatten)]
    pub subject: ModelArgs,
    /// Number of devices [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub devices: Option<u64>,
    /// Sequences in one optimizer step, over all devices [default: one a device]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub global_batch: Option<u64>,
    /// Tokens in a sequence [default: 4096, or the model's longest when that is less]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub sequence_length: Option<u64>,
    /// Sequences a replica processes at a time [default: searched]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub micro_batch: Option<u64>,
    /// Devices that split tensors [default: searched]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub tensor: Option<u64>,
    /// Pipeline stages [default: searched]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub pipeline: Option<u64>,
    /// Replicas that split the batch [default: searched]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub data_parallel: Option<u64>,
    /// Sharding of optimizer states over the replicas: auto, off or 1 [default: auto]
    #[arg(long, value_name = "STAGE", value_parser = named(&ZERO))]
    pub zero: Option<ZeroChoice>,
    /// Which plans are searched: all of them, or those of a published baseline [default: auto]
    #[arg(long, value_parser = named(&STRATEGY))]
    pub strategy: Option<Baseline>,
    /// What the backward pass may compute again [default: auto]
    #[arg(long, value_name = "WHAT", value_parser = named(&RECOMPUTE))]
    pub recompute: Option<Recompute>,
    /// How a norm over sharded features gets its statistic [default: auto]
    #[arg(long, value_parser = named(&NORM))]
    pub norm: Option<NormRule>,
    /// Whether factors that share an input run as one product [default: auto]
    #[arg(long, value_parser = named(&GROUPING))]
    pub grouping: Option<GroupingRule>,
    /// Whether weights may be replicated over the tensor axis [default: any]
    #[arg(long, value_parser = named(&WEIGHTS))]
    pub weights: Option<WeightRule>,
    /// Memory of a device: `auto` (the profile's, less its reserve), `none`, or bytes such as 64GiB
    #[arg(long, value_name = "BYTES", default_value = "auto", allow_hyphen_values = true)]
    #[arg(value_parser = units::memory_limit)]
    pub memory_limit: MemoryLimit,
    /// How kernels are launched: a captured graph with fused passes, or one by one [default: captured]
    ///
    /// For a plan file: as it was priced, unless given here.
    #[arg(long, value_parser = named(&EXECUTOR))]
    pub executor: Option<Executor>,
    /// What is minimised
    #[arg(long, value_enum, default_value_t = Objective::StepTime)]
    pub objective: Objective,
    /// When to stop searching [default: when the plan is proven the fastest]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = units::seconds)]
    pub time_limit: Option<Duration>,
}

/// Where the answer goes.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Write the plan to this file, or `-`
    #[arg(long, value_name = "FILE")]
    pub output: Option<OsString>,
    /// Form of the answer
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

type ValueNames<T> = [(&'static str, T)];

/// A stage of ZeRO, or `None` for a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroChoice(pub Option<Zero>);

const ZERO: [(&str, ZeroChoice); 5] = [
    ("auto", ZeroChoice(None)),
    ("off", ZeroChoice(Some(Zero::Off))),
    ("0", ZeroChoice(Some(Zero::Off))),
    ("1", ZeroChoice(Some(Zero::One))),
    ("one", ZeroChoice(Some(Zero::One))),
];

const STRATEGY: [(&str, Baseline); 5] = [
    ("auto", Baseline::Auto),
    ("fullrank-tp", Baseline::FullrankTp),
    ("vanilla-tp", Baseline::VanillaTp),
    ("vanilla-tp-published", Baseline::VanillaTpPublished),
    ("btp", Baseline::Btp),
];

const RECOMPUTE: [(&str, Recompute); 4] = [
    ("auto", Recompute::Auto),
    ("none", Recompute::None),
    ("latents", Recompute::Latents),
    ("block", Recompute::Block),
];

/// Steps of GPTs are priced with no other.
const RECOMPUTE_OF_GPT: [(&str, Recompute); 2] =
    [("none", Recompute::None), ("block", Recompute::Block)];

const NORM: [(&str, NormRule); 3] =
    [("auto", NormRule::Auto), ("sync", NormRule::Sync), ("online", NormRule::Online)];

const GROUPING: [(&str, GroupingRule); 3] =
    [("auto", GroupingRule::Auto), ("on", GroupingRule::On), ("off", GroupingRule::Off)];

const WEIGHTS: [(&str, WeightRule); 2] =
    [("any", WeightRule::Any), ("sharded", WeightRule::Sharded)];

const EXECUTOR: [(&str, Executor); 2] =
    [("captured", Executor::Captured), ("eager", Executor::Eager)];

/// Parses one of a few names.
fn named<T>(names: &'static ValueNames<T>) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    PossibleValuesParser::new(names.iter().map(|(name, _)| *name)).map(move |given| {
        // The first parser lets nothing else through.
        let found = names.iter().find(|(name, _)| *name == given);
        found.map_or(names[0].1, |(_, value)| *value)
    })
}

/// The name of a value among those of a flag.
pub fn name_of<T: PartialEq>(names: &'static ValueNames<T>, value: &T) -> &'static str {
    names.iter().find(|(_, known)| known == value).map_or("", |(name, _)| name)
}

/// The name of an executor.
pub fn executor_name(executor: Executor) -> &'static str {
    name_of(&EXECUTOR, &executor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        LowArgs::command().debug_assert();
    }

    #[test]
    fn every_baseline_has_its_name() {
        for baseline in Baseline::ALL {
            assert_eq!(name_of(&STRATEGY, &baseline), baseline.name());
        }
    }

    #[test]
    fn any_words_are_parsed_or_refused() {
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
            let _ = LowArgs::try_parse_from(line);
            Ok(())
        })
        .budget_ms(200);
    }
}
