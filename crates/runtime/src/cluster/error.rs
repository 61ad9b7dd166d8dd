//! Why a run of many processes does not begin, or ends.

use std::fmt;

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

/// Why a run of many processes ends, as one of them sees it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub struct ClusterError {
    /// What went wrong.
    pub fault: Fault,
    /// The last collectives and transfers of this process, the newest last.
    pub recent: Vec<String>,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// Process 0 cannot wait for the others where they are to meet.
    #[error(
        "cannot listen at {at}: {why} (try: another port in NARROWS_PORT, or the address of the \
         machine of process 0 in MASTER_ADDR)"
    )]
    Meeting {
        /// Where.
        at: String,
        /// What the system says.
        why: String,
    },
    /// Some did not come.
    #[error(
        "{} of {world} processes did not come to {at} within {waited_s:.0} s: {} (try: their own \
         output, and whether they can reach that address)",
        missing.len(), listed(missing)
    )]
    Missing {
        /// Who.
        missing: Vec<u64>,
        /// Processes of the run.
        world: u64,
        /// Where.
        at: String,
        /// How long they were waited for.
        waited_s: f64,
    },
    /// A process was not found.
    #[error(
        "process {rank} cannot be reached at {at} within {waited_s:.0} s: {why} (try: whether it \
         runs, and whether the address and port can be reached from here)"
    )]
    Unreachable {
        /// Who.
        rank: u64,
        /// Where.
        at: String,
        /// How long it was tried.
        waited_s: f64,
        /// What the system says of the last try.
        why: String,
    },
    /// Two processes mean to do different things.
    #[error(
        "process {rank} means another run than process 0: its {what}: {theirs}, not {ours} (try: the \
         same files and flags for all processes)"
    )]
    Differs {
        /// Who.
        rank: u64,
        /// In what.
        what: String,
        /// What it has.
        theirs: String,
        /// What process 0 has.
        ours: String,
    },
    /// Two processes have the same number, or one has a number that there is not.
    #[error("process {rank} of {world} came twice, or as one of another number of processes")]
    Stranger {
        /// Its number.
        rank: u64,
        /// Processes of the run.
        world: u64,
    },
    /// A process is gone.
    #[error("process {rank} is gone ({why}) while this one was in {doing}")]
    Lost {
        /// Who.
        rank: u64,
        /// What this process was doing.
        doing: String,
        /// What the connection says.
        why: String,
    },
    /// A process says nothing.
    #[error(
        "process {rank} did not come within {waited_s:.1} s to {doing}; it was last heard of \
         {silent_s:.1} s ago"
    )]
    Late {
        /// Who.
        rank: u64,
        /// What this process was doing.
        doing: String,
        /// How long it waited.
        waited_s: f64,
        /// Since when nothing at all came.
        silent_s: f64,
    },
    /// Another process ended the run.
    #[error("process {rank} ended the run: {why}")]
    GaveUp {
        /// Who.
        rank: u64,
        /// Why.
        why: String,
    },
    /// Two processes are in different collectives.
    #[error(
        "process {rank} is in {theirs}, and this one in {ours}: they do not run the same program"
    )]
    OutOfStep {
        /// Who.
        rank: u64,
        /// What it does.
        theirs: String,
        /// What this one does.
        ours: String,
    },
}

impl From<Fault> for ClusterError {
    fn from(fault: Fault) -> ClusterError {
        ClusterError { fault, recent: vec![] }
    }
}

impl fmt::Display for ClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)?;
        if let Some((newest, before)) = self.recent.split_last() {
            write!(f, "\nthe last of its collectives and transfers:")?;
            before.iter().try_for_each(|done| write!(f, "\n  {done}"))?;
            write!(f, "\n  {newest}")?;
        }
        Ok(())
    }
}

/// The first few of many numbers.
fn listed(ranks: &[u64]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = ranks.iter().take(SHOWN).map(u64::to_string).collect();
    let more = ranks.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    shown.join(", ") + &more
}
