//! Flags of `compare`.

use std::ffi::OsString;

use clap::Args;
use narrows_cost_model::TrainingRunTerms;
use narrows_planner::Request;

use crate::compare::PLANS_MAX;
use crate::errors::{CommandResult, Failure, Problem, Problems};
use crate::output;
use crate::plot::PlotKind;
use crate::text::plural;

use super::documents::DocumentFiles;
use super::output::{Detail, DetailArgs, FormatArgs, OutputFormat};
use super::plan::LoroArgs;
use super::plan_file::PlanFile;
use super::request::{MemoryArgs, RequestArgs, at_most_one_stdin};
use super::training_run::TrainingRunArgs;

/// Flags of `compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Plan files, one of them may be `-`; the first one is the reference
    #[arg(value_name = "PLAN", required = true)]
    pub plans: Vec<OsString>,
    /// Compare with the fastest plan for the hardware, devices and batch of the first plan too
    #[arg(long)]
    pub with_search: bool,
    /// Planning request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
    /// Picture and page.
    #[command(flatten)]
    pub documents: DocumentFiles,
    /// Optimizer.
    #[command(flatten)]
    pub optimizer: LoroArgs,
    /// Training run.
    #[command(flatten)]
    pub training_run: TrainingRunArgs,
}

/// Settings of `compare`.
#[derive(Debug)]
pub struct CompareSettings {
    /// The plans, all of one model; at least two of them or a search.
    pub files: Vec<PlanFile>,
    /// Memory that a device may use.
    pub memory: MemoryArgs,
    /// The request whose fastest plan is compared too.
    pub search: Option<Request>,
    /// Text or JSON.
    pub format: OutputFormat,
    /// Detail of the report.
    pub detail: Detail,
    /// Picture and page.
    pub documents: DocumentFiles,
    /// The training run to estimate.
    pub training_run: Option<TrainingRunTerms>,
}

impl CompareArgs {
    /// The settings. Batch, sequence length, executor and exact steps of the flags replace those of every plan; other
    /// flags restrict the search.
    ///
    /// # Errors
    /// Inputs that cannot be read, plans of different models, too few or too many plans, and flags of a search without
    /// `--with-search`.
    pub fn resolve(&self) -> CommandResult<CompareSettings> {
        self.check_plans()?;
        self.reject_flags_of_searches()?;
        let training_run = self.training_run.resolve(self.request.minimises_cost())?;
        let documents = self.documents.resolve(&[PlotKind::StepTime], &[])?;
        let model = &self.request.model;
        at_most_one_stdin(self.plans.iter().chain(&model.model).chain(&model.hardware))?;
        let mut problems = Problems::default();
        let read = |argument| {
            let mut file = PlanFile::read(argument, model)?;
            file.override_workload(&self.request);
            file.override_executor(&self.request);
            file.plan.loro_every = self.optimizer.loro_every.or(file.plan.loro_every);
            file.validate()?;
            Ok(file)
        };
        let files: Vec<PlanFile> =
            self.plans.iter().filter_map(|argument| problems.take(read(argument))).collect();
        problems.into_result()?;
        let Some((first, others)) = files.split_first() else { return Err(self.too_few_plans()) };
        for other in others {
            require_one_model(first, other)?;
        }
        let search = match self.with_search {
            true => Some(first.request(&self.request)?),
            false => None,
        };
        if let Some(devices) = self.request.devices {
            files.iter().for_each(|file| warn_of_other_devices(file, devices));
        }
        Ok(CompareSettings {
            search,
            files,
            memory: self.request.memory.clone(),
            format: self.format.format,
            detail: self.detail.resolve(),
            documents,
            training_run,
        })
    }

    fn check_plans(&self) -> CommandResult<()> {
        let plans = self.plans.len() + usize::from(self.with_search);
        match plans {
            0 | 1 => Err(self.too_few_plans()),
            2..=PLANS_MAX => Ok(()),
            _ => {
                let message = format!("{plans} plans are too many for one table");
                let problem = Problem::new("PLAN", message);
                Err(Failure::input(problem.hint(format!("at most {PLANS_MAX} plans"))))
            }
        }
    }

    fn too_few_plans(&self) -> Failure {
        let problem = Problem::new("PLAN", "one plan has nothing to be compared with");
        let hint = "another plan file, or --with-search for the fastest plan of the same request";
        Failure::input(problem.hint(hint))
    }

    fn reject_flags_of_searches(&self) -> CommandResult<()> {
        let mut problems = Problems::default();
        if !self.with_search {
            for flag in [self.request.search_flags(), self.request.mesh_flags()].concat() {
                let message = "describes a search, but the plans are given";
                problems.push(Problem::new(flag, message).hint("--with-search, or omit the flag"));
            }
        }
        problems.into_result()
    }
}

/// Warns of a plan for another number of devices than the search of `--devices`, which does not change the plan.
fn warn_of_other_devices(PlanFile { name, plan, .. }: &PlanFile, devices: u64) {
    let of_plan = plan.mesh.devices();
    if of_plan != devices {
        let of_plan = plural(of_plan, "device");
        output::warn(&format!(
            "{name} is a plan for {of_plan}, and is compared as such: --devices {devices} applies to the search only"
        ));
    }
}

fn require_one_model(first: &PlanFile, other: &PlanFile) -> CommandResult<()> {
    if first.plan.model.fingerprint == other.plan.model.fingerprint {
        return Ok(());
    }
    let (name, reference) = (&other.plan.model.name, &first.plan.model.name);
    let message = match name == reference {
        true => format!("is a plan of another model called `{name}` than {}", first.name),
        false => format!("is a plan of `{name}`, and {} is one of `{reference}`", first.name),
    };
    let problem = Problem::new(&other.name, message).field("model");
    let hint = "plans of one model; `narrows whatif --sweep model=A,B` compares models";
    Err(Failure::input(problem.hint(hint)))
}
