//! From what was typed to what is meant: files read, defaults filled in, sense checked. The only
//! place where that happens.

use std::ffi::{OsStr, OsString};

use narrows_cost_model::{Executor, Profile};
use narrows_plan::decisions::PlanSource;
use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::{Baseline, NormRule, Recompute, Rules, WeightRule};
use narrows_plan::{Defect, Mesh, Plan};
use narrows_planner::{GroupingRule, MemoryLimit, Request};

use crate::calibrate::cache::{self, CachedProfileKey};
use crate::calibrate::machine;
use crate::errors::{CommandResult, ExitStatus, Failure, Problem, Problems};
use crate::input;
use crate::output;

use super::low::{ModelArgs, OutputArgs, OutputFormat, RequestArgs, executor_name};

/// What is meant by who does not say.
#[derive(Clone, Copy, Debug)]
pub struct ModelDefaults {
    /// The model; `None` when it has to be said.
    pub model: Option<&'static str>,
    /// The hardware.
    pub hardware: &'static str,
    /// The devices.
    pub devices: u64,
    /// Sequences of a step, rounded up to a multiple of the devices.
    pub global_batch: u64,
    /// Tokens of a sequence, or the model's longest when that is less.
    pub sequence_length: u64,
}

/// One sequence a device, as long as those of the published measurements.
const DEFAULTS: ModelDefaults = ModelDefaults {
    model: None,
    hardware: "a100-80gb",
    devices: 1,
    global_batch: 1,
    sequence_length: 4096,
};

/// A plan that was read, with what it is for.
#[derive(Debug)]
pub struct PlanFile {
    /// The file's name, for messages.
    pub name: String,
    /// The plan, with the flags' sizes in place of its own.
    pub plan: Plan,
    /// The model it was made for.
    pub model: Model,
    /// The hardware to price it on.
    pub profile: Profile,
}

/// Where an answer goes, and in which form.
#[derive(Debug)]
pub struct OutputSettings {
    /// Text or JSON.
    pub format: OutputFormat,
    /// A file for the plan.
    pub output: Option<OsString>,
}

impl OutputSettings {
    /// Whether a report on standard output would get mixed up with the plan.
    pub fn plan_on_stdout(&self) -> bool {
        self.output.as_deref().is_some_and(output::is_stdout)
    }
}

/// The form of the answer. Two documents on one stream are refused.
pub fn answer(args: &OutputArgs) -> CommandResult<OutputSettings> {
    let answer = OutputSettings { format: args.format, output: args.output.clone() };
    if answer.output.as_ref().is_some_and(|file| file.is_empty()) {
        let problem = Problem::new("--output", "an empty name is no file's");
        return Err(Failure::input(problem.hint("a file for the plan, or `-`")));
    }
    if answer.format == OutputFormat::Json && answer.plan_on_stdout() {
        let problem = "the plan and the JSON answer would both go to standard output";
        let hint = "--format json alone: the plan is its `decisions`";
        return Err(Failure::input(Problem::new("--output", problem).hint(hint)));
    }
    Ok(answer)
}

/// The whole request of `plan`, and of other commands without a plan file.
pub fn request(args: &RequestArgs) -> CommandResult<Request> {
    request_with(args, &DEFAULTS)
}

/// The same, with other defaults.
pub fn request_with(args: &RequestArgs, defaults: &ModelDefaults) -> CommandResult<Request> {
    only_one_stdin(args.subject.model.iter().chain(&args.subject.hardware))?;
    let mut problems = Problems::default();
    let model = problems.take(required_model(&args.subject, defaults));
    let hardware = args.subject.hardware.as_deref().unwrap_or(OsStr::new(defaults.hardware));
    let profile = problems.take(input::profile(hardware));
    if let (Some(model), Some(profile)) = (model, profile) {
        let devices = args.devices.unwrap_or(defaults.devices);
        let sizes = RequestSizes {
            devices,
            global_batch: args.global_batch.unwrap_or(round_up(defaults.global_batch, devices)),
            sequence_length: args
                .sequence_length
                .unwrap_or(defaults.sequence_length.min(model.max_sequence_length)),
        };
        let request = assemble(args, sizes, model, profile);
        let sense = request.validate().map_err(Failure::flags);
        problems.take(sense);
        problems.take(dense_enough(&request));
        problems.failure().map_or(Ok(request), Err)
    } else {
        Err(problems.failure().unwrap_or_else(|| Failure::failed(vec![])))
    }
}

