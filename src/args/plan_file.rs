//! Plan files with their model and hardware, and the flags that change them.

use std::ffi::{OsStr, OsString};

use narrows_cost_model::Profile;
use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::Rules;
use narrows_plan::{BucketSplit, Defect, Executor, GradReduceDtype, Mesh, Plan, PlanSource, Zero};
use narrows_planner::{GroupingRule, MemoryLimit, Objective, Request, RequestDefect, RequestField};

use crate::calibrate::cache::{self, CachedProfileKey};
use crate::calibrate::machine;
use crate::errors::{CommandResult, ExitStatus, Failure, Problem, Problems};
use crate::host::cores;
use crate::{input, output};

use super::request::{
    ModelArgs, RequestArgs, RequestSizes, at_most_one_stdin, reject_dense_baseline_of_low_rank,
};
use super::values::{ContextAttentionArg, OverlapArg, ScheduleArg, ZeroArg};

/// A plan with its model and hardware.
#[derive(Debug)]
pub struct PlanFile {
    /// The name of the file, for messages.
    pub name: String,
    /// The plan.
    pub plan: Plan,
    /// The model of the plan.
    pub model: Model,
    /// The hardware to price the plan on.
    pub profile: Profile,
}

impl PlanFile {
    /// Reads a plan file, and the model and hardware of the flags or else of the plan.
    ///
    /// # Errors
    /// A file that cannot be read, names that are not presets, and a model other than the plan's.
    pub fn read(argument: &OsString, args: &ModelArgs) -> CommandResult<PlanFile> {
        at_most_one_stdin([argument].into_iter().chain(&args.model).chain(&args.hardware))?;
        let (name, plan) = input::plan(argument)?;
        let mut problems = Problems::default();
        let model = problems.take(match &args.model {
            Some(model) => input::model(model),
            None => named_model(&name, &plan.model),
        });
        let profile = problems.take(match &args.hardware {
            Some(hardware) => input::profile(hardware),
            None => match cached_profile(&plan.hardware) {
                Some(profile) => Ok(profile),
                None => named_profile(&name, &plan.hardware),
            },
        });
        let (Some(model), Some(profile)) = (model, profile) else {
            return Err(problems.into_result().err().unwrap_or_else(|| Failure::failed(vec![])));
        };
        require_same_model(&name, &plan, &model)?;
        Ok(PlanFile { name, plan, model, profile })
    }

    /// Checks the sizes of the plan as those of a request.
    ///
    /// # Errors
    /// Every invalid size, by its field in the plan.
    pub fn validate(&self) -> CommandResult<()> {
        let PlanFile { name, plan, model, profile } = self;
        let request = Request {
            objective: Objective::StepTime,
            model: model.clone(),
            profile: profile.clone(),
            devices: devices(plan.mesh).unwrap_or(u64::MAX),
            global_batch: plan.workload.global_batch,
            sequence_length: plan.workload.sequence_length,
            micro_batch: Some(plan.workload.micro_batch),
            tensor: Some(plan.mesh.tensor),
            tensor_max: None,
            tensor_within_node: false,
            pipeline: Some(plan.mesh.pipeline),
            data: Some(plan.mesh.data),
            context: Some(plan.mesh.context),
            context_attention: Some(plan.context_attention),
            // The precision is the plan's, which resolving it compares with the format of reductions.
            grad_reduce_dtype: GradReduceDtype::Fp32,
            zero: Some(plan.zero),
            shard_size: plan.shard_size,
            schedule: Some(plan.schedule),
            overlap_grad_reduce: Some(plan.overlap_grad_reduce),
            overlap_tensor_collectives: plan.overlap_tensor_collectives,
            loro_every: plan.loro_every,
            overlap_microbatch_pairs: plan.overlap_microbatch_pairs,
            rules: Rules::ALL,
            grouping: GroupingRule::Auto,
            memory_limit: MemoryLimit::None,
            executor: Executor::Captured,
            time_limit: None,
        };
        let defects = request.validate().err().unwrap_or_default().0.into_iter();
        let problems: Vec<Problem> = defects.map(|defect| in_plan(name, defect)).collect();
        match problems.is_empty() {
            true => Ok(()),
            false => Err(Failure { status: ExitStatus::BadInput, problems }),
        }
    }

