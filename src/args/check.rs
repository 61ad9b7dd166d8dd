//! Flags of `check`.

use std::ffi::OsString;

use clap::Args;
use narrows_plan::Bytes;

use crate::errors::CommandResult;

use super::output::{FormatArgs, OutputFormat};
use super::plan_file::PlanFile;
use super::request::{MemoryArgs, ModelArgs};

/// Flags of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// A plan file, or `-`
    #[arg(value_name = "PLAN")]
    pub plan: OsString,
    /// Model and hardware.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Memory limit.
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Also run a miniature of the plan, and compare its loss and gradients with unsharded training
    ///
    /// The miniature has the mesh, stages and decisions of the plan with small widths. Its devices are
    /// threads of this machine.
    #[arg(long)]
    pub numeric: bool,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// Settings of `check`.
#[derive(Debug)]
pub struct CheckSettings {
    /// The plan.
    pub file: PlanFile,
    /// Memory that a device may use; `Bytes(u64::MAX)` without a limit.
    pub memory_limit: Bytes,
    /// Whether the miniature is run.
    pub numeric: bool,
    /// Output format.
    pub format: OutputFormat,
}

impl CheckArgs {
    /// The settings.
    ///
    /// # Errors
    /// A plan, model or profile that cannot be read or is invalid.
    pub fn resolve(&self) -> CommandResult<CheckSettings> {
        let file = PlanFile::read(&self.plan, &self.model)?;
        file.validate()?;
        Ok(CheckSettings {
            memory_limit: self.memory.bytes(&file.profile),
            file,
            numeric: self.numeric,
            format: self.format.format,
        })
    }
}
