//! Other processes of a job on the same machine.

use super::launch::LaunchInfo;

/// Whether another process of the job may be running: on this machine, if all processes of the job are here, or else anywhere.
pub(crate) fn may_have_siblings(launch: &LaunchInfo) -> bool {
    let host = launch.rendezvous.host.as_str();
    let is_here =
        host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
    !is_here || has_siblings(launch)
}

/// Whether a process of this machine has the environment of another process of the job.
#[cfg(target_os = "linux")]
fn has_siblings(launch: &LaunchInfo) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return true };
    // Processes of other users cannot be read.
    let environments = processes
        .flatten()
        .filter_map(|process| std::fs::read(process.path().join("environ")).ok());
    environments.into_iter().any(|environment| is_sibling(launch, &environment))
}

#[cfg(not(target_os = "linux"))]
fn has_siblings(_launch: &LaunchInfo) -> bool {
    true
}

/// Whether an environment, as the kernel shows it, is that of another process of the job.
#[cfg(target_os = "linux")]
fn is_sibling(launch: &LaunchInfo, environment: &[u8]) -> bool {
    let variable = |name: &str| {
        let value = environment
            .split(|byte| *byte == 0)
            .find_map(|assignment| assignment.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        String::from_utf8(value.to_vec()).ok()
    };
    LaunchInfo::from_launcher(launch.launcher, variable).ok().flatten().is_some_and(|other| {
        other.rank != launch.rank
            && other.world_size == launch.world_size
            && other.rendezvous == launch.rendezvous
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    fn variables(rank: &str, port: &str) -> [(&'static str, String); 4] {
        [("RANK", rank), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)]
            .map(|(name, value)| (name, value.to_owned()))
    }

    fn launch(rank: &str, port: &str) -> LaunchInfo {
        let variables = variables(rank, port);
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
        };
        LaunchInfo::from_environment(variable).unwrap().unwrap()
    }

    /// A process with the same rank may be a child of this one.
    #[test]
    fn siblings_are_processes_of_the_job_with_other_ranks() {
        let mut sibling = Command::new("cat")
            .envs(variables("1", "17"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The kernel shows the environment of a process a little after it was started.
        let (input, output) = (sibling.stdin.as_mut().unwrap(), sibling.stdout.as_mut().unwrap());
        input.write_all(b"!").unwrap();
        output.read_exact(&mut [0]).unwrap();
        let found = ["0", "1", "2"].map(|rank| may_have_siblings(&launch(rank, "17")));
        let of_other_job = may_have_siblings(&launch("0", "18"));
        drop(sibling.stdin.take());
        sibling.wait().unwrap();
        assert_eq!((found, of_other_job), ([true, false, true], false));
        assert!(!may_have_siblings(&launch("0", "17")), "the process has ended");
    }

    #[test]
    fn processes_of_other_machines_may_be_running() {
        let mut elsewhere = launch("0", "17");
        elsewhere.rendezvous.host = "node1".into();
        assert!(may_have_siblings(&elsewhere));
    }
}