/// What every request needs to know.
struct RequestSizes {
    devices: u64,
    global_batch: u64,
    sequence_length: u64,
}

/// The request that a plan answers: its model, hardware, devices and batch, all else searched.
pub fn request_of_plan(args: &RequestArgs, file: &PlanFile) -> CommandResult<Request> {
    sensible(file)?;
    let sizes = RequestSizes {
        devices: args.devices.unwrap_or(devices(file.plan.mesh).unwrap_or(u64::MAX)),
        global_batch: args.global_batch.unwrap_or(file.plan.workload.global_batch),
        sequence_length: args.sequence_length.unwrap_or(file.plan.workload.sequence_length),
    };
    let executor = args.executor.unwrap_or(file.plan.executor);
    let request = assemble(args, sizes, file.model.clone(), file.profile.clone());
    let request = Request { executor, ..request };
    request.validate().map_err(Failure::flags)?;
    dense_enough(&request)?;
    Ok(request)
}

/// Whether a plan's sizes are ones that could have been asked for, and its model one that can be
/// planned.
pub fn sensible(file: &PlanFile) -> CommandResult<()> {
    let PlanFile { name, plan, model, profile } = file;
    let request = Request {
        model: model.clone(),
        profile: profile.clone(),
        devices: devices(plan.mesh).unwrap_or(u64::MAX),
        global_batch: plan.workload.global_batch,
        sequence_length: plan.workload.sequence_length,
        micro_batch: Some(plan.workload.micro_batch),
        tensor: Some(plan.mesh.tensor),
        pipeline: Some(plan.mesh.pipeline),
        data: Some(plan.mesh.data),
        zero: Some(plan.zero),
        rules: Rules::ALL,
        grouping: GroupingRule::Auto,
        memory_limit: MemoryLimit::None,
        executor: Executor::Captured,
        time_limit: None,
    };
    let defects = request.validate().err().unwrap_or_default().0.into_iter();
    let problems: Vec<Problem> = defects.map(|defect| in_plan(name, defect)).collect();
    if problems.is_empty() {
        Ok(())
    } else {
        Err(Failure { ending: ExitStatus::BadInput, problems })
    }
}

/// The devices of a mesh nobody has checked.
fn devices(mesh: Mesh) -> Option<u64> {
    mesh.tensor.checked_mul(mesh.pipeline)?.checked_mul(mesh.data)
}

/// A defect of a request, where the plan has what the request was made from.
fn in_plan(file: &str, defect: Defect) -> Problem {
    let field = match defect.field.as_str() {
        "devices" => "mesh",
        "global-batch" => "workload.global_batch",
        "sequence-length" => "workload.sequence_length",
        "micro-batch" => "workload.micro_batch",
        "tensor" => "mesh.tensor",
        "pipeline" => "mesh.pipeline",
        "data-parallel" => "mesh.data",
        _ => return Problem::in_flag(defect),
    };
    Problem::in_file(file, Defect { field: field.into(), ..defect })
}

