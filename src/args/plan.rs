//! Flags of `plan`, `cost` and `explain`.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;
use narrows_calibration::FrameworkStep;
use narrows_cost_model::{Profile, TrainingRunTerms};
use narrows_plan::Bytes;
use narrows_plan::model::Model;
use narrows_planner::Request;

use crate::defaults::RequestDefaults;
use crate::errors::{CommandResult, Failure, Problem, Problems};
use crate::plot::PlotKind;
use crate::step_cost::priced_terms;

use super::documents::DocumentFiles;
use super::framework::{FrameworkArgs, RefusedFrameworkArgs};
use super::output::{Detail, DetailArgs, OutputArgs, OutputFormat, OutputSettings};
use super::plan_file::PlanFile;
use super::request::RequestArgs;
use super::trace::StepTraceArgs;
use super::training_run::{DevicePriceArgs, TrainingRunArgs};

/// Flags of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Planning request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Output settings.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Picture and page.
    #[command(flatten)]
    pub documents: DocumentFiles,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
    /// Trace of the simulated step.
    #[command(flatten)]
    pub trace: StepTraceArgs,
    /// Optimizer.
    #[command(flatten)]
    pub optimizer: LoroArgs,
    /// Training run.
    #[command(flatten)]
    pub training_run: TrainingRunArgs,
    /// Another framework.
    #[command(flatten)]
    pub framework: RefusedFrameworkArgs,
}

/// Planning request and optimizer, whose flags are fields of sweeps.
#[derive(Clone, Debug, Args)]
pub struct PlanningArgs {
    /// Planning request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Optimizer.
    #[command(flatten)]
    pub optimizer: LoroArgs,
}

impl PlanningArgs {
    /// The request for a model and a profile, with defaults for omitted flags, not validated.
    pub fn request(&self, defaults: &RequestDefaults, model: Model, profile: Profile) -> Request {
        let request = self.request.request(defaults, model, profile);
        Request { loro_every: self.optimizer.loro_every, ..request }
    }
}

/// The optimizer that a plan is priced for.
#[derive(Clone, Copy, Debug, Args)]
pub struct LoroArgs {
    /// Price the exact steps of the optimizer LORO, with this many steps from one to the next [default: AdamW]
    ///
    /// With a plan file, the default is the optimizer of the plan.
    #[arg(long, value_name = "STEPS")]
    pub loro_every: Option<NonZeroU64>,
}

impl LoroArgs {
    /// The request for a plan with this optimizer.
    ///
    /// # Errors
    /// A model that the optimizer cannot train.
    fn apply(self, request: Request) -> CommandResult<Request> {
        let request = Request { loro_every: self.loro_every, ..request };
        request.validate().map_err(Failure::request)?;
        Ok(request)
    }
}

/// Flags of `cost`.
#[derive(Debug, Args)]
pub struct CostArgs {
    /// Plan or request.
    #[command(flatten)]
    pub file: PlanFileArgs,
    /// Another framework.
    #[command(flatten)]
    pub framework: FrameworkArgs,
    /// Trace of the simulated step.
    #[command(flatten)]
    pub trace: StepTraceArgs,
    /// Training run.
    #[command(flatten)]
    pub training_run: TrainingRunArgs,
}

/// Flags of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Plan or request.
    #[command(flatten)]
    pub file: PlanFileArgs,
    /// Price of a device.
    #[command(flatten)]
    pub price: DevicePriceArgs,
    /// Another framework.
    #[command(flatten)]
    pub framework: RefusedFrameworkArgs,
}

/// Flags of `cost` and `explain`.
#[derive(Debug, Args)]
pub struct PlanFileArgs {
    /// A plan file, or `-`
    #[arg(value_name = "PLAN")]
    pub plan: Option<OsString>,
    /// Planning request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Output settings.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Picture and page.
    #[command(flatten)]
    pub documents: DocumentFiles,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
    /// Optimizer.
    #[command(flatten)]
    pub optimizer: LoroArgs,
}

/// A plan file, or a request to search for a plan.
#[derive(Debug)]
pub enum PlanSelection {
    /// A plan file.
    File(Box<PlanFile>),
    /// The fastest plan of a request.
    Search(Box<Request>),
}

