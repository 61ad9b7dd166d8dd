//! The flags of runs of many processes, and what they mean.

use std::time::Duration;

use clap::{Args, ValueEnum};
use narrows_cluster::{ClusterTimeouts, LaunchError, LaunchInfo, Launcher};

use super::units;
use crate::errors::{CommandResult, Failure, Problem};

/// Flags of runs of many processes.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Who started this process as one of many, each of which is a device; its environment says which
    #[arg(long, value_enum, default_value_t = LauncherName::Auto)]
    pub launcher: LauncherName,
    /// How long the processes of a run wait until all are there
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = units::wait)]
    pub join_timeout: Duration,
    /// How long a process waits for another in a collective, before the run ends
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = units::wait)]
    pub collective_timeout: Duration,
}

/// Who starts processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LauncherName {
    /// Whoever set the environment; nobody, if nobody did
    Auto,
    /// Nobody: all devices are in this process
    None,
    /// torchrun, or whoever sets RANK and WORLD_SIZE
    Torchrun,
    /// srun
    Slurm,
    /// mpirun of Open MPI
    Openmpi,
}

/// One process of many.
#[derive(Clone, Debug)]
pub struct LaunchedProcess {
    /// Which one, and where all meet.
    pub launch: LaunchInfo,
    /// How long it waits.
    pub deadlines: ClusterTimeouts,
}

impl LaunchedProcess {
    /// Whether this process speaks and writes for all.
    pub fn leads(&self) -> bool {
        self.launch.rank == 0
    }

    /// Its name, for messages.
    pub fn process(&self) -> String {
        format!("process {} of {}", self.launch.rank, self.launch.world_size)
    }
}

impl LaunchArgs {
    /// What they and the environment mean; `None` when this process is alone.
    pub fn resolve(&self) -> CommandResult<Option<LaunchedProcess>> {
        let variable = |name: &str| std::env::var(name).ok();
        let chosen = match self.launcher {
            LauncherName::None => return Ok(None),
            LauncherName::Auto => None,
            LauncherName::Torchrun => Some(Launcher::Torchrun),
            LauncherName::Slurm => Some(Launcher::Slurm),
            LauncherName::Openmpi => Some(Launcher::OpenMpi),
        };
        let read = match chosen {
            None => LaunchInfo::from_environment(variable),
            Some(launcher) => LaunchInfo::from_launcher(launcher, variable),
        };
        let launch = read.map_err(|error| refused(&error))?;
        if let (None, Some(launcher)) = (&launch, chosen) {
            let problem = format!("{} did not start several processes here", launcher.name());
            let hint = "--launcher none, for all devices in this process";
            return Err(Failure::input(Problem::new("--launcher", problem).hint(hint)));
        }
        let deadlines =
            ClusterTimeouts { join: self.join_timeout, collective: self.collective_timeout };
        Ok(launch.map(|launch| LaunchedProcess { launch, deadlines }))
    }
}

fn refused(error: &LaunchError) -> Failure {
    let problem = Problem::new("environment", error.to_string());
    Failure::input(problem.hint("--launcher none, for all devices in this process"))
}
