//! Flags of runs with several processes.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory as _, Parser, ValueEnum};
use narrows_cluster::{ClusterTimeouts, JobToken, LaunchError, LaunchInfo, Launcher};

use crate::cluster::LaunchedProcess;
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

use super::units::Timeout;

/// Flags of runs with several processes.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Launcher that started the processes of this run: rank and rendezvous are read from its environment variables
    #[arg(long, value_enum, default_value_t = LauncherArg::Auto)]
    pub launcher: LauncherArg,
    /// File with a secret that all processes of the job share: other connections are rejected [default: the job id of the launcher]
    #[arg(long, value_name = "FILE")]
    pub job_token_file: Option<PathBuf>,
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
    /// The launcher that set the environment; none if no launcher did
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
    /// The rank and rendezvous of this process; `None` for a process without a launcher. With several processes, that of
    /// rank 0 prints the warnings of all.
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
        let Some(mut launch) = launch else { return Ok(None) };
        if launch.rank > 0 {
            output::leave_warnings_to_rank_0();
        }
        if let Some(file) = &self.job_token_file {
            launch.job = read_token(file)?;
        }
        let timeouts =
            ClusterTimeouts { join: self.join_timeout.0, collective: self.collective_timeout.0 };
        Ok(Some(LaunchedProcess { launch, timeouts }))
    }
}

/// The flags that say whether a command has other processes, and where it meets them.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, args_override_self = true, disable_help_flag = true)]
struct MeetingFlags {
    #[command(flatten)]
    launch: LaunchArgs,
    #[arg(long)]
    backend: Option<String>,
}

/// The process of a command line whose flags may be invalid, so that it can tell the others. Invalid flags, and a launcher whose
/// environment is invalid, count as not given. `None` for commands without other processes.
pub fn process_of_words(words: &[OsString]) -> Option<LaunchedProcess> {
    let text = |word: &OsString| word.to_str().unwrap_or_default().to_owned();
    let command = text(words.get(1)?);
    let mut flags: Vec<OsString> = vec![];
    for (index, word) in words.iter().enumerate().skip(2) {
        let Some(name) = text(word).strip_prefix("--").map(str::to_owned) else { continue };
        let name = name.split('=').next().unwrap_or_default().to_owned();
        let is_known =
            MeetingFlags::command().get_arguments().any(|arg| arg.get_long() == Some(&name));
        let with_value = match text(word).contains('=') {
            true => vec![word.clone()],
            false => words[index..].iter().take(2).cloned().collect(),
        };
        if is_known && MeetingFlags::try_parse_from(&with_value).is_ok() {
            flags.extend(with_value);
        }
    }
    let MeetingFlags { launch, backend } = MeetingFlags::try_parse_from(flags).ok()?;
    let has_others = match command.as_str() {
        "run" => backend.as_deref() != Some("null"),
        "calibrate" => backend.as_deref() == Some("cuda"),
        _ => false,
    };
    if has_others { launch.resolve().ok().flatten() } else { None }
}

/// Longest token: a secret of a few lines.
const TOKEN_BYTES_MAX: usize = 64 << 10;

/// Reads a token. White space at its end, which editors add, does not count.
fn read_token(file: &Path) -> CommandResult<JobToken> {
    let problem =
        |message: String| {
            Failure::input(Problem::new(file.display().to_string(), message).hint(
                "a file with a secret of this job, equal on all nodes and readable by you alone",
            ))
        };
    let token = fs::read(file).map_err(|error| problem(format!("cannot be read: {error}")))?;
    let token = token.trim_ascii_end();
    match token.len() {
        0 => Err(problem("is empty, so every process would know the token".into())),
        bytes if bytes > TOKEN_BYTES_MAX => {
            Err(problem(format!("has {bytes} bytes, and a token at most {TOKEN_BYTES_MAX}")))
        }
        _ => Ok(JobToken::new(token)),
    }
}

fn bad_environment(error: &LaunchError) -> Failure {
    let problem = Problem::new("environment", error.to_string());
    Failure::input(
        problem.hint(error.hint()).hint("--launcher none, for all devices in this process"),
    )
}
