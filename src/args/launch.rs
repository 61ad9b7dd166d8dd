//! Flags of runs with several processes.

use clap::{Args, ValueEnum};
use narrows_cluster::{ClusterTimeouts, LaunchError, LaunchInfo, Launcher};

use crate::cluster::LaunchedProcess;
use crate::errors::{CommandResult, Failure, Problem};

use super::units::Timeout;

/// Flags of runs with several processes.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Launcher of a run of several processes, one per device; it sets the environment of each process
    #[arg(long, value_enum, default_value_t = LauncherArg::Auto)]
    pub launcher: LauncherArg,
    /// Time to wait for all processes to join
    #[arg(long, value_name = "SECONDS", default_value_t = Timeout(ClusterTimeouts::DEFAULT.join))]
    pub join_timeout: Timeout,
    /// Time to wait for another process in a collective before the run ends
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = Timeout(ClusterTimeouts::DEFAULT.collective)
    )]
    pub collective_timeout: Timeout,
}

/// `--launcher`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LauncherArg {
    /// Whichever set the environment; none if it is not set
    Auto,
    /// None: all devices are in this process
    None,
    /// torchrun, or anything that sets RANK and WORLD_SIZE
    Torchrun,
    /// srun
    Slurm,
    /// mpirun of Open MPI
    Openmpi,
}

impl LaunchArgs {
    /// The rank and rendezvous of this process; `None` for a process without a launcher.
    ///
    /// # Errors
    /// An environment that contradicts itself or the flag.
    pub fn resolve(&self) -> CommandResult<Option<LaunchedProcess>> {
        let variable = |name: &str| std::env::var(name).ok();
        let launcher = match self.launcher {
            LauncherArg::None => return Ok(None),
            LauncherArg::Auto => None,
            LauncherArg::Torchrun => Some(Launcher::Torchrun),
            LauncherArg::Slurm => Some(Launcher::Slurm),
            LauncherArg::Openmpi => Some(Launcher::OpenMpi),
        };
        let launch = match launcher {
            None => LaunchInfo::from_environment(variable),
            Some(launcher) => LaunchInfo::from_launcher(launcher, variable),
        };
        let launch = launch.map_err(|error| bad_environment(&error))?;
        if let (None, Some(launcher)) = (&launch, launcher) {
            let message = format!("{} did not start several processes", launcher.name());
            let hint = "--launcher none, for all devices in this process";
            return Err(Failure::input(Problem::new("--launcher", message).hint(hint)));
        }
        let timeouts =
            ClusterTimeouts { join: self.join_timeout.0, collective: self.collective_timeout.0 };
        Ok(launch.map(|launch| LaunchedProcess { launch, timeouts }))
    }
}

fn bad_environment(error: &LaunchError) -> Failure {
    let problem = Problem::new("environment", error.to_string());
    Failure::input(
        problem.hint(error.hint()).hint("--launcher none, for all devices in this process"),
    )
}
