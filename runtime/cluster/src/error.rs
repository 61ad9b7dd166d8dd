//! Why a launcher's environment does not describe a process of a run.

use super::launch::Launcher;

/// The environment of a process says something that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// A variable should be a number.
    #[error("{variable} is `{value}`, which is no number (it is set by what started this process)")]
    NoNumber {
        /// The variable.
        variable: &'static str,
        /// What it says.
        value: String,
    },
    /// There are fewer processes.
    #[error("{variable} is {rank}, but there are {world} processes, counted from 0")]
    Rank {
        /// The variable.
        variable: &'static str,
        /// What it says.
        rank: u64,
        /// Processes of the run.
        world: u64,
    },
    /// No port has this number.
    #[error("{variable} is {port}, which is no port (try: a number from 1024 to 65535)")]
    NoPort {
        /// The variable.
        variable: &'static str,
        /// What it says.
        port: u64,
    },
    /// Nobody says where the processes meet.
    #[error(
        "{launcher} started processes on several nodes, and nothing says where they meet \
         (try: MASTER_ADDR set to the name of the first node, for every process)",
        launcher = launcher.name()
    )]
    NoMeeting {
        /// Who started them.
        launcher: Launcher,
    },
}
