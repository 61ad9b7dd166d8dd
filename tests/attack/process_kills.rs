//! Runs of several processes, of which one is killed at random moments; a launcher then starts all again.

use std::collections::BTreeMap;
use std::process::{Child, Command};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use narrows_test_support::free_port;
use narrows_test_support::plans::TestRng;

use super::fixture::{copy_folder, fixture, message_of_rank, run, start_rank, wait_for_rank};
use super::kills::{assert_nothing_lost, assert_undisturbed, losses, saving_run};

/// Meshes of the runs, with their numbers of processes.
const MESHES: [(&str, usize); 4] = [
    ("--tensor 2 --pipeline 1", 2),
    ("--tensor 1 --pipeline 2", 2),
    ("--tensor 1 --pipeline 1", 2),
    ("--tensor 2 --pipeline 2", 4),
];

/// Kills of one run.
const KILLS: usize = 3;
/// Longest time before a kill: most runs are over by then.
const DELAY_MAX: Duration = Duration::from_millis(1200);
/// Time in which processes end that have lost another one. A process that still waits for others to join is ended then, as a
/// launcher does.
const SURVIVAL_MAX: Duration = Duration::from_secs(1);

/// Kills one process of a run a few times, and lets the run end.
pub fn attempt(seed: u64) {
    let mut rng = TestRng::new(seed);
    let (mesh, world) = MESHES[rng.below(MESHES.len())];
    let mode = ["", " --checkpoint-async"][rng.below(2)];
    let arguments =
        format!("{} {mesh}{mode} --join-timeout 30 --collective-timeout 30", saving_run());
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    copy_folder(fixture(), folder).expect("a copy");
    // A launcher has one port for all starts.
    let port = free_port();
    let start = || -> Vec<Child> {
        (0..world).map(|rank| start_rank(folder, (rank, world), port, &arguments)).collect()
    };
    let mut saved = 0;
    for _ in 0..KILLS {
        let mut children = start();
        std::thread::sleep(Duration::from_micros(rng.below(DELAY_MAX.as_micros() as usize) as u64));
        end(&mut children[rng.below(world)], ["-KILL", "-KILL", "-TERM"][rng.below(3)]);
        end_survivors(&mut children);
        for (rank, child) in children.iter_mut().enumerate() {
            let status = child.wait().expect("a child");
            let message = message_of_rank(folder, rank);
            let is_documented = matches!(status.code(), None | Some(0 | 1 | 130));
            assert!(is_documented, "process {rank} of {world}: {status}: {message}");
            assert!(!message.contains("panicked"), "process {rank} of {world}: {message}");
        }
        saved = assert_nothing_lost(folder, saved);
    }
    for (rank, child) in start().into_iter().enumerate() {
        wait_for_rank(folder, rank, child);
    }
    assert_undisturbed(folder, &undisturbed(mesh, world), 0);
}

/// Sends a signal. A process that has ended takes none.
fn end(child: &mut Child, signal: &str) {
    if child.try_wait().expect("a child").is_none() {
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(sent.expect("kill").success());
    }
}

fn end_survivors(children: &mut [Child]) {
    let deadline = Instant::now() + SURVIVAL_MAX;
    for child in children {
        while child.try_wait().expect("a child").is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        end(child, "-KILL");
    }
}

/// Losses of an undisturbed run of one process with the same mesh, which are those of several processes to the bit.
fn undisturbed(mesh: &'static str, world: usize) -> Vec<[u64; 3]> {
    static LOSSES: Mutex<BTreeMap<&str, Vec<[u64; 3]>>> = Mutex::new(BTreeMap::new());
    let mut known = LOSSES.lock().unwrap_or_else(PoisonError::into_inner);
    let run_once = || {
        let folder = tempfile::tempdir().expect("a temporary folder");
        copy_folder(fixture(), folder.path()).expect("a copy");
        let arguments = format!("{} {mesh} --devices {world}", saving_run());
        let ended = run(folder.path(), &arguments, &[]);
        assert!(ended.status.success(), "{}", ended.message);
        losses(folder.path())
    };
    known.entry(mesh).or_insert_with(run_once).clone()
}