    /// The request that the plan answers: its model, hardware, devices, batch and format of gradient reductions, with the
    /// rest searched.
    ///
    /// # Errors
    /// Invalid sizes of the plan, and invalid values of flags.
    pub fn request(&self, args: &RequestArgs) -> CommandResult<Request> {
        self.validate()?;
        let sizes = RequestSizes {
            devices: args.devices.unwrap_or(devices(self.plan.mesh).unwrap_or(u64::MAX)),
            global_batch: args.global_batch.unwrap_or(self.plan.workload.global_batch),
            sequence_length: args.sequence_length.unwrap_or(self.plan.workload.sequence_length),
        };
        let executor = args.executor.map_or(self.plan.executor, Executor::from);
        let request = args.assemble(sizes, self.model.clone(), self.profile.clone());
        let dtype = args.grad_reduce_dtype.map(GradReduceDtype::from);
        let grad_reduce_dtype = dtype.unwrap_or(self.plan.grad_reduce_dtype);
        let loro_every = self.plan.loro_every;
        let request = Request { executor, grad_reduce_dtype, loro_every, ..request };
        request.validate().map_err(Failure::request)?;
        reject_dense_baseline_of_low_rank(&request)?;
        Ok(request)
    }

    /// Replaces the batch and the sequence length of the plan by those of the flags.
    pub fn override_workload(&mut self, args: &RequestArgs) {
        let workload = &mut self.plan.workload;
        workload.global_batch = args.global_batch.unwrap_or(workload.global_batch);
        workload.sequence_length = args.sequence_length.unwrap_or(workload.sequence_length);
    }

    /// Replaces the sizes of the plan by those of the flags.
    ///
    /// # Errors
    /// Flags that restrict a search, and a number of devices other than the mesh's.
    pub fn override_sizes(&mut self, args: &RequestArgs) -> CommandResult<()> {
        let plan = &mut self.plan;
        let mut problems = Problems::default();
        for flag in args.search_flags() {
            let message = "restricts a search, but the plan is given";
            let hint = format!("omit {flag}, or omit the plan file");
            problems.push(Problem::new(flag, message).hint(hint));
        }
        let (mesh, workload) = (&mut plan.mesh, &mut plan.workload);
        let sizes = [
            (args.tensor, &mut mesh.tensor),
            (args.pipeline, &mut mesh.pipeline),
            (args.data_parallel, &mut mesh.data),
            (args.context, &mut mesh.context),
            (args.micro_batch, &mut workload.micro_batch),
        ];
        for (value, size) in sizes {
            *size = value.unwrap_or(*size);
        }
        let attention = args.context_attention.and_then(ContextAttentionArg::attention);
        plan.context_attention = attention.unwrap_or(plan.context_attention);
        if let Some(zero) = args.zero.and_then(ZeroArg::stage) {
            plan.zero = zero;
        }
        if args.zero == Some(ZeroArg::Off) {
            plan.shard_size = None;
        }
        plan.shard_size = args.shard_size.or(plan.shard_size);
        if let Some(schedule) = args.schedule.and_then(ScheduleArg::schedule) {
            plan.schedule = schedule;
        }
        if let Some(overlap) = args.overlap.and_then(OverlapArg::grad_reduce) {
            plan.overlap_grad_reduce = overlap;
            plan.overlap_param_gather = overlap && matches!(plan.zero, Zero::One | Zero::Two);
            // Passes of two microbatches overlap tensor-axis collectives already.
            plan.overlap_tensor_collectives = overlap && !plan.overlap_microbatch_pairs;
            if !overlap {
                plan.overlap_microbatch_pairs = false;
                plan.last_gradient_bucket = BucketSplit::Whole;
                plan.first_gather_bucket = BucketSplit::Whole;
            }
        }
        let hint = "--tensor, --pipeline, --context and --data-parallel change it";
        problems.take(self.override_work(args, hint));
        problems.into_result()
    }

    /// Replaces batch, sequence length and format of gradient reductions of the plan by those of the flags. `hint` is what
    /// to try where its devices are others than those of the flags.
    ///
    /// # Errors
    /// A number of devices other than the mesh's.
    pub fn override_work(&mut self, args: &RequestArgs, hint: &str) -> CommandResult<()> {
        self.override_workload(args);
        let plan = &mut self.plan;
        let dtype = args.grad_reduce_dtype.map(GradReduceDtype::from);
        plan.grad_reduce_dtype = dtype.unwrap_or(plan.grad_reduce_dtype);
        if args.devices.is_some_and(|requested| Some(requested) != devices(plan.mesh)) {
            let message = format!("the mesh of the plan is {}", plan.mesh);
            return Err(Failure::input(Problem::new("--devices", message).hint(hint)));
        }
        Ok(())
    }