/// Content, forms and destinations of the report on one plan.
#[derive(Debug)]
pub struct PlanReportSettings {
    /// Format of the report, and the plan file.
    pub output: OutputSettings,
    /// Picture and page.
    pub documents: DocumentFiles,
    /// File for the trace of the simulated step.
    pub trace: Option<PathBuf>,
    /// Detail of the report.
    pub detail: Detail,
    /// The training run to estimate.
    pub training_run: Option<TrainingRunTerms>,
    /// Price of one device for one hour, if it is known.
    pub price_per_device_hour: Option<f64>,
}

/// Settings of `plan`.
#[derive(Debug)]
pub struct PlanSettings {
    /// Planning request.
    pub request: Request,
    /// The report on its plan.
    pub report: PlanReportSettings,
}

/// Settings of `cost`.
#[derive(Debug)]
pub struct CostSettings {
    /// The plan to price.
    pub selection: PlanSelection,
    /// Memory that a device may use; `Bytes(u64::MAX)` without a limit.
    pub memory_limit: Bytes,
    /// The report on the plan.
    pub report: PlanReportSettings,
}

/// Settings of `cost --framework`.
#[derive(Debug)]
pub struct FrameworkCostSettings {
    /// The step to price.
    pub step: FrameworkStep,
    /// Request with the model and the hardware of the step.
    pub request: Request,
    /// Page.
    pub documents: DocumentFiles,
    /// Format of the report.
    pub format: OutputFormat,
    /// Detail of the report.
    pub detail: Detail,
    /// The training run to estimate.
    pub training_run: Option<TrainingRunTerms>,
}

/// Pipeline stages of every plan of a request; `None` if the search chooses their number.
fn stages_of(request: &Request) -> Option<u64> {
    if request.devices == 1 { Some(1) } else { request.pipeline }
}

/// Settings of `explain`.
#[derive(Debug)]
pub struct ExplainSettings {
    /// Planning request.
    pub request: Request,
    /// A plan to compare with the one that the search finds.
    pub compared: Option<PlanFile>,
    /// Output settings.
    pub output: OutputSettings,
    /// Picture and page.
    pub documents: DocumentFiles,
    /// Detail of the report.
    pub detail: Detail,
    /// Price of one device for one hour, if it is known.
    pub price_per_device_hour: Option<f64>,
}

impl PlanArgs {
    /// The settings.
    ///
    /// # Errors
    /// Inputs that cannot be read, and an invalid request.
    pub fn resolve(&self) -> CommandResult<PlanSettings> {
        self.framework.refuse()?;
        let output = self.output.resolve_checked()?;
        let training_run = self.training_run.resolve(self.request.minimises_cost())?;
        let documents = self.documents.resolve(
            PlotKind::OF_PLAN,
            &[
                ("--output", self.output.output.as_deref()),
                ("--trace", self.trace.trace.as_deref()),
            ],
        )?;
        let trace = self.trace.resolve()?;
        let request = self.optimizer.apply(self.request.resolve(&RequestDefaults::PLAN)?)?;
        self.documents.require_pipeline(stages_of(&request))?;
        let report = PlanReportSettings {
            output,
            documents,
            trace,
            detail: self.detail.resolve(),
            training_run: training_run.map(|terms| priced_terms(terms, &request.profile)),
            price_per_device_hour: self.training_run.price(&request.profile),
        };
        Ok(PlanSettings { request, report })
    }
}

