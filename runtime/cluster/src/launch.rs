//! Rank, world size and rendezvous address of a process, from the environment variables that
//! launchers set.

use std::fmt;

use super::job_token::JobToken;
use super::launcher::Launcher;
use super::slurm::{TaskCounts, first_host};

/// One process of a run, as its launcher describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchInfo {
    /// The launcher.
    pub launcher: Launcher,
    /// Process rank: the id of its device on the mesh.
    pub rank: u64,
    /// Number of processes of the run.
    pub world_size: u64,
    /// Rank on its node: the index of its GPU.
    pub local_rank: u64,
    /// Number of processes on its node; the world size where the launcher does not set it.
    pub local_world_size: u64,
    /// Address where rank 0 waits for the other processes.
    pub rendezvous: Address,
    /// Token that tells the processes of the job from strangers: the id that the launcher gives to the job, if it gives one.
    pub job: JobToken,
}

/// Error of an environment that does not describe a process of a run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// A variable is not a number from 0 up.
    #[error("{variable} is `{value}`, not a whole number from 0 up")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Value of the variable.
        value: String,
    },
    /// A variable is no list of the tasks of each node.
    #[error("{variable} is `{value}`, not a list of numbers such as 8(x2),4")]
    NotANumberPerNode {
        /// The variable.
        variable: &'static str,
        /// Value of the variable.
        value: String,
    },
    /// The node of a process is not in the list of the tasks of each node.
    #[error("SLURM_NODEID is {node}, and SLURM_STEP_TASKS_PER_NODE has no such node: `{counts}`")]
    NodeOutOfRange {
        /// Index of the node in the step.
        node: u64,
        /// The list.
        counts: String,
    },
    /// One of two variables is set without the other.
    #[error(
        "{set} is set, and {missing} is not: with one of them alone, a process does not know of the others of its run"
    )]
    Incomplete {
        /// The variable that is set.
        set: &'static str,
        /// The variable that is not.
        missing: &'static str,
    },
    /// A rank is not less than the number of processes.
    #[error("{variable} is {rank}, but the ranks of {world_size} processes count from 0")]
    RankOutOfRange {
        /// The variable.
        variable: &'static str,
        /// Value of the variable.
        rank: u64,
        /// Number of processes of the run.
        world_size: u64,
    },
    /// A node has more processes than the run.
    #[error("{variable} is {count}, but the run has {world_size} processes")]
    TooManyOnNode {
        /// The variable.
        variable: &'static str,
        /// Value of the variable.
        count: u64,
        /// Number of processes of the run.
        world_size: u64,
    },
    /// A port is not a number from 1 to 65535.
    #[error("{variable} is `{value}`, which is not a port")]
    InvalidPort {
        /// The variable.
        variable: &'static str,
        /// Value of the variable.
        value: String,
    },
    /// torchrun's agent listens at the last port, and the rendezvous would be at the next.
    #[error(
        "MASTER_PORT is 65535, where torchrun's agent listens, and there is no next port for the rendezvous"
    )]
    NoNextPort,
    /// No variable gives the address of the rendezvous.
    #[error(
        "no variable gives the address of the rendezvous, and {launcher} does not say that all processes are on one \
         node",
        launcher = launcher.name()
    )]
    NoRendezvous {
        /// The launcher.
        launcher: Launcher,
    },
}

impl LaunchError {
    /// Advice for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            LaunchError::Incomplete { .. } => "both for every process, or neither for one process",
            LaunchError::NotANumber { .. }
            | LaunchError::NotANumberPerNode { .. }
            | LaunchError::NodeOutOfRange { .. }
            | LaunchError::TooManyOnNode { .. }
            | LaunchError::RankOutOfRange { .. } => {
                "look at the program that started this process: it sets this variable"
            }
            LaunchError::InvalidPort { .. } => "a number from 1 to 65535, equal for every process",
            LaunchError::NoNextPort => "a smaller MASTER_PORT, or NARROWS_PORT for the rendezvous",
            LaunchError::NoRendezvous { .. } => {
                "MASTER_ADDR set to the name of the first node for every process, or to 127.0.0.1 if all are on this one"
            }
        }
    }
}

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Host name or IP address.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An IPv6 address contains colons.
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// Default port of the rendezvous, as in torch.
const DEFAULT_PORT: u16 = 29_500;
/// Number of ports from 15,000 on for steps of Slurm jobs.
const STEP_PORTS: u64 = 15_000;
/// Distance of the ports of consecutive steps: a prime, so that steps of a job have different ports, as have jobs that start one
/// after the other.
const STEP_STRIDE: u64 = 4_099;

