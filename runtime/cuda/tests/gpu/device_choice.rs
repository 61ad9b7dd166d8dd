//! Choice of the GPUs that a test runs on: the fake ones, or with `NARROWS_TEST_GPU=1` those of this machine.
//!
//! In both cases the body runs in a child process, whose loader path contains the libraries. A test that needs more GPUs
//! than there are is skipped with a message, unless `NCCL_MULTI_RANK_GPU_ENABLE=1` lets NCCL (2.30.3 or newer) put several
//! ranks on one GPU.

use std::env;
use std::path::Path;
use std::process::Command;

use narrows_cuda::{find_libraries, gpus, library_search_folders, link_libraries};
use narrows_fake_cuda::child;

/// Selects the GPUs of this machine.
const REAL_GPUS_VARIABLE: &str = "NARROWS_TEST_GPU";

/// Set in a child on this machine's GPUs: the seed of its random plans.
const SEED: &str = "NARROWS_TEST_GPU_SEED";

/// Lines of a child's output that are reported contain one of these.
const REPORTED: [&str; 3] = ["skipped:", "programs:", "long sequences:"];

const PASSED: &str = "passed on this machine's GPUs";

/// Whether this machine's GPUs are used.
pub fn uses_real_gpus() -> bool {
    env::var(REAL_GPUS_VARIABLE).is_ok_and(|value| value == "1")
}

/// Number of GPUs.
pub fn count() -> u64 {
    gpus().unwrap_or_else(|reason| panic!("the driver does not initialise: {reason}")).len() as u64
}

/// Maximum number of devices of a plan.
pub fn devices_max() -> u64 {
    let several = env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
    if uses_real_gpus() && several && count() > 0 { u64::MAX } else { count() }
}

/// GPU of a rank.
pub fn ordinal(rank: u64) -> u64 {
    rank % count()
}

/// Runs a body that needs this many devices in a child process per seed.
pub fn under_seeds(
    test: &str,
    seeds: impl IntoIterator<Item = u32>,
    devices: u64,
    body: impl FnOnce(u64),
) {
    if uses_real_gpus() {
        return on_real_gpus(test, seeds, devices, body);
    }
    let devices = devices.to_string();
    let variables = [("NARROWS_FAKE_CUDA_DEVICES", devices.as_str())];
    child::under_seeds(test, seeds, &variables, || body(fake_seed()));
}

/// As [`under_seeds`]; on fake GPUs with all children at the same time, for a body that mostly waits.
pub fn under_seeds_at_once(
    test: &str,
    seeds: impl IntoIterator<Item = u32>,
    devices: u64,
    body: impl FnOnce(u64),
) {
    if uses_real_gpus() {
        return on_real_gpus(test, seeds, devices, body);
    }
    let devices = devices.to_string();
    let variables = [("NARROWS_FAKE_CUDA_DEVICES", devices.as_str())];
    child::under_seeds_at_once(test, seeds, &variables, || body(fake_seed()));
}

fn fake_seed() -> u64 {
    env::var("NARROWS_FAKE_CUDA_SEED").unwrap().parse().unwrap()
}

fn on_real_gpus(
    test: &str,
    seeds: impl IntoIterator<Item = u32>,
    devices: u64,
    body: impl FnOnce(u64),
) {
    if let Ok(seed) = env::var(SEED) {
        match devices_max() {
            enough if enough >= devices => body(seed.parse().unwrap()),
            few => println!(
                "skipped: {test} needs {devices} GPUs, and this machine has {few} \
                 (NCCL_MULTI_RANK_GPU_ENABLE=1 puts several ranks on one)"
            ),
        }
        println!("{PASSED}");
        return;
    }
    // Links under the names that are loaded, at the beginning of the loader's path.
    let links = tempfile::tempdir().unwrap();
    let libraries = find_libraries(&library_search_folders(|name| env::var_os(name)));
    link_libraries(&libraries, links.path()).unwrap();
    let loader_path = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = [links.path().into()].into_iter().chain(env::split_paths(&loader_path));
    let folders = folders.filter(|folder| folder != Path::new(""));
    let loader_path = env::join_paths(folders).unwrap();
    for seed in seeds {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture", "--include-ignored"]);
        command.env(SEED, seed.to_string()).env("LD_LIBRARY_PATH", &loader_path);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(PASSED), "{text}{errors}");
        text.lines()
            .filter(|line| REPORTED.iter().any(|marker| line.contains(marker)))
            .for_each(|line| println!("{line}"));
    }
}

/// Runs a body that works on fake GPUs only, configured by these variables.
pub fn on_fake_gpus(test: &str, variables: child::Variables, body: impl FnOnce()) {
    if uses_real_gpus() {
        println!("skipped: {test} is for fake GPUs only");
    } else {
        child::under_one_seed(test, variables, body);
    }
}
