//! Which GPUs a test runs on: the stand-ins', unless `NARROWS_TEST_GPU=1` asks for those of this machine.
//!
//! Either way its body runs in a child, whose loader was told where the libraries are. A test that needs more GPUs than
//! there are says so and ends, unless `NCCL_MULTI_RANK_GPU_ENABLE=1` lets NCCL (2.30.3 or newer) put several devices on
//! one GPU.

use std::env;
use std::path::Path;
use std::process::Command;

use narrows_cuda::libraries;
use narrows_cuda::machine;

use narrows_fake_cuda::child;

/// Asks for the GPUs of this machine.
const ASKED: &str = "NARROWS_TEST_GPU";

/// Set in a child that has them: what it draws with.
const SEED: &str = "NARROWS_TEST_GPU_SEED";

const CHECKED: &str = "checked on this machine's GPUs";

/// Whether this machine's own GPUs are asked for.
pub fn real() -> bool {
    env::var(ASKED).is_ok_and(|value| value == "1")
}

/// How many GPUs there are.
pub fn count() -> u64 {
    machine::gpus().unwrap_or_else(|why| panic!("no GPU comes up: {why}")).len() as u64
}

/// How many devices a plan may have.
pub fn devices_max() -> u64 {
    let several = env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
    if real() && several && count() > 0 { u64::MAX } else { count() }
}

/// Which GPU a device runs on.
pub fn ordinal(rank: u64) -> u64 {
    rank % count()
}

/// Runs a body that needs so many devices in a child, under each of these seeds.
pub fn seeded(test: &str, seeds: u32, devices: u64, body: impl FnOnce(u64)) {
    if real() {
        return on_this_machine(test, seeds, devices, body);
    }
    let devices = devices.to_string();
    child::seeded(test, seeds, &[("NARROWS_FAKE_CUDA_DEVICES", &devices)], || {
        body(env::var("NARROWS_FAKE_CUDA_SEED").unwrap().parse().unwrap());
    });
}

fn on_this_machine(test: &str, seeds: u32, devices: u64, body: impl FnOnce(u64)) {
    if let Ok(seed) = env::var(SEED) {
        match devices_max() {
            enough if enough >= devices => body(seed.parse().unwrap()),
            few => println!(
                "skipped: {test} wants {devices} GPUs, and this machine has {few} \
                 (NCCL_MULTI_RANK_GPU_ENABLE=1 puts several devices on one)"
            ),
        }
        println!("{CHECKED}");
        return;
    }
    // Links under the names that are asked for, before all else that the loader knows.
    let links = tempfile::tempdir().unwrap();
    let found = libraries::find(&libraries::places(|name| env::var_os(name)));
    libraries::link(&found, links.path()).unwrap();
    let before = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let places = [links.path().into()].into_iter().chain(env::split_paths(&before));
    let places = env::join_paths(places.filter(|place| place != Path::new(""))).unwrap();
    for seed in 0..seeds {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture"]);
        command.env(SEED, seed.to_string()).env("LD_LIBRARY_PATH", &places);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains(CHECKED), "{said}{errors}");
        said.lines()
            .filter(|line| line.contains("skipped:") || line.contains("programs:"))
            .for_each(|line| println!("{line}"));
    }
}

/// Runs a body that needs what only stand-ins do, by variables of theirs.
pub fn of_stand_ins(test: &str, variables: child::Variables, body: impl FnOnce()) {
    if real() {
        println!("skipped: {test} is for stand-ins alone");
    } else {
        child::once(test, variables, body);
    }
}