impl LaunchInfo {
    /// Ranks of the processes on this node.
    pub fn node_ranks(&self) -> std::ops::Range<u64> {
        let first = self.rank - self.local_rank.min(self.rank);
        first..first + self.local_world_size
    }

    /// Reads the environment; `None` when no launcher started several processes. `variable` returns the
    /// value of a variable, if it is set.
    ///
    /// The rendezvous is at `MASTER_ADDR` and `MASTER_PORT`. Without `MASTER_ADDR` it is the loopback
    /// address for processes of one node, and the first node of a Slurm step; without `MASTER_PORT`, a
    /// port derived from the ids of the Slurm job and step, or 29500. A torchrun agent listens at `MASTER_PORT` itself
    /// and sets `TORCHELASTIC_USE_AGENT_STORE`: the rendezvous is then at the next port.
    /// `NARROWS_PORT` takes precedence over all other ports.
    ///
    /// # Errors
    /// When a variable is not a number or out of range, or no rendezvous address can be derived.
    pub fn from_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<LaunchInfo>, LaunchError> {
        for launcher in Launcher::ALL {
            if let Some(launch) = LaunchInfo::from_launcher(launcher, &variable)? {
                return Ok(Some(launch));
            }
            // torchrun may start one process in each task of another launcher.
            let names = launcher.variables();
            let is_alone =
                [names.rank, names.world_size].iter().all(|name| variable(name).is_some());
            if launcher == Launcher::Torchrun && is_alone {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Reads the variables of one launcher.
    ///
    /// # Errors
    /// As [`from_environment`](LaunchInfo::from_environment).
    pub fn from_launcher(
        launcher: Launcher,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<LaunchInfo>, LaunchError> {
        let names = launcher.variables();
        let rank = number(&variable, names.rank)?;
        let world_size = number(&variable, names.world_size)?;
        let (rank, world_size) = match (rank, world_size) {
            (Some(rank), Some(world_size)) => (rank, world_size),
            // Shells of other launchers may have the number of processes without a rank.
            (None, Some(2..)) if launcher == Launcher::Torchrun => {
                let (set, missing) = (names.world_size, names.rank);
                return Err(LaunchError::Incomplete { set, missing });
            }
            (Some(_), None) if launcher == Launcher::Torchrun => {
                let (set, missing) = (names.rank, names.world_size);
                return Err(LaunchError::Incomplete { set, missing });
            }
            _ => return Ok(None),
        };
        if rank >= world_size {
            return Err(LaunchError::RankOutOfRange { variable: names.rank, rank, world_size });
        }
        if world_size == 1 {
            return Ok(None);
        }
        let local_rank = number(&variable, names.local_rank)?;
        let on_this_node = match launcher {
            Launcher::Slurm => tasks_of_node(&variable, names.local_world_size)?,
            Launcher::Torchrun | Launcher::OpenMpi => {
                let set = |name: &str| variable(name).filter(|value| !value.is_empty());
                number(set, names.local_world_size)?
            }
        };
        let local_world_size = on_this_node.unwrap_or(world_size);
        if local_world_size > world_size {
            let (variable, count) = (names.local_world_size, local_world_size);
            return Err(LaunchError::TooManyOnNode { variable, count, world_size });
        }
        if let Some(rank) = local_rank.filter(|rank| *rank >= local_world_size) {
            let (variable, world_size) = (names.local_rank, local_world_size);
            return Err(LaunchError::RankOutOfRange { variable, rank, world_size });
        }
        let one_node = on_this_node == Some(world_size);
        let host = match variable("MASTER_ADDR").filter(|host| !host.is_empty()) {
            Some(host) => host,
            None if one_node => "127.0.0.1".into(),
            None => first_node(&variable).ok_or(LaunchError::NoRendezvous { launcher })?,
        };
        // A loopback rendezvous implies one node, even where the launcher sets no local rank.
        let loopback = ["localhost", "::1"].contains(&host.as_str()) || host.starts_with("127.");
        let local_rank = local_rank.unwrap_or(if loopback { rank } else { 0 });
        let rendezvous = Address { host, port: port(&variable)? };
        Ok(Some(LaunchInfo {
            launcher,
            rank,
            world_size,
            local_rank,
            local_world_size,
            rendezvous,
            job: launcher.job(&variable),
        }))
    }
}

fn number(
    variable: impl Fn(&str) -> Option<String>,
    name: &'static str,
) -> Result<Option<u64>, LaunchError> {
    let Some(value) = variable(name) else { return Ok(None) };
    match value.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(LaunchError::NotANumber { variable: name, value }),
    }
}

/// Number of the tasks of a Slurm step on this node; `None` where the variable is not set.
fn tasks_of_node(
    variable: impl Fn(&str) -> Option<String>,
    name: &'static str,
) -> Result<Option<u64>, LaunchError> {
    let Some(value) = variable(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let node = number(&variable, "SLURM_NODEID")?.unwrap_or(0);
    let Some(counts) = TaskCounts::parse(&value) else {
        return Err(LaunchError::NotANumberPerNode { variable: name, value });
    };
    match counts.on_node(node) {
        Some(count) => Ok(Some(count)),
        None => Err(LaunchError::NodeOutOfRange { node, counts: value }),
    }
}

fn port(variable: impl Fn(&str) -> Option<String>) -> Result<u16, LaunchError> {
    let port_in = |name: &'static str| -> Result<Option<u16>, LaunchError> {
        let Some(value) = variable(name) else { return Ok(None) };
        let port = value.trim().parse().ok().filter(|port| *port > 0);
        port.map(Some).ok_or(LaunchError::InvalidPort { variable: name, value })
    };
    if let Some(port) = port_in("NARROWS_PORT")? {
        return Ok(port);
    }
    if let Some(port) = port_in("MASTER_PORT")? {
        let agent = variable("TORCHELASTIC_USE_AGENT_STORE");
        let taken = agent.is_some_and(|value| value.eq_ignore_ascii_case("true"));
        return match taken {
            true => port.checked_add(1).ok_or(LaunchError::NoNextPort),
            false => Ok(port),
        };
    }
    // Different for each step of each job, because two of them may share a node; below the ephemeral ports, which
    // begin at 32768.
    let Some(job) = number(&variable, "SLURM_JOB_ID")? else { return Ok(DEFAULT_PORT) };
    let step = number(&variable, "SLURM_STEP_ID")?.unwrap_or(0);
    let offset = job % STEP_PORTS + (step % STEP_PORTS) * STEP_STRIDE;
    Ok(15_000 + (offset % STEP_PORTS) as u16)
}

/// The first node of a Slurm step.
fn first_node(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    names.into_iter().filter_map(variable).find_map(|list| first_host(&list))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<LaunchInfo>, LaunchError> {
        LaunchInfo::from_environment(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
        })
    }

    fn rendezvous(variables: &[(&str, &str)]) -> String {
        read(variables).unwrap().unwrap().rendezvous.to_string()
    }

    #[test]
    fn reads_torchrun() {
        let run = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node1"),
            ("MASTER_PORT", "4000"),
        ];
        let launch = read(&run).unwrap().unwrap();
        assert_eq!((launch.rank, launch.world_size, launch.local_rank), (5, 8, 1));
        assert_eq!(
            (launch.launcher, launch.rendezvous.to_string().as_str()),
            (Launcher::Torchrun, "node1:4000")
        );
        // The agent listens at the port itself.
        let agent = [&run[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(rendezvous(&agent), "node1:4001");
        let chosen = [&agent[..], &[("NARROWS_PORT", "77")]].concat();
        assert_eq!(rendezvous(&chosen), "node1:77");
        assert_eq!(
            rendezvous(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "::1")]),
            "[::1]:29500"
        );
        // A shell loop sets no local rank.
        let local = |host| {
            let run = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", host)];
            read(&run).unwrap().unwrap().local_rank
        };
        assert_eq!(["127.0.0.1", "localhost", "::1", "node1"].map(local), [1, 1, 1, 0]);
    }

    #[test]
    fn reads_slurm() {
        let step = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "16"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "8(x2)"),
            ("SLURM_STEP_NODELIST", "gpu[07-09,12]"),
            ("SLURM_JOB_ID", "1234567"),
        ];
        let launch = read(&step).unwrap().unwrap();
        assert_eq!((launch.rank, launch.world_size, launch.local_rank), (3, 16, 3));
        assert_eq!(
            (launch.launcher, launch.rendezvous.to_string().as_str()),
            (Launcher::Slurm, "gpu07:19567")
        );
        // Steps of a job may run at the same time.
        let of_step = |id| rendezvous(&[&step[..], &[("SLURM_STEP_ID", id)]].concat());
        assert_eq!(of_step("0"), "gpu07:19567");
        assert_eq!(of_step("1"), "gpu07:23666");
        assert_eq!(of_step("18446744073709551615"), "gpu07:29452");
        // Nodes may have different numbers of tasks.
        let on_node = |node, counts| {
            let uneven = [
                ("SLURM_NODEID", node),
                ("SLURM_STEP_TASKS_PER_NODE", counts),
                ("SLURM_STEP_NUM_TASKS", "20"),
            ];
            let others = &step[..1];
            read(&[&uneven[..], others, &step[2..3], &step[4..]].concat())
        };
        let local = |node| on_node(node, "8(x2),4").unwrap().unwrap().local_world_size;
        assert_eq!(["0", "1", "2"].map(local), [8, 8, 4]);
        let message = |node, counts| on_node(node, counts).unwrap_err().to_string();
        assert!(message("3", "8(x2),4").contains("SLURM_NODEID is 3"));
        assert!(message("0", "8(xx)").contains("`8(xx)`, not a list of numbers"));
        // torchrun starts one process in each task.
        let alone = [&step[..], &[("RANK", "0"), ("WORLD_SIZE", "1")]].concat();
        assert_eq!(read(&alone), Ok(None));
        // A batch script is not one of the tasks.
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "16")]), Ok(None));
    }

    #[test]
    fn reads_open_mpi() {
        let run = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        let launch = read(&run).unwrap().unwrap();
        assert_eq!((launch.launcher, launch.rank, launch.world_size), (Launcher::OpenMpi, 1, 4));
        assert_eq!(launch.rendezvous.to_string(), "127.0.0.1:29500");
        // Several nodes need MASTER_ADDR.
        let apart = [&run[..3], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]].concat();
        assert_eq!(read(&apart), Err(LaunchError::NoRendezvous { launcher: Launcher::OpenMpi }));
    }

    #[test]
    fn one_process_is_no_cluster_and_invalid_variables_are_errors() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        let message = |variables: &[(&str, &str)]| read(variables).unwrap_err().to_string();
        assert!(message(&[("RANK", "2"), ("WORLD_SIZE", "2")]).starts_with("RANK is 2"));
        assert!(message(&[("WORLD_SIZE", "2")]).contains("RANK is not"));
        for rank in ["0", "1"] {
            assert!(message(&[("RANK", rank)]).contains("WORLD_SIZE is not"), "{rank}");
        }
        assert!(message(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("`x`"));
        let port =
            [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")];
        assert_eq!(message(&port), "MASTER_PORT is `70000`, which is not a port");
        let of = |name: &'static str, value: &'static str| {
            let run = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), (name, value)];
            read(&run).unwrap_err()
        };
        for value in ["0", "-1", "http", ""] {
            let error = of("MASTER_PORT", value);
            assert!(matches!(error, LaunchError::InvalidPort { .. }), "{error}");
            assert!(error.hint().contains("from 1 to 65535"), "{}", error.hint());
        }
        assert!(of("LOCAL_WORLD_SIZE", "all").to_string().contains("`all`, not a whole number"));
        let negative = message(&[("RANK", "-1"), ("WORLD_SIZE", "2")]);
        assert_eq!(negative, "RANK is `-1`, not a whole number from 0 up");
        let most = of("LOCAL_WORLD_SIZE", "18446744073709551615").to_string();
        assert!(most.ends_with("but the run has 2 processes"), "{most}");
        let local = of("LOCAL_RANK", "2").to_string();
        assert_eq!(local, "LOCAL_RANK is 2, but the ranks of 2 processes count from 0");
        let agent = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_PORT", "65535")];
        let agent = [&port[..3], &agent].concat();
        assert_eq!(read(&agent), Err(LaunchError::NoNextPort));
        // A shell loop without MASTER_ADDR may be on one node or on several.
        let error = read(&[("RANK", "0"), ("WORLD_SIZE", "2")]).unwrap_err();
        assert!(error.to_string().starts_with("no variable gives the address"), "{error}");
        assert!(error.hint().contains("127.0.0.1"), "{}", error.hint());
    }

    #[test]
    fn the_rendezvous_of_a_slurm_step_is_at_its_first_node() {
        let step = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_STEP_NODELIST", ""),
            ("SLURM_JOB_NODELIST", "gpu[1-2]"),
        ];
        assert_eq!(rendezvous(&step), "gpu1:29500");
    }
}
