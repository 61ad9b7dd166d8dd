//! Devices of a machine that compute on the same cores.
//!
//! A launcher may bind each process to cores of its own. Others leave all processes of a machine all cores that the job has.

use std::ops::RangeInclusive;

use narrows_cluster::{LaunchInfo, TcpProcessGroup};
use narrows_runtime::process_group::gather_and_broadcast;
use serde::{Deserialize, Serialize};

use crate::cluster::cluster_failure;
use crate::errors::CommandResult;
use crate::host;

/// Ranges of cores; `None` where they are not known.
type CoreRanges = Option<Vec<RangeInclusive<u32>>>;

/// The cores of a process, and the processes on its machine.
#[derive(Serialize, Deserialize)]
struct BoundProcess {
    /// The cores as the kernel lists them, such as `0-3,8`; empty where they are not known.
    cores: String,
    /// Ranks of the processes on the machine: the first, and the one after the last.
    machine: [u64; 2],
}

/// Number of processes of this machine that may use a core of this one, itself included. All processes must call this.
///
/// # Errors
/// A process is gone or late.
pub fn sharing_processes(group: &TcpProcessGroup, launch: &LaunchInfo) -> CommandResult<u64> {
    let ranks = launch.node_ranks();
    let cores = host::allowed_cores().unwrap_or_default();
    let process = BoundProcess { cores, machine: [ranks.start, ranks.end] };
    let counts = gather_and_broadcast(group, process, |all| counts(&all));
    let counts: Vec<u64> = counts.map_err(cluster_failure)?;
    Ok(counts.get(launch.rank as usize).copied().unwrap_or(launch.local_world_size))
}

/// For each process, the number of those on its machine that may use a core of it.
fn counts(all: &[BoundProcess]) -> Vec<u64> {
    let cores: Vec<CoreRanges> = all.iter().map(|process| parse(&process.cores)).collect();
    let of_process = |rank: usize| {
        let [first, end] = all[rank].machine.map(|rank| rank as usize);
        let on_machine = cores.get(first..end.min(cores.len())).unwrap_or(&[]);
        on_machine.iter().filter(|other| share_a_core(&cores[rank], other)).count().max(1) as u64
    };
    (0..all.len()).map(of_process).collect()
}

/// Whether two processes may use the same core, as those do whose cores are not known.
fn share_a_core(a: &CoreRanges, b: &CoreRanges) -> bool {
    let (Some(a), Some(b)) = (a, b) else { return true };
    a.iter().any(|a| b.iter().any(|b| a.start() <= b.end() && b.start() <= a.end()))
}

/// The ranges of a list such as `0-3,8`; `None` for another text.
fn parse(list: &str) -> CoreRanges {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_share_the_cores_that_no_launcher_binds() {
        let of = |all: &[(&str, [u64; 2])]| {
            let process = |(cores, machine): &(&str, [u64; 2])| BoundProcess {
                cores: (*cores).to_owned(),
                machine: *machine,
            };
            counts(&all.iter().map(process).collect::<Vec<_>>())
        };
        let machine = [0, 3];
        assert_eq!(of(&[("0-7", machine), ("0-7", machine), ("0-7", machine)]), [3, 3, 3]);
        assert_eq!(of(&[("0-1", machine), ("2,4", machine), ("3,5-9", machine)]), [1, 1, 1]);
        assert_eq!(of(&[("0-2", machine), ("2-3", machine), ("4", machine)]), [2, 2, 1]);
        assert_eq!(of(&[("0-2", machine), ("", machine), ("4", machine)]), [2, 3, 2]);
        assert_eq!(of(&[("0-1", [0, 1]), ("0-1", [1, 3]), ("0-1", [1, 3])]), [1, 2, 2]);
        assert_eq!(of(&[("0-1", [5, 9])]), [1]);
    }
}
