//! Launchers, and the environment variables that each of them sets.

use super::job_token::JobToken;

/// A program that starts processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// torchrun, or anything that sets `RANK` and `WORLD_SIZE` as torchrun does.
    Torchrun,
    /// srun.
    Slurm,
    /// Open MPI's mpirun.
    OpenMpi,
}

impl Launcher {
    /// All launchers, in order of precedence: srun may run torchrun.
    pub const ALL: [Launcher; 3] = [Launcher::Torchrun, Launcher::Slurm, Launcher::OpenMpi];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Launcher::Torchrun => "torchrun",
            Launcher::Slurm => "slurm",
            Launcher::OpenMpi => "openmpi",
        }
    }

    /// The token of a job from its id. Processes that no launcher gives an id share the empty token.
    pub(crate) fn job(self, variable: impl Fn(&str) -> Option<String>) -> JobToken {
        let names: &[&str] = match self {
            // A restarted agent counts its restarts anew, so that their number may differ between nodes.
            Launcher::Torchrun => &["TORCHELASTIC_RUN_ID"],
            Launcher::Slurm => &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
            Launcher::OpenMpi => &["PMIX_NAMESPACE"],
        };
        let ids: Vec<String> =
            names.iter().map(|name| variable(name).unwrap_or_default()).collect();
        JobToken::new(ids.join(" "))
    }

    pub(crate) fn variables(self) -> &'static LauncherVariables {
        match self {
            Launcher::Torchrun => &LauncherVariables {
                rank: "RANK",
                world_size: "WORLD_SIZE",
                local_rank: "LOCAL_RANK",
                local_world_size: "LOCAL_WORLD_SIZE",
            },
            // Variables of the step, because SLURM_NTASKS is also set for a batch script, which is
            // not one of the tasks.
            Launcher::Slurm => &LauncherVariables {
                rank: "SLURM_PROCID",
                world_size: "SLURM_STEP_NUM_TASKS",
                local_rank: "SLURM_LOCALID",
                local_world_size: "SLURM_STEP_TASKS_PER_NODE",
            },
            Launcher::OpenMpi => &LauncherVariables {
                rank: "OMPI_COMM_WORLD_RANK",
                world_size: "OMPI_COMM_WORLD_SIZE",
                local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
                local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
            },
        }
    }
}

/// Environment variables of a launcher.
pub(crate) struct LauncherVariables {
    pub rank: &'static str,
    pub world_size: &'static str,
    pub local_rank: &'static str,
    pub local_world_size: &'static str,
}
