//! `narrows doctor` on machines with and without CUDA.

use std::fs;

use super::{json, narrows, stdout};

#[test]
fn doctor_reports_which_backends_can_run() {
    let report = json("doctor");
    assert_eq!(report["backends"]["cpu"]["usable"], true);
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0);
    assert_eq!(report["libraries"].as_array().unwrap().len(), 5);
    for library in report["libraries"].as_array().unwrap() {
        assert!(library["loads"].is_boolean() && library["purpose"].is_string(), "{library}");
    }
    // A backend that cannot run has a reason and, if there is a remedy, a hint.
    let cuda = &report["backends"]["cuda"];
    assert!(cuda["usable"] == true || !cuda["because"].as_array().unwrap().is_empty(), "{cuda}");
    let text = stdout("doctor --details");
    assert!(text.contains("cpu   available") && text.contains("CUDA libraries"), "{text}");
    let summary = stdout("doctor");
    assert!(summary.contains("cpu   available"), "{summary}");
    if report["devices"].as_array().unwrap().is_empty() {
        assert_eq!(summary.lines().count(), 2, "a line for each backend: {summary}");
        assert!(summary.contains("--details says more"), "{summary}");
    }
}

/// Python packages contain libraries under names that programs do not load.
#[cfg(unix)]
#[test]
fn libraries_are_linked_under_the_names_that_are_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("lib/python3.11/site-packages/nvidia/nccl/lib");
    fs::create_dir_all(&place).unwrap();
    let file = place.join("libnccl.so.2");
    fs::write(&file, "no library").unwrap();
    let cache = folder.path().join("cache");
    let output = narrows("doctor --format json")
        .env("VIRTUAL_ENV", folder.path())
        .env("XDG_CACHE_HOME", &cache)
        .env_remove("LD_LIBRARY_PATH")
        .assert()
        .success();
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let mut libraries = report["libraries"].as_array().unwrap().iter();
    let nccl = libraries.find(|library| library["name"] == "libnccl").unwrap();
    // An NCCL of the machine takes precedence.
    if nccl["loads"] == false {
        let real = fs::canonicalize(&file).unwrap();
        assert_eq!(nccl["path"].as_str(), real.to_str());
        let causes = report["backends"]["cuda"]["because"].to_string();
        assert!(causes.contains("libnccl (collectives) does not load"), "{causes}");
        let mut cached = fs::read_dir(cache.join("narrows")).unwrap();
        let links = cached.next().unwrap().unwrap().path();
        assert_eq!(fs::read_link(links.join("libnccl.so")).unwrap(), real);
    }
}

#[test]
fn doctor_reports_the_process_rank() {
    let output = narrows("doctor")
        .envs([("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "node1"), ("MASTER_PORT", "7")])
        .assert()
        .success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(text.contains("3 of 8, started by torchrun, rendezvous at node1:7"), "{text}");
}
