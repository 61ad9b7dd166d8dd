//! Runs the body of a test in a child process that loads the stand-ins.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fs};

const CHILD: &str = "NARROWS_FAKE_CUDA_CHILD";
const CHECKED: &str = "all of it is checked";

/// Variables of a child.
pub type Variables<'a> = &'a [(&'a str, &'a str)];

/// What this process was told by the test that began it, if it is a child.
pub fn role() -> Option<String> {
    env::var(CHILD).ok()
}

/// Where the libraries are; `None`, and a printed reason, where they cannot be made.
pub fn libraries() -> Option<PathBuf> {
    match crate::build(&crate::target_folder()) {
        Ok(libraries) => Some(libraries),
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

/// Begins a child with a role.
fn begin(libraries: &Path, test: &str, role: &str, variables: Variables) -> Child {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args([test, "--exact", "--nocapture"]);
    command.env(CHILD, role).env("LD_LIBRARY_PATH", libraries);
    command.envs(variables.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("this program runs")
}

/// What a child printed on both streams, when it did all it should.
fn end(child: Child) -> String {
    let output = child.wait_with_output().expect("an end");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains(CHECKED), "{said}{errors}");
    said + &errors
}

/// Runs the body in a child, under each of these seeds; in the child, runs it. Gives what the
/// children printed.
pub fn seeded(test: &str, seeds: u32, variables: Variables, body: impl FnOnce()) -> Vec<String> {
    if role().is_some() {
        body();
        println!("{CHECKED}");
        return vec![];
    }
    let Some(libraries) = libraries() else { return vec![] };
    let run = |seed: u32| {
        let seed = seed.to_string();
        let all = [variables, &[("NARROWS_FAKE_CUDA_SEED", seed.as_str())]].concat();
        end(begin(&libraries, test, "alone", &all))
    };
    (0..seeds).map(run).collect()
}

/// The same under the first seed.
pub fn once(test: &str, variables: Variables, body: impl FnOnce()) -> Option<String> {
    seeded(test, 1, variables, body).pop()
}

/// Runs the body in so many processes that meet in a folder; each is told its number and the folder.
/// Gives what they printed.
pub fn together(
    test: &str,
    count: usize,
    seed: u32,
    variables: Variables,
    body: impl FnOnce(usize, &Path),
) -> Vec<String> {
    if let Some(role) = role() {
        let (number, folder) = role.split_once(' ').expect("a number and a folder");
        body(number.parse().expect("a number"), Path::new(folder));
        println!("{CHECKED}");
        return vec![];
    }
    let Some(libraries) = libraries() else { return vec![] };
    let folder = tempfile::tempdir().expect("a folder");
    let (devices, seed) = (count.to_string(), seed.to_string());
    let within = folder.path().to_str().expect("a name");
    let of_all = [
        ("NARROWS_FAKE_CUDA_DEVICES", devices.as_str()),
        ("NARROWS_FAKE_CUDA_SEED", seed.as_str()),
        ("TMPDIR", within),
    ];
    let variables = [&of_all, variables].concat();
    let begun = |number| begin(&libraries, test, &format!("{number} {within}"), &variables);
    let children: Vec<Child> = (0..count).map(begun).collect();
    let said = children.into_iter().map(end).collect();
    let left: Vec<_> = fs::read_dir(folder.path()).expect("a folder").flatten().collect();
    let left: Vec<_> = left.iter().filter(|entry| entry.path().is_dir()).collect();
    assert!(left.is_empty(), "communicators leave {left:?}");
    said
}

/// What a child printed that a signal ended.
pub fn dies(libraries: &Path, test: &str) -> String {
    let output = begin(libraries, test, "alone", &[]).wait_with_output().expect("an end");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.code().is_none(), "{}: {said}", output.status);
    said
}