fn assemble(args: &RequestArgs, sizes: RequestSizes, model: Model, profile: Profile) -> Request {
    let RequestSizes { devices, global_batch, sequence_length } = sizes;
    Request {
        devices,
        global_batch,
        sequence_length,
        micro_batch: args.micro_batch,
        tensor: args.tensor,
        pipeline: args.pipeline,
        data: args.data_parallel,
        zero: args.zero.and_then(|choice| choice.0),
        rules: Rules {
            baseline: args.strategy.unwrap_or(Baseline::Auto),
            weights: args.weights.unwrap_or(WeightRule::Any),
            norm: args.norm.unwrap_or(NormRule::Auto),
            recompute: args.recompute.unwrap_or(Recompute::Auto),
        },
        grouping: args.grouping.unwrap_or(GroupingRule::Auto),
        memory_limit: args.memory_limit,
        executor: args.executor.unwrap_or_default(),
        time_limit: args.time_limit,
        model,
        profile,
    }
}

/// The next multiple; the number itself where there is none, which the request's checks refuse.
fn round_up(number: u64, of: u64) -> u64 {
    if of == 0 { number } else { number.checked_next_multiple_of(of).unwrap_or(number) }
}

fn required_model(args: &ModelArgs, defaults: &ModelDefaults) -> CommandResult<Model> {
    let Some(model) = args.model.as_deref().or(defaults.model.map(OsStr::new)) else {
        let hint = "a preset such as cola-7b or llama-7b, or the path of a config.json";
        return Err(Failure::input(Problem::new("--model", "is missing").hint(hint)));
    };
    input::model(model)
}

/// Refuses a second `-` among inputs.
pub fn only_one_stdin<'a>(inputs: impl IntoIterator<Item = &'a OsString>) -> CommandResult<()> {
    if inputs.into_iter().filter(|input| input::is_stdin(input)).count() < 2 {
        return Ok(());
    }
    let problem = "two inputs are `-`, but there is one standard input";
    Err(Failure::input(Problem::new("-", problem).hint("a file for all but one")))
}

/// FullRank-TP is how dense models are split: on a low-rank one it has no meaning.
fn dense_enough(request: &Request) -> CommandResult<()> {
    let model = &request.model;
    if request.rules.baseline != Baseline::FullrankTp || !model.is_low_rank() {
        return Ok(());
    }
    let twin = model.dense_counterpart().name;
    let problem = format!("`fullrank-tp` is for dense models, and `{}` is low-rank", model.name);
    let problem = Problem::new("--strategy", problem);
    let problem = if presets::find(&twin).is_ok() {
        problem.hint(format!("--model {twin}, its dense twin"))
    } else {
        problem.hint(format!("a model file of its dense twin `{twin}`: every linear \"dense\""))
    };
    Err(Failure::input(problem.hint("--strategy vanilla-tp or --strategy btp for this model")))
}

/// A plan file with the model and hardware it names, or those of the flags.
pub fn plan_file(argument: &OsString, subject: &ModelArgs) -> CommandResult<PlanFile> {
    only_one_stdin([argument].into_iter().chain(&subject.model).chain(&subject.hardware))?;
    let (name, plan) = input::plan(argument)?;
    let mut problems = Problems::default();
    let model = problems.take(match &subject.model {
        Some(model) => input::model(model),
        None => named(&name, "model", &plan.model, input::model),
    });
    let profile = problems.take(match &subject.hardware {
        Some(hardware) => input::profile(hardware),
        None => match kept(&plan.hardware) {
            Some(profile) => Ok(profile),
            None => named(&name, "hardware", &plan.hardware, input::profile),
        },
    });
    let (Some(model), Some(profile)) = (model, profile) else {
        return Err(problems.failure().unwrap_or_else(|| Failure::failed(vec![])));
    };
    same_model(&name, &plan, &model)?;
    Ok(PlanFile { name, plan, model, profile })
}

/// This machine's measured profile, or that of its GPUs, if it is what a plan names.
fn kept(origin: &PlanSource) -> Option<Profile> {
    if origin.name != machine::NAME {
        return cache::of_gpus_with(&origin.fingerprint).filter(|of| of.name() == origin.name);
    }
    CachedProfileKey::of_processors(super::run::cores()).load()
}