    /// Replaces the executor of the plan by that of the flag, with a warning.
    pub fn override_executor(&mut self, args: &RequestArgs) {
        let executor = args.executor.map(Executor::from);
        let Some(executor) = executor.filter(|executor| *executor != self.plan.executor) else {
            return;
        };
        let (name, before, now) = (&self.name, self.plan.executor.name(), executor.name());
        output::warn(&format!("{name} was priced for executor `{before}`; re-priced for `{now}`"));
        self.plan.executor = executor;
    }
}

/// The devices of a mesh that was not validated; `None` on overflow.
fn devices(mesh: Mesh) -> Option<u64> {
    mesh.tensor.checked_mul(mesh.pipeline)?.checked_mul(mesh.data)?.checked_mul(mesh.context)
}

/// A defect of the request that a plan was turned into, at the field of the plan.
fn in_plan(file: &str, defect: RequestDefect) -> Problem {
    let field = match defect.field {
        RequestField::Devices => "mesh",
        RequestField::GlobalBatch => "workload.global_batch",
        RequestField::SequenceLength => "workload.sequence_length",
        RequestField::MicroBatch => "workload.micro_batch",
        RequestField::Tensor | RequestField::TensorMax => "mesh.tensor",
        RequestField::Pipeline => "mesh.pipeline",
        RequestField::Data => "mesh.data",
        RequestField::Context => "mesh.context",
        RequestField::ContextAttention => "context_attention",
        RequestField::GradReduceDtype => "grad_reduce_dtype",
        RequestField::ShardSize => "shard_size",
        RequestField::LoroEvery => "loro_every",
    };
    let RequestDefect { problem, hint, .. } = defect;
    Problem::in_file(file, Defect { field: field.into(), problem, hint })
}

/// The cached profile of this machine's CPU or GPUs, if the plan names it.
fn cached_profile(source: &PlanSource) -> Option<Profile> {
    if source.name != machine::NAME {
        let gpus = cache::gpu_profile_with_fingerprint(&source.fingerprint);
        return gpus.filter(|profile| profile.name() == source.name);
    }
    CachedProfileKey::cpu(cores()).load()
}

// A name in a plan is never opened as a file, since plans may come from untrusted sources.

fn named_model(file: &str, source: &PlanSource) -> CommandResult<Model> {
    match presets::find(&source.name) {
        Ok(_) => input::model(OsStr::new(&source.name)),
        Err(_) => Err(no_preset(file, "model", source)),
    }
}

fn named_profile(file: &str, source: &PlanSource) -> CommandResult<Profile> {
    match narrows_cost_model::profile::preset_names().any(|name| name == source.name) {
        true => input::profile(OsStr::new(&source.name)),
        false => Err(no_preset(file, "hardware", source)),
    }
}

fn no_preset(file: &str, field: &str, source: &PlanSource) -> Failure {
    let message = format!("`{}` is not a preset", source.name);
    let defect = Defect::new(format!("{field}.name"), message);
    let hint = format!("--{field} FILE, with the file that the plan was made for");
    Failure::input(Problem::in_file(file, defect).hint(hint))
}

fn require_same_model(file: &str, plan: &Plan, model: &Model) -> CommandResult<()> {
    let fingerprint = model.fingerprint();
    if plan.model.fingerprint == fingerprint {
        return Ok(());
    }
    let message = format!("the plan was made for a different model than `{}`", model.name);
    let problem = Problem::in_file(file, Defect::new("model.fingerprint", message))
        .because([format!("because the plan names {}…", prefix(&plan.model.fingerprint))])
        .because([format!("and the fingerprint of the model is {}…", prefix(&fingerprint))])
        .hint("--model with the model that it was made for, or a new plan for this one");
    Err(Failure::input(problem))
}

/// The first digits of a hash, enough to compare.
fn prefix(fingerprint: &str) -> String {
    fingerprint.chars().take(12).collect()
}
