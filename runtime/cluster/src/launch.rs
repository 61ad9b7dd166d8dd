//! What the environment says of a process: which of how many it is, and where all of them meet.

use std::fmt;

use super::error::LaunchError;

/// One process of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchInfo {
    /// Who says so.
    pub launcher: Launcher,
    /// Its number in the run: it is that device of the mesh.
    pub rank: u64,
    /// Processes of the run.
    pub world: u64,
    /// Its number on its node: which of the node's GPUs is its own.
    pub local_rank: u64,
    /// Processes on its node (or on the first, if nodes differ); all, if nobody says.
    pub local_world: u64,
    /// Where process 0 waits for the others.
    pub meeting: Address,
}

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// A name or an IP address.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An IPv6 address has colons of its own.
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// What started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// torchrun, or anything that sets RANK and WORLD_SIZE as it does.
    Torchrun,
    /// srun.
    Slurm,
    /// mpirun of Open MPI.
    OpenMpi,
}

impl Launcher {
    /// In the order in which they are looked for: torchrun may be run by srun.
    pub const ALL: [Launcher; 3] = [Launcher::Torchrun, Launcher::Slurm, Launcher::OpenMpi];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Launcher::Torchrun => "torchrun",
            Launcher::Slurm => "slurm",
            Launcher::OpenMpi => "openmpi",
        }
    }

    fn variables(self) -> &'static LauncherVariables {
        match self {
            Launcher::Torchrun => &LauncherVariables {
                rank: "RANK",
                world: "WORLD_SIZE",
                local_rank: "LOCAL_RANK",
                local_world: "LOCAL_WORLD_SIZE",
            },
            // Those of the step: a batch script, which is not one of the tasks that it starts, has
            // SLURM_NTASKS too.
            Launcher::Slurm => &LauncherVariables {
                rank: "SLURM_PROCID",
                world: "SLURM_STEP_NUM_TASKS",
                local_rank: "SLURM_LOCALID",
                local_world: "SLURM_STEP_TASKS_PER_NODE",
            },
            Launcher::OpenMpi => &LauncherVariables {
                rank: "OMPI_COMM_WORLD_RANK",
                world: "OMPI_COMM_WORLD_SIZE",
                local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
                local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
            },
        }
    }
}

/// Where a launcher says what.
struct LauncherVariables {
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
}

/// The port of a run that nobody gave one: torch's default.
const PORT: u16 = 29_500;

impl LaunchInfo {
    /// Ranks of the processes on this node.
    pub fn node_ranks(&self) -> std::ops::Range<u64> {
        let first = self.rank - self.local_rank.min(self.rank);
        first..first + self.local_world
    }

    /// What an environment says; `None` when nobody started several processes. `variable` gives the
    /// value of a variable that is set.
    ///
    /// The meeting is at `MASTER_ADDR` and `MASTER_PORT`. Without them, processes of one node meet on
    /// their own machine, and those of a Slurm step at its first node, at a port made of its job's
    /// number. An agent of torchrun listens at `MASTER_PORT` itself, and says so in
    /// `TORCHELASTIC_USE_AGENT_STORE`: the run then meets at the next port. `NARROWS_PORT` goes before
    /// all of these.
    ///
    /// # Errors
    /// When a variable is no number, or what it says cannot be, or no meeting can be made out.
    pub fn read(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<LaunchInfo>, LaunchError> {
        for launcher in Launcher::ALL {
            if let Some(launch) = LaunchInfo::of(launcher, &variable)? {
                return Ok(Some(launch));
            }
        }
        Ok(None)
    }

    /// The same of one launcher.
    ///
    /// # Errors
    /// As [`read`](LaunchInfo::read).
    pub fn of(
        launcher: Launcher,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<LaunchInfo>, LaunchError> {
        let names = launcher.variables();
        let (Some(rank), Some(world)) =
            (number(&variable, names.rank)?, number(&variable, names.world)?)
        else {
            return Ok(None);
        };
        if rank >= world {
            return Err(LaunchError::Rank { variable: names.rank, rank, world });
        }
        if world == 1 {
            return Ok(None);
        }
        let local_rank = number(&variable, names.local_rank)?;
        // Slurm writes how often it repeats, and then those of other nodes: `8(x2),4`.
        let counts = variable(names.local_world).unwrap_or_default();
        let first: String = counts.chars().take_while(char::is_ascii_digit).collect();
        let local_world = first.parse().unwrap_or(world);
        let one_node = local_world == world && !first.is_empty();
        let host = match variable("MASTER_ADDR").filter(|host| !host.is_empty()) {
            Some(host) => host,
            None if one_node => "127.0.0.1".into(),
            None => first_node(&variable).ok_or(LaunchError::NoMeeting { launcher })?,
        };
        // Who meets at a loopback address is on one node, whoever forgot to say so.
        let here = ["localhost", "::1"].contains(&host.as_str()) || host.starts_with("127.");
        let local_rank = local_rank.unwrap_or(if here { rank } else { 0 });
        let meeting = Address { host, port: port(&variable)? };
        Ok(Some(LaunchInfo { launcher, rank, world, local_rank, local_world, meeting }))
    }
}

fn number(
    variable: impl Fn(&str) -> Option<String>,
    name: &'static str,
) -> Result<Option<u64>, LaunchError> {
    let Some(value) = variable(name) else { return Ok(None) };
    match value.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(LaunchError::NoNumber { variable: name, value }),
    }
}

fn port(variable: impl Fn(&str) -> Option<String>) -> Result<u16, LaunchError> {
    let given = |name: &'static str| -> Result<Option<u16>, LaunchError> {
        let Some(port) = number(&variable, name)? else { return Ok(None) };
        let fits = u16::try_from(port).ok().filter(|port| *port > 0);
        fits.map(Some).ok_or(LaunchError::NoPort { variable: name, port })
    };
    if let Some(port) = given("NARROWS_PORT")? {
        return Ok(port);
    }
    if let Some(port) = given("MASTER_PORT")? {
        let agent = variable("TORCHELASTIC_USE_AGENT_STORE");
        let taken = agent.is_some_and(|said| said.eq_ignore_ascii_case("true"));
        return match taken {
            true => port
                .checked_add(1)
                .ok_or(LaunchError::NoPort { variable: "MASTER_PORT", port: port.into() }),
            false => Ok(port),
        };
    }
    // Two jobs may share a node. Ports that the system gives out by itself begin at 32768.
    let job = number(&variable, "SLURM_JOB_ID")?;
    Ok(job.map_or(PORT, |job| 15_000 + (job % 15_000) as u16))
}

