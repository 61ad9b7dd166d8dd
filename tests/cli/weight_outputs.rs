//! Outputs of `factor` and `export-weights`: what they refuse before any work, and what signals leave.
#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use super::interrupts::wait_for_handler;
use super::narrows;

/// The commands with outputs, of weights that do not exist.
const COMMANDS: [&str; 2] =
    ["factor none --model llama-60m --rank 4", "export-weights none --model cola-tiny --to cola"];

/// The weights do not exist: errors of the output come before any work.
#[test]
fn an_unusable_folder_is_found_before_the_weights_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("working")).unwrap();
    fs::create_dir(at("full")).unwrap();
    fs::write(at("full/file"), "").unwrap();
    symlink("full", at("to full")).unwrap();
    symlink("loop", at("loop")).unwrap();
    for command in COMMANDS {
        for (output, part) in [
            (".", "--output: `.` is the working folder, which cannot be replaced"),
            ("../full", "--output: `../full` exists and is not an empty folder"),
            ("../to full", "--output: `../to full` exists and is not an empty folder"),
            ("../loop", "--output: `../loop` is a link that leads nowhere"),
            ("new/..", "--output: `new/..` does not name a new folder"),
            ("/proc/new", "/proc/new: cannot be written: no file can be created in `/proc`"),
            ("../full/file/new", "cannot be written: `../full/file` is not a folder"),
            ("-", "--output: a folder cannot go to standard output"),
        ] {
            let mut command = narrows(command);
            let assert = command.args(["--output", output]).current_dir(at("working"));
            let assert = assert.assert().code(2);
            let error = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
            assert!(error.contains(part), "{output}: {error}");
            assert_eq!(fs::read_dir(at("working")).unwrap().count(), 0, "{output}");
        }
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
}

#[test]
fn links_to_new_and_empty_folders_are_followed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("empty")).unwrap();
    symlink("empty", at("one")).unwrap();
    symlink("new", at("two")).unwrap();
    for (link, target) in [("one/", "empty"), ("two", "new")] {
        export_golden(&at(link));
        assert!(at(target).join("model.safetensors").is_file(), "{link}");
        assert!(fs::symlink_metadata(at(link.trim_end_matches('/'))).unwrap().is_symlink());
    }
}

/// Exports weights of CoLA that the tests have.
fn export_golden(output: &Path) {
    let cases = fs::read_to_string("tests/golden/weights/cases.json").unwrap();
    let cases: serde_json::Value = serde_json::from_str(&cases).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    fs::write(&config, cases["cola"]["config"].to_string()).unwrap();
    let export = "export-weights tests/golden/weights/cola --to cola --model";
    narrows(export).arg(config).arg("--output").arg(output).assert().success();
}

/// The model comes from a pipe that nothing is written to, so that only the signal ends the command.
#[test]
fn a_command_that_is_stopped_before_it_writes_leaves_nothing() {
    for (command, name) in COMMANDS.into_iter().zip(["-INT", "-TERM"]) {
        let folder = tempfile::tempdir().unwrap();
        let (pipe, output) = (folder.path().join("model.json"), folder.path().join("a/new"));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let words = command.split_whitespace().map(|word| match word {
            "llama-60m" | "cola-tiny" => pipe.display().to_string(),
            "none" => "tests/golden/weights/cola".to_owned(),
            word => word.to_owned(),
        });
        let child = crate::interruptible(env!("CARGO_BIN_EXE_narrows"))
            .args(words)
            .arg("--output")
            .arg(&output)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        wait_for_handler(&child);
        let id = child.id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
        let ended = child.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(130), "{command}: {message}");
        let sentence =
            format!("Stopped by a signal: nothing was written to {}\n", output.display());
        assert_eq!(message, sentence, "{command}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{command}");
    }
}
