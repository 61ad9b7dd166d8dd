//! Runs the body of a test in child processes that load the fake libraries.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fs};

/// Set in a child: its role.
const CHILD: &str = "NARROWS_FAKE_CUDA_CHILD";
/// Printed by a child whose body returned.
const PASSED: &str = "the test body has passed";

/// Environment variables of a child.
pub type Variables<'a> = &'a [(&'a str, &'a str)];

/// The role of this process, if it is a child of a test.
pub fn role() -> Option<String> {
    env::var(CHILD).ok()
}

/// Folder of the fake libraries; `None`, with a printed reason, where they cannot be compiled.
pub fn libraries() -> Option<PathBuf> {
    match crate::build() {
        Ok(libraries) => Some(libraries),
        Err(reason) => {
            println!("skipped: {reason}");
            None
        }
    }
}

fn spawn(libraries: &Path, test: &str, role: &str, variables: Variables) -> Child {
    let mut command = Command::new(env::current_exe().expect("the path of this program"));
    command.args([test, "--exact", "--nocapture", "--include-ignored"]);
    command.env(CHILD, role).env("LD_LIBRARY_PATH", libraries);
    command.envs(variables.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("a child process")
}

fn spawn_with_seed(libraries: &Path, test: &str, seed: u32, variables: Variables) -> Child {
    let seed = seed.to_string();
    let all = [variables, &[("NARROWS_FAKE_CUDA_SEED", seed.as_str())]].concat();
    spawn(libraries, test, "alone", &all)
}

/// Waits for a child, which must pass, and returns its output.
fn finish(child: Child) -> String {
    let output = child.wait_with_output().expect("the output of the child");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.contains(PASSED), "{text}{errors}");
    text + &errors
}

/// Runs the body in one child per seed and returns their outputs. In a child, runs the body.
pub fn under_seeds(
    test: &str,
    seeds: impl IntoIterator<Item = u32>,
    variables: Variables,
    body: impl FnOnce(),
) -> Vec<String> {
    if role().is_some() {
        body();
        println!("{PASSED}");
        return vec![];
    }
    let Some(libraries) = libraries() else { return vec![] };
    let run = |seed| finish(spawn_with_seed(&libraries, test, seed, variables));
    seeds.into_iter().map(run).collect()
}

/// As [`under_seeds`], with all children at the same time: for a body that mostly waits.
pub fn under_seeds_at_once(
    test: &str,
    seeds: impl IntoIterator<Item = u32>,
    variables: Variables,
    body: impl FnOnce(),
) -> Vec<String> {
    if role().is_some() {
        return under_seeds(test, [], variables, body);
    }
    let Some(libraries) = libraries() else { return vec![] };
    let start = |seed| spawn_with_seed(&libraries, test, seed, variables);
    let children: Vec<Child> = seeds.into_iter().map(start).collect();
    children.into_iter().map(finish).collect()
}

/// Runs the body in one child with seed 0.
pub fn under_one_seed(test: &str, variables: Variables, body: impl FnOnce()) -> Option<String> {
    under_seeds(test, [0], variables, body).pop()
}

/// Runs the body in `count` processes that share a folder. Each receives its index and the folder. Returns their
/// outputs.
pub fn as_processes(
    test: &str,
    count: usize,
    seed: u32,
    variables: Variables,
    body: impl FnOnce(usize, &Path),
) -> Vec<String> {
    if let Some(role) = role() {
        let (index, folder) = role.split_once(' ').expect("an index and a folder");
        body(index.parse().expect("an index"), Path::new(folder));
        println!("{PASSED}");
        return vec![];
    }
    let Some(libraries) = libraries() else { return vec![] };
    let folder = tempfile::tempdir().expect("a folder");
    let (devices, seed) = (count.to_string(), seed.to_string());
    let path = folder.path().to_str().expect("a UTF-8 path");
    let common = [
        ("NARROWS_FAKE_CUDA_DEVICES", devices.as_str()),
        ("NARROWS_FAKE_CUDA_SEED", seed.as_str()),
        ("TMPDIR", path),
    ];
    let variables = [&common, variables].concat();
    let process = |index| spawn(&libraries, test, &format!("{index} {path}"), &variables);
    let children: Vec<Child> = (0..count).map(process).collect();
    let outputs = children.into_iter().map(finish).collect();
    let entries: Vec<_> = fs::read_dir(folder.path()).expect("the folder").flatten().collect();
    let remaining: Vec<_> = entries.iter().filter(|entry| entry.path().is_dir()).collect();
    assert!(remaining.is_empty(), "communicators left {remaining:?}");
    outputs
}

/// The output of a child that is ended by a signal.
pub fn output_of_crash(libraries: &Path, test: &str) -> String {
    let child = spawn(libraries, test, "alone", &[]);
    let output = child.wait_with_output().expect("the output of the child");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.code().is_none(), "{}: {text}", output.status);
    text
}