impl CostArgs {
    /// The settings of a step under another framework; `None` without one.
    ///
    /// # Errors
    /// An invalid request, and flags that only plans have.
    pub fn resolve_framework(&self) -> CommandResult<Option<FrameworkCostSettings>> {
        let Some(framework) = self.framework.other() else { return Ok(None) };
        let PlanFileArgs { plan, request, output, documents, detail, optimizer } = &self.file;
        let of_plans = [
            ("PLAN", plan.is_some()),
            ("--output", output.output.is_some()),
            ("--plot", documents.plot.is_some()),
            ("--trace", self.trace.trace.is_some()),
            ("--loro-every", optimizer.loro_every.is_some()),
        ];
        let mut problems = Problems::default();
        for (place, _) in of_plans.into_iter().filter(|(_, is_set)| *is_set) {
            let message = format!("is for plans of narrows, and `{framework}` runs no plan");
            let hint = format!("omit {place}, or omit --framework");
            problems.push(Problem::new(place, message).hint(hint));
        }
        let documents = problems.take(documents.resolve(PlotKind::OF_PLAN, &[]));
        let training_run = problems.take(self.training_run.resolve(false));
        let step = problems.take(self.framework.step(framework, request));
        problems.into_result()?;
        let (Some(documents), Some(training_run), Some((step, request))) =
            (documents, training_run, step)
        else {
            return Ok(None);
        };
        let training_run = training_run.map(|terms| priced_terms(terms, &request.profile));
        let (format, detail) = (output.format.format, detail.resolve());
        let settings =
            FrameworkCostSettings { step, request, documents, format, detail, training_run };
        Ok(Some(settings))
    }

    /// The settings, for which flags change the plan.
    ///
    /// # Errors
    /// Inputs that cannot be read, flags that do not apply to plan files, and an incomplete training run.
    pub fn resolve(&self) -> CommandResult<CostSettings> {
        self.framework.require_none()?;
        let PlanFileArgs { plan, request, output, documents, detail, optimizer } = &self.file;
        let others =
            [("--output", output.output.as_deref()), ("--trace", self.trace.trace.as_deref())];
        let documents = documents.resolve(PlotKind::OF_PLAN, &others)?;
        let output = output.resolve_checked()?;
        let trace = self.trace.resolve()?;
        let training_run = self.training_run.resolve(request.minimises_cost())?;
        let (selection, memory_limit) = match plan {
            Some(argument) => {
                let mut file = PlanFile::read(argument, &request.model)?;
                file.override_sizes(request)?;
                file.override_executor(request);
                file.plan.loro_every = optimizer.loro_every.or(file.plan.loro_every);
                file.validate()?;
                documents.require_pipeline(Some(file.plan.mesh.pipeline))?;
                let memory_limit = request.memory.bytes(&file.profile);
                (PlanSelection::File(Box::new(file)), memory_limit)
            }
            None => {
                let request = optimizer.apply(request.resolve(&RequestDefaults::PLAN)?)?;
                documents.require_pipeline(stages_of(&request))?;
                let memory_limit = request.arena_limit();
                (PlanSelection::Search(Box::new(request)), memory_limit)
            }
        };
        let profile = match &selection {
            PlanSelection::File(file) => &file.profile,
            PlanSelection::Search(request) => &request.profile,
        };
        let report = PlanReportSettings {
            output,
            documents,
            trace,
            detail: detail.resolve(),
            training_run: training_run.map(|terms| priced_terms(terms, profile)),
            price_per_device_hour: self.training_run.price(profile),
        };
        Ok(CostSettings { selection, memory_limit, report })
    }
}

impl ExplainArgs {
    /// The settings, for which flags change the search. Those that change the work of a step change the plan too.
    ///
    /// # Errors
    /// Inputs that cannot be read, an invalid request, and other devices than those of the plan.
    pub fn resolve(&self) -> CommandResult<ExplainSettings> {
        self.framework.refuse()?;
        let PlanFileArgs { plan, request, output, documents, detail, optimizer } = &self.file;
        let others = [("--output", output.output.as_deref())];
        let (output, detail) = (output.resolve_checked()?, detail.resolve());
        let documents = documents.resolve(PlotKind::OF_PLANS, &others)?;
        self.price.require_cost(request.minimises_cost())?;
        let (request, compared) = match plan {
            Some(argument) => {
                let mut file = PlanFile::read(argument, &request.model)?;
                file.override_work(request, "omit --devices, or omit the plan file")?;
                file.override_executor(request);
                file.plan.loro_every = optimizer.loro_every.or(file.plan.loro_every);
                (file.request(request)?, Some(file))
            }
            None => (optimizer.apply(request.resolve(&RequestDefaults::PLAN)?)?, None),
        };
        let price_per_device_hour = self.price.of(&request.profile);
        Ok(ExplainSettings { request, compared, output, documents, detail, price_per_device_hour })
    }
}
