//! The command line: flags, JSON keys, exit codes and messages.

mod break_even;
mod calibrate;
mod calibrate_cuda;
mod check;
mod checkpoints;
mod cluster;
mod compare;
mod context;
mod convert;
mod cuda;
mod data;
mod depth;
mod doctor;
mod documents;
mod dtype;
mod environment;
mod errors;
mod evaluation;
mod export;
mod files;
mod framework;
mod generate;
mod grad_reduce_dtype;
mod interrupts;
mod loro;
mod meeting;
mod memory;
mod objective;
mod plan;
mod plot;
mod pretrained;
mod recipe;
mod restarts;
mod run;
mod schedule;
mod sensitivity;
mod shell;
mod signals;
mod tensorboard;
mod text;
mod token_documents;
mod trace;
mod training_run;
mod ui;
mod unwritable;
mod validate;
mod weight_outputs;
mod weights;
mod whatif;
mod zero;

use assert_cmd::Command;
use serde_json::Value;

/// The cache folder of tests, so that profiles measured under the load of tests do not reach the user's cache.
const CACHE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/cache");

/// `narrows` with arguments separated by blanks.
fn narrows(arguments: &str) -> Command {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("narrows");
    command.args(arguments.split_whitespace()).env_remove("CLICOLOR_FORCE");
    command.env("XDG_CACHE_HOME", CACHE);
    command
}

/// A program as a child that signals end. A program leaves ignored signals ignored, and shells start background jobs, such
/// as these tests may be, with SIGINT ignored.
fn interruptible(program: &str) -> std::process::Command {
    if cfg!(target_os = "linux") {
        let mut command = std::process::Command::new("env");
        command.args(["--default-signal=INT,HUP,TERM,USR1,USR2,ALRM,XCPU", program]);
        command
    } else {
        std::process::Command::new(program)
    }
}

/// Standard output of a command that succeeds.
fn stdout(arguments: &str) -> String {
    let output = narrows(arguments).assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("answers are UTF-8")
}

/// The JSON answer of a command that succeeds.
fn json(arguments: &str) -> Value {
    let text = stdout(&format!("{arguments} --format json"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

/// Standard error of a command that ends with this exit code and prints nothing on standard output.
fn failure(arguments: &str, code: i32) -> String {
    let assert = narrows(arguments).assert().code(code);
    let output = assert.get_output();
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    let message = String::from_utf8(output.stderr.clone()).expect("messages are UTF-8");
    assert!(!message.contains('\u{1b}'), "colour in a pipe: {message}");
    assert!(!message.contains("panicked"), "{message}");
    message
}

/// A plan of a small model, as text.
fn small_plan() -> String {
    stdout("plan --model cola-tiny --devices 2 --global-batch 4 --output -")
}
