//! Errors of a run of many processes.

use std::fmt;

use narrows_plan::printable;

/// An error that ends a run of many processes, as one of them sees it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub struct ClusterError {
    /// The fault.
    pub fault: ClusterFault,
    /// The last collectives and transfers of this process, the newest last.
    pub recent_operations: Vec<String>,
}

/// A fault that ends a run of many processes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClusterFault {
    /// Rank 0 cannot listen at the rendezvous address, or another rank at its own.
    #[error("cannot listen at {address}: {reason}")]
    CannotListen {
        /// The address.
        address: String,
        /// The error of the operating system.
        reason: String,
    },
    /// Some processes did not join in time.
    #[error(
        "{} of {world_size} processes did not join at {address} within {waited_s:.0} s: {}",
        ranks.len(), list_ranks(ranks)
    )]
    MissingProcesses {
        /// The missing ranks.
        ranks: Vec<u64>,
        /// Number of processes of the run.
        world_size: u64,
        /// Address at which this process listens.
        address: String,
        /// Seconds waited.
        waited_s: f64,
    },
    /// No connection to a process was established in time.
    #[error("cannot reach process {rank} at {address} within {waited_s:.0} s: {reason}")]
    Unreachable {
        /// The rank.
        rank: u64,
        /// Address of the rank.
        address: String,
        /// Seconds spent trying.
        waited_s: f64,
        /// The error of the last attempt.
        reason: String,
    },
    /// Two processes were started for different runs.
    #[error(
        "process {rank} was started for another run than process 0: {fact}: {peer_value}, not \
         {rank_0_value}"
    )]
    RunMismatch {
        /// The rank.
        rank: u64,
        /// Name of the fact that differs.
        fact: String,
        /// The value of that rank.
        peer_value: String,
        /// The value of rank 0.
        rank_0_value: String,
    },
    /// Two processes have the same rank, or a process has a rank or a world size that does not fit
    /// the run.
    #[error(
        "two processes have rank {rank}, or one belongs to a run that does not have {world_size} \
         processes"
    )]
    RankConflict {
        /// The rank.
        rank: u64,
        /// Number of processes of the run.
        world_size: u64,
    },
    /// The connection to a process broke.
    #[error("lost the connection to process {rank} ({reason}) during {operation}")]
    Disconnected {
        /// The rank.
        rank: u64,
        /// Operation of this process.
        operation: String,
        /// Error of the connection.
        reason: String,
    },
    /// A process did not answer within the timeout.
    #[error(
        "process {rank} did not take part in {operation} within {waited_s:.1} s; it last sent \
         something {silent_s:.1} s ago"
    )]
    Timeout {
        /// The rank.
        rank: u64,
        /// Operation of this process.
        operation: String,
        /// Seconds waited.
        waited_s: f64,
        /// Seconds since anything was received from the rank.
        silent_s: f64,
    },
    /// Another device of this process failed.
    #[error("another device of this process failed")]
    DeviceFailed,
    /// Another process ended the run.
    #[error("process {rank} aborted the run: {reason}")]
    Aborted {
        /// The rank.
        rank: u64,
        /// Reason that the rank gave.
        reason: String,
    },
    /// Two processes are in different operations.
    #[error(
        "process {rank} is in {peer_operation}, and this one in {local_operation}: they do not run the \
         same program"
    )]
    OperationMismatch {
        /// The rank.
        rank: u64,
        /// The operation of that rank.
        peer_operation: String,
        /// The operation of this process.
        local_operation: String,
    },
}

impl ClusterFault {
    /// Advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ClusterFault::CannotListen { .. } => Some(
                "another port in NARROWS_PORT, or the address of the machine of process 0 in MASTER_ADDR",
            ),
            ClusterFault::MissingProcesses { .. } => {
                Some("look at their output, and check that they can reach that address")
            }
            ClusterFault::Unreachable { .. } => Some(
                "check that the process runs, and that the address and port can be reached from here",
            ),
            ClusterFault::RunMismatch { .. } | ClusterFault::OperationMismatch { .. } => {
                Some("the same files and flags for all processes")
            }
            ClusterFault::RankConflict { .. } => {
                Some("one launcher for all processes, or another NARROWS_PORT for each run")
            }
            ClusterFault::Disconnected { .. } => {
                Some("the output of that process shows why it ended")
            }
            ClusterFault::Timeout { .. } => Some(
                "the output of that process shows why it is late; or a longer --collective-timeout",
            ),
            ClusterFault::DeviceFailed | ClusterFault::Aborted { .. } => None,
        }
    }

    /// The fault of a process that sent bytes which cannot be decoded.
    pub fn undecodable(rank: u64, operation: &str) -> ClusterFault {
        let reason = "it sent a message that cannot be decoded".into();
        ClusterFault::Disconnected { rank, operation: operation.into(), reason }
    }
}

impl From<ClusterFault> for ClusterError {
    fn from(fault: ClusterFault) -> ClusterError {
        ClusterError { fault, recent_operations: vec![] }
    }
}

impl fmt::Display for ClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)?;
        if !self.recent_operations.is_empty() {
            write!(f, "\nlast collectives and transfers of this process:")?;
        }
        self.recent_operations.iter().try_for_each(|operation| write!(f, "\n  {operation}"))
    }
}

/// The first ranks of a list, and how many more there are.
fn list_ranks(ranks: &[u64]) -> String {
    const SHOWN_MAX: usize = 8;
    let shown: Vec<String> = ranks.iter().take(SHOWN_MAX).map(u64::to_string).collect();
    let more = ranks.len().saturating_sub(SHOWN_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    shown.join(", ") + &more
}

/// Longest text of another process in a message.
const EXCERPT_CHARS_MAX: usize = 1000;

/// A text of another process, fit to be printed: characters that control a terminal or the direction of text are escaped, and a
/// long text is cut.
pub fn excerpt(text: &str) -> String {
    match text.char_indices().nth(EXCERPT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", printable(&text[..end])),
        None => printable(text).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::excerpt;

    #[test]
    fn texts_of_other_processes_are_cut_and_escaped() {
        assert_eq!(excerpt("rank 3: a\u{1b}[2Jb"), "rank 3: a\\u{1b}[2Jb");
        assert_eq!(excerpt("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(excerpt(&"é".repeat(5000)).chars().count(), 1001);
    }
}