/// The first node of a Slurm step.
fn first_node(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let list = variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_JOB_NODELIST"))?;
    first_host(&list)
}

/// The first of a list of hosts as Slurm shortens it: `gpu[07-09,12],login1` begins with `gpu07`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.chars();
    while let Some(letter) = rest.next() {
        match letter {
            ',' => break,
            '[' => {
                let inside: String = rest.by_ref().take_while(|letter| *letter != ']').collect();
                host.push_str(inside.split([',', '-']).next()?);
            }
            letter => host.push(letter),
        }
    }
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<LaunchInfo>, LaunchError> {
        LaunchInfo::read(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
        })
    }

    fn meeting(variables: &[(&str, &str)]) -> String {
        read(variables).unwrap().unwrap().meeting.to_string()
    }

    #[test]
    fn torchrun_is_understood() {
        let run = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node1"),
            ("MASTER_PORT", "4000"),
        ];
        let launch = read(&run).unwrap().unwrap();
        assert_eq!((launch.rank, launch.world, launch.local_rank), (5, 8, 1));
        assert_eq!(
            (launch.launcher, launch.meeting.to_string().as_str()),
            (Launcher::Torchrun, "node1:4000")
        );
        // Its agent has taken the port.
        let agent = [&run[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(meeting(&agent), "node1:4001");
        let chosen = [&agent[..], &[("NARROWS_PORT", "77")]].concat();
        assert_eq!(meeting(&chosen), "node1:77");
        assert_eq!(
            meeting(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "::1")]),
            "[::1]:29500"
        );
        // A loop in a shell says no local rank.
        let local = |host| {
            let run = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", host)];
            read(&run).unwrap().unwrap().local_rank
        };
        assert_eq!(["127.0.0.1", "localhost", "::1", "node1"].map(local), [1, 1, 1, 0]);
    }

    #[test]
    fn slurm_is_understood() {
        let step = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "16"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "8(x2)"),
            ("SLURM_STEP_NODELIST", "gpu[07-09,12]"),
            ("SLURM_JOB_ID", "1234567"),
        ];
        let launch = read(&step).unwrap().unwrap();
        assert_eq!((launch.rank, launch.world, launch.local_rank), (3, 16, 3));
        assert_eq!(
            (launch.launcher, launch.meeting.to_string().as_str()),
            (Launcher::Slurm, "gpu07:19567")
        );
        // A batch script is not one of the tasks that it will start.
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "16")]), Ok(None));
    }

    #[test]
    fn open_mpi_is_understood() {
        let run = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        let launch = read(&run).unwrap().unwrap();
        assert_eq!((launch.launcher, launch.rank, launch.world), (Launcher::OpenMpi, 1, 4));
        assert_eq!(launch.meeting.to_string(), "127.0.0.1:29500");
        // On several nodes somebody must say where.
        let apart = [&run[..3], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]].concat();
        assert_eq!(read(&apart), Err(LaunchError::NoMeeting { launcher: Launcher::OpenMpi }));
    }

    #[test]
    fn one_process_is_no_cluster_and_nonsense_is_refused() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        let refused = |variables: &[(&str, &str)]| read(variables).unwrap_err().to_string();
        assert!(refused(&[("RANK", "2"), ("WORLD_SIZE", "2")]).starts_with("RANK is 2"));
        assert!(refused(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("`x`"));
        let port =
            [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")];
        assert!(refused(&port).contains("70000"));
    }

    #[test]
    fn the_first_host_of_a_list() {
        let cases = [
            ("a", "a"),
            ("a,b", "a"),
            ("gpu[3]", "gpu3"),
            ("gpu[007-012,20],login", "gpu007"),
            ("r[1-2]n[03-04].cluster", "r1n03.cluster"),
        ];
        for (list, host) in cases {
            assert_eq!(first_host(list).as_deref(), Some(host));
        }
        assert_eq!(first_host(""), None);
    }
}