/// What a plan names, if it is a preset.
fn named<T>(
    file: &str,
    field: &str,
    origin: &PlanSource,
    find: impl Fn(&OsStr) -> CommandResult<T>,
) -> CommandResult<T> {
    // A name in a plan is never opened as a file: plans come from anywhere.
    let known = match field {
        "model" => presets::find(&origin.name).is_ok(),
        _ => narrows_cost_model::profile::preset_names().any(|name| name == origin.name),
    };
    if known {
        return find(OsStr::new(&origin.name));
    }
    let problem = format!("`{}` is not a preset", origin.name);
    let defect = Defect::new(format!("{field}.name"), problem);
    let hint = format!("--{field} FILE, with the file that the plan was made for");
    Err(Failure::input(Problem::in_file(file, defect).hint(hint)))
}

fn same_model(file: &str, plan: &Plan, model: &Model) -> CommandResult<()> {
    let fingerprint = model.fingerprint();
    if plan.model.fingerprint == fingerprint {
        return Ok(());
    }
    let problem = format!(
        "the plan was made for a different model than `{}`: its decisions mean nothing here",
        model.name
    );
    let defect = Defect::new("model.fingerprint", problem);
    let problem = Problem::in_file(file, defect)
        .because([format!("because the plan names {}…", short(&plan.model.fingerprint))])
        .because([format!("and the model's fingerprint is {}…", short(&fingerprint))])
        .hint("--model with the model it was made for, or a new plan for this one");
    Err(Failure::input(problem))
}

/// The first digits of a hash, which people compare.
fn short(fingerprint: &str) -> String {
    fingerprint.chars().take(12).collect()
}

/// Prices the plan for the executor that a flag names, if one does.
pub fn launch(file: &mut PlanFile, args: &RequestArgs) {
    let Some(executor) = args.executor.filter(|executor| *executor != file.plan.executor) else {
        return;
    };
    let PlanFile { name, plan, .. } = file;
    let (before, now) = (executor_name(plan.executor), executor_name(executor));
    output::warn(&format!("{name} was priced for executor `{before}`; re-priced for `{now}`"));
    plan.executor = executor;
}

/// How a plan names the hardware it is for.
pub fn origin(profile: &Profile) -> PlanSource {
    PlanSource { name: profile.name().into(), fingerprint: profile.fingerprint().into() }
}

/// Puts the sizes that flags give in the place of the plan's, and refuses the flags of a search.
pub fn replace(file: &mut PlanFile, args: &RequestArgs) -> CommandResult<()> {
    let plan = &mut file.plan;
    let searching = [
        ("--strategy", args.strategy.is_some()),
        ("--recompute", args.recompute.is_some()),
        ("--norm", args.norm.is_some()),
        ("--grouping", args.grouping.is_some()),
        ("--weights", args.weights.is_some()),
        ("--time-limit", args.time_limit.is_some()),
    ];
    let mut problems = Problems::default();
    for (flag, _) in searching.iter().filter(|(_, given)| *given) {
        let problem = Problem::new(*flag, "restricts a search, and a plan file has decided");
        problems.push(problem.hint("leave it out, or leave the plan file out"));
    }
    let (mesh, workload) = (&mut plan.mesh, &mut plan.workload);
    let sizes = [
        (args.tensor, &mut mesh.tensor),
        (args.pipeline, &mut mesh.pipeline),
        (args.data_parallel, &mut mesh.data),
        (args.global_batch, &mut workload.global_batch),
        (args.sequence_length, &mut workload.sequence_length),
        (args.micro_batch, &mut workload.micro_batch),
    ];
    for (given, place) in sizes {
        *place = given.unwrap_or(*place);
    }
    if let Some(zero) = args.zero.and_then(|choice| choice.0) {
        plan.zero = zero;
    }
    if args.devices.is_some_and(|wanted| Some(wanted) != devices(plan.mesh)) {
        let problem = format!("the plan's mesh is {}", plan.mesh);
        let hint = "--tensor, --pipeline and --data-parallel change it";
        problems.push(Problem::new("--devices", problem).hint(hint));
    }
    problems.failure().map_or(Ok(()), Err)
}
