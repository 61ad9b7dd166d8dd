//! Flags of `plan`, `cost` and `explain`.

use std::ffi::OsString;

use clap::Args;
use narrows_plan::Bytes;
use narrows_planner::Request;

use crate::defaults::RequestDefaults;
use crate::errors::CommandResult;

use super::output::{Detail, DetailArgs, OutputArgs, OutputSettings};
use super::plan_file::PlanFile;
use super::request::RequestArgs;

/// Flags of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Planning request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Output settings.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
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
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
}

/// A plan file, or a request to search for a plan.
#[derive(Debug)]
pub enum PlanSelection {
    /// A plan file.
    File(Box<PlanFile>),
    /// The fastest plan of a request.
    Search(Box<Request>),
}

/// Settings of `plan`.
#[derive(Debug)]
pub struct PlanSettings {
    /// Planning request.
    pub request: Request,
    /// Output settings.
    pub output: OutputSettings,
    /// Detail of the report.
    pub detail: Detail,
}

/// Settings of `cost`.
#[derive(Debug)]
pub struct CostSettings {
    /// The plan to price.
    pub selection: PlanSelection,
    /// Memory that a device may use; `Bytes(u64::MAX)` without a limit.
    pub memory_limit: Bytes,
    /// Output settings.
    pub output: OutputSettings,
    /// Detail of the report.
    pub detail: Detail,
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
    /// Detail of the report.
    pub detail: Detail,
}

impl PlanArgs {
    /// The settings.
    ///
    /// # Errors
    /// Inputs that cannot be read, and an invalid request.
    pub fn resolve(&self) -> CommandResult<PlanSettings> {
        let output = self.output.resolve()?;
        let request = self.request.resolve(&RequestDefaults::PLAN)?;
        Ok(PlanSettings { request, output, detail: self.detail.resolve() })
    }
}

impl PlanFileArgs {
    /// The settings of `cost`, for which flags change the plan.
    ///
    /// # Errors
    /// Inputs that cannot be read, and flags that do not apply to plan files.
    pub fn resolve_cost(&self) -> CommandResult<CostSettings> {
        let output = self.output.resolve()?;
        let (selection, memory_limit) = match &self.plan {
            Some(argument) => {
                let mut file = PlanFile::read(argument, &self.request.model)?;
                file.override_sizes(&self.request)?;
                file.override_executor(&self.request);
                file.validate()?;
                let memory_limit = self.request.memory.bytes(&file.profile);
                (PlanSelection::File(Box::new(file)), memory_limit)
            }
            None => {
                let request = self.request.resolve(&RequestDefaults::PLAN)?;
                let memory_limit = request.arena_limit();
                (PlanSelection::Search(Box::new(request)), memory_limit)
            }
        };
        Ok(CostSettings { selection, memory_limit, output, detail: self.detail.resolve() })
    }

    /// The settings of `explain`, for which flags change the search.
    ///
    /// # Errors
    /// Inputs that cannot be read, and an invalid request.
    pub fn resolve_explain(&self) -> CommandResult<ExplainSettings> {
        let output = self.output.resolve()?;
        let (request, compared) = match &self.plan {
            Some(argument) => {
                let mut file = PlanFile::read(argument, &self.request.model)?;
                file.override_executor(&self.request);
                (file.request(&self.request)?, Some(file))
            }
            None => (self.request.resolve(&RequestDefaults::PLAN)?, None),
        };
        Ok(ExplainSettings { request, compared, output, detail: self.detail.resolve() })
    }
}
